"""Lays a bundle over a base image: which files the layer holds, what the image says of itself.

The base image has the release installed below a *site directory*. The layer puts our files in
their places and leaves everything else alone: vLLM keeps its version and its RECORD, and the
judge knows that state by name. Made from a published bundle, so it needs no engine, and only
bytes that the judge has accepted get in. Steps of :func:`image_layout`:

1. the receipt is that of the wanted target, made with the pins of this checkout;
2. the patched files and modules come out of the bundle's wheel and are the pinned bytes;
3. the connector comes out of its wheel, with its command and a RECORD that lists both;
4. receipt, bill of materials, attestations, contract and licences are files below
   ``/usr/share/sparkcache/<target>``, and the attestations also referrers of the image.
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path, PurePosixPath

from builder.attest.assemble import FILENAME as ATTESTATIONS
from builder.bundle import write_file
from builder.errors import BuildError
from builder.oci import ARCHITECTURES, LayerFile, Referrer, layer, layout
from builder.package import BOM, CONTRACT, LICENSES, RECEIPT
from builder.pinned import Pinned
from builder.wheel_record import Row, dump_record, parse_record
from verify import strictjson
from verify.strictjson import Record

SHARE = "usr/share/sparkcache"
SITE = "usr/local/lib/python3.12/dist-packages"
ATTESTATION_TYPE = "application/vnd.in-toto+json"
TITLE = "SparkCache for vLLM"
_SCRIPT = """#!/usr/bin/env python3
import sys
from {module} import {function}

sys.exit({function}())
"""


class ImageError(BuildError):
    """An image cannot be made from what is there."""


@dataclass(frozen=True, slots=True)
class BaseImage:
    """The image that the layer is for, as far as it is known.

    ``digest`` is ``sha256:`` and 64 hexadecimal digits; ``name`` is the reference without it.
    """

    name: str
    digest: str

    @classmethod
    def parse(cls, reference: str) -> BaseImage:
        """Read ``NAME@sha256:HEX``.

        Raises:
            ImageError: without a digest: a tag can move.
        """
        name, at, digest = reference.partition("@")
        if not (name and at and digest.startswith("sha256:") and len(digest) == 71):
            raise ImageError(
                f"base image {reference!r}: expected NAME@sha256:<64 hex>, since a tag can move; "
                "`skopeo inspect docker://NAME:TAG` shows the digest"
            )
        return cls(name, digest)


def image_layout(
    bundle: Path, pinned: Pinned, base: str, site: str, image: BaseImage | None
) -> dict[str, bytes]:
    """Return the files of the image layout.

    Args:
        bundle: a published bundle of ``base``.
        pinned: the pins of the target.
        base: which base the bundle was built on.
        site: the base image's site directory, absolute or relative to its root.
        image: what to name as the base in the annotations.

    Raises:
        ImageError: when the bundle is not there or not of these pins.
    """
    site = site.strip("/")
    receipt_data = _read(bundle / RECEIPT)
    receipt = Record(strictjson.parse(receipt_data, RECEIPT), RECEIPT)  # (1)
    if receipt.record("pins").sha256("sha256") != pinned.sha256 or receipt.text("base") != base:
        raise ImageError(
            f"{bundle}: was built for other pins or another base than {base}; build it again "
            f"with `make build BASE={base}`"
        )
    files = list(_patched(bundle, pinned, site))  # (2)
    with _open(bundle / receipt.record("connector").text("filename")) as wheel:
        files += _connector(wheel, site)  # (3)
        dist_info = _dist_info(wheel)
        contract = wheel.read(CONTRACT)
    attestations = _read(bundle / ATTESTATIONS)  # (4)
    documents = {
        RECEIPT: receipt_data,
        ATTESTATIONS: attestations,
        PurePosixPath(CONTRACT).name: contract,
        **{name: _read(bundle / name) for name in (BOM, *LICENSES)},
    }
    share = f"{SHARE}/{pinned.target}"
    files += [LayerFile(f"{share}/{name}", data) for name, data in documents.items()]
    own = [f"{site}/sparkcache_connector", f"{site}/{dist_info}", SHARE]
    facts = _facts(pinned, receipt, hashlib.sha256(receipt_data).hexdigest())
    if image is not None:
        facts |= {
            "org.opencontainers.image.base.name": image.name,
            "org.opencontainers.image.base.digest": image.digest,
        }
    return layout(
        layer(files, own),
        architecture=ARCHITECTURES[base.rpartition("-")[2]],
        tag=pinned.target,
        labels=facts,
        annotations=facts,
        referrers=[
            Referrer(
                ATTESTATION_TYPE, line + b"\n", {"in-toto.io/predicate-type": _predicate(line)}
            )
            for line in attestations.splitlines()
        ],
    )


def containerfile(pinned: Pinned, base: str, site: str) -> bytes:
    """Return the recipe that lays the image over a base and has the result judged.

    Bytecode of a changed module would be believed by its time and size alone, so it goes.
    """
    site = f"/{site.strip('/')}"
    stale = sorted(
        f"{site}/{path.parent}/__pycache__/{path.stem}.*.pyc"
        for path in map(PurePosixPath, (*pinned.files, *pinned.modules))
        if path.suffix == ".py"
    )
    removed = " \\\n    ".join(stale)
    return f"""\
# Lays the SparkCache layer over a base image; the build fails unless the judge accepts the result.
# From the folder that holds image/ and verify.pyz:
#   buildah build --build-arg BASE=NAME@sha256:HEX --build-arg LAYER=oci:image:{pinned.target} .
#   docker build --build-arg BASE=NAME@sha256:HEX \\
#     --build-context layer=oci-layout://./image:{pinned.target} .
ARG BASE
ARG LAYER=layer
FROM ${{LAYER}} AS layer
FROM ${{BASE}}
COPY --from=layer / /
RUN rm -f {removed}
# The judge comes from outside the image and leaves nothing in it.
RUN --mount=type=bind,source=verify.pyz,target=/run/verify.pyz \\
    python3 -I /run/verify.pyz venv {site} --target {pinned.target} --base {base}
""".encode()


def write_layout(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the layout; blobs first and the index last, so that no index names what is missing.

    Raises:
        OutputError: when something cannot be written.
    """
    for path in sorted(files, key=lambda path: (path == "index.json", path)):
        data = files[path]
        write_file(folder / path, methodcaller("write", data))
    for found in folder.glob("blobs/sha256/*"):
        if found.relative_to(folder).as_posix() not in files:
            found.unlink()


def _patched(bundle: Path, pinned: Pinned, site: str) -> Iterator[LayerFile]:
    """(2) The files that the target changes or adds."""
    wheels = [p for p in sorted(bundle.glob("*.whl")) if p.name.startswith("vllm")]
    if len(wheels) != 1:
        raise ImageError(f"{bundle}: expected one vLLM wheel, found {len(wheels)}; build it again")
    expected = {**pinned.modules}
    expected |= {path: sha256 for path, sha256 in pinned.files.items() if sha256 is not None}
    with _open(wheels[0]) as wheel:
        for path, sha256 in sorted(expected.items()):
            data = wheel.read(path)
            found = hashlib.sha256(data).hexdigest()
            if found != sha256:
                raise ImageError(
                    f"{wheels[0].name}: {path}: expected SHA-256 {sha256} as pinned, found "
                    f"{found}; build it again"
                )
            yield LayerFile(f"{site}/{path}", data)
    if gone := [path for path, sha256 in pinned.files.items() if sha256 is None]:
        raise ImageError(f"{gone[0]}: the target deletes it, which a layer of files cannot say")


def _connector(wheel: zipfile.ZipFile, site: str) -> Iterator[LayerFile]:
    """(3) The connector as an installer would leave it, its command included."""
    dist_info = _dist_info(wheel)
    record = f"{dist_info}/RECORD"
    rows = parse_record(wheel.read(record), record, "the connector's wheel")
    for member in wheel.infolist():
        if member.filename != record:
            executable = bool(member.external_attr >> 16 & 0o111)
            yield LayerFile(f"{site}/{member.filename}", wheel.read(member), executable)
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(f"{dist_info}/entry_points.txt").decode())
    for name, target in entry_points["console_scripts"].items():
        module, _, function = target.partition(":")
        data = _SCRIPT.format(module=module, function=function).encode()
        place = f"{site.partition('/lib/')[0]}/bin/{name}"
        yield LayerFile(place, data, executable=True)
        rows[os.path.relpath(place, site)] = Row.of(data)
    yield LayerFile(f"{site}/{record}", dump_record(sorted(rows.items()), record))


def _dist_info(wheel: zipfile.ZipFile) -> str:
    return next(
        name.partition("/")[0] for name in wheel.namelist() if name.endswith(".dist-info/RECORD")
    )


def _facts(pinned: Pinned, receipt: Record, receipt_sha256: str) -> dict[str, str]:
    connector = receipt.record("connector")
    facts = {
        "org.opencontainers.image.title": TITLE,
        "org.opencontainers.image.version": pinned.local_version,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.sparkcache.target": pinned.target,
        "org.sparkcache.base": receipt.text("base"),
        "org.sparkcache.pins-sha256": pinned.sha256,
        "org.sparkcache.contract-sha256": pinned.contract_sha256,
        "org.sparkcache.composition-sha256": pinned.composed_sha256,
        "org.sparkcache.connector-version": connector.text("version"),
        "org.sparkcache.connector-source-sha256": connector.sha256("source_sha256"),
        "org.sparkcache.receipt-sha256": receipt_sha256,
    }
    if pinned.commit is not None:
        facts["org.sparkcache.vllm-commit"] = pinned.commit
    return facts


def _predicate(envelope: bytes) -> str:
    statement = json.loads(base64.b64decode(json.loads(envelope)["payload"]))
    return str(statement["predicateType"])


def _open(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise ImageError(f"{path}: {error}; build it again") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImageError(
            f"{path}: {error.strerror}; make the bundle first with `make build`"
        ) from error
