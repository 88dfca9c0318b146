"""The mutations: what is done to a small world, and which checks must then fail, exactly.

Tables and generators of :class:`Mutation`; ``test_verify_mutations`` runs them. What a change
to a file must cause follows from who owns the file (``own_check``), so every touched file,
module, library and released file is mutated in every way. A *careful* forger also rewrites
RECORD.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.unit.verify import small_target as small
from tests.unit.verify.small_target import F, World, X

Members = dict[str, tuple[int, bytes]]
Edit = Callable[[Members], Members]

INFO = f"vllm-{small.LOCAL}.dist-info"
CONNECTOR_INFO = f"sparkcache_connector-{small.CONNECTOR_VERSION}.dist-info"


@dataclass(frozen=True)
class Mutation:
    """``subject`` is judged after ``apply``; exactly ``expected`` must fail or be undecided.

    ``anchor`` says that what lies beside the pins is changed, too.
    """

    name: str
    subject: str
    apply: Callable[[World], None]
    expected: frozenset[str]
    anchor: bool = False


# What is done to the bytes of one file.


def flip(data: bytes) -> bytes:
    """Toggle the case of the last letter, so that Python stays Python; else the last bit."""
    for at in range(len(data) - 1, -1, -1):
        if data[at : at + 1].isalpha() and not data.startswith(small.ELF[:4]):
            return data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]
    return data[:-1] + bytes([data[-1] ^ 1])


def truncate(data: bytes) -> bytes:
    return data[:-1]


def append(data: bytes) -> bytes:
    return data + b"\n# more\n"


def crlf(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n") if b"\r" in data else data.replace(b"\n", b"\r\n")


CHANGES: Mapping[str, Callable[[bytes], bytes]] = {
    "flip": flip,
    "truncate": truncate,
    "append": append,
    "crlf": crlf,
}


# Who owns a file, and so which check fails when it changes or is missing.


def own_check(path: str, *, missing: bool = False) -> set[str]:
    if path in small.MODULES:
        if path not in small.CONTRACT_FILES:
            return {"TREE-6"}
        # without the module the tree is, for this file, in the state of the release
        return {"TREE-6", "CONTRACT-3" if missing else "CONTRACT-2"}
    checks = {"CONTRACT-2"} if path in small.CONTRACT_FILES else set()
    if path in small.POST:
        return checks | {"PATCH-5" if missing else "PATCH-4"}
    if path.endswith(".so"):
        return checks | {"NATIVE-1"}
    if path == "vllm/_version.py" or path.endswith("/METADATA"):
        return checks | {"PKG-3"}
    return checks | {"TREE-2" if missing else "TREE-1"}


def file_mutations(
    subject: str,
    files: Mapping[str, tuple[int, bytes]],
    edit: Callable[[World, Edit, bool], None],
    *,
    record: bool,
    always: frozenset[str] = frozenset(),
) -> Iterator[Mutation]:
    """Every change to every one of ``files``; with ``record``, careless and careful."""
    careful_forms = (False, True) if record else (True,)
    for path, (mode, data) in files.items():
        for careful in careful_forms:
            how = "careful" if careful else "careless"

            # without its entry points, nothing explains the script's row in RECORD
            script = subject == "venv" and path.endswith("/entry_points.txt")
            lost = own_check(path, missing=True) | ({"PKG-4"} if script else set())
            if subject == "venv" and path == "vllm/__init__.py":
                lost |= {"PKG-8"}  # what is left is a namespace

            def mutation(
                name: str,
                change: Edit,
                expected: set[str],
                careless: set[str],
                *,
                careful: bool = careful,
                label: str = f"{subject}-{how}",
                path: str = path,
            ) -> Mutation:
                checks = expected | always | (set() if careful else careless)
                return Mutation(
                    f"{label}-{name}-{path}",
                    subject,
                    lambda world: edit(world, change, careful),
                    frozenset(checks),
                )

            for name, change in CHANGES.items():
                if data and change(data) != data:
                    yield mutation(
                        name,
                        lambda m, path=path, change=change: (
                            m | {path: (m[path][0], change(m[path][1]))}
                        ),
                        own_check(path),
                        {"PKG-5"},
                    )
            yield mutation(
                "remove",
                lambda m, path=path: {p: each for p, each in m.items() if p != path},
                lost,
                {"PKG-4"},
            )
            folder, _, base = path.rpartition("/")
            new = f"{folder}/renamed_{base}" if folder else f"renamed_{base}"
            extra = "NATIVE-2" if path.endswith(".so") else "TREE-3"
            yield mutation(
                "rename",
                lambda m, path=path, new=new: {
                    (new if p == path else p): each for p, each in m.items()
                },
                lost | {extra},
                {"PKG-4"},
            )
        # modes are not in RECORD
        yield Mutation(
            f"{subject}-mode-{path}",
            subject,
            lambda world, path=path, mode=mode: edit(
                world, lambda m: m | {path: (mode ^ 0o111, m[path][1])}, False
            ),
            frozenset({"TREE-4"} | always),
        )


# How the files of each subject are edited.


def edit_wheel(world: World, change: Edit, careful: bool) -> None:
    _edit_zip(world.wheel, change, careful)


def edit_connector(world: World, change: Edit, careful: bool) -> None:
    _edit_zip(world.connector, change, careful)


def _edit_zip(file: Path, change: Edit, careful: bool) -> None:
    members = change(small.unzipped(file.read_bytes()))
    if careful:
        place = next(path for path in members if path.endswith("/RECORD"))
        rest = {path: each for path, each in members.items() if path != place}
        members = rest | {place: (F, small.record(rest, place))}
    file.write_bytes(small.zipped(members))


def edit_tree(world: World, change: Edit, _careful: bool) -> None:
    _edit_folder(world.tree, change)


def edit_sdist(world: World, change: Edit, _careful: bool) -> None:
    files = small.RELEASE | {path: (F, data) for path, data in small.GENERATED.items()}
    world.sdist.write_bytes(small.tarred(change(files)))


def edit_site(world: World, change: Edit, careful: bool) -> None:
    _edit_folder(world.site, change)
    if careful:
        rewrite_record(world, INFO)


def rewrite_record(world: World, info: str) -> None:
    """What a careful forger of an environment does."""
    place = world.site / info / "RECORD"
    outside = [row for row in place.read_text().splitlines() if row.startswith("..")]
    package = "vllm" if info == INFO else "sparkcache_connector"
    files = {
        path: each
        for path, each in _read_folder(world.site).items()
        if path.startswith((f"{package}/", f"{info}/")) and not path.endswith("/RECORD")
    }
    rows = small.record(files, f"{info}/RECORD").decode()
    place.write_text("\n".join([*outside, rows]))


def _read_folder(folder: Path) -> Members:
    return {
        file.relative_to(folder).as_posix(): (0o100000 | file.stat().st_mode, file.read_bytes())
        for file in folder.rglob("*")
        if file.is_file() and not file.is_symlink()
    }


def _edit_folder(folder: Path, change: Edit) -> None:
    before = _read_folder(folder)
    after = change(dict(before))
    for path in before.keys() - after.keys():
        (folder / path).unlink()
    changed = {path: each for path, each in after.items() if before.get(path) != each}
    small.write(folder, changed)


# Mutations of the vLLM wheel, member by member.


def wheel_files() -> Iterator[Mutation]:
    members = small.patched_wheel("cuda-x86_64")
    files = {path: each for path, each in members.items() if not path.endswith("/RECORD")}
    yield from file_mutations("wheel", files, edit_wheel, record=True)
    for path, post in small.POST.items():
        pre = small.RELEASE.get(path, (F, b""))[1]
        contract = {"CONTRACT-3"} if path in small.CONTRACT_FILES else set()
        if post is None:
            yield _wheel(f"undelete-{path}", {"PATCH-5"}, lambda m, p=path, d=pre: m | {p: (F, d)})
        elif pre:
            yield _wheel(
                f"revert-{path}",
                {"PATCH-3"} | contract,
                lambda m, p=path, d=pre: m | {p: (F, d)},
            )
    scheduler, base = "vllm/core/scheduler.py", "vllm/connector/base.py"
    yield _wheel(
        "swap", {"PATCH-4", "CONTRACT-2", "CONTRACT-4"}, lambda m: _swap(m, scheduler, base)
    )
    yield _wheel(
        "swap-natives",
        {"NATIVE-1"},
        lambda m: _swap(m, *[path for path in m if path.endswith(".so")]),
    )
    yield _wheel(
        "unpatched-whole",
        {"PATCH-3", "PATCH-5", "TREE-6", "CONTRACT-3", "PKG-3"},
        _unpatched,
    )
    yield _wheel(
        "signature",
        {"PATCH-4", "CONTRACT-2", "CONTRACT-4"},
        lambda m: m | {base: (F, m[base][1].replace(b"(self)", b"(self, now)"))},
    )
    yield _wheel(
        "syntax",
        {"PATCH-4", "CONTRACT-2", "CONTRACT-4"},
        lambda m: m | {base: (F, b"class Base(\n")},
    )
    yield _wheel(
        "symbol-gone",
        {"TREE-1", "CONTRACT-2", "CONTRACT-4"},
        lambda m: m | {"vllm/core/pool.py": (F, b"def give() -> None: ...\n")},
    )
    yield _wheel("extra-module", {"TREE-3"}, lambda m: m | {"vllm/extra.py": (F, b"")})
    yield _wheel("extra-top", {"TREE-3"}, lambda m: m | {"sitecustomize.py": (F, b"")})
    yield _wheel("extra-pth", {"TREE-3"}, lambda m: m | {"a.pth": (F, b"import os\n")})
    yield _wheel("extra-so", {"NATIVE-2"}, lambda m: m | {"vllm/x.so": (X, b"text")})
    yield _wheel("extra-elf", {"NATIVE-2"}, lambda m: m | {"vllm/x.bin": (F, small.ELF)})
    yield _wheel(
        "extra-bytecode",
        {"TREE-3"},
        lambda m: m | {"vllm/__pycache__/script.cpython-311.pyc": (F, b"")},
    )
    yield _wheel(
        "other-dist-info",
        {"PKG-2"},
        lambda m: {path.replace(INFO, "vllm-9.9.0.dist-info"): each for path, each in m.items()},
    )
    yield _wheel(
        "second-dist-info",
        {"PKG-2", "TREE-3"},
        lambda m: m | {"other-1.dist-info/METADATA": (F, b"Name: other\n")},
    )
    for name, bits in (("setuid", 0o4000), ("setgid", 0o2000), ("world-writable", 0o002)):
        yield _wheel(
            name,
            {"PKG-6"},
            lambda m, bits=bits: m | {scheduler: (F | bits, m[scheduler][1])},
        )


def _wheel(name: str, expected: set[str], change: Edit) -> Mutation:
    return Mutation(
        f"wheel-{name}",
        "wheel",
        lambda world: edit_wheel(world, change, True),
        frozenset(expected),
    )


def _swap(members: Members, left: str, right: str) -> Members:
    a, b = members[left], members[right]
    return members | {left: (a[0], b[1]), right: (b[0], a[1])}


def _unpatched(_members: Members) -> Members:
    upstream = small.base_wheel("cuda-x86_64")
    old = f"vllm-{small.VERSION}.dist-info"
    return {path.replace(old, INFO): each for path, each in upstream.items()}


# Mutations of RECORD, and of the archive itself.


def wheel_record() -> Iterator[Mutation]:
    row = rb"vllm/crlf\.py,(sha256=[^,]+),(\d+)\n"
    edits: list[tuple[str, set[str], Callable[[bytes], bytes]]] = [
        ("no-row", {"PKG-4"}, lambda d: re.sub(row, b"", d)),
        ("row-twice", {"PKG-4"}, lambda d: d + re.search(row, d)[0]),  # type: ignore[index]
        ("row-of-nothing", {"PKG-4"}, lambda d: d + b"vllm/none.py,sha256=" + b"A" * 43 + b",1\n"),
        ("no-hash", {"PKG-5"}, lambda d: re.sub(row, rb"vllm/crlf.py,,\2\n", d)),
        ("other-size", {"PKG-5"}, lambda d: re.sub(row, rb"vllm/crlf.py,\1,1\n", d)),
        ("size-no-number", {"PKG-4"}, lambda d: re.sub(row, rb"vllm/crlf.py,\1,x\n", d)),
        (
            "size-too-long",
            {"PKG-4"},
            lambda d: re.sub(row, b"vllm/crlf.py,\\1," + b"9" * 30 + b"\n", d),
        ),
        ("md5", {"PKG-4"}, lambda d: d.replace(b"vllm/crlf.py,sha256=", b"vllm/crlf.py,md5=")),
        ("bad-base64", {"PKG-4"}, lambda d: re.sub(row, b"vllm/crlf.py,sha256=!,12\n", d)),
        ("two-fields", {"PKG-4"}, lambda d: d + b"vllm/crlf.py,x\n"),
        (
            "own-digest",
            {"PKG-5"},
            lambda d: d.replace(b"RECORD,,", b"RECORD,sha256=" + b"A" * 43 + b",1"),
        ),
        ("own-row-gone", {"PKG-4"}, lambda d: re.sub(rb"[^\n]+RECORD,,\n", b"", d)),
        ("crlf", {"PKG-4"}, lambda d: d.replace(b"\n", b"\r\n")),
        ("not-utf8", {"PKG-4"}, lambda d: d + b"\xff,,\n"),
        ("open-quote", {"PKG-4"}, lambda d: d + b'"vllm'),
        ("empty", {"PKG-4"}, lambda _d: b""),
    ]
    place = f"{INFO}/RECORD"
    for name, expected, change in edits:
        yield Mutation(
            f"record-{name}",
            "wheel",
            lambda world, change=change: edit_wheel(
                world, lambda m: m | {place: (F, change(m[place][1]))}, False
            ),
            frozenset(expected),
        )
    yield Mutation(
        "record-missing",
        "wheel",
        lambda world: edit_wheel(
            world, lambda m: {p: each for p, each in m.items() if p != place}, False
        ),
        frozenset({"PKG-4"}),
    )


def _raw(name: str, change: Callable[[bytes], bytes]) -> Mutation:
    def apply(world: World) -> None:
        before = world.wheel.read_bytes()
        after = change(before)
        assert after != before, "the mutation must change something"
        world.wheel.write_bytes(after)

    return Mutation(f"zip-{name}", "wheel", apply, frozenset({"PKG-1"}))


def _local(data: bytes, path: bytes) -> int:
    """The offset of a member's local header."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.getinfo(path.decode()).header_offset


def _patch(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def _central(data: bytes, path: bytes) -> int:
    """The offset of a member's entry in the central directory."""
    return data.rindex(path) - 46


def wheel_archive() -> Iterator[Mutation]:
    stored, deflated = b"vllm/connector/added.py", b"vllm/core/scheduler.py"
    yield _raw("data-flip-stored", lambda d: _patch(d, _local(d, stored) + 30 + 23, b"X"))
    yield _raw("data-flip-deflated", lambda d: _patch(d, _local(d, deflated) + 30 + 22 + 9, b"\0"))
    yield _raw("comment", lambda d: d[:-2] + b"\x03\x00abc")
    yield _raw("trailing", lambda d: d + b"trailing")
    yield _raw("prefix", lambda d: b"#!/bin/sh\n" + d)
    yield _raw("cut", lambda d: d[:-30])
    yield _raw("half", lambda d: d[: len(d) // 2])
    yield _raw("empty", lambda _d: b"")
    yield _raw(
        "no-zip",
        lambda d: b"\x1f\x8b" + d[2:],
    )
    yield _raw(
        "local-name", lambda d: _patch(d, _local(d, stored) + 30, b"vllm/connector/other.py")
    )
    yield _raw("local-size", lambda d: _patch(d, _local(d, stored) + 22, b"\x01"))
    yield _raw("local-packed", lambda d: _patch(d, _local(d, stored) + 18, b"\x01"))
    yield _raw("local-crc", lambda d: _patch(d, _local(d, stored) + 14, b"\x01\x02\x03\x04"))
    yield _raw("local-method", lambda d: _patch(d, _local(d, stored) + 8, b"\x08"))
    yield _raw("local-flags", lambda d: _patch(d, _local(d, stored) + 6, b"\x08"))
    yield _raw("local-marker", lambda d: _patch(d, _local(d, stored), b"XX"))
    yield _raw("central-method", lambda d: _patch(d, _central(d, stored) + 10, b"\x0c"))
    yield _raw("central-encrypted", lambda d: _patch(d, _central(d, stored) + 8, b"\x01"))
    yield _raw("central-size", lambda d: _patch(d, _central(d, stored) + 24, b"\xff\xff\xff\x7f"))
    yield _raw("central-packed", lambda d: _patch(d, _central(d, deflated) + 20, b"\x01"))
    yield _raw("central-crc", lambda d: _patch(d, _central(d, deflated) + 16, b"\x01\x02\x03\x04"))
    yield _raw("central-bomb", lambda d: _patch(d, _central(d, deflated) + 24, b"\xf0\xff\xff\xff"))
    yield _raw("member-twice", _twice)
    yield _raw("gap", _gap)
    for name, path, more in (
        ("directory", "vllm/folder/", ()),
        ("parent", "vllm/../../up.py", ()),
        ("absolute", "/vllm/up.py", ()),
        ("backslash", "vllm\\up.py", ()),
        ("control", "vllm/up\n.py", ()),
    ):
        yield Mutation(
            f"zip-name-{name}",
            "wheel",
            lambda world, path=path: edit_wheel(world, lambda m: m | {path: (F, b"x")}, False),
            frozenset({"PKG-1", *more}),
        )
    yield Mutation(
        "zip-symlink",
        "wheel",
        lambda world: edit_wheel(world, lambda m: m | {"vllm/link.py": (0o120777, b"a")}, False),
        frozenset({"PKG-1"}),
    )
    yield Mutation(
        "wheel-file-name",
        "wheel",
        lambda world: (
            (world.bundle / "vllm.whl").write_bytes(world.wheel.read_bytes())
            and world.wheel.unlink()
        ),
        frozenset({"PKG-2"}),
    )


def _twice(data: bytes) -> bytes:
    sink = io.BytesIO(data)
    with zipfile.ZipFile(sink, "a") as archive:
        info = zipfile.ZipInfo("vllm/crlf.py", (2020, 1, 1, 0, 0, 0))
        info.external_attr, info.create_system = F << 16, 3
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            archive.writestr(info, b"other")
    return sink.getvalue()


def _gap(data: bytes) -> bytes:
    """Hide bytes between the last member and the directory, and correct the offset."""
    end = len(data) - 22
    start = int.from_bytes(data[end + 16 : end + 20], "little")
    hidden = b"hidden bytes"
    moved = data[:start] + hidden + data[start:]
    return _patch(moved, end + len(hidden) + 16, (start + len(hidden)).to_bytes(4, "little"))


# Mutations of source trees and of the sdist.


def sources() -> Iterator[Mutation]:
    yield from file_mutations("tree", small.composed(), edit_tree, record=False)
    released = small.RELEASE
    for mutation in file_mutations(
        "sdist", released, edit_sdist, record=False, always=frozenset({"BASE-6"})
    ):
        # an sdist is judged as released: patches touch nothing
        renamed = {"PATCH-4": "TREE-1", "PATCH-5": "TREE-2"}
        expected = frozenset(renamed.get(check, check) for check in mutation.expected)
        yield Mutation(mutation.name, mutation.subject, mutation.apply, expected)
    yield from _folder_cases(
        "tree",
        [
            ("link", {"TREE-5"}, lambda w: _link(w.tree / "vllm/crlf.py", "data/table.json")),
            ("linked-folder", {"TREE-5"}, lambda w: _link_folder(w.tree / "vllm/data")),
            ("extra-link", {"TREE-5"}, lambda w: _link(w.tree / "vllm/more.py", "crlf.py")),
            ("pipe", {"TREE-5"}, lambda w: _pipe(w.tree / "vllm/crlf.py")),
            ("folder", {"TREE-2"}, lambda w: _folder(w.tree / "vllm/crlf.py")),
            ("bytes-name", {"TREE-5"}, lambda w: _bytes_name(w.tree / "vllm")),
            ("newline-name", {"TREE-5"}, lambda w: (w.tree / "vllm/a\nb.py").write_text("")),
            ("pth", {"TREE-3"}, lambda w: (w.tree / "x.pth").write_text("import os")),
            ("git-inside", {"TREE-3"}, lambda w: small.write(w.tree, {"vllm/.git/config": b""})),
            (
                "undelete",
                {"PATCH-5"},
                lambda w: small.write(w.tree, {"vllm/connector/gone.py": b""}),
            ),
            ("bytecode", {"PKG-7"}, lambda w: _bytecode(w.tree, "vllm/none.py", b"1\n")),
            ("sticky", {"PKG-6"}, lambda w: (w.tree / "vllm/crlf.py").chmod(0o1644)),
        ],
    )
    for name, files, expected in (
        ("extra", {"vllm/extra.py": (F, b"")}, {"TREE-3"}),
        ("extra-elf", {"vllm/x": (F, small.ELF)}, {"NATIVE-2"}),
    ):
        yield Mutation(
            f"sdist-{name}",
            "sdist",
            lambda world, files=files: edit_sdist(world, lambda m: m | files, False),
            frozenset(expected | {"BASE-6"}),
        )
    yield _sdist("top", {"PKG-1"}, lambda _d: small.tarred(_sdist_files(), "vllm-9.9.1"))
    yield _sdist("recompressed", set(), lambda d: _gzip(d))
    yield _sdist("cut", {"TREE-2", "CONTRACT-2"}, lambda d: _gzip_cut(d))
    yield _sdist("crc", {"PKG-1"}, lambda d: d[:-8] + bytes(4) + d[-4:])
    yield _sdist("no-gzip", {"PKG-1"}, lambda _d: b"PK\x03\x04")
    yield _sdist("no-tar", {"PKG-1"}, lambda _d: _gzip(b"", raw=b"x" * 2000))
    yield _sdist("twice", {"PKG-1"}, lambda d: _tar_more(d, "vllm/crlf.py", b"0"))
    yield _sdist("symlink", {"TREE-5"}, lambda d: _tar_more(d, "vllm/link.py", b"2"))
    yield _sdist("hard-link", {"TREE-5"}, lambda d: _tar_more(d, "vllm/link.py", b"1"))
    yield _sdist("device", {"TREE-5"}, lambda d: _tar_more(d, "vllm/dev", b"3"))
    yield _sdist("parent", {"TREE-5"}, lambda d: _tar_more(d, "../../up.py", b"0"))
    yield _sdist("other-top", {"PKG-1"}, lambda d: _tar_more(d, "a", b"0", top="other"))


def _sdist(name: str, expected: set[str], change: Callable[[bytes], bytes]) -> Mutation:
    def apply(world: World) -> None:
        world.sdist.write_bytes(change(world.sdist.read_bytes()))

    return Mutation(f"sdist-{name}", "sdist", apply, frozenset(expected | {"BASE-6"}))


def _sdist_files() -> Members:
    return small.RELEASE | {path: (F, data) for path, data in small.GENERATED.items()}


def _gzip(data: bytes, raw: bytes | None = None) -> bytes:
    import gzip

    return gzip.compress(raw if raw is not None else gzip.decompress(data), 1, mtime=5)


def _gzip_cut(data: bytes) -> bytes:
    import gzip

    return gzip.compress(gzip.decompress(data)[: 512 * 13], mtime=0)


def _tar_more(data: bytes, path: str, kind: bytes, top: str = f"vllm-{small.VERSION}") -> bytes:
    import gzip
    import tarfile

    sink = io.BytesIO(gzip.decompress(data))
    with tarfile.open(fileobj=sink, mode="a") as archive:
        info = tarfile.TarInfo(f"{top}/{path}")
        info.type, info.linkname = kind, f"{top}/vllm/crlf.py" if kind in b"12" else ""
        archive.addfile(info, io.BytesIO(b""))
    return gzip.compress(sink.getvalue(), mtime=0)


def _folder_cases(
    subject: str, cases: list[tuple[str, set[str], Callable[[World], object]]]
) -> Iterator[Mutation]:
    for name, expected, apply in cases:
        yield Mutation(f"{subject}-{name}", subject, apply, frozenset(expected))  # type: ignore[arg-type]


def _link(file: Path, target: str) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(target)


def _link_folder(folder: Path) -> None:
    moved = folder.parent.parent.parent / "elsewhere"
    folder.rename(moved)
    folder.symlink_to(moved)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _bytes_name(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/a\xff.py")).write_text("")


def _bytecode(root: Path, source: str, code: bytes, *, flags: int = 0, stale: bool = False) -> None:
    """Compile ``code`` into the place where Python looks for the module of ``source``."""
    import importlib.util
    import marshal
    import struct
    import sys

    file = root / source
    found = file.stat() if file.exists() else os.stat_result((0,) * 10)
    stamp = struct.pack("<II", int(found.st_mtime) + stale, found.st_size)
    if flags & 1:
        stamp = importlib.util.source_hash(file.read_bytes())
    body = marshal.dumps(compile(code, source, "exec", dont_inherit=True))
    data = importlib.util.MAGIC_NUMBER + struct.pack("<I", flags) + stamp + body
    place = file.parent / "__pycache__" / f"{file.stem}.{sys.implementation.cache_tag}.pyc"
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(data)


# Mutations of what lies beside the subject: pins, manifests, contract, patches, objects.


def _json_edit(
    file: Callable[[World], Path], change: Callable[[Any], object]
) -> Callable[[World], None]:
    def apply(world: World) -> None:
        value = json.loads(file(world).read_bytes())
        change(value)
        file(world).write_bytes(small.canonical(value))

    return apply


def _pins_file(world: World) -> Path:
    return world.pins / "pins.json"


def _other(text: str) -> str:
    return ("0" if text[0] != "0" else "1") + text[1:]


def _set(*keys: str | int) -> Callable[[Any], None]:
    """Change the hex digest, number or text at ``keys``."""

    def change(value: Any) -> None:
        for key in keys[:-1]:
            value = value[key]
        old = value[keys[-1]]
        value[keys[-1]] = old + 1 if isinstance(old, int) else _other(old)

    return change


def anchors() -> Iterator[Mutation]:
    base = ("bases", "cuda-x86_64")
    cases: list[tuple[str, set[str], tuple[str | int, ...]]] = [
        ("source-manifest", {"BASE-2"}, ("source", "manifest", "sha256")),
        ("vllm-manifest", {"BASE-2"}, ("source", "vllm_manifest_sha256")),
        ("composed-manifest", {"BASE-2"}, ("composed", "manifest_sha256")),
        ("base-manifest", {"BASE-2"}, (*base, "manifest", "sha256")),
        ("packaging-pre", {"BASE-2"}, (*base, "packaging", "files", 0, "pre")),
        ("packaging-post", {"PKG-3"}, (*base, "packaging", "files", 0, "post")),
        ("differs", {"BASE-2"}, ("bases", "cpu-x86_64", "differs", "vllm/platform.py")),
        ("pre", {"BASE-2"}, ("files", 0, "pre", "sha256")),
        ("post", {"BASE-2"}, ("files", 0, "post", "sha256")),
        ("pre-git", {"PATCH-2"}, ("files", 0, "pre", "git")),
        ("post-git", {"PATCH-2"}, ("files", 1, "post", "git")),
        ("module", {"BASE-2"}, ("modules", 1, "sha256")),
        ("composed-tree", {"BASE-5"}, ("composed", "vllm_tree")),
        ("commit", {"BASE-3"}, ("commit", "id")),
        ("tree", {"BASE-3"}, ("source", "tree")),
        ("vllm-tree", {"BASE-3"}, ("source", "vllm_tree")),
        ("native", {"NATIVE-3"}, (*base, "native", "sha256")),
        ("native-count", {"NATIVE-3"}, (*base, "native", "count")),
        ("contract", {"CONTRACT-1"}, ("contract", "sha256")),
        ("patch", {"PATCH-1"}, ("patches", 0, "sha256")),
    ]
    for name, expected, keys in cases:
        yield Mutation(
            f"pins-{name}", "wheel", _json_edit(_pins_file, _set(*keys)), frozenset(expected)
        )
    for name, expected, keys in (
        ("sdist", {"BASE-6"}, ("sdist", "sha256")),
        ("tree-unproven", {"BASE-4"}, ("source", "tree")),
        ("vllm-tree-unproven", {"BASE-5"}, ("source", "vllm_tree")),
    ):

        def change(value: Any, keys: tuple[str, ...] = keys) -> None:
            value["commit"]["status"] = "unproven"
            _set(*keys)(value)

        yield Mutation(f"pins-{name}", "sdist", _json_edit(_pins_file, change), frozenset(expected))
    yield Mutation(
        "pins-mode",
        "wheel",
        _json_edit(_pins_file, lambda v: v["files"][0].update(mode="100755")),
        frozenset({"BASE-2"}),
    )
    yield Mutation(
        "pins-module-of-release",
        "wheel",
        _json_edit(_pins_file, lambda v: v["modules"][0].update(path="vllm/crlf.py")),
        frozenset({"BASE-2"}),
    )
    yield Mutation(
        "pins-patch-order",
        "wheel",
        _json_edit(_pins_file, lambda v: v["patches"].reverse()),
        frozenset({"PATCH-1"}),
    )
    files: list[tuple[str, str, set[str]]] = [
        ("source.manifest", "overlay/targets/v9.9.0/source.manifest", {"BASE-2"}),
        ("base.manifest", "overlay/targets/v9.9.0/bases/cpu-x86_64.manifest", {"BASE-2"}),
        ("contract", "overlay/targets/v9.9.0/contract.json", {"CONTRACT-1"}),
        ("commit", "overlay/targets/v9.9.0/objects/commit", {"BASE-3"}),
        ("tree", "overlay/targets/v9.9.0/objects/tree", {"BASE-3"}),
        ("first-patch", "patches/v9.9.0/0001-first.patch", {"PATCH-1"}),
        ("second-patch", "patches/v9.9.0/0002-second.patch", {"PATCH-1"}),
        ("series", "patches/v9.9.0/series", {"PATCH-1"}),
    ]
    for name, path, expected in files:
        for how, change in {**CHANGES, "empty": lambda _d: b""}.items():
            if name == "series" and how in ("append", "crlf", "truncate"):
                continue  # the series is read by lines; these name the same patches
            if change(b"a b\nc\n") == b"a b\nc\n":
                continue
            yield Mutation(
                f"{name}-{how}",
                "wheel",
                lambda world, path=path, change=change: _rewrite(world.home / path, change),
                frozenset(expected),
            )
        if name != "series":
            yield Mutation(
                f"{name}-missing",
                "wheel",
                lambda world, path=path: (world.home / path).unlink(),
                frozenset(expected),
            )
    yield Mutation("patch-other-path", "wheel", _patch_story, frozenset({"PATCH-2"}))
    yield Mutation("contract-disagrees", "wheel", _contract_story, frozenset({"CONTRACT-1"}))
    yield Mutation("contract-states", "wheel", _contract_states, frozenset({"CONTRACT-1"}))
    yield Mutation("contract-schema", "wheel", _contract_schema, frozenset({"CONTRACT-1"}))
    yield Mutation("operator", "wheel", _operator, frozenset({"NATIVE-4"}))


def _rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    before = file.read_bytes()
    after = change(before)
    if after == before:  # no line ends to convert, as in a raw tree
        after = before[:-1]
    file.write_bytes(after)


def _repin(world: World, section: str, data: bytes, name: str | None = None) -> None:
    """Pin what was forged beside the pins: they agree in bytes, not in what they say."""
    pins = json.loads(_pins_file(world).read_bytes())
    entry = (
        pins[section]
        if name is None
        else next(each for each in pins[section] if each["name"] == name)
    )
    entry["sha256"] = small.sha256(data)
    _pins_file(world).write_bytes(small.canonical(pins))


def _patch_story(world: World) -> None:
    file = world.home / "patches/v9.9.0/0001-first.patch"
    data = file.read_bytes().replace(b"core/scheduler.py", b"core/pool.py")
    file.write_bytes(data)
    _repin(world, "patches", data, file.name)


def _operator(world: World) -> None:
    file = world.home / "patches/v9.9.0/0001-first.patch"
    data = file.read_bytes() + b"+torch.ops.vllm.no_such_operator\n"
    file.write_bytes(data)
    _repin(world, "patches", data, file.name)


def _contract(world: World, change: Callable[[Any], object]) -> None:
    file = world.pins / "contract.json"
    value = json.loads(file.read_bytes())
    change(value)
    data = small.canonical(value)
    file.write_bytes(data)
    _repin(world, "contract", data)


def _contract_story(world: World) -> None:
    _contract(world, lambda v: v["files"][0]["sha256"].update({"spark.1": "0" * 64}))


def _contract_states(world: World) -> None:
    def rename(value: Any) -> None:
        value["states"]["spark.2"] = value["states"].pop("spark.1")
        for file in value["files"]:
            for mapping in (file["sha256"], *file["symbols"].values()):
                mapping["spark.2"] = mapping.pop("spark.1")

    _contract(world, rename)


def _contract_schema(world: World) -> None:
    _contract(world, lambda v: v.update(schema="sparkcache.contract/v2"))


# Mutations of the bundle's papers and of the connector.


def bundles() -> Iterator[Mutation]:
    def receipt(world: World) -> Path:
        return world.bundle / "receipt.json"

    keys: list[tuple[str, set[str], tuple[str | int, ...]]] = [
        ("target", {"PKG-12"}, ("target",)),
        ("local-version", {"PKG-12"}, ("local_version",)),
        ("commit", {"PKG-12"}, ("commit", "id")),
        ("pins", {"PKG-12"}, ("pins", "sha256")),
        ("contract", {"PKG-12"}, ("contract", "sha256")),
        ("patch", {"PKG-12"}, ("patches", 1, "sha256")),
        ("module", {"PKG-12"}, ("modules", 0, "sha256")),
        ("tree", {"PKG-12"}, ("composition", "vllm_tree")),
        ("manifest", {"PKG-12"}, ("composition", "manifest_sha256")),
        ("native", {"PKG-12"}, ("native", "sha256")),
        ("native-count", {"PKG-12"}, ("native", "count")),
        ("input", {"BASE-6"}, ("inputs", 0, "sha256")),
        ("input-name", {"BASE-6"}, ("inputs", 0, "name")),
        ("connector-version", {"PKG-13"}, ("connector", "version")),
        ("connector-tree", {"PKG-13"}, ("connector", "git_tree")),
        ("connector-source", {"PKG-13"}, ("connector", "source_sha256")),
        ("connector-contract", {"PKG-14"}, ("connector", "contract_sha256")),
        ("artifact", {"PKG-11"}, ("artifacts", "LICENSE", "sha256")),
        ("artifact-size", {"PKG-11"}, ("artifacts", "NOTICE", "size")),
    ]
    for name, expected, path in keys:
        yield Mutation(
            f"receipt-{name}", "bundle", _json_edit(receipt, _set(*path)), frozenset(expected)
        )
    edits: list[tuple[str, set[str], Callable[[Any], object]]] = [
        ("base", {"PKG-12"}, lambda v: v.update(base="cpu-x86_64")),
        ("unknown-base", {"PKG-12"}, lambda v: v.update(base="cpu")),
        ("no-inputs", {"BASE-6"}, lambda v: v.update(inputs=[])),
        ("claims-proof", {"PKG-12"}, lambda v: v["commit"].update(status="unproven")),
        ("unknown-key", {"PKG-12"}, lambda v: v.update(extra=1)),
        ("missing-key", {"PKG-12"}, lambda v: v.pop("native")),
        ("schema", {"PKG-12"}, lambda v: v.update(schema="sparkcache.receipt/v2")),
        (
            "lists-more",
            {"PKG-11"},
            lambda v: v["artifacts"].update(more={"sha256": "0" * 64, "size": 1}),
        ),
        ("lists-less", {"PKG-11"}, lambda v: v["artifacts"].pop("NOTICE")),
    ]
    for name, expected, change in edits:
        expected = expected | ({"BASE-6"} if name == "base" else set())
        yield Mutation(
            f"receipt-{name}", "bundle", _json_edit(receipt, change), frozenset(expected)
        )
    for name, data in (
        ("empty", b""),
        ("no-json", b"{"),
        ("deep", b"[" * 100_000),
        ("twice", b'{"a":1,"a":2}\n'),
        ("list", b"[]\n"),
    ):
        yield Mutation(
            f"receipt-{name}",
            "bundle",
            lambda world, data=data: (world.bundle / "receipt.json").write_bytes(data),  # type: ignore[arg-type,return-value]
            frozenset({"PKG-12"}),
        )
    yield from _folder_cases(
        "bundle",
        [
            ("no-receipt", {"PKG-12"}, lambda w: receipt(w).unlink()),
            ("extra", {"PKG-11"}, lambda w: (w.bundle / "more.txt").write_text("x")),
            ("license-gone", {"PKG-11"}, lambda w: (w.bundle / "LICENSE").unlink()),
            ("license", {"PKG-11"}, lambda w: (w.bundle / "LICENSE").write_text("MIT\n")),
            ("link", {"TREE-5"}, lambda w: _link(w.bundle / "LICENSE", "NOTICE")),
            ("no-wheel", {"PKG-11"}, lambda w: w.wheel.unlink()),
            ("no-connector", {"PKG-11"}, lambda w: w.connector.unlink()),
            ("bom-gone", {"PKG-11"}, lambda w: (w.bundle / "bom.cdx.json").unlink()),
        ],
    )
    boms: list[tuple[str, Callable[[Any], object]]] = [
        ("version", lambda v: v["metadata"]["component"].update(version="9.9.0")),
        ("purl", lambda v: v["metadata"]["component"].update(purl="pkg:pypi/vllm@9.9.0")),
        ("hash", lambda v: v["metadata"]["component"]["hashes"][0].update(content="0" * 64)),
        ("no-hash", lambda v: v["metadata"]["component"].pop("hashes")),
        ("no-component", lambda v: v["metadata"].pop("component")),
        ("format", lambda v: v.update(bomFormat="SPDX")),
        ("spec", lambda v: v.update(specVersion="1.5")),
    ]
    for name, change in boms:
        yield Mutation(
            f"bom-{name}",
            "bundle",
            _json_edit(lambda w: w.bundle / "bom.cdx.json", change),
            frozenset({"PKG-11", "PKG-15"}),
        )
    yield Mutation(
        "bundle-wheel-edited",
        "bundle",
        lambda world: edit_wheel(world, lambda m: m | {"vllm/crlf.py": (F, b"")}, True),
        frozenset({"PKG-11", "PKG-15", "TREE-1"}),
    )


def connectors() -> Iterator[Mutation]:
    init = "sparkcache_connector/__init__.py"
    edits: list[tuple[str, set[str], Edit, bool]] = [
        ("edited", {"PKG-13"}, lambda m: m | {init: (F, flip(m[init][1]))}, True),
        ("careless", {"PKG-13", "PKG-5"}, lambda m: m | {init: (F, flip(m[init][1]))}, False),
        ("removed", {"PKG-13"}, lambda m: {p: e for p, e in m.items() if p != init}, True),
        ("more", {"PKG-13"}, lambda m: m | {"sparkcache_connector/x.py": (F, b"")}, True),
        ("elf", {"PKG-13"}, lambda m: m | {"sparkcache_connector/x.so": (X, small.ELF)}, True),
        ("top", {"TREE-3"}, lambda m: m | {"vllm/connector/base.py": (F, b"")}, True),
        (
            "contract",
            {"PKG-14"},
            lambda m: m | {"sparkcache_connector/contract.json": (F, b"{}\n")},
            True,
        ),
        (
            "no-contract",
            {"PKG-14"},
            lambda m: {p: e for p, e in m.items() if not p.endswith("contract.json")},
            True,
        ),
        ("setuid", {"PKG-6"}, lambda m: m | {init: (F | 0o4000, m[init][1])}, True),
        (
            "dist-info",
            {"PKG-2"},
            lambda m: {p.replace("-0.1.0.", "-0.2.0."): each for p, each in m.items()},
            True,
        ),
    ]
    for name, expected, change, careful in edits:
        yield Mutation(
            f"connector-{name}",
            "connector",
            lambda world, change=change, careful=careful: edit_connector(world, change, careful),
            frozenset(expected),
        )


# Mutations of an environment.


def environments() -> Iterator[Mutation]:
    members = small.patched_wheel("cuda-x86_64")
    files = {path: each for path, each in members.items() if not path.endswith("/RECORD")}
    yield from file_mutations("venv", files, edit_site, record=True)
    scheduler = "vllm/core/scheduler.py"
    cases: list[tuple[str, set[str], Callable[[World], object]]] = [
        ("extra", {"TREE-3", "PKG-4"}, lambda w: (w.site / "vllm/x.py").write_text("")),
        ("extra-so", {"NATIVE-2", "PKG-4"}, lambda w: (w.site / "vllm/x.so").write_bytes(b"")),
        ("link", {"TREE-5"}, lambda w: _link(w.site / scheduler, "pool.py")),
        ("setuid", {"PKG-6"}, lambda w: (w.site / scheduler).chmod(0o4644)),
        ("writable", {"PKG-6"}, lambda w: (w.site / scheduler).chmod(0o646)),
        ("no-record", {"PKG-4"}, lambda w: (w.site / INFO / "RECORD").unlink()),
        ("folder-record", {"PKG-4"}, lambda w: _folder(w.site / INFO / "RECORD")),
        ("row-outside", {"PKG-4"}, lambda w: _row(w, "../../../etc/passwd,,")),
        ("row-script", {"PKG-4"}, lambda w: _row(w, "../../../bin/python,,")),
        ("script", {"PKG-5"}, lambda w: (w.venv / "bin/vllm").write_text("#!/bin/sh\n")),
        ("script-gone", {"PKG-4"}, lambda w: (w.venv / "bin/vllm").unlink()),
        ("installer", {"PKG-10", "PKG-5"}, lambda w: _info(w, "INSTALLER", b"\x1b[2J evil\n")),
        ("requested", {"PKG-10", "PKG-5"}, lambda w: _info(w, "REQUESTED", b"x")),
        ("direct-url", {"PKG-10"}, lambda w: _info(w, "direct_url.json", b"{")),
        ("direct-url-list", {"PKG-10"}, lambda w: _info(w, "direct_url.json", b"[1]")),
        ("direct-url-none", {"PKG-10"}, lambda w: _info(w, "direct_url.json", b"{}")),
        ("info-extra", {"TREE-3", "PKG-4"}, lambda w: _info(w, "extra.txt", b"")),
        ("shadow-module", {"PKG-8"}, lambda w: (w.venv / "bin/vllm.py").write_text("")),
        ("second", {"PKG-8"}, _second_distribution),
        (
            "start-line",
            {"PKG-9"},
            lambda w: (w.site / "a.pth").write_text("import os; os.abort()\n"),
        ),
        ("sitecustomize", {"PKG-9"}, lambda w: (w.site / "sitecustomize.py").write_text("x\n")),
        (
            "sitecustomize-package",
            {"PKG-9"},
            lambda w: small.write(w.site, {"sitecustomize/__init__.py": b""}),
        ),
        ("start-file", {"PKG-9"}, lambda w: (w.site / "a.start").write_text("a:b\n")),
        ("pth-bytes", {"PKG-8"}, lambda w: (w.site / "a.pth").write_bytes(b"\xff\xfe\n")),
        ("pth-before", {"PKG-8"}, _editable_before),
        ("no-vllm", {"PKG-8"}, lambda w: _remove_folder(w.site / "vllm")),
        (
            "no-dist-info",
            {"PKG-8", "TREE-3", "NATIVE-2", "TREE-4"},
            lambda w: _remove_folder(w.site / INFO),
        ),
        (
            "namespace",
            {"PKG-8", "TREE-2", "PKG-4"},
            lambda w: (w.site / "vllm/__init__.py").unlink(),
        ),
        ("connector", {"PKG-13", "PKG-5"}, lambda w: _connector(w, "cli.py", b"x = 1\n")),
        ("connector-more", {"PKG-13", "PKG-4"}, lambda w: _connector(w, "x.py", b"")),
        ("connector-contract", {"PKG-14", "PKG-5"}, lambda w: _connector(w, "contract.json", b"")),
        ("connector-info", {"PKG-8"}, lambda w: _remove_folder(w.site / CONNECTOR_INFO)),
        ("pyc-other", {"PKG-7"}, lambda w: _bytecode(w.site, scheduler, b"evil = 1\n")),
        ("pyc-hashed", {"PKG-7"}, lambda w: _bytecode(w.site, scheduler, b"evil = 1\n", flags=3)),
        (
            "pyc-unchecked",
            {"PKG-7"},
            lambda w: _bytecode(w.site, "vllm/crlf.py", b"A = 1\n", flags=1),
        ),
        ("pyc-orphan", {"PKG-7"}, lambda w: _bytecode(w.site, "vllm/none.py", b"")),
        (
            "pyc-connector",
            {"PKG-7"},
            lambda w: _bytecode(w.site, "sparkcache_connector/cli.py", b"x = 1\n"),
        ),
        ("pyc-legacy", {"TREE-3", "PKG-4"}, lambda w: (w.site / "vllm/x.pyc").write_bytes(b"")),
        (
            "pycache-text",
            {"TREE-3", "PKG-4"},
            lambda w: small.write(w.site, {"vllm/__pycache__/x.txt": b""}),
        ),
    ]
    yield from _folder_cases("venv", cases)


def harmless() -> Iterator[Mutation]:
    """Changes that installers and users make, and that fail nothing."""
    scheduler = "vllm/core/scheduler.py"
    post = small.POST[scheduler] or b""
    cases: list[tuple[str, set[str], Callable[[World], object]]] = [
        ("pyc-same", set(), lambda w: _bytecode(w.site, scheduler, post)),
        ("pyc-stale", set(), lambda w: _bytecode(w.site, scheduler, b"old = 1\n", stale=True)),
        ("direct-url-ok", set(), lambda w: _info(w, "direct_url.json", b'{"url":"file:///x"}')),
        ("uv", set(), lambda w: _info(w, "uv_cache.json", b'{"timestamp":1.5}')),
        ("path-line", set(), lambda w: (w.site / "a.pth").write_text("# c\n\n../elsewhere\n")),
        ("shim", set(), lambda w: (w.site / "distutils-precedence.pth").write_text(SHIM)),
        ("empty-folder", set(), lambda w: (w.site / "vllm/core/more").mkdir()),
        ("other-package", set(), lambda w: small.write(w.site, {"torch/__init__.py": b""})),
    ]
    yield from _folder_cases("venv", cases)
    yield from _folder_cases(
        "tree",
        [
            ("git", set(), lambda w: small.write(w.tree, {".git/config": b""})),
            ("generated", set(), lambda w: small.write(w.tree, {"PKG-INFO": b"Name: vllm\n"})),
            ("bytecode-same", set(), lambda w: _bytecode(w.tree, scheduler, post)),
        ],
    )


SHIM = (
    "import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os.environ.get(var, 'local') == "
    "'local'; enabled and __import__('_distutils_hack').add_shim(); \n"
)


def _row(world: World, row: str) -> None:
    place = world.site / INFO / "RECORD"
    place.write_text(place.read_text() + row + "\n")


def _info(world: World, name: str, data: bytes) -> None:
    small.write(world.site / INFO, {name: data})


def _connector(world: World, name: str, data: bytes) -> None:
    small.write(world.site / "sparkcache_connector", {name: data})


def _remove_folder(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


def _second_distribution(world: World) -> None:
    info = world.site / "vllm_rocm-9.9.0.dist-info"
    small.write(info, {"RECORD": b"vllm/__init__.py,,\nvllm_rocm-9.9.0.dist-info/RECORD,,\n"})


def _editable_before(world: World) -> None:
    """The standard library's directory comes before site directories."""
    small.write(world.root, {"base/lib/python3.11/vllm/__init__.py": b""})
    text = (world.venv / "pyvenv.cfg").read_text()
    text = re.sub(r"home = .*", f"home = {world.root}/base/bin", text)
    (world.venv / "pyvenv.cfg").write_text(text)


def every() -> list[Mutation]:
    """All of them; names are unique."""
    return [
        *wheel_files(),
        *wheel_record(),
        *wheel_archive(),
        *sources(),
        *(replace(each, anchor=True) for each in anchors()),
        *bundles(),
        *connectors(),
        *environments(),
        *harmless(),
    ]
