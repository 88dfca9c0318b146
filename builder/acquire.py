"""Gets the files that a build starts from: by name, checked against their pins, cached.

Steps of :meth:`Acquirer.get`: (1) the cache, whose file is hashed on every use; (2) offline,
that is all there is; (3) the index is asked for the file, and what it says of the SHA-256
must agree with the pin; (4) the download completes the partial file; (5) the whole file is
hashed, and only then takes its name in the cache.
"""

from __future__ import annotations

from pathlib import Path

from unearth.fetchers import PyPIClient

from builder import index
from builder.cache import Cache, CacheError, Digest, default_folder, digest_of
from builder.console import Console
from builder.download import DownloadError, fetch
from builder.errors import BuildError
from builder.target import IndexFile


class OfflineError(BuildError):
    """A file is needed that only the network has."""


class Acquirer:
    """Gets files from the cache and the configured package indexes."""

    def __init__(
        self,
        console: Console,
        *,
        offline: bool = False,
        cache: Cache | None = None,
        settings: index.IndexSettings | None = None,
    ) -> None:
        self.console = console
        self.offline = offline
        self._cache = cache if cache is not None else Cache(default_folder())
        self._settings = settings

    def get(self, file: IndexFile, pinned: Digest | None) -> Path:
        """Return the path of ``file``, whole and with the pinned SHA-256 and size.

        Without a pin (only the first ``builder pin`` of a target has none) the SHA-256 that
        the index states is what is checked.

        Raises:
            BuildError: naming what was expected, what was found and what to do.
        """
        if pinned is not None and (path := self._from_cache(file, pinned)) is not None:
            return path  # (1)
        if self.offline:  # (2)
            raise OfflineError(
                f"{file.filename}: expected it in the download cache with --offline, found "
                "none; run once without --offline (`python -m builder acquire`)"
            )
        settings = self._settings or index.read_pip_configuration()
        with index.open_session(settings) as session:
            return self._download(file, pinned, settings, session)

    def _download(
        self,
        file: IndexFile,
        pinned: Digest | None,
        settings: index.IndexSettings,
        session: PyPIClient,
    ) -> Path:
        found = index.find(file, settings, session)  # (3)
        expected = pinned.sha256 if pinned is not None else found.sha256
        if found.sha256 is not None and found.sha256 != expected:
            raise DownloadError(
                found.shown,
                f"expected SHA-256 {expected} as pinned, the index states {found.sha256}: it is "
                "not the file that was pinned; find out why before you pin again",
            )
        if pinned is None and expected is not None:
            known = self._cache.path_of(expected)
            if known.exists() and digest_of(known).sha256 == expected:
                return known
        size = pinned.size if pinned is not None else None
        with self._cache.partial(expected or file.filename) as partial:
            # another process may have finished it while this one waited for the lock
            if pinned is not None and (path := self._from_cache(file, pinned)) is not None:
                return path
            fetch(found.url, found.shown, partial, session, self.console, size=size)  # (4)
            digest = digest_of(partial)  # (5)
            if digest.sha256 != (expected or digest.sha256):
                partial.unlink()
                raise DownloadError(
                    found.shown,
                    f"expected SHA-256 {expected}, found {digest.sha256} ({digest.size} bytes): "
                    "the download was damaged or replaced on the way; nothing of it was kept",
                )
            return self._cache.commit(partial, digest)

    def _from_cache(self, file: IndexFile, pinned: Digest) -> Path | None:
        try:
            return self._cache.find(pinned)
        except CacheError as error:
            if self.offline:
                raise
            self.console.say(f"{file.filename}: {error.problem}; downloading it again")
            self._cache.discard(pinned.sha256)
            return None
