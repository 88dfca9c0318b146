"""An OCI image layout as pure data: one uncompressed layer, its config, manifest and referrers.

Implements the OCI image-spec 1.1 (layer, config, manifest with ``subject``, image layout).
The layer is a POSIX USTAR archive of plain files in sorted order, owned by root, without
user names, at one fixed time, and it is not compressed: deflate bytes depend on the zlib
build, so only an uncompressed layer has one digest everywhere. Nothing here touches a file.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from builder.errors import BuildError
from verify import strictjson
from verify.manifest import path_problem
from verify.strictjson import Json

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"

REF_NAME = "org.opencontainers.image.ref.name"

ARCHITECTURES: Mapping[str, str] = {"x86_64": "amd64", "aarch64": "arm64"}
"""What a Linux machine calls itself → what OCI calls it."""

_EMPTY = b"{}"
# Any fixed time would do; archive tools warn about times before 1980.
_TIME = 315532800
_CREATED = "1980-01-01T00:00:00Z"


class LayerPathError(BuildError):
    """A file cannot be put into the layer.

    Attributes:
        path: its path.
        problem: what is wrong with it.
    """

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(
            f"layer file {path!r}: {problem}; check SITE and the files to be laid over"
        )


@dataclass(frozen=True, slots=True)
class LayerFile:
    """One regular file of the layer; ``path`` is relative to the root directory."""

    path: str
    data: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Referrer:
    """A document about the image: it names the image's manifest as its subject."""

    artifact_type: str
    data: bytes
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Blob:
    """Content and its media type; everything in a layout is named by its digest."""

    media_type: str
    data: bytes

    @property
    def digest(self) -> str:
        """``sha256:`` and 64 hexadecimal digits."""
        return f"sha256:{hashlib.sha256(self.data).hexdigest()}"

    @property
    def path(self) -> str:
        """Where a layout keeps it."""
        return f"blobs/{self.digest.replace(':', '/')}"

    def descriptor(self, **more: Json) -> dict[str, Json]:
        """Return the descriptor by which another document refers to it."""
        return {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": len(self.data),
            **more,
        }


def layer(files: Iterable[LayerFile], own_directories: Sequence[str] = ()) -> Blob:
    """Return the layer that lays ``files`` over a root directory.

    A directory gets an entry only below one of ``own_directories``. For every other one the
    base image's mode and owner stay what they are, which an entry here would replace.

    Raises:
        LayerPathError: for a path that is unsafe, too long for USTAR, occurs twice, or is a
            file and a directory at once.
    """
    entries: dict[str, LayerFile | None] = {}
    for file in files:
        if problem := path_problem(file.path):
            raise LayerPathError(file.path, problem)
        if file.path in entries:
            raise LayerPathError(file.path, "expected once, found twice")
        entries[file.path] = file
        for parent in PurePosixPath(file.path).parents:
            if any(parent.is_relative_to(own) for own in own_directories):
                entries.setdefault(str(parent), None)
    for path in entries:
        for parent in PurePosixPath(path).parents:
            if entries.get(str(parent)) is not None:
                raise LayerPathError(path, f"expected a directory at {parent}, found a file")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(entries, key=str.encode):
            _add(tar, path, entries[path])
    return Blob(LAYER_TYPE, archive.getvalue())


def _add(tar: tarfile.TarFile, path: str, file: LayerFile | None) -> None:
    info = tarfile.TarInfo(path)
    info.mtime = _TIME
    if file is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    else:
        info.size, info.mode = len(file.data), 0o755 if file.executable else 0o644
    try:
        tar.addfile(info, io.BytesIO(file.data) if file else None)
    except ValueError as error:
        raise LayerPathError(path, f"{error} (USTAR holds paths of up to 255 bytes)") from error


def layout(
    content: Blob,
    *,
    architecture: str,
    tag: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    referrers: Sequence[Referrer] = (),
) -> dict[str, bytes]:
    """Return the files of an image layout with one image, by path.

    Args:
        content: the layer.
        architecture: OCI's name, a value of :data:`ARCHITECTURES`.
        tag: the only name under which the layout offers the image.
        labels: what ``docker inspect`` shows.
        annotations: the manifest's.
        referrers: documents about the image; they are in the layout, without a name.
    """
    config = _json(
        CONFIG_TYPE,
        {
            "architecture": architecture,
            "os": "linux",
            "created": _CREATED,
            "config": {"Labels": dict(labels)},
            "rootfs": {"type": "layers", "diff_ids": [content.digest]},
            "history": [{"created": _CREATED, "comment": "files laid over the base image"}],
        },
    )
    image = _json(
        MANIFEST_TYPE,
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": config.descriptor(),
            "layers": [content.descriptor()],
            "annotations": dict(annotations),
        },
    )
    platform: Json = {"architecture": architecture, "os": "linux"}
    blobs = [content, config, image]
    manifests = [image.descriptor(platform=platform, annotations={REF_NAME: tag})]
    for referrer in referrers:
        empty = Blob(EMPTY_TYPE, _EMPTY)
        document = Blob(referrer.artifact_type, referrer.data)
        manifest = _json(
            MANIFEST_TYPE,
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "artifactType": referrer.artifact_type,
                "config": empty.descriptor(),
                "layers": [document.descriptor()],
                "subject": image.descriptor(),
                "annotations": dict(referrer.annotations),
            },
        )
        blobs += [empty, document, manifest]
        manifests.append(manifest.descriptor(artifactType=referrer.artifact_type))
    index = _json(INDEX_TYPE, {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests})
    return {
        "oci-layout": strictjson.dump({"imageLayoutVersion": "1.0.0"}),
        "index.json": index.data,
        **{blob.path: blob.data for blob in blobs},
    }


def _json(media_type: str, value: Json) -> Blob:
    return Blob(media_type, strictjson.dump(value))
