"""verify.judges.image: what an image's layers make, and every way in which one can be wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.verify import small_image, small_target
from tests.unit.verify import test_verify_library as library
from tests.unit.verify.small_image import (
    CONNECTOR_INFO,
    IN_TOTO,
    SHARE,
    SITE,
    TAG,
    Entry,
    Image,
    folder,
    hard,
    link,
    tarred,
)
from verify.catalogue import CHECKS
from verify.checks.attestation import Demands
from verify.cli import main
from verify.digest import quiet
from verify.errors import ConfigError
from verify.judges.case import Options
from verify.judges.image import judge_image
from verify.oci import layer as layers
from verify.oci.merged import MergedRoot
from verify.report import Report, Status

Change = Callable[[Image], object]
BASE_LAYER, OURS = 1, 2
SCHEDULER = f"{SITE}/vllm/core/scheduler.py"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("home")
    small_target.write(place, small_target.checkout())
    return place


def bad(report: Report) -> set[str]:
    found = [f for f in report.findings if f.status in (Status.FAIL, Status.UNDECIDED)]
    assert all(f.hint and "\n" not in f.message for f in found)
    return {f.check for f in found}


def edit(number: int, name: str, **changes: object) -> Change:
    """Change the entry ``name`` of a layer."""

    def apply(image: Image) -> None:
        found = [each.name for each in image.layers[number]]
        at = found.index(name)
        image.layers[number][at] = dataclasses.replace(image.layers[number][at], **changes)

    return apply


def drop(number: int, name: str) -> Change:
    def apply(image: Image) -> None:
        kept = [e for e in image.layers[number] if not e.name.startswith(name)]
        assert kept != image.layers[number]
        image.layers[number] = kept

    return apply


def add(number: int, *entries: Entry) -> Change:
    return lambda image: image.layers[number].extend(entries)


def new_layer(*entries: Entry) -> Change:
    return lambda image: image.layers.append(list(entries))


def both(*changes: Change) -> Change:
    return lambda image: [change(image) for change in changes]


def set_to(**values: object) -> Change:
    return lambda image: [setattr(image, name, value) for name, value in values.items()]


def test_a_base_with_the_layer_passes_with_every_compression(tmp_path: Path, home: Path) -> None:
    for packed in (False, True):
        image = small_image.whole()
        image.gzip = packed
        report = judge_image(image.write(tmp_path / str(packed)), Options(home=home))
        assert not bad(report), report.findings
        assert report.base == small_image.BASE
        assert {"IMAGE-1", "IMAGE-2", "IMAGE-3", "IMAGE-4", "IMAGE-5"} <= report.checks().keys()


def test_the_layer_alone_is_undecided_until_it_is_what_the_caller_means(
    tmp_path: Path, home: Path
) -> None:
    reference = small_image.layer().write(tmp_path)
    report = judge_image(reference, Options(home=home))
    assert bad(report) == {"IMAGE-5"}
    assert report.exit_code == 3
    meant = judge_image(reference, Options(home=home, layer=True))
    assert not bad(meant), meant.findings
    # what a part cannot show is not claimed
    assert not {"TREE-1", "TREE-2", "CONTRACT-2", "NATIVE-1"} & meant.checks().keys()


WHOLE: dict[str, tuple[Change, set[str]]] = {
    "patched-file": (edit(OURS, SCHEDULER, data=b"x = 1\n"),
                     {"PATCH-4", "CONTRACT-2", "CONTRACT-4"}),
    "patched-file-missing-from-the-layer": (drop(OURS, SCHEDULER), {"PATCH-3", "CONTRACT-3"}),
    "later-layer-changes-it": (new_layer(Entry(SCHEDULER, small_target.SCHEDULER)),
                               {"PATCH-3", "CONTRACT-3"}),
    "base-file": (edit(BASE_LAYER, f"{SITE}/vllm/crlf.py", data=b"x"), {"TREE-1", "PKG-5"}),
    "base-library": (edit(BASE_LAYER, f"{SITE}/vllm/_C.abi3.so", data=small_target.ELF),
                     {"NATIVE-1", "PKG-5"}),
    "whiteout-lost": (drop(OURS, f"{SITE}/vllm/connector/.wh."), {"PATCH-5"}),
    "whiteout-of-a-module": (new_layer(Entry(f"{SITE}/vllm/spark/.wh.__init__.py")), {"TREE-6"}),
    "whiteout-of-a-folder": (new_layer(Entry(f"{SITE}/vllm/.wh.data")), {"TREE-2", "PKG-4"}),
    "opaque-folder": (new_layer(Entry(f"{SITE}/vllm/data/.wh..wh..opq")), {"TREE-2", "PKG-4"}),
    "opaque-spares-its-own-layer": (
        new_layer(Entry(f"{SITE}/vllm/data/.wh..wh..opq"),
                  Entry(f"{SITE}/vllm/data/table.json", b'{"rows": []}\n')), set()),
    "file-in-place-of-a-folder": (new_layer(Entry(f"{SITE}/vllm/data", b"")),
                                  {"TREE-2", "TREE-3", "PKG-4"}),
    "link-in-vllm": (new_layer(link(f"{SITE}/vllm/extra.py", "/etc/passwd")), {"TREE-5"}),
    "link-out-of-the-root": (
        new_layer(link(f"{SITE}/vllm/crlf.py", "../../../../../../../etc/passwd")), {"TREE-5"}),
    "device-in-vllm": (new_layer(Entry(f"{SITE}/vllm/null", kind=tarfile.CHRTYPE)), {"TREE-5"}),
    "hard-link-with-the-same-bytes": (
        new_layer(Entry("opt/table", b'{"rows": []}\n'),
                  hard(f"{SITE}/vllm/data/table.json", "opt/table")), set()),
    "hard-link-to-other-bytes": (
        new_layer(hard(f"{SITE}/vllm/crlf.py", "etc/passwd")), {"TREE-1", "PKG-5"}),
    "hard-link-to-nothing": (new_layer(hard("opt/x", "opt/missing")), {"IMAGE-4"}),
    "hard-link-to-a-folder": (new_layer(hard("opt/x", "usr")), {"IMAGE-4"}),
    "hard-link-out-of-the-root": (new_layer(hard("opt/x", "../../etc/passwd")), {"IMAGE-4"}),
    "hard-link-through-a-link": (new_layer(hard("opt/x", "bin/python3.12")), {"IMAGE-4"}),
    "name-out-of-the-root": (new_layer(Entry("../etc/shadow")), {"IMAGE-4"}),
    "name-out-and-in": (new_layer(Entry("usr/../../x")), {"IMAGE-4"}),
    "file-as-the-root": (new_layer(Entry("./")), {"IMAGE-4"}),
    "name-without-end": (new_layer(Entry("/".join(["d" * 200] * 30))), {"IMAGE-4"}),
    "name-twice": (new_layer(Entry("opt/x", b"1"), Entry("opt/x", b"2")), {"IMAGE-4"}),
    "name-as-file-and-folder": (new_layer(Entry("opt/x"), Entry("opt/x/y")), {"IMAGE-4"}),
    "folder-twice": (new_layer(folder("opt/x"), folder("opt/x/"), Entry("./opt/x/y")), set()),
    "below-a-link": (new_layer(Entry("bin/tool")), {"IMAGE-4"}),
    "whiteout-below-a-link": (new_layer(Entry("bin/.wh.python3.12")), {"IMAGE-4"}),
    "below-a-file": (new_layer(Entry("etc/passwd/x")), {"IMAGE-4"}),
    "removed-and-added": (
        new_layer(Entry(f"{SITE}/vllm/.wh.crlf.py"),
                  Entry(f"{SITE}/vllm/crlf.py", b"A = 1\r\nB = 2\r\n")), {"IMAGE-4"}),
    "whiteout-with-bytes": (new_layer(Entry("opt/.wh.x", b"x")), {"IMAGE-4"}),
    "whiteout-as-a-link": (new_layer(link("opt/.wh.x", "x")), {"IMAGE-4"}),
    "whiteout-as-a-folder": (new_layer(folder("opt/.wh.x"), Entry("opt/.wh.x/y")), {"IMAGE-4"}),
    "whiteout-of-no-name": (new_layer(Entry("opt/.wh.")), {"IMAGE-4"}),
    "whiteout-of-another-kind": (new_layer(Entry("opt/.wh..wh.plnk")), {"IMAGE-4"}),
    "whiteout-of-nothing": (new_layer(Entry("opt/none/.wh.x")), set()),
    "absolute-name": (new_layer(Entry("/opt/x")), set()),
    "python-missing": (drop(0, "usr/bin/python"), {"IMAGE-5"}),
    "no-vllm": (both(drop(BASE_LAYER, SITE), drop(OURS, f"{SITE}/vllm")), {"IMAGE-5"}),
    "two-vllms": (
        new_layer(Entry("opt/venv/lib/python3.12/site-packages/vllm/__init__.py")), {"IMAGE-5"}),
    "pythonpath": (
        both(new_layer(Entry("opt/other/vllm/__init__.py")), set_to(env=["PYTHONPATH=/opt/other"])),
        {"PKG-8"}),
    "user-site": (
        both(new_layer(Entry("root/.local/lib/python3.12/site-packages/vllm.py"))), {"PKG-8"}),
    "home": (
        both(new_layer(Entry("srv/.local/lib/python3.12/site-packages/vllm.py")),
             set_to(env=["HOME=/srv"])), {"PKG-8"}),
    "pth": (new_layer(Entry(f"{SITE}/evil.pth", b"import os\n")), {"PKG-9"}),
    "sitecustomize-behind-a-link": (
        new_layer(link("usr/lib/python3.12/sitecustomize.py", "/etc/custom.py"),
                  Entry("etc/custom.py", b"import vllm\n")), {"PKG-9"}),
    "stale-bytecode": (
        new_layer(Entry(f"{SITE}/vllm/core/__pycache__/scheduler.cpython-312.pyc",
                        b"abcd\x01\x00\x00\x00" + bytes(8))), {"PKG-7"}),
    "everyone-may-write": (edit(OURS, SCHEDULER, mode=0o666), {"PKG-6"}),
    "executable": (edit(OURS, SCHEDULER, mode=0o755), {"TREE-4"}),
    "label": (set_to(labels={"org.sparkcache.target": "v1"}), {"IMAGE-6"}),
    "unknown-label": (set_to(labels={"org.sparkcache.verified": "yes"}), {"IMAGE-6"}),
    "annotation": (set_to(annotations={"org.sparkcache.pins-sha256": "0" * 64}), {"IMAGE-6"}),
    "labels-of-others": (set_to(labels={"maintainer": "you"}, annotations={"a": "b"}), set()),
    "platform": (set_to(architecture="arm64"), {"IMAGE-6"}),
    "no-papers": (drop(OURS, SHARE), set()),
    "papers-of-another-target": (
        new_layer(Entry("usr/share/sparkcache/v1/receipt.json", b"{}")), {"IMAGE-7"}),
    "paper-changed": (edit(OURS, f"{SHARE}/NOTICE", data=b"x"), {"IMAGE-7"}),
    "paper-missing": (drop(OURS, f"{SHARE}/LICENSE"), {"IMAGE-7"}),
    "paper-too-many": (new_layer(Entry(f"{SHARE}/README")), {"IMAGE-7"}),
    "shipped-contract": (edit(OURS, f"{SHARE}/contract.json", data=b"{}\n"), {"IMAGE-7"}),
    "receipt-missing": (drop(OURS, f"{SHARE}/receipt.json"), {"PKG-12"}),
    "receipt-damaged": (edit(OURS, f"{SHARE}/receipt.json", data=b"{}\n"), {"PKG-12"}),
    "paper-as-a-link": (
        new_layer(Entry(f"{SHARE}/.wh.NOTICE"), link(f"{SHARE}/NOTES", "/etc/passwd")),
        {"IMAGE-7", "TREE-5"}),
    "attestation": (edit(OURS, f"{SHARE}/attestations.intoto.jsonl", data=b"{}\n"), {"ATT-2"}),
    "connector": (
        edit(OURS, f"{SITE}/sparkcache_connector/cli.py", data=b"x = 1\n"), {"PKG-13", "PKG-5"}),
    "connectors-contract": (
        edit(OURS, f"{SITE}/sparkcache_connector/contract.json", data=b"{}\n"),
        {"PKG-14", "PKG-5"}),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_a_changed_image_fails_its_own_checks_and_no_other(
    name: str, tmp_path: Path, home: Path
) -> None:
    change, expected = WHOLE[name]
    image = small_image.whole()
    image.gzip = len(name) % 2 == 1
    change(image)
    report = judge_image(image.write(tmp_path), Options(home=home))
    assert bad(report) == expected, report.findings


def other_referrer(change: Callable[[list[tuple[str, bytes, dict[str, str]]]], object]) -> Change:
    return lambda image: change(image.referrers)


LAYER: dict[str, tuple[Change, set[str]]] = {
    "patched-file": (edit(0, SCHEDULER, data=small_target.SCHEDULER), {"PATCH-3"}),
    "patched-file-missing": (drop(0, SCHEDULER), {"PATCH-5"}),
    "deleted-file": (add(0, Entry(f"{SITE}/vllm/connector/gone.py", b"OLD = 1\n")),
                     {"PATCH-5", "IMAGE-4"}),
    "module": (edit(0, f"{SITE}/vllm/spark/handoff.py", data=b"x"), {"TREE-6"}),
    "file-of-the-base": (add(0, Entry(f"{SITE}/vllm/crlf.py", b"A = 1\r\nB = 2\r\n")), {"TREE-3"}),
    "file-beside": (add(0, Entry(f"{SITE}/evil.pth", b"import os\n")), {"TREE-3"}),
    "file-elsewhere": (add(0, Entry("etc/ld.so.preload", b"/evil.so\n")), {"TREE-3"}),
    "link-elsewhere": (add(0, link("usr/bin/python3", "/opt/evil")), {"TREE-3"}),
    "listed-file-beside": (
        both(add(0, Entry("etc/evil", b"x")),
             edit(0, f"{SITE}/{CONNECTOR_INFO}/RECORD",
                  data=small_target.record(
                      {**small_target.installed(small_target.connector_wheel(), CONNECTOR_INFO),
                       "../../../../../etc/evil": (0, b"x")}, f"{CONNECTOR_INFO}/RECORD"))),
        {"PKG-4"}),
    "label-missing": (lambda image: image.labels.pop("org.sparkcache.base"), {"IMAGE-6"}),
    "label-more": (lambda image: image.labels.update(vendor="me"), {"IMAGE-6"}),
    "title": (
        lambda image: image.labels.update({"org.opencontainers.image.title": "x"}), {"IMAGE-6"}),
    "annotation": (
        lambda image: image.annotations.update({"org.sparkcache.vllm-commit": "0" * 40}),
        {"IMAGE-6"}),
    "bases-differ": (
        lambda image: image.labels.update({"org.opencontainers.image.base.name": "x"}),
        {"IMAGE-6"}),
    "referrer-missing": (other_referrer(lambda found: found.pop()), {"IMAGE-8"}),
    "referrer-longer": (
        other_referrer(lambda found: found.append((IN_TOTO, found[0][1] + b"\n", found[0][2]))),
        {"IMAGE-8"}),
    "referrer-twice": (other_referrer(lambda found: found.append(found[0])), {"IMAGE-8"}),
    "referrer-of-other-bytes": (
        other_referrer(lambda found: found.__setitem__(0, (IN_TOTO, b"{}\n", found[0][2]))),
        {"IMAGE-8"}),
    "referrer-with-another-predicate": (
        other_referrer(lambda found: found.__setitem__(
            0, (IN_TOTO, found[0][1], {"in-toto.io/predicate-type": "x"}))), {"IMAGE-8"}),
    "referrer-of-another-kind": (
        other_referrer(lambda found: found.append(("text/plain", b"hello", {}))), set()),
    "no-papers": (both(drop(0, SHARE), other_referrer(lambda found: found.clear())),
                  {"IMAGE-7", "IMAGE-6"}),
    "connector-missing": (drop(0, f"{SITE}/sparkcache_connector"), {"PKG-13"}),
    "connectors-record-missing": (drop(0, f"{SITE}/{CONNECTOR_INFO}/RECORD"),
                                  {"PKG-4", "TREE-3"}),
    "name-twice": (add(0, Entry(SCHEDULER, b"other")), {"IMAGE-4"}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYER)
def test_a_changed_layer_fails_its_own_checks_and_no_other(
    name: str, tmp_path: Path, home: Path
) -> None:
    change, expected = LAYER[name]
    image = small_image.layer()
    change(image)
    report = judge_image(image.write(tmp_path), Options(home=home, layer=True))
    assert bad(report) == expected, report.findings


# What is done to the files of a layout that was written.


def blob_of(place: Path, *keys: str | int) -> Path:
    """The blob of the image's manifest, or of what ``keys`` of it lead to."""
    value = json.loads((place / "index.json").read_bytes())["manifests"][0]
    for key in keys:
        if "digest" in value:
            value = json.loads(_blob(place, value).read_bytes())
        value = value[key]
    return _blob(place, value)


def _blob(place: Path, descriptor: dict[str, str]) -> Path:
    return place / "blobs" / descriptor["digest"].replace(":", "/")


def flip(file: Path, at: int = 600) -> None:
    data = bytearray(file.read_bytes())
    data[at % len(data)] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + bytes(512))


def rewrite(place: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((place / "index.json").read_bytes())
    change(index)
    (place / "index.json").write_text(json.dumps(index))


def replace_by_link(file: Path) -> None:
    file.rename(file.with_suffix(".real"))
    file.symlink_to(file.with_suffix(".real"))


LAYOUT: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "layer-flipped": (lambda p: flip(blob_of(p, "layers", 0)), {"IMAGE-2"}),
    "last-layer-flipped": (lambda p: flip(blob_of(p, "layers", 2), -1), {"IMAGE-2"}),
    "layer-cut": (lambda p: cut(blob_of(p, "layers", 1)), {"IMAGE-2"}),
    "layer-longer": (lambda p: lengthen(blob_of(p, "layers", 1)), {"IMAGE-2"}),
    "layer-missing": (lambda p: blob_of(p, "layers", 1).unlink(), {"IMAGE-2"}),
    "layer-behind-a-link": (lambda p: replace_by_link(blob_of(p, "layers", 1)), {"IMAGE-2"}),
    "layers-swapped": (
        lambda p: blob_of(p, "layers", 0).write_bytes(blob_of(p, "layers", 1).read_bytes()),
        {"IMAGE-2"}),
    "config-flipped": (lambda p: flip(blob_of(p, "config")), {"IMAGE-2"}),
    "config-missing": (lambda p: blob_of(p, "config").unlink(), {"IMAGE-2"}),
    "manifest-flipped": (lambda p: flip(blob_of(p)), {"IMAGE-2"}),
    "manifest-missing": (lambda p: blob_of(p).unlink(), {"IMAGE-2"}),
    "manifest-of-another-size": (
        lambda p: rewrite(p, lambda i: i["manifests"][0].update(size=1)), {"IMAGE-2"}),
    "manifest-huge": (
        lambda p: rewrite(p, lambda i: i["manifests"][0].update(size=1 << 40)), {"IMAGE-2"}),
    "manifest-as-something-else": (
        lambda p: rewrite(p, lambda i: i["manifests"][0].update(mediaType="text/plain")),
        {"IMAGE-2"}),
    "manifest-by-another-hash": (
        lambda p: rewrite(p, lambda i: i["manifests"][0].update(digest="sha512:" + "0" * 128)),
        {"IMAGE-1"}),
    "digest-as-a-path": (
        lambda p: rewrite(p, lambda i: i["manifests"][0].update(digest="sha256:../../../x")),
        {"IMAGE-1"}),
    "index-no-json": (lambda p: (p / "index.json").write_bytes(b"{"), {"IMAGE-1"}),
    "index-twice-a-key": (
        lambda p: (p / "index.json").write_bytes(b'{"a": 1, "a": 2}'), {"IMAGE-1"}),
    "index-two-spellings": (
        lambda p: rewrite(p, lambda i: i.update(Manifests=i["manifests"])), {"IMAGE-1"}),
    "index-missing": (lambda p: (p / "index.json").unlink(), {"IMAGE-1"}),
    "index-of-a-list": (lambda p: (p / "index.json").write_bytes(b"[]"), {"IMAGE-1"}),
    "index-deep": (lambda p: (p / "index.json").write_bytes(b"[" * 100_000), {"IMAGE-1"}),
    "mark-of-another-version": (
        lambda p: (p / "oci-layout").write_bytes(b'{"imageLayoutVersion": "2.0.0"}'),
        {"IMAGE-1"}),
    "tag-twice": (
        lambda p: rewrite(p, lambda i: i["manifests"].append(i["manifests"][0])), {"IMAGE-1"}),
    "referrer-flipped": (lambda p: flip(_referrer(p, "layers", 0), 5), {"IMAGE-2"}),
    "referrer-missing": (lambda p: _referrer(p, "layers", 0).unlink(), {"IMAGE-2"}),
    "referrers-manifest-missing": (lambda p: _referrer(p).unlink(), {"IMAGE-2"}),
}  # fmt: skip


def _referrer(place: Path, *keys: str | int) -> Path:
    index = json.loads((place / "index.json").read_bytes())
    value = json.loads(_blob(place, index["manifests"][1]).read_bytes())
    if not keys:
        return _blob(place, index["manifests"][1])
    for key in keys:
        value = value[key]
    return _blob(place, value)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", LAYOUT)
def test_a_damaged_layout_fails_its_own_checks_and_no_other(
    name: str, packed: bool, tmp_path: Path, home: Path
) -> None:
    apply, expected = LAYOUT[name]
    image = small_image.whole()
    image.gzip = packed
    image.referrers = small_image.layer().referrers
    reference = image.write(tmp_path)
    apply(tmp_path)
    assert bad(judge_image(reference, Options(home=home))) == expected


ARCHIVES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut-in-a-file": (lambda plain: plain[: plain.index(b"root:x:")], "unexpected end of data"),
    "cut-in-a-header": (lambda plain: plain[:700], "damaged or cut short"),
    "damaged-header": (
        lambda plain: plain[:520] + b"x" + plain[521:1024] + bytes(1024), "damaged or cut short"),
    "no-archive": (lambda plain: b"x" * 2048, "invalid header"),
    "empty": (lambda plain: b"", "empty file"),
    "more-behind-the-end": (lambda plain: plain + tarred([Entry("x")]), "bytes behind the end"),
    "one-empty-block-between": (
        lambda plain: plain[:1024] + bytes(512) + plain[1024:], "bytes behind the end"),
    "header-without-end": (
        lambda plain: _header(b"x", 1 << 30), "a header of 1073741824 bytes"),
    "negative-size": (lambda plain: _negative(), "an entry of a negative size"),
}  # fmt: skip


def _header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("header")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.USTAR_FORMAT) + bytes(1024)


def _negative() -> bytes:
    """A header whose size is negative, as base-256 numbers can be."""
    data = bytearray(_header(tarfile.REGTYPE, 0))
    data[124:136] = b"\xff" * 11 + b"\x00"
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", ARCHIVES)
def test_a_layer_that_is_no_sound_archive_fails_as_such(
    name: str, packed: bool, tmp_path: Path, home: Path
) -> None:
    change, reason = ARCHIVES[name]
    image = small_image.whole()
    image.gzip = packed
    image.raw[0] = change(tarred(image.layers[0]))
    report = judge_image(image.write(tmp_path), Options(home=home))
    assert bad(report) == {"IMAGE-4"}
    found = next(f for f in report.findings if f.check == "IMAGE-4")
    assert reason in str(found.actual)


def test_a_global_header_is_refused_because_readers_disagree(tmp_path: Path, home: Path) -> None:
    image = small_image.whole()
    header = tarfile.TarInfo.create_pax_global_header({"path": "usr/bin/python3"})
    image.raw[0] = header + tarred(image.layers[0])
    report = judge_image(image.write(tmp_path), Options(home=home))
    assert bad(report) == {"IMAGE-4"}


CONFIGS: dict[str, tuple[Change, set[str], int]] = {
    "wrong-diff-id": (set_to(diff_ids={1: "sha256:" + "0" * 64}), {"IMAGE-3"}, 1),
    "diff-id-missing": (set_to(diff_ids={2: ""}), {"IMAGE-3"}, 1),
    "layer-of-an-unknown-kind": (set_to(types={0: "text/plain"}), {"IMAGE-2"}, 1),
    "zstd": (
        set_to(types={0: "application/vnd.oci.image.layer.v1.tar+zstd"}), {"IMAGE-2"}, 3),
    "plain-said-to-be-gzip": (
        set_to(types={0: "application/vnd.oci.image.layer.v1.tar+gzip"}), {"IMAGE-4"}, 1),
    "docker-media-types": (
        set_to(types={0: "application/vnd.docker.image.rootfs.diff.tar"}), set(), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_does_not_fit_its_layers(name: str, tmp_path: Path, home: Path) -> None:
    change, expected, code = CONFIGS[name]
    image = small_image.whole()
    change(image)
    report = judge_image(image.write(tmp_path), Options(home=home))
    assert bad(report) == expected, report.findings
    assert report.exit_code == code


def test_zstd_is_refused_by_name_with_a_way_out(tmp_path: Path, home: Path) -> None:
    image = small_image.whole()
    image.types[0] = "application/vnd.oci.image.layer.v1.tar+zstd"
    report = judge_image(image.write(tmp_path), Options(home=home))
    found = next(f for f in report.findings if f.status is Status.UNDECIDED)
    assert "zstd" in found.message
    assert "skopeo copy --dest-compress-format gzip" in str(found.hint)


def test_files_of_a_large_gzip_layer_are_found_from_states_on_the_way(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_STEP", 4096)
    monkeypatch.setattr(layers, "_PACKED", 512)
    image = small_image.whole()
    image.gzip = True
    assert not bad(judge_image(image.write(tmp_path), Options(home=home)))


def test_a_gzip_layer_of_several_members_is_one_stream(tmp_path: Path) -> None:
    plain = tarred([Entry("a", b"1" * 5000), Entry("b", b"2" * 5000)])
    packed = b"".join(gzip.compress(plain[at : at + 700]) for at in range(0, len(plain), 700))
    (tmp_path / "layer").write_bytes(packed)
    with layers.Layer(tmp_path / "layer", "gzip") as layer:
        entries = list(layer.entries())
        assert layer.diff_id == small_target.sha256(plain)
        assert layer.sha256 == small_target.sha256(packed)
        for entry, data in zip(reversed(entries), (b"2" * 5000, b"1" * 5000), strict=True):
            assert b"".join(layer.chunks(entry.name, entry.offset, entry.size)) == data


LIBRARY = f"{SITE}/{library.FOLDER}/x86_64/libsparkcache_placement.so"
NATIVE: dict[str, tuple[Change, set[str]]] = {
    "as-built": (lambda image: None, set()),
    "another": (edit(OURS, LIBRARY, data=small_target.ELF), {"PKG-14", "PKG-5"}),
    "missing": (drop(OURS, LIBRARY), {"PKG-14", "PKG-4"}),
    "whiteout": (
        new_layer(Entry(LIBRARY.replace("/libspark", "/.wh.libspark"))), {"PKG-14", "PKG-4"}),
    "one-more": (
        new_layer(Entry(LIBRARY.replace("placement.so", "more.so"), small_target.ELF)),
        {"PKG-14", "PKG-4"}),
    "of-another-machine": (
        edit(OURS, f"{SITE}/{CONNECTOR_INFO}/WHEEL",
             data=b"Wheel-Version: 1.0\nTag: py3-none-manylinux_2_28_aarch64\n"),
        {"PKG-14", "PKG-5"}),
}  # fmt: skip


@pytest.mark.parametrize("name", NATIVE)
def test_the_native_library_of_the_layer_is_the_pinned_one(name: str, tmp_path: Path) -> None:
    change, expected = NATIVE[name]
    pins = {"csrc/pins.json": small_target.canonical(library.NATIVE)}
    small_target.write(tmp_path / "home", small_target.checkout() | pins)
    extra = library.members("x86_64", library.LIBRARIES["x86_64"])
    image = small_image.whole(tuple(extra.items()), library.TAG("x86_64"))
    change(image)
    report = judge_image(image.write(tmp_path / "layout"), Options(home=tmp_path / "home"))
    assert bad(report) == expected, report.findings


@given(
    st.integers(0, 2),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=12)), max_size=6),
    st.integers(0, 4096),
)
def test_no_bytes_of_a_layer_crash_the_judge(
    tmp_path_factory: pytest.TempPathFactory,
    number: int,
    packed: bool,
    changes: list[tuple[int, bytes]],
    cut_off: int,
) -> None:
    """Whatever a layer holds, it is listed, laid over and read, or refused as damaged."""
    image = small_image.whole()
    data = bytearray(tarred(image.layers[number]))
    for at, new in changes:
        at %= len(data)
        data[at : at + len(new)] = new
    plain = bytes(data[: len(data) - cut_off])
    file = tmp_path_factory.mktemp("layer") / "blob"
    file.write_bytes(gzip.compress(plain) if packed else plain)
    root = MergedRoot()
    with layers.Layer(file, "gzip" if packed else "none") as layer:
        with contextlib.suppress(layers.DamagedError):
            root.apply(layer, list(layer.entries()))
        holder = root.hold(Path("/"))
        holder.digests(holder.items.keys(), quiet)
        for path, _ in root.walk():
            root.real(Path("/", path))
            root.is_dir(Path("/", path, ".."))
    assert len(layer.sha256) == 64


def test_site_chooses_among_several_and_must_be_one(tmp_path: Path, home: Path) -> None:
    image = small_image.whole()
    change, _ = WHOLE["two-vllms"]
    change(image)
    reference = image.write(tmp_path)
    assert not bad(judge_image(reference, Options(home=home, site=f"/{SITE}")))
    report = judge_image(reference, Options(home=home, site="/usr/lib"))
    assert bad(report) == {"IMAGE-5"}


def test_a_platform_must_be_chosen_among_several(tmp_path: Path, home: Path) -> None:
    image = small_image.whole()
    image.nested = ("linux/amd64", "unknown/unknown")
    reference = image.write(tmp_path)
    with pytest.raises(ConfigError, match=r"--platform among: linux/amd64, unknown/unknown"):
        judge_image(reference, Options(home=home))
    assert not bad(judge_image(reference, Options(home=home, platform="linux/amd64")))
    with pytest.raises(ConfigError, match="no image for linux/arm64"):
        judge_image(reference, Options(home=home, platform="linux/arm64"))


def test_an_index_of_one_platform_needs_no_choice(tmp_path: Path, home: Path) -> None:
    image = small_image.whole()
    image.nested = ("linux/amd64",)
    assert not bad(judge_image(image.write(tmp_path), Options(home=home)))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("missing:x", "expected an image layout, found no directory"),
        ("empty:x", "found no file oci-layout"),
        ("layout:other", f"no image other; known tags: {TAG}"),
    ],
)
def test_a_reference_that_names_nothing_says_what_there_is(
    reference: str, message: str, tmp_path: Path, home: Path
) -> None:
    (tmp_path / "empty").mkdir()
    small_image.whole().write(tmp_path / "layout")
    with pytest.raises(ConfigError, match=message):
        judge_image(tmp_path / reference, Options(home=home))


def test_a_layout_with_one_image_needs_no_tag(tmp_path: Path, home: Path) -> None:
    small_image.layer().write(tmp_path)
    assert not bad(judge_image(tmp_path, Options(home=home, layer=True)))


def test_required_attestations_that_an_image_lacks_leave_it_undecided(
    tmp_path: Path, home: Path
) -> None:
    image = small_image.whole()
    drop(OURS, SHARE)(image)
    demands = Demands(required=True)
    report = judge_image(image.write(tmp_path), Options(home=home, attestations=demands))
    assert bad(report) == {"ATT-1"}
    assert report.exit_code == 3


def test_nothing_is_written_and_no_file_of_this_machine_is_read(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links of the image lead to places in the image: this machine's /etc is none of them."""
    opened: list[str] = []
    real = layers.os.open

    def record(path: object, *args: int, **kwargs: int) -> int:
        opened.append(str(path))
        return real(path, *args, **kwargs)

    image = small_image.whole()
    WHOLE["sitecustomize-behind-a-link"][0](image)
    reference = image.write(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(layers.os, "open", record)
    judge_image(reference, Options(home=home))
    assert opened
    assert all(Path(path).is_relative_to(tmp_path) for path in opened)
    assert sorted(tmp_path.rglob("*")) == before


def test_every_check_of_the_family_is_hit() -> None:
    tables = [*WHOLE.values(), *LAYER.values(), *LAYOUT.values()]
    hit = {check for _, expected in tables for check in expected}
    hit |= {check for _, expected, _ in CONFIGS.values() for check in expected}
    assert {check for check in CHECKS if check.startswith("IMAGE-")} <= hit


def test_the_command_judges_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = small_image.layer().write(tmp_path)
    assert main(["image", f"{tmp_path}:other"]) == 2
    assert "known tags" in capsys.readouterr().err
    home = tmp_path / "home"
    small_target.write(home, small_target.checkout())
    pins = home / "overlay" / "targets" / small_target.TARGET / "pins.json"
    assert main(["image", str(reference), "--layer", "--pins", str(pins), "--format", "json"]) != 2
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "image"
    assert report["checks"]["IMAGE-2"] == "pass"
