"""The release's files, wherever they come from: one role, one identity.

A provider yields files; what they amount to is computed here, the same way for every
provider. Two providers that yield the same release have the same identity, and a build does
not care which of them it used (the shared suite in tests/unit/builder/source_suite.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from builder.errors import BuildError
from verify.gitobj import File, blob_id, tree_ids
from verify.manifest import Entry, Manifest

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file; ``mode`` is None where the provider does not keep git's modes."""

    path: str
    mode: str | None
    data: bytes


class SourceProvider(Protocol):
    """One way to obtain the release's sources.

    Attributes:
        name: what to call it in messages: a file name, a repository.
        whole: whether it yields the whole release, or only ``vllm/``.
    """

    name: str
    whole: bool

    def walk(self) -> Iterator[SourceFile]:
        """Yield every file once, in any order.

        Files that release tooling generates (:data:`GENERATED`) are yielded where the
        provider has them; files that are no source (a wheel's natives) may be yielded.

        Raises:
            BuildError: when the provider cannot be read, or holds what no release holds
                (links, devices, paths that lead outside).
        """
        ...


GENERATED = frozenset(
    {
        "PKG-INFO",
        "setup.cfg",
        "vllm/_version.py",
        "vllm.egg-info/PKG-INFO",
        "vllm.egg-info/SOURCES.txt",
        "vllm.egg-info/dependency_links.txt",
        "vllm.egg-info/entry_points.txt",
        "vllm.egg-info/requires.txt",
        "vllm.egg-info/top_level.txt",
    }
)
"""What setuptools writes into an sdist beside the files of the commit."""


class SourceError(BuildError):
    """A provider does not hold what it should.

    Attributes:
        source: the provider's name.
        differences: one line for each, all of them.
    """

    def __init__(self, source: str, summary: str, differences: Collection[str] = ()) -> None:
        self.source = source
        self.differences = tuple(differences)
        lines = [f"{source}: {summary}"]
        lines += [f"  {difference}" for difference in self.differences[:_SHOWN]]
        if len(self.differences) > _SHOWN:
            lines.append(f"  … and {len(self.differences) - _SHOWN} more")
        super().__init__("\n".join(lines))


@dataclass(frozen=True, slots=True)
class Release:
    """A release as its files are: manifest, git blob ids, and the generated files beside it.

    ``generated`` maps the generated files to their SHA-256. ``kept`` holds the files whose
    bytes were asked for.
    """

    manifest: Manifest
    blobs: Mapping[str, str]
    generated: Mapping[str, str]
    kept: Mapping[str, SourceFile]

    def git_files(self) -> Iterator[File]:
        """The release as git sees it."""
        for path, entry in self.manifest.files.items():
            yield File(path, entry.mode, self.blobs[path])

    def git_trees(self) -> dict[str, str]:
        """The id of the root (``""``) and of every directory."""
        return tree_ids(self.git_files())


def scan(provider: SourceProvider, keep: Collection[str] = ()) -> Release:
    """Read a whole release and return what it is; generated files are set apart.

    The bytes of the files named in ``keep`` are kept, as far as the release has them.

    Raises:
        SourceError: when the provider has no modes or only a part, or yields a path twice.
    """
    files: dict[str, Entry] = {}
    blobs: dict[str, str] = {}
    generated: dict[str, str] = {}
    kept: dict[str, SourceFile] = {}
    for file in provider.walk():
        if file.path in files or file.path in generated:
            raise SourceError(provider.name, f"expected each file once, found {file.path} twice")
        digest = hashlib.sha256(file.data).hexdigest()
        if file.path in GENERATED:
            generated[file.path] = digest
            continue
        if file.mode is None or not provider.whole:
            raise SourceError(provider.name, "expected a whole release with modes, found a part")
        files[file.path] = Entry(file.mode, digest)
        blobs[file.path] = blob_id(file.data)
        if file.path in keep:
            kept[file.path] = file
    return Release(Manifest(files), blobs, generated, kept)


def read_proven(
    provider: SourceProvider,
    release: Manifest,
    wanted: Collection[str],
    differs: Mapping[str, str] | None = None,
) -> dict[str, SourceFile]:
    """Return the ``wanted`` files after proving that *all* of the provider's are the release's.

    ``release`` is the pinned manifest. From a provider of ``vllm/`` alone, only that part is
    asked; modes come from the manifest where the provider has none. ``differs`` maps the
    files that this provider may have otherwise (SHA-256), which then cannot be wanted.

    Raises:
        SourceError: listing every missing, changed and extra file; extra files are allowed
            only where the provider yields more than sources.
    """
    differs = differs or {}
    expected = release if provider.whole else release.below("vllm")
    missing = set(expected.files)
    found: dict[str, SourceFile] = {}
    problems: list[str] = []
    for file in provider.walk():
        entry = expected.files.get(file.path)
        if entry is None:
            if provider.whole and file.path not in GENERATED:
                problems.append(f"{file.path}: not in the release")
            continue
        missing.discard(file.path)
        digest = hashlib.sha256(file.data).hexdigest()
        if digest != differs.get(file.path, entry.sha256):
            problems.append(
                f"{file.path}: expected SHA-256 {differs.get(file.path, entry.sha256)}, "
                f"found {digest}{_line_ends(file.data, entry.sha256)}"
            )
        if file.mode is not None and file.mode != entry.mode:
            problems.append(f"{file.path}: expected mode {entry.mode}, found {file.mode}")
        if file.path in wanted:
            found[file.path] = SourceFile(file.path, entry.mode, file.data)
    problems += [f"{path}: missing" for path in missing]
    if problems:
        raise SourceError(
            provider.name,
            f"not the pinned release, {len(problems)} difference(s); use an unchanged copy, "
            "or pin what you mean with `python -m builder pin`",
            sorted(problems),
        )
    absent = sorted(set(wanted) - set(found))
    forbidden = sorted(set(wanted) & set(differs))
    if absent or forbidden:
        raise SourceError(provider.name, "cannot give these files as released", absent + forbidden)
    return found


def _line_ends(data: bytes, expected: str) -> str:
    """Say so when a conversion of line ends explains a difference, the usual accident."""
    for converted in (data.replace(b"\r\n", b"\n"), data.replace(b"\n", b"\r\n")):
        if hashlib.sha256(converted).hexdigest() == expected:
            return " (only the line ends differ)"
    return ""
