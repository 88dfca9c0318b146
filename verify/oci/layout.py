"""An OCI image layout: from a tag over the manifest to config and layers, digest by digest.

Implements the reading side of the OCI image-spec 1.1 (image layout, index, manifest, config,
``subject``) and of Docker's media types, which mean the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verify import strictjson
from verify.digest import ReadError
from verify.errors import ConfigError, FormatError, VerifyError
from verify.holders import collect
from verify.holders.directory import file_chunks
from verify.strictjson import Json, Record

REF_NAME = "org.opencontainers.image.ref.name"
DOCUMENT_LIMIT = 4 << 20
"""Registries accept no larger manifest (OCI distribution-spec)."""

INDEX_TYPES = frozenset(
    {
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    }
)
MANIFEST_TYPES = frozenset(
    {
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    }
)
CONFIG_TYPES = frozenset(
    {
        "application/vnd.oci.image.config.v1+json",
        "application/vnd.docker.container.image.v1+json",
    }
)

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z")
_REFERENCE_TYPE = "vnd.docker.reference.type"
_MAX_DEPTH = 4
_MAX_LAYERS = 1024


class LayoutError(VerifyError):
    """Something in the layout that leaves the image unknown: one finding of the check ``check``.

    Attributes:
        check: the check that fails.
        path: the file of the layout.
        problem: what is wrong with it.
        expected: what a sound layout has there.
        actual: what was found.
    """

    def __init__(self, check: str, path: str, problem: str, expected: str, actual: str) -> None:
        self.check = check
        self.path = path
        self.problem = problem
        self.expected = expected
        self.actual = actual
        super().__init__(f"{path}: {problem}: expected {expected}, found {actual}")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """How one document of a layout refers to another. ``platform`` is ``os/arch[/variant]``."""

    media_type: str
    sha256: str
    size: int
    annotations: Mapping[str, str]
    platform: str | None = None
    artifact_type: str | None = None

    @property
    def path(self) -> str:
        """Where the layout keeps the blob."""
        return f"blobs/sha256/{self.sha256}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image manifest, and what it says of another one when it is a referrer."""

    config: Descriptor
    layers: Sequence[Descriptor]
    annotations: Mapping[str, str]
    artifact_type: str | None
    subject: Descriptor | None


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What the image's config says: the platform, its layers, and how it is started."""

    architecture: str
    os: str
    diff_ids: Sequence[str]
    labels: Mapping[str, str]
    environ: Mapping[str, str]
    user: str


class Layout:
    """The layout in the directory ``folder``.

    Raises:
        ConfigError: when there is no such directory, or it is no image layout.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: expected an image layout, found no directory")
        if not (folder / "oci-layout").is_file():
            raise ConfigError(
                f"{folder}: expected an OCI image layout, found no file oci-layout in it; "
                "`skopeo copy docker://NAME:TAG oci:DIR:TAG` makes one"
            )
        self.folder = folder

    def index(self) -> Sequence[Descriptor]:
        """Return what the layout's index lists.

        Raises:
            LayoutError: when it cannot be read as one.
        """
        mark = self._record("oci-layout", self._read("oci-layout", "IMAGE-1"), "IMAGE-1")
        with _as_finding("oci-layout", "IMAGE-1"):
            mark.expect("imageLayoutVersion", "1.0.0")
        data = self._read("index.json", "IMAGE-1")
        return self._index(self._record("index.json", data, "IMAGE-1"), "index.json", "IMAGE-1")

    def image(
        self, index: Sequence[Descriptor], tag: str | None, platform: str | None
    ) -> Descriptor:
        """Return the descriptor of the one image manifest that ``tag`` names.

        Raises:
            ConfigError: when the tag names none, or several platforms' and none was chosen.
            LayoutError: when it names several, or an index on the way cannot be read.
        """
        named = [each for each in index if _named(each, tag)]
        if not named:
            known = sorted({n for each in index if (n := each.annotations.get(REF_NAME))})
            raise ConfigError(
                f"{self.folder}: there is no image {tag or 'without a tag'}; "
                f"known tags: {', '.join(known) or 'none'}"
            )
        if len(named) > 1:
            if tag is None:
                raise ConfigError(f"{self.folder}: several images; name one as LAYOUT:TAG")
            raise LayoutError(
                "IMAGE-1",
                "index.json",
                f"the tag {tag} is given several times, and tools disagree which counts",
                "one descriptor",
                ", ".join(f"sha256:{each.sha256}" for each in named),
            )
        return self._resolve(named[0], platform, _MAX_DEPTH)

    def _resolve(self, found: Descriptor, platform: str | None, depth: int) -> Descriptor:
        if found.media_type not in INDEX_TYPES:
            return found
        if not depth:
            raise LayoutError(
                "IMAGE-1", found.path, "indexes in indexes", f"at most {_MAX_DEPTH} deep", "more"
            )
        record = self._record(found.path, self.blob(found), "IMAGE-2")
        listed = [
            each
            for each in self._index(record, found.path, "IMAGE-2")
            if _REFERENCE_TYPE not in each.annotations and each.artifact_type is None
        ]
        chosen = [each for each in listed if platform in (None, each.platform)]
        if len(chosen) == 1:
            return self._resolve(chosen[0], platform, depth - 1)
        there = ", ".join(sorted(each.platform or "one without a platform" for each in listed))
        if chosen and platform is not None:
            raise LayoutError(
                "IMAGE-1", found.path, f"several images for {platform}", "one", f"{len(chosen)}"
            )
        wanted = "an image of several platforms" if platform is None else f"no image for {platform}"
        raise ConfigError(
            f"{self.folder}: {wanted}; choose with --platform among: {there or 'none'}"
        )

    def manifest(self, descriptor: Descriptor) -> Manifest:
        """Return the manifest that ``descriptor`` names.

        Raises:
            LayoutError: when it is missing, has other bytes, or is none.
        """
        path = descriptor.path
        if descriptor.media_type not in MANIFEST_TYPES:
            raise _foreign("IMAGE-2", path, "a manifest", descriptor.media_type)
        record = self._record(path, self.blob(descriptor), "IMAGE-2")
        with _as_finding(path, "IMAGE-2"):
            if record.has("mediaType") and record.text("mediaType") != descriptor.media_type:
                record.fail("mediaType", f"expected {descriptor.media_type}, as referred to")
            layers = [_descriptor(each, path) for each in record.records("layers")]
            if len(layers) > _MAX_LAYERS:
                record.fail("layers", f"expected at most {_MAX_LAYERS}, found {len(layers)}")
            return Manifest(
                config=_descriptor(record.record("config"), path),
                layers=layers,
                annotations=_texts(record, "annotations"),
                artifact_type=record.text("artifactType") if record.has("artifactType") else None,
                subject=_descriptor(record.record("subject"), path)
                if record.has("subject")
                else None,
            )

    def config(self, descriptor: Descriptor) -> ImageConfig:
        """Return the config that ``descriptor`` names.

        Raises:
            LayoutError: when it is missing, has other bytes, or is no image's.
        """
        path = descriptor.path
        if descriptor.media_type not in CONFIG_TYPES:
            raise _foreign("IMAGE-2", path, "an image's config", descriptor.media_type)
        record = self._record(path, self.blob(descriptor), "IMAGE-2")
        with _as_finding(path, "IMAGE-2"):
            root = _known(record.record("rootfs"), path)
            root.expect("type", "layers")
            diff_ids = [_hex(root, each) for each in root.texts("diff_ids")]
            empty: Mapping[str, Json] = {}
            settings = record.json("config") if record.has("config") else None
            start = _known(Record(settings or empty, path, "config"), path)
            pairs = start.texts("Env") if start.has("Env") and start.json("Env") is not None else []
            return ImageConfig(
                architecture=record.text("architecture"),
                os=record.text("os"),
                diff_ids=diff_ids,
                labels=_texts(start, "Labels"),
                environ={name: value for name, _, value in (p.partition("=") for p in pairs)},
                user=start.text("User") if start.has("User") else "",
            )

    def blob(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a document that ``descriptor`` names.

        Raises:
            LayoutError: when it is missing, too large, or has another digest or size.
        """
        if descriptor.size > DOCUMENT_LIMIT:
            expected = f"at most {DOCUMENT_LIMIT} bytes"
            raise LayoutError(
                "IMAGE-2", descriptor.path, "too large a document", expected, f"{descriptor.size}"
            )
        data = self._read(descriptor.path, "IMAGE-2")
        compare(descriptor, hashlib.sha256(data).hexdigest(), len(data))
        return data

    def _read(self, path: str, check: str) -> bytes:
        try:
            return collect(file_chunks(self.folder / path, path), path)
        except ReadError as error:
            message = "a file of the layout cannot be read"
            raise LayoutError(check, path, message, error.expected, error.actual) from error

    def _record(self, path: str, data: bytes, check: str) -> Record:
        with _as_finding(path, check):
            return _known(Record(strictjson.parse(data, path, canonical=False), path), path)
        raise AssertionError("unreachable")

    def _index(self, record: Record, path: str, check: str) -> Sequence[Descriptor]:
        with _as_finding(path, check):
            if record.integer("schemaVersion") != 2:
                record.fail("schemaVersion", "expected 2")
            return [_descriptor(each, path) for each in record.records("manifests")]
        raise AssertionError("unreachable")


def compare(descriptor: Descriptor, sha256: str, size: int) -> None:
    """Raise ``LayoutError`` unless a blob is the one that ``descriptor`` names."""
    if (sha256, size) != (descriptor.sha256, descriptor.size):
        raise LayoutError(
            "IMAGE-2",
            descriptor.path,
            "not the blob that is referred to",
            f"sha256:{descriptor.sha256}, {descriptor.size} bytes",
            f"sha256:{sha256}, {size} bytes",
        )


class _as_finding:  # noqa: N801 - reads as a statement
    """Turns a ``FormatError`` inside of it into a finding."""

    def __init__(self, path: str, check: str) -> None:
        self._path = path
        self._check = check

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, FormatError):
            where = f"{error.where}: " if error.where else ""
            raise LayoutError(
                self._check,
                self._path,
                "not the document that it must be",
                "what the OCI image-spec describes",
                f"{where}{error.problem}",
            ) from error


def _named(descriptor: Descriptor, tag: str | None) -> bool:
    name = descriptor.annotations.get(REF_NAME)
    return name == tag if tag is not None else descriptor.artifact_type is None


def _descriptor(record: Record, what: str) -> Descriptor:
    _known(record, what)
    platform = record.record("platform") if record.has("platform") else None
    return Descriptor(
        media_type=record.text("mediaType"),
        sha256=_hex(record, record.text("digest")),
        size=record.integer("size"),
        annotations=_texts(record, "annotations"),
        platform=None if platform is None else "/".join(_platform(platform)),
        artifact_type=record.text("artifactType") if record.has("artifactType") else None,
    )


def _platform(record: Record) -> Iterator[str]:
    yield record.text("os")
    yield record.text("architecture")
    if record.has("variant"):
        yield record.text("variant")


def _hex(record: Record, digest: str) -> str:
    match = _DIGEST.match(digest)
    if match is None:
        record.fail("digest", f"expected sha256:<64 hex digits>, found {digest[:80]!r}")
    return match[1]


def _texts(record: Record, key: str) -> dict[str, str]:
    if not record.has(key) or record.json(key) is None:
        return {}
    inner = record.record(key)
    return {name: inner.text(name) for name in inner}


def _known(record: Record, what: str) -> Record:
    """Refuse keys that differ in case only: some readers take one, some the other."""
    seen: dict[str, str] = {}
    for key in record:
        other = seen.setdefault(key.casefold(), key)
        if other != key:
            raise FormatError(what, repr(key), f"expected one spelling, found also {other!r}")
    return record


def _foreign(check: str, path: str, expected: str, media_type: str) -> LayoutError:
    return LayoutError(check, path, "another kind of blob", expected, media_type)
