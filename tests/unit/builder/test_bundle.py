from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from builder import bundle
from builder.bundle import OutputError, staging, write_file
from builder.errors import BuildError

OLD = {"wheel.whl": b"old wheel" * 1000, "receipt.json": b"old receipt"}
NEW = {"wheel.whl": b"new wheel" * 30_000, "receipt.json": b"new receipt", "NOTICE": b"n"}
# Every file operation of the module that Python announces, and so can be made to fail or kill.
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")


def publish(final: Path, files: dict[str, bytes]) -> None:
    with staging(final) as stage:
        for name, data in files.items():
            stage.write(name, data)


def held(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def whole(parent: Path) -> dict[str, bytes] | None:
    """What is published, checked to be one of the bundles, with nothing beside it."""
    assert {entry.name for entry in parent.iterdir()} <= {"cpu"}
    found = held(parent / "cpu") if (parent / "cpu").exists() else None
    assert found in (None, OLD, NEW)
    return found


@pytest.fixture(params=["exchange", "no exchange"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """File systems that swap two directories in one step, and those that cannot."""
    if request.param == "no exchange":
        monkeypatch.setattr(bundle, "_exchange", lambda *_: False)
    return str(request.param)


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps publish hundreds of times; what syncing does is tested by itself."""
    monkeypatch.setattr(bundle.os, "fsync", lambda _: None)


class Interceptor:
    """Calls ``action`` at the k-th file operation below a folder, through Python's audit hook."""

    def __init__(self) -> None:
        self._folder = ""
        self._left = 0
        self._action: Callable[[], None] | None = None
        sys.addaudithook(self._hook)

    def at(self, number: int, folder: Path, action: Callable[[], None]) -> None:
        self._folder, self._left, self._action = str(folder), number, action

    @property
    def reached(self) -> bool:
        return self._action is None

    def off(self) -> None:
        self._action = None

    def _hook(self, event: str, args: tuple[object, ...]) -> None:
        if self._action is None or event not in EVENTS or self._folder not in str(args[0]):
            return
        self._left -= 1
        if self._left < 0:
            action, self._action = self._action, None
            action()


@pytest.fixture(scope="module")
def interceptor() -> Interceptor:
    return Interceptor()


@pytest.fixture
def intercept(interceptor: Interceptor) -> Iterator[Interceptor]:
    yield interceptor
    interceptor.off()


def test_bundle_replaces_the_earlier_one_whole(tmp_path: Path, file_system: str) -> None:
    publish(tmp_path / "cpu", OLD)
    assert whole(tmp_path) == OLD
    publish(tmp_path / "cpu", NEW)
    assert whole(tmp_path) == NEW


def test_artifacts_tell_what_was_written(tmp_path: Path) -> None:
    with staging(tmp_path / "cpu") as stage:
        stage.stream("a", lambda sink: (sink.write(b"ab"), sink.write(memoryview(b"c"))))
        assert stage.artifacts["a"].size == 3
        assert stage.artifacts["a"].sha256.startswith("ba7816bf")


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    modes = set()
    for umask in (0o000, 0o077):
        old = os.umask(umask)
        try:
            folder = tmp_path / f"{umask}"
            publish(folder / "cpu", NEW)
            write_file(folder / "v.pyz", lambda sink: sink.write(b"x"), mode=0o755)
        finally:
            os.umask(old)
        paths = (folder, folder / "cpu", folder / "cpu" / "NOTICE", folder / "v.pyz")
        modes.add(tuple(stat.S_IMODE(path.stat().st_mode) for path in paths))
    assert modes == {(0o755, 0o755, 0o644, 0o755)}


@pytest.mark.parametrize("error", [BuildError("the judge said no"), KeyboardInterrupt()])
def test_failed_block_leaves_the_earlier_bundle_and_no_trace(
    tmp_path: Path, error: BaseException
) -> None:
    publish(tmp_path / "cpu", OLD)

    def fail() -> None:
        with staging(tmp_path / "cpu") as stage:
            stage.write("wheel.whl", b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert whole(tmp_path) == OLD


def test_debris_of_a_killed_build_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".cpu.partial").mkdir()
    (tmp_path / ".cpu.partial" / "wheel.whl").write_bytes(b"half")
    publish(tmp_path / "cpu", NEW)
    assert whole(tmp_path) == NEW


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_any_file_operation_may_fail(
    tmp_path: Path, file_system: str, intercept: Interceptor, number: int
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    for step in range(200):
        publish(tmp_path / "cpu", OLD)
        intercept.at(step, tmp_path, fail)
        try:
            publish(tmp_path / "cpu", NEW)
        except OutputError as error:
            assert error.errno == number  # noqa: PT017 - many steps, one of them ends well
            intercept.off()
            publish(tmp_path / "other", NEW)  # the lock is free again
            subprocess.run(["rm", "-rf", str(tmp_path / "other")], check=True)
            remains = {entry.name for entry in tmp_path.iterdir()} - {"cpu"}
            assert remains <= {".cpu.partial", ".cpu.partial.old"}, (
                "removing may have been what failed"
            )
            assert held(tmp_path / "cpu") in (OLD, NEW)
        else:
            if not intercept.reached:
                break
    assert 10 < step < 199


@pytest.mark.parametrize("function", ["fsync", "fchmod"])
@pytest.mark.parametrize("call", range(4))
def test_failed_sync_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int
) -> None:
    publish(tmp_path / "cpu", OLD)
    real = getattr(os, function)
    calls = iter(range(100))

    def sometimes(*args: int) -> None:
        if next(calls) == call:
            raise OSError(errno.EIO, "Input/output error")
        real(*args)

    monkeypatch.setattr(bundle.os, function, sometimes)
    if function == "fchmod" and call >= len(NEW):
        publish(tmp_path / "cpu", NEW)
        return
    with pytest.raises(OutputError, match="Input/output error"):
        publish(tmp_path / "cpu", NEW)
    assert whole(tmp_path) == OLD


@pytest.mark.usefixtures("no_sync")
def test_killed_at_any_file_operation_one_bundle_is_whole(
    tmp_path: Path, file_system: str, intercept: Interceptor
) -> None:
    seen = set()
    for step in range(200):
        publish(tmp_path / "cpu", OLD)
        child = os.fork()
        if not child:
            intercept.at(step, tmp_path, lambda: os.kill(os.getpid(), signal.SIGKILL))
            with suppress(BaseException):
                publish(tmp_path / "cpu", NEW)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if (tmp_path / "cpu").exists():
            assert held(tmp_path / "cpu") in (OLD, NEW)
            seen.add(held(tmp_path / "cpu") == NEW)
        else:  # between the two renames of a file system without exchange: next to it, whole
            assert file_system == "no exchange"
            assert held(tmp_path / ".cpu.partial.old") == OLD
        with pytest.raises(KeyboardInterrupt), staging(tmp_path / "cpu"):
            raise KeyboardInterrupt
        assert whole(tmp_path) in (OLD, NEW)  # a build that fails afterwards loses nothing
        if code == 0:
            break
    assert 10 < step < 199
    assert seen == {True, False}


def test_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A process may not write more than 64 KiB into a file: the kernel refuses like a full disk."""
    publish(tmp_path / "cpu", OLD)
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            publish(tmp_path / "cpu", NEW)
        except OutputError as error:
            os._exit(10 if "ulimit -f" in str(error) and "wheel.whl" in str(error) else 11)
        os._exit(12)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    assert whole(tmp_path) == OLD


def test_full_file_system_leaves_nothing_half_written(tmp_path: Path) -> None:
    """On a real file system of 256 KiB, mounted in a private namespace."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from builder.bundle import OutputError, staging
final = Path({str(disk)!r}) / "cpu"
def publish(size):
    with staging(final) as stage:
        stage.write("wheel.whl", b"x" * size)
        stage.write("receipt.json", b"{{}}")
publish(100_000)
try:
    publish(200_000)
except OutputError as error:
    assert "No space left on device" in str(error), error
    assert "--out" in str(error)
else:
    raise SystemExit("the disk was not full")
assert sorted(os.listdir(final.parent)) == ["cpu"]
assert (final / "wheel.whl").stat().st_size == 100_000
os.system("mount -o remount,ro " + {str(disk)!r})
try:
    publish(10)
except OutputError as error:
    assert "Read-only file system" in str(error), error
    assert "writable file system" in str(error)
else:
    raise SystemExit("the disk was not read-only")
assert (final / "wheel.whl").stat().st_size == 100_000
"""
    in_namespace(f'mount -t tmpfs -o size=256k tmpfs {disk} && {sys.executable} -c "$0"', script)


def in_namespace(command: str, argument: str) -> None:
    """Run a shell command where mounting is allowed and nobody else sees it."""
    prefix = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "-m"]
    probe = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"mounting in a private namespace is not permitted: {probe.stderr.strip()}")
    result = subprocess.run(
        [*prefix, "sh", "-ec", command, argument], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=r"file/dist: cannot be written: Not a directory"):
        publish(tmp_path / "file" / "dist" / "cpu", NEW)


def test_second_build_waits_for_the_first(tmp_path: Path) -> None:
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        with staging(tmp_path / "cpu", waiting=lambda _: waiting.set()) as stage:
            order.append("second")
            stage.write("NOTICE", b"2")

    thread = threading.Thread(target=second)
    with staging(tmp_path / "cpu") as stage:
        thread.start()
        assert waiting.wait(10)
        time.sleep(0.05)
        order.append("first")
        stage.write("NOTICE", b"1")
    thread.join()
    assert order == ["first", "second"]
    assert held(tmp_path / "cpu") == {"NOTICE": b"2"}


def test_single_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "verify.pyz"
    write_file(target, lambda sink: sink.write(b"old"))

    def half(sink: bundle.Sink) -> None:
        sink.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(target, half)
    assert held(tmp_path) == {"verify.pyz": b"old"}
    write_file(target, lambda sink: sink.write(b"new"))
    assert held(tmp_path) == {"verify.pyz": b"new"}


@pytest.mark.parametrize("sizes", [(3, 3, 3), (9, 1, 8), (1, 20, 1), (8, 8), (0, 9, 0), ()])
def test_small_and_large_writes_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(bundle, "_BUFFER", 8)
    data = bytes(range(100))
    with staging(tmp_path / "cpu") as stage:

        def produce(sink: bundle.Sink) -> None:
            position = 0
            for size in sizes:
                assert sink.write(memoryview(data)[position : position + size]) == size
                position += size

        artifact = stage.stream("a", produce)
    expected = data[: sum(sizes)]
    assert (tmp_path / "cpu" / "a").read_bytes() == expected
    assert artifact == bundle.Artifact(hashlib.sha256(expected).hexdigest(), len(expected))
