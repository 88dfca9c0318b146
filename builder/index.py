"""Finds a named file of a project on the package indexes that the user's pip is configured for.

pip itself is asked for its configuration, so files, environment and precedence are pip's;
finding and parsing is ``unearth``'s. No index is named here: without configuration it is the
one that unearth looks at by default.
"""

from __future__ import annotations

import ast
import os
import ssl
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from unearth import PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.fetchers import Fetcher, PyPIClient

from builder.errors import BuildError
from builder.target import IndexFile

_SECTIONS = ("global", "download", ":env:")
_TIMEOUT_SECONDS = 15.0
_SHOWN = 12


class PackageIndexError(BuildError):
    """A file was not found on the configured indexes, or they could not be asked."""


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Where to look, as pip would."""

    index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    ca_bundle: str | None = None
    client_cert: str | None = None
    timeout: float = _TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True)
class Found:
    """A file on an index: where, and the SHA-256 that the index states, if it does."""

    url: str = field(repr=False)
    shown: str
    sha256: str | None


def read_pip_configuration() -> IndexSettings:
    """Return what ``pip download`` would use in this environment.

    Raises:
        PackageIndexError: when pip is missing or refuses its own configuration.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise PackageIndexError(f"pip could not read its configuration: {reason}")
    return settings_from(done.stdout)


def settings_from(listing: str) -> IndexSettings:
    """Read the output of ``pip config list``: lines ``section.option='value'``.

    A later section overrides an earlier one as a whole, as in pip.
    """
    by_section: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listing.splitlines():
        name, equals, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if equals and section in by_section:
            try:
                text = ast.literal_eval(value)
            except (SyntaxError, ValueError):
                continue
            by_section[section][option] = str(text)
    options: dict[str, str] = {}
    for section in _SECTIONS:
        options.update(by_section[section])

    def words(option: str) -> list[str]:
        return options.get(option, "").split()

    index_urls = [] if _is_true(options, "no-index") else [
        options.get("index-url") or options.get("pypi-url") or _default_index(),
        *words("extra-index-url"),
    ]  # fmt: skip
    return IndexSettings(
        index_urls=tuple(index_urls),
        find_links=tuple(words("find-links")),
        trusted_hosts=tuple(words("trusted-host")),
        ca_bundle=options.get("cert"),
        client_cert=options.get("client-cert"),
        timeout=_seconds(options.get("timeout") or options.get("default-timeout")),
    )


def open_session(settings: IndexSettings) -> PyPIClient:
    """Return an open HTTP session with pip's certificates, credentials and timeout.

    Raises:
        PackageIndexError: when a certificate file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=settings.ca_bundle)
        if settings.client_cert:
            context.load_cert_chain(settings.client_cert)
    except (OSError, ssl.SSLError) as error:
        raise PackageIndexError(
            f"pip's option cert or client-cert: expected usable certificates: {error}"
        ) from error
    session = PyPIClient(
        trusted_hosts=settings.trusted_hosts,
        verify=context,
        timeout=settings.timeout,
        follow_redirects=True,
    )
    session.auth = MultiDomainBasicAuth(prompting=False, index_urls=list(settings.index_urls))
    return session


def find(file: IndexFile, settings: IndexSettings, session: PyPIClient) -> Found:
    """Return where ``file`` is.

    Raises:
        PackageIndexError: when no configured index has it; the message lists what they have
            of that version, or says that they could not be asked.
    """
    finder = PackageFinder(
        # the protocol's return types are invariant, so its own client does not satisfy it
        cast("Fetcher", session),
        index_urls=settings.index_urls,
        find_links=settings.find_links,
        trusted_hosts=settings.trusted_hosts,
        ignore_compatibility=True,
    )
    where = f"{file.project} {file.version}"
    try:
        packages = list(finder.find_matches(f"{file.project}=={file.version}", allow_yanked=True))
    except Exception as error:  # unearth lets its HTTP client's errors through, of many types
        raise PackageIndexError(f"{where}: the index could not be asked: {error}") from error
    for package in packages:
        if package.link.filename == file.filename:
            stated = (package.link.hash_option or {}).get("sha256", [None])[0]
            return Found(package.link.normalized, package.link.redacted, stated)
    names = sorted({package.link.filename for package in packages})
    listed = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
    raise PackageIndexError(
        f"{where}: expected the file {file.filename} on the configured indexes, found "
        f"{listed or 'no file of this version'}; look at `pip config list` (index-url, "
        "extra-index-url, find-links), or give the file by name"
    )


def _default_index() -> str:
    """The index that unearth uses when it is told of none."""
    return str(PackageFinder().sources[0]["url"])


def _is_true(options: Mapping[str, str], option: str) -> bool:
    return options.get(option, "").lower() in ("1", "true", "yes", "on")


def _seconds(value: str | None) -> float:
    try:
        return float(value) if value else _TIMEOUT_SECONDS
    except ValueError:
        return _TIMEOUT_SECONDS
