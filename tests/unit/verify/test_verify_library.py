"""PKG-14, the native library: the pinned bytes, whole, for the machine that the wheel is for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.verify import small_target as small
from verify.errors import FormatError
from verify.judges.bundle import judge_bundle
from verify.judges.case import Options
from verify.judges.site import judge_venv
from verify.judges.wheel import judge_wheel
from verify.natives import NativePins
from verify.report import Report, Status

BASE = "cuda-x86_64"
FOLDER = "sparkcache_connector/native"
TAG = "py3-none-manylinux_2_28_{}".format
LIBRARIES = {
    arch: {
        "libsparkcache_placement.so": small.ELF + f"placement on {arch}".encode(),
        "placement.json": f'{{"arch": "{arch}"}}\n'.encode(),
    }
    for arch in ("x86_64", "aarch64")
}
KERNELS = {
    compiler: {"kernels.fatbin": f"kernels of {compiler}".encode(), "kernels.json": b"{}\n"}
    for compiler in ("nvcc 12.9.1", "nvcc 13.0.88")
}
OTHER_KERNELS = {"kernels.fatbin": b"kernels of nobody knows", "kernels.json": b"{ }\n"}
INFO = f"sparkcache_connector-{small.CONNECTOR_VERSION}.dist-info"

Files = Mapping[str, bytes]


def pins(groups: Mapping[str, Files]) -> dict[str, dict[str, str]]:
    return {
        group: {name: small.sha256(data) for name, data in files.items()}
        for group, files in groups.items()
    }


NATIVE = {
    "schema": "sparkcache.native/v1",
    "libraries": pins(LIBRARIES),
    "kernels": pins(KERNELS),
}


def members(arch: str, *parts: Files) -> dict[str, bytes]:
    """What a wheel for ``arch`` carries beside the source."""
    return {f"{FOLDER}/{arch}/{name}": data for files in parts for name, data in files.items()}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that has native pins."""
    folder = tmp_path_factory.mktemp("home")
    small.write(folder, small.checkout() | {"csrc/pins.json": small.canonical(NATIVE)})
    return folder


def bundle(folder: Path, extra: Files, tag: str = TAG("x86_64"), base: str = BASE) -> Path:
    small.write(folder, small.bundle(base, extra, tag))
    return folder


def verdict(report: Report) -> tuple[int, set[str]]:
    """The exit code, and the checks that did not pass."""
    bad = {f.check for f in report.findings if f.status in (Status.FAIL, Status.UNDECIDED)}
    return report.exit_code, bad


def judged(home: Path, folder: Path) -> tuple[int, set[str]]:
    return verdict(judge_bundle(folder, Options(home=home)))


@pytest.mark.parametrize("kernels", [{}, *KERNELS.values()], ids=["none", *KERNELS])
@pytest.mark.parametrize("arch", LIBRARIES)
def test_the_pinned_library_passes_with_and_without_pinned_kernels(
    home: Path, tmp_path: Path, arch: str, kernels: Files
) -> None:
    base = f"cuda-{arch}"
    if base not in small.BASES:
        pytest.skip(f"the small target has no base {base}")
    made = bundle(tmp_path, members(arch, LIBRARIES[arch], kernels), TAG(arch), base)
    assert judged(home, made) == (0, set())
    wheel = made / small.connector_name(TAG(arch))
    assert verdict(judge_wheel(wheel, Options(home=home))) == (0, set())


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_change_of_what_is_carried_fails(
    home: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A byte, a file less, a file more: also where the receipt of the bundle says the same."""
    right = members("x86_64", LIBRARIES["x86_64"], KERNELS["nvcc 13.0.88"])
    changed = dict(right)
    path = data.draw(st.sampled_from(sorted(right)))
    kind = data.draw(st.sampled_from(["byte", "cut", "grown", "missing", "extra", "swapped"]))
    if kind == "byte":
        at = data.draw(st.integers(0, len(right[path]) - 1))
        flipped = bytearray(right[path])
        flipped[at] ^= data.draw(st.integers(1, 255))
        changed[path] = bytes(flipped)
    elif kind == "cut":
        changed[path] = right[path][: data.draw(st.integers(0, len(right[path]) - 1))]
    elif kind == "grown":
        changed[path] = right[path] + b"\0"
    elif kind == "missing":
        del changed[path]
    elif kind == "extra":
        name = data.draw(st.sampled_from(["x86_64/libother.so", "aarch64/placement.json", "a"]))
        changed[f"{FOLDER}/{name}"] = small.ELF
    else:
        changed |= members("x86_64", LIBRARIES["aarch64"])
    code, bad = judged(home, bundle(tmp_path_factory.mktemp("bundle"), changed))
    # only kernels that the receipt names may be of a compiler that nobody pinned
    undecided = "kernels" in path and kind in ("byte", "cut", "grown")
    assert (code, bad) == (3 if undecided else 1, {"PKG-14"})


def test_a_wheel_that_promises_a_library_must_have_it(home: Path, tmp_path: Path) -> None:
    assert judged(home, bundle(tmp_path, {})) == (1, {"PKG-14"})


def test_a_library_in_a_wheel_that_runs_anywhere_is_refused(home: Path, tmp_path: Path) -> None:
    file = tmp_path / small.connector_name()
    extra = members("x86_64", LIBRARIES["x86_64"])
    file.write_bytes(small.zipped(small.connector_wheel(extra)))
    assert verdict(judge_wheel(file, Options(home=home))) == (1, {"PKG-14"})


def test_a_wheel_that_runs_anywhere_needs_no_library_but_a_bundle_does(
    home: Path, tmp_path: Path
) -> None:
    made = bundle(tmp_path, {}, "py3-none-any")
    wheel = made / small.connector_name()
    assert verdict(judge_wheel(wheel, Options(home=home))) == (0, set())
    assert judged(home, made) == (1, {"PKG-14"})


def test_the_wheel_of_another_machine_does_not_belong_into_a_bundle(
    home: Path, tmp_path: Path
) -> None:
    made = bundle(tmp_path, members("aarch64", LIBRARIES["aarch64"]), TAG("aarch64"))
    assert judged(home, made) == (1, {"PKG-14"})
    wheel = made / small.connector_name(TAG("aarch64"))
    assert verdict(judge_wheel(wheel, Options(home=home))) == (0, set())


@pytest.mark.parametrize("tag", [TAG("riscv64"), "cp311-cp311-linux_x86_64", ""])
def test_a_tag_that_no_library_is_pinned_for_is_refused(
    home: Path, tmp_path: Path, tag: str
) -> None:
    file = tmp_path / small.connector_name(TAG("x86_64"))
    extra = members("x86_64", LIBRARIES["x86_64"])
    file.write_bytes(small.zipped(small.connector_wheel(extra, tag)))
    assert verdict(judge_wheel(file, Options(home=home))) == (1, {"PKG-14"})


def test_kernels_of_an_unpinned_compiler_need_somebody_who_knows_them(
    home: Path, tmp_path: Path
) -> None:
    extra = members("x86_64", LIBRARIES["x86_64"], OTHER_KERNELS)
    made = bundle(tmp_path / "bundle", extra)
    assert judged(home, made) == (3, {"PKG-14"})
    alone = made / small.connector_name(TAG("x86_64"))
    assert verdict(judge_wheel(alone, Options(home=home))) == (1, {"PKG-14"})
    known = dict(NATIVE, kernels=pins({**KERNELS, "nvcc 14.0.1": OTHER_KERNELS}))
    source = {path: small.sha256(data) for path, data in small.CONNECTOR.items()}
    anchor = {
        "schema": "sparkcache.connector/v1",
        "version": small.CONNECTOR_VERSION,
        "files": source,
        "generated": {},
        "native": known,
    }
    given = tmp_path / "connector.json"
    given.write_bytes(small.canonical(anchor))
    assert verdict(judge_bundle(made, Options(home=home, connector=given))) == (0, set())


def test_kernels_of_two_compilers_do_not_mix(home: Path, tmp_path: Path) -> None:
    """Each file is pinned, together they are nobody's."""
    first, second = ({**files, "kernels.json": name.encode()} for name, files in KERNELS.items())
    pinned = dict(NATIVE, kernels=pins({"a": first, "b": second}))
    other = tmp_path / "home"
    small.write(other, small.checkout() | {"csrc/pins.json": small.canonical(pinned)})
    mixed = {"kernels.fatbin": first["kernels.fatbin"], "kernels.json": second["kernels.json"]}
    made = bundle(tmp_path / "bundle", members("x86_64", LIBRARIES["x86_64"], mixed))
    assert judged(other, made) == (3, {"PKG-14"})
    wheel = made / small.connector_name(TAG("x86_64"))
    assert verdict(judge_wheel(wheel, Options(home=other))) == (1, {"PKG-14"})


def test_a_receipt_that_names_another_library_is_found_out(home: Path, tmp_path: Path) -> None:
    extra = members("x86_64", LIBRARIES["x86_64"])
    made = bundle(tmp_path, extra)
    lie = {**extra, f"{FOLDER}/x86_64/libsparkcache_placement.so": b"another"}
    files = {path.name: path.read_bytes() for path in made.iterdir() if path.suffix != ".json"}
    files["bom.cdx.json"] = (made / "bom.cdx.json").read_bytes()
    name = small.connector_name(TAG("x86_64"))
    (made / "receipt.json").write_bytes(small.canonical(small.receipt(BASE, files, lie, name)))
    assert judged(home, made) == (1, {"PKG-14"})


def test_an_installed_library_is_judged_like_a_packed_one(home: Path, tmp_path: Path) -> None:
    def environment(folder: Path, extra: Files) -> Path:
        files = small.environment(BASE)
        for path in [path for path in files if path.startswith(f"{small.SITE}/{INFO}")]:
            del files[path]
        installed = small.installed(small.connector_wheel(extra, TAG("x86_64")), INFO)
        small.write(folder, files | {f"{small.SITE}/{path}": e for path, e in installed.items()})
        return folder

    right = members("x86_64", LIBRARIES["x86_64"], KERNELS["nvcc 13.0.88"])
    good = environment(tmp_path / "good", right)
    assert verdict(judge_venv(good, Options(home=home))) == (0, set())
    wrong = dict(right) | members("x86_64", LIBRARIES["aarch64"])
    bad = environment(tmp_path / "bad", wrong)
    assert verdict(judge_venv(bad, Options(home=home))) == (1, {"PKG-14"})


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "sparkcache.native/v2"},
        {"libraries": {"x86_64": {"a.so": "not a digest"}}},
        {"libraries": {"x86_64": {"../a.so": "0" * 64}}},
        {"kernels": []},
        {"unknown": {}},
    ],
)
def test_pins_that_say_anything_else_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(FormatError, match=r"csrc/pins\.json"):
        NativePins.parse(small.canonical({**NATIVE, **change}), "csrc/pins.json")


def test_pins_are_written_as_they_are_read() -> None:
    data = small.canonical(NATIVE)
    assert small.canonical(NativePins.parse(data, "pins").json()) == data
