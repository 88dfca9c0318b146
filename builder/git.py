"""Runs git as if nobody had ever configured it.

The environment is made here, not inherited: a caller's ``GIT_DIR``, hooks, aliases, line-end
conversion, signing, credential helpers or replaced objects must not change what a build
sees. That is why git is run directly and not through a wrapper library, which would hand
the caller's environment on.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

from builder.errors import BuildError

_NETWORK = (
    "SSH_AUTH_SOCK", "http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY",
    "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO",
)  # fmt: skip

_SETTINGS = {
    "core.autocrlf": "false",
    "core.safecrlf": "false",
    "core.quotePath": "false",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.symlinks": "true",
    "core.fileMode": "true",
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "init.defaultBranch": "series",
    "user.name": "SparkCache",
    "user.email": "patches@sparkcache.invalid",
    "user.useConfigOnly": "true",
}


class GitError(BuildError):
    """A git command failed.

    Attributes:
        command: the git command and its arguments.
        code: its exit code, or None when git itself could not be started.
        message: what it said.
    """

    def __init__(self, command: str, code: int | None, message: str) -> None:
        self.command = command
        self.code = code
        self.message = message
        super().__init__(f"git {command}: {message or f'exit code {code}'}")


class Git:
    """Git commands in one folder, isolated from the user's and the system's configuration."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._settings = _SETTINGS | dict(settings or {})

    def run(
        self,
        *arguments: str,
        data: bytes | None = None,
        ok: Collection[int] = (0,),
        environment: Mapping[str, str] | None = None,
    ) -> bytes:
        """Run ``git ARGUMENTS`` and return what it wrote to standard output.

        Raises:
            GitError: when it exits with a code outside ``ok`` or git is not installed.
        """
        command = ["git"]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        shown = " ".join(argument for argument in arguments[:3])
        try:
            done = subprocess.run(
                [*command, *arguments],
                cwd=self.folder,
                env=isolated_environment() | dict(environment or {}),
                input=data if data is not None else b"",
                capture_output=True,
                check=False,
            )
        except FileNotFoundError as error:
            raise GitError(shown, None, "git is not installed, or its folder is gone") from error
        if done.returncode not in ok:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise GitError(shown, done.returncode, "; ".join(lines[-3:]))
        return done.stdout

    def line(self, *arguments: str, data: bytes | None = None) -> str:
        """Run a command that answers one line, and return that."""
        return self.run(*arguments, data=data).decode("utf-8").rstrip("\n")


def isolated_environment() -> dict[str, str]:
    """The environment of every git command: the path, the network's needs, and no more."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", *_NETWORK) if name in os.environ}
    return kept | {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_CEILING_DIRECTORIES": "/",
        "LC_ALL": "C",
        "TZ": "UTC",
    }
