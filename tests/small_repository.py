"""Makes git repositories of small releases; the ids depend on the files alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_AUTHOR_NAME": "Upstream",
    "GIT_AUTHOR_EMAIL": "up@example.invalid",
    "GIT_COMMITTER_NAME": "Upstream",
    "GIT_COMMITTER_EMAIL": "up@example.invalid",
    "GIT_AUTHOR_DATE": "1700000000 +0000",
    "GIT_COMMITTER_DATE": "1700000000 +0000",
}


def git(folder: Path, *arguments: str, data: bytes | None = None) -> str:
    """Run git in ``folder`` without anybody's configuration; return its answer."""
    done = subprocess.run(
        ["git", "-c", "core.autocrlf=false", "-c", "init.defaultBranch=main", *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        input=data,
        capture_output=True,
        check=True,
    )
    return done.stdout.decode().strip()


def make(folder: Path, files: Mapping[str, tuple[str, bytes]], message: str = "Release") -> str:
    """Commit ``files`` (path -> mode, bytes) to the repository ``folder``; return the id."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / ".git").exists():
        git(folder, "init", "--quiet")
    git(folder, "read-tree", "--empty")
    for path, (mode, data) in files.items():
        id_ = data.decode() if mode == "160000" else git(
            folder, "hash-object", "-w", "--stdin", data=data
        )  # fmt: skip
        git(folder, "update-index", "--add", "--cacheinfo", f"{mode},{id_},{path}")
    commit = git(folder, "commit-tree", "-m", message, git(folder, "write-tree"))
    git(folder, "update-ref", "refs/heads/main", commit)
    return commit
