"""Finds what artefacts are compared with, outside of what is judged.

Looked for in this order: ``--pins FILE``, the checkout that this package runs from, the pins
embedded in ``verify.pyz``. Whatever is found is read whole, as bytes; whether it agrees with
itself is judged like everything else (:mod:`verify.checks.base`). An anchor that lies inside
the subject authenticates nothing: whoever made the subject could have made it too.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from verify import strictjson
from verify.errors import ConfigError, FormatError
from verify.manifest import is_deployable, path_problem
from verify.natives import NativePins
from verify.pins import Pins
from verify.strictjson import Json, Record

CONNECTOR_SCHEMA = "sparkcache.connector/v1"
EMBEDDED = "_pins"
PACKAGE = "sparkcache_connector"
NATIVE_PINS = "csrc/pins.json"

_VERSION = re.compile(rb"""^__version__ *= *["']([^"'\n]+)["']""", re.MULTILINE)
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})\Z")


class Origin(enum.StrEnum):
    """Where an anchor was found."""

    CHECKOUT = "checkout"
    EMBEDDED = "embedded"
    GIVEN = "given"


@dataclass(frozen=True, slots=True)
class ConnectorAnchor:
    """What the connector is made from: its version, and the SHA-256 of each source file.

    ``generated`` are files that a build adds and that are known beforehand; ``native`` the
    native library that wheels for one architecture carry, None where there is none.
    """

    version: str
    files: Mapping[str, str]
    generated: Mapping[str, str]
    native: NativePins | None

    @classmethod
    def parse(cls, data: bytes, what: str) -> ConnectorAnchor:
        """Read the ``connector.json`` that a build embeds in ``verify.pyz``.

        Raises:
            FormatError: for anything that the schema does not allow.
        """
        top = Record(strictjson.parse(data, what), what)
        top.expect("schema", CONNECTOR_SCHEMA)
        files, generated = top.record("files"), top.record("generated")
        native = top.record_or_null("native")
        value = cls(
            top.text("version"),
            {path: files.sha256(path) for path in files},
            {path: generated.sha256(path) for path in generated},
            None if native is None else NativePins.take(native),
        )
        for part in (files, generated, top):
            part.done()
        return value


@dataclass(frozen=True, slots=True)
class Anchor:
    """A target's pins and the files beside them, as bytes; None where a file is not there.

    ``required_sha256`` is a digest of ``pins.json`` that a person gave by hand, and
    ``inside`` says that the anchor lies within the subject.
    """

    origin: Origin
    place: str
    pins: Pins
    pins_json: Json
    pins_sha256: str
    required_sha256: str | None
    inside: bool
    contract: bytes | None
    release: bytes | None
    bases: Mapping[str, bytes]
    series: bytes | None
    patches: Mapping[str, bytes]
    objects: Mapping[str, bytes]
    connector: ConnectorAnchor | None

    @property
    def authenticated(self) -> bool:
        """Whether somebody outside the subject vouches for these pins."""
        return not self.inside or self.required_sha256 == self.pins_sha256


def read_connector(file: Path) -> ConnectorAnchor:
    """Read a ``connector.json`` that was given by hand.

    Raises:
        ConfigError: when there is no such file.
        FormatError: when it is none.
    """
    data = _read(file)
    if data is None:
        raise ConfigError(f"--connector {file}: expected a connector.json, found no file")
    return ConnectorAnchor.parse(data, str(file))


def find(
    given: str | None, target: str | None, subject: Sequence[Path], home: Path | None = None
) -> Anchor | None:
    """Return the anchor for ``target``, or None when there is none at all.

    ``given`` is the value of ``--pins``: a file, or ``sha256:<64 hex>`` to demand that the
    pins found elsewhere have this digest. ``subject`` are the places that are judged. ``home``
    is the directory to take for the checkout; by default the one that holds this package.

    Raises:
        ConfigError: when ``given`` or ``target`` names nothing, or several targets exist and
            none is named.
        FormatError: when pins that were found cannot be read.
    """
    required: str | None = None
    if given is not None:
        match = _SHA256.match(given)
        if match is None:
            return _given(Path(given), target, subject)
        required = match[1]
    root = Path(__file__).resolve().parent.parent if home is None else home
    folders = root / "overlay" / "targets"
    if folders.is_dir():
        name = _choose(sorted(each.name for each in folders.iterdir() if each.is_dir()), target)
        return _load(
            Origin.CHECKOUT,
            folders / name,
            root / "patches" / name,
            _source_of(root),
            str(root),
            required,
            _within(root, subject),
        )
    embedded = resources.files("verify") / EMBEDDED
    if home is None and embedded.is_dir():
        names = sorted(each.name for each in embedded.iterdir() if each.is_dir())
        folder = embedded / _choose(names, target)
        data = _read(embedded / "connector.json")
        connector = ConnectorAnchor.parse(data, "connector.json") if data is not None else None
        return _load(
            Origin.EMBEDDED,
            folder,
            folder / "patches",
            connector,
            root.name,
            required,
            _within(root, subject),
        )
    return None


def _given(file: Path, target: str | None, subject: Sequence[Path]) -> Anchor:
    if not file.is_file():
        raise ConfigError(f"--pins {file}: expected a pins.json or sha256:<64 hex>, found no file")
    folder = file.resolve().parent
    patches = folder / "patches"
    source: ConnectorAnchor | None = None
    if folder.parent.name == "targets" and folder.parent.parent.name == "overlay":
        root = folder.parent.parent.parent
        patches = root / "patches" / folder.name
        source = _source_of(root)
    anchor = _load(
        Origin.GIVEN, folder, patches, source, str(file), None, _within(folder, subject), file
    )
    if target is not None and anchor.pins.target != target:
        raise ConfigError(
            f"--target {target}: the pins in {file} are those of {anchor.pins.target}"
        )
    return anchor


def _load(
    origin: Origin,
    folder: Traversable,
    patches: Traversable,
    connector: ConnectorAnchor | None,
    place: str,
    required: str | None,
    inside: bool,
    file: Traversable | None = None,
) -> Anchor:
    pins_file = file if file is not None else folder / "pins.json"
    data = _read(pins_file)
    if data is None:
        raise ConfigError(
            f"{pins_file}: the target has no pins; make them with `python -m builder pin`"
        )
    pins = Pins.parse(data, str(pins_file))
    bases = {name: _read(folder / "bases" / f"{name}.manifest") for name in pins.bases}
    series = _read(patches / "series")
    names = [] if series is None else list(series_names(series))
    texts = {name: _read(patches / name) for name in names}
    objects = {name: _read(folder / "objects" / name) for name in ("commit", "tree")}
    return Anchor(
        origin=origin,
        place=place,
        pins=pins,
        pins_json=strictjson.parse(data, str(pins_file)),
        pins_sha256=hashlib.sha256(data).hexdigest(),
        required_sha256=required,
        inside=inside,
        contract=_read(folder / "contract.json"),
        release=_read(folder / "source.manifest"),
        bases={name: data for name, data in bases.items() if data is not None},
        series=series,
        patches={name: data for name, data in texts.items() if data is not None},
        objects={name: data for name, data in objects.items() if data is not None},
        connector=connector,
    )


def series_names(series: bytes) -> Iterator[str]:
    """Return the patch names of a ``series`` file; names that leave its folder are dropped.

    A dropped name is missing from the pinned list, which the judgement then reports.
    """
    for line in series.decode("utf-8", "replace").splitlines():
        name = line.partition("#")[0].strip()
        if name and "/" not in name and path_problem(name) is None:
            yield name


def _choose(names: Sequence[str], target: str | None) -> str:
    if target is not None:
        if target not in names:
            known = ", ".join(names) or "none"
            raise ConfigError(f"--target {target}: there is no such target; known: {known}")
        return target
    if len(names) != 1:
        known = ", ".join(names) or "none"
        raise ConfigError(f"expected one target, found {known}: name one with --target")
    return names[0]


def _within(place: Path, subject: Sequence[Path]) -> bool:
    place = place.resolve()
    return any(place.is_relative_to(each.resolve()) for each in subject)


def _source_of(root: Path) -> ConnectorAnchor | None:
    """Digest the connector's source in the checkout ``root``; None when it is not there."""
    folder = root / PACKAGE
    version_file = _read(folder / "__init__.py")
    match = None if version_file is None else _VERSION.search(version_file)
    if match is None:
        return None
    digests: dict[str, str] = {}
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder.parent).as_posix()
        if is_deployable(path) and file.is_file() and not file.is_symlink():
            digests[path] = hashlib.sha256(file.read_bytes()).hexdigest()
    native_file = root / NATIVE_PINS
    native = _read(native_file)
    return ConnectorAnchor(
        match[1].decode("utf-8", "replace"),
        digests,
        {},
        None if native is None else NativePins.parse(native, str(native_file)),
    )


def _read(file: Traversable) -> bytes | None:
    try:
        return file.read_bytes() if file.is_file() else None
    except OSError as error:
        raise FormatError(str(file), "", f"cannot be read: {error.strerror or error}") from error
