"""A real image build with our layer: its last step is the judge, and the judge decides.

buildah builds our Containerfile on a base image that has a Python and a small release; no
engine, daemon or network is needed. What it makes is judged again from outside, layers and
all, and its root is compared file by file with what buildah itself makes of the layers.
"""

from __future__ import annotations

import json
import py_compile
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.image import roots
from tests.image.tool import TAG, Buildah
from tests.small_target import NAME, TOUCHED, SmallTarget
from tests.unit.verify import small_target as verify_target
from tests.unit.verify.small_image import Entry, Image, files, folder, hard, link
from verify.oci.layer import COMPRESSION, Layer
from verify.oci.layout import Layout
from verify.oci.merged import MergedRoot

BASE = "cuda-x86_64"


@pytest.fixture(scope="session")
def system() -> list[Entry]:
    return roots.small()


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    """The small release as pip installs it, with bytecode that claims to need no check."""
    members = verify_target.unzipped(SmallTarget().wheel(BASE))
    entries = files(verify_target.installed(members, "vllm-0.28.0.dist-info"), roots.SITE)
    source = tmp_path_factory.mktemp("stale") / "stale.py"
    source.write_text("stale = True\n")
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    stale = Path(py_compile.compile(str(source), invalidation_mode=mode, doraise=True))
    package, _, name = TOUCHED.rpartition("/")
    tag = stale.name.split(".")[1]
    cached = f"{package}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"
    script = Entry("usr/local/bin/vllm", verify_target.SCRIPT, 0o755)
    return [*entries, script, Entry(f"{roots.SITE}/{cached}", stale.read_bytes())]


def write_base(place: Path, system: list[Entry], release: list[Entry]) -> Path:
    Image([[*system, *release]], tags=(TAG,)).write(place)
    return place


def judge(product: Path, reference: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(product / "verify.pyz"), "image", reference, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_layer_of_make_image_passes_by_itself(product: Path) -> None:
    done = judge(product, f"{product}/image:{NAME}", "--layer")
    assert done.returncode == 0, done.stdout
    assert judge(product, f"{product}/image:{NAME}").returncode == 3


def test_an_image_build_passes_its_gate_and_what_it_made_is_judged_alike(
    product: Path, buildah: Buildah, system: list[Entry], release: list[Entry], tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", system, release)
    built = buildah.build(product, base)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "PASSED" in built.stdout
    pushed = buildah("push", "gated", f"oci:{tmp_path}/gated:{NAME}")
    assert pushed.returncode == 0, pushed.stderr
    done = judge(product, f"{tmp_path}/gated:{NAME}", "--format", "json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, [f for f in report["findings"] if f["status"] == "fail"]
    assert {"IMAGE-4", "IMAGE-5", "IMAGE-7", "ATT-8", "NATIVE-3", "CONTRACT-3"} <= {
        check for check, status in report["checks"].items() if status == "pass"
    }
    # the base itself, by the same judge, is what was released and not what we make of it
    assert judge(product, f"{base}:{TAG}").returncode == 1
    # buildah's own merged root is the judge's
    container = buildah("from", "gated").stdout.strip()
    mounted = Path(buildah("mount", container).stdout.strip())
    assert merged(Layout(tmp_path / "gated")) == unpacked(mounted)


def test_a_base_with_one_wrong_byte_fails_the_build(
    product: Path, buildah: Buildah, system: list[Entry], release: list[Entry], tmp_path: Path
) -> None:
    untouched = f"{roots.SITE}/vllm/__init__.py"
    at = [entry.name for entry in release].index(untouched)
    wrong = release[at].data.replace(b"version", b"Version", 1)
    changed = [*release[:at], Entry(untouched, wrong), *release[at + 1 :]]
    base = write_base(tmp_path / "base", system, changed)
    built = buildah.build(product, base)
    assert built.returncode != 0
    assert "TREE-1" in built.stdout
    assert untouched.removeprefix(f"{roots.SITE}/") in built.stdout
    assert not buildah("images", "--quiet", "gated").stdout


def test_without_the_removal_of_bytecode_the_gate_fails(
    product: Path, buildah: Buildah, system: list[Entry], release: list[Entry], tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", system, release)
    text = (product / "Containerfile").read_text()
    head, _, rest = text.partition("RUN rm -f ")
    recipe = tmp_path / "Containerfile"
    recipe.write_text(head + rest[rest.index("# The judge") :])
    built = buildah.build(product, base, recipe)
    assert built.returncode != 0
    assert "PKG-7" in built.stdout


UNUSUAL: list[list[Entry]] = [
    [
        folder("a"), Entry("a/one", b"1"), Entry("a/two", b"22"), folder("a/deep"),
        Entry("a/deep/three", b"333", 0o755), link("to-a", "a"), link("to-nothing", "/nothing"),
        Entry("file", b"f"), folder("b"), Entry("b/gone", b"x"), Entry("b/kept", b"yy"),
    ],
    [
        Entry("a/.wh.one"), hard("a/again", "a/two"), Entry("a/deep/.wh..wh..opq"),
        Entry("a/deep/four", b"4444"), folder("to-a"), Entry("to-a/inside", b"i"),
        folder("file"), Entry("file/inside", b"ii"), Entry("b/.wh.gone"), Entry("c/.wh.never"),
    ],
    [
        Entry("a/two", b"new"), Entry(".wh.to-nothing"), Entry("b", b"no folder any more"),
        hard("a/third", "a/again"), Entry("./d/e", b"e", 0o600),
    ],
]  # fmt: skip
"""Whiteouts, opaque folders, hard links across layers, and kinds that replace each other."""


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_unusual_layers_become_the_root_that_buildah_makes_of_them(
    buildah: Buildah, tmp_path: Path, packed: bool
) -> None:
    place = tmp_path / "unusual"
    Image([list(each) for each in UNUSUAL], tags=(TAG,), gzip=packed).write(place)
    made = buildah("from", f"oci:{place}:{TAG}")
    assert made.returncode == 0, made.stderr
    root = Path(buildah("mount", made.stdout.strip()).stdout.strip())
    found = unpacked(root)
    assert merged(Layout(place)) == found
    assert found["a/again"] == found["a/third"] == (0o644, 2)
    assert set(found) == {
        "a/two", "a/again", "a/third", "a/deep/four", "to-a/inside", "file/inside", "b", "d/e",
    }  # fmt: skip


def merged(layout: Layout) -> dict[str, object]:
    """The root that the judge makes of the layers: files by size and mode, links by target."""
    (descriptor,) = layout.index()
    manifest = layout.manifest(descriptor)
    root = MergedRoot()
    found: dict[str, object] = {}
    open_layers = []
    for each in manifest.layers:
        layer = Layer(layout.folder / each.path, COMPRESSION[each.media_type])
        open_layers.append(layer)
        assert not root.apply(layer, list(layer.entries()))
    for path, node in root.walk():
        found[path] = node.target if node.kind == "link" else (node.mode, node.size)
    for layer in open_layers:
        layer.__exit__()
    return found


def unpacked(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in root.rglob("*"):
        status = path.lstat()
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif stat.S_ISREG(status.st_mode):
            found[name] = (stat.S_IMODE(status.st_mode), status.st_size)
    return found
