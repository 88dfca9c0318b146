"""Makes image layouts of the small target: a base, a layer over it, papers and referrers.

Written from the OCI image-spec with the standard library, independently of the builder. An
:class:`Image` is changed first and written then, so a forger who rewrites every digest is as
easy to play as one who only flips a byte of a file.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.verify import small_target as small
from tests.unit.verify.small_target import F, X
from tests.unit.verify.test_verify_attestation import ALICE, envelope, statements

BASE = "cuda-x86_64"
TAG = "v9.9.0"
PREFIX = "usr/local"
SITE = f"{PREFIX}/lib/python3.12/dist-packages"
SHARE = f"usr/share/sparkcache/{small.TARGET}"
INFO = f"vllm-{small.VERSION}.dist-info"
CONNECTOR_INFO = f"sparkcache_connector-{small.CONNECTOR_VERSION}.dist-info"
IN_TOTO = "application/vnd.in-toto+json"
OCI = "application/vnd.oci"


@dataclass(frozen=True)
class Entry:
    """One entry of a layer: a file unless ``kind`` says otherwise."""

    name: str
    data: bytes = b""
    mode: int = 0o644
    kind: bytes = tarfile.REGTYPE
    target: str = ""
    pax: Mapping[str, str] = field(default_factory=dict)


def files(members: Mapping[str, tuple[int, bytes]], folder: str) -> list[Entry]:
    return [Entry(f"{folder}/{p}", data, mode & 0o777) for p, (mode, data) in members.items()]


def folder(name: str) -> Entry:
    return Entry(name, mode=0o755, kind=tarfile.DIRTYPE)


def link(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.SYMTYPE, target=target)


def hard(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.LNKTYPE, target=target)


def tarred(entries: list[Entry]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for each in entries:
            info = tarfile.TarInfo(each.name)
            info.size, info.mode, info.type = len(each.data), each.mode, each.kind
            info.linkname, info.pax_headers, info.mtime = each.target, dict(each.pax), 1_600_000_000
            archive.addfile(info, io.BytesIO(each.data))
    return sink.getvalue()


@functools.cache
def base_layers() -> list[list[Entry]]:
    """A root with Debian's Python, merged /usr, and the released vLLM installed."""
    system = [
        folder("usr/bin"),
        link("bin", "usr/bin"),
        Entry("usr/bin/python3.12", small.ELF, 0o755),
        link("usr/bin/python3", "python3.12"),
        Entry("usr/lib/python3.12/os.py", b"# the library\n"),
        Entry("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n"),
    ]
    installed = files(small.installed(small.base_wheel(BASE), INFO), SITE)
    return [system, [*installed, Entry(f"{PREFIX}/bin/vllm", small.SCRIPT, 0o755)]]


Extra = tuple[tuple[str, bytes], ...]
"""Files that a build adds to the connector: its native library."""

ANYWHERE = "py3-none-any"


@functools.cache
def laid_over(extra: Extra = (), tag: str = ANYWHERE) -> list[Entry]:
    """The touched files, the modules, the connector and the papers."""
    entries = [
        Entry(f"{SITE}/{path}", post) for path, post in small.POST.items() if post is not None
    ]
    for path, post in small.POST.items():
        if post is None:
            head, _, name = path.rpartition("/")
            entries.append(Entry(f"{SITE}/{head}/.wh.{name}"))
    entries += files(small.MODULES, SITE)
    connector = small.connector_wheel(dict(extra), tag)
    entries += files(small.installed(connector, CONNECTOR_INFO), SITE)
    bundle = small.bundle(BASE, dict(extra), tag)
    papers = {name: data for name, data in bundle.items() if not name.endswith(".whl")}
    papers["contract.json"] = small.canonical(small.contract())
    papers["attestations.intoto.jsonl"] = b"".join(attestations(extra, tag))
    return entries + [Entry(f"{SHARE}/{name}", data) for name, data in papers.items()]


@functools.cache
def attestations(extra: Extra = (), tag: str = ANYWHERE) -> list[bytes]:
    told = statements(small.bundle(BASE, dict(extra), tag))
    return [small.canonical(envelope(small.canonical(each), [ALICE])) for each in told]


@functools.cache
def facts() -> dict[str, str]:
    bundle = small.bundle(BASE)
    pins, receipt = small.pins(), json.loads(bundle["receipt.json"])
    found = {
        "org.opencontainers.image.title": "SparkCache for vLLM",
        "org.opencontainers.image.version": small.LOCAL,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.sparkcache.target": small.TARGET,
        "org.sparkcache.base": BASE,
        "org.sparkcache.pins-sha256": small.sha256(small.canonical(pins)),
        "org.sparkcache.contract-sha256": pins["contract"]["sha256"],
        "org.sparkcache.composition-sha256": pins["composed"]["manifest_sha256"],
        "org.sparkcache.connector-version": receipt["connector"]["version"],
        "org.sparkcache.connector-source-sha256": receipt["connector"]["source_sha256"],
        "org.sparkcache.receipt-sha256": small.sha256(bundle["receipt.json"]),
    }
    commit = pins["commit"]["id"]
    return found if commit is None else found | {"org.sparkcache.vllm-commit": commit}


@dataclass
class Image:
    """An image before it is written; what is None or empty is computed."""

    layers: list[list[Entry]]
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    env: list[str] = field(default_factory=lambda: ["PATH=/usr/local/bin:/usr/bin:/bin"])
    architecture: str = "amd64"
    gzip: bool = False
    raw: dict[int, bytes] = field(default_factory=dict)
    types: dict[int, str] = field(default_factory=dict)
    diff_ids: dict[int, str] = field(default_factory=dict)
    referrers: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list)
    tags: tuple[str, ...] = (TAG,)
    nested: tuple[str, ...] = ()
    blobs: dict[str, bytes] = field(default_factory=dict)

    def blob(self, data: bytes, media_type: str, **more: Any) -> dict[str, Any]:
        self.blobs[small.sha256(data)] = data
        digest = f"sha256:{small.sha256(data)}"
        return {"mediaType": media_type, "digest": digest, "size": len(data), **more}

    def json(self, value: Any, media_type: str, **more: Any) -> dict[str, Any]:
        return self.blob(json.dumps(value, indent=1).encode(), media_type, **more)

    def manifest(self) -> dict[str, Any]:
        layers, diff_ids = [], []
        for number, entries in enumerate(self.layers):
            plain = self.raw[number] if number in self.raw else tarred(entries)
            packed = gzip.compress(plain, mtime=0) if self.gzip else plain
            suffix = "+gzip" if self.gzip else ""
            kind = self.types.get(number, f"{OCI}.image.layer.v1.tar{suffix}")
            layers.append(self.blob(packed, kind))
            diff_ids.append(self.diff_ids.get(number, f"sha256:{small.sha256(plain)}"))
        config = {
            "architecture": self.architecture,
            "os": "linux",
            "config": {"Labels": self.labels, "Env": self.env},
            "rootfs": {"type": "layers", "diff_ids": [each for each in diff_ids if each]},
        }
        value = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.image.manifest.v1+json",
            "config": self.json(config, f"{OCI}.image.config.v1+json"),
            "layers": layers,
            "annotations": self.annotations,
        }
        return self.json(value, f"{OCI}.image.manifest.v1+json")

    def write(self, place: Path) -> Path:
        """Write the layout; return what is judged, ``LAYOUT:TAG``."""
        image = self.manifest()
        top = image
        if self.nested:
            listed = []
            for name in self.nested:
                system, _, machine = name.partition("/")
                listed.append({**image, "platform": {"os": system, "architecture": machine}})
            value = {"schemaVersion": 2, "manifests": listed}
            top = self.json(value, f"{OCI}.image.index.v1+json")
        ref = "org.opencontainers.image.ref.name"
        manifests = [{**top, "annotations": {ref: tag}} for tag in self.tags]
        for kind, data, said in self.referrers:
            value = {
                "schemaVersion": 2,
                "artifactType": kind,
                "config": self.blob(b"{}", f"{OCI}.empty.v1+json"),
                "layers": [self.blob(data, kind)],
                "subject": image,
                "annotations": said,
            }
            media_type = f"{OCI}.image.manifest.v1+json"
            manifests.append(self.json(value, media_type, artifactType=kind))
        small.write(
            place,
            {
                "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
                "index.json": json.dumps({"schemaVersion": 2, "manifests": manifests}).encode(),
                **{f"blobs/sha256/{name}": data for name, data in self.blobs.items()},
            },
        )
        return Path(f"{place}:{TAG}")


def whole(extra: Extra = (), tag: str = ANYWHERE) -> Image:
    """A base image and the layer over it, as an image build leaves it."""
    return Image([list(each) for each in (*base_layers(), laid_over(extra, tag))])


def layer() -> Image:
    """The layer by itself, as ``make image`` writes it."""
    lines = attestations()
    kinds = [each["predicateType"] for each in statements(small.bundle(BASE))]
    referrers = [
        (IN_TOTO, line, {"in-toto.io/predicate-type": kind})
        for line, kind in zip(lines, kinds, strict=True)
    ]
    return Image([list(laid_over())], {**facts()}, {**facts()}, env=[], referrers=referrers)


__all__ = ["BASE", "SHARE", "SITE", "TAG", "Entry", "F", "Image", "X", "layer", "whole"]
