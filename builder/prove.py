"""Proves that a target's release is the tree of its commit, and keeps the proof.

The proof is two raw git objects, a few kilobytes: the commit, which hashes to its id and
names the root tree, and the root tree, which hashes to the id that is pinned for the release
and names the tree of ``vllm/``. Checking it needs neither git nor the network.
"""

from __future__ import annotations

from operator import methodcaller
from pathlib import Path

from builder import source_git
from builder.acquire import Acquirer
from builder.bundle import write_file
from builder.cache import default_folder
from builder.pin import PinError
from builder.source_git import GitSource
from builder.target import Layout, Target
from verify import strictjson
from verify.gitobj import object_id, parse_commit, parse_tree
from verify.strictjson import Record


def git_cache() -> Path:
    """Where fetched commits are kept."""
    return default_folder().parent / "git"


def fetch_release(target: Target, acquirer: Acquirer, url: str | None = None) -> GitSource:
    """Return the source of the target's commit, from ``url`` or the target's repository.

    Raises:
        PinError: when the target names no commit.
        SourceError: when the commit cannot be fetched as it is.
    """
    if target.commit is None:
        raise PinError(f"{target.name}: target.yaml names no commit to fetch")
    return source_git.fetch(
        url or target.git,
        target.commit,
        target.name,
        git_cache(),
        acquirer.console,
        offline=acquirer.offline,
    )


def prove(layout: Layout, target: Target, acquirer: Acquirer, url: str | None = None) -> list[Path]:
    """Fetch the target's commit, check it against the pins, write objects and status.

    Returns the paths that were written.

    Raises:
        PinError: when there is no commit or there are no pins to prove, or the commit's tree
            is not the pinned release.
        SourceError: when the commit cannot be fetched as it is.
    """
    if not layout.pins.is_file():
        raise PinError(f"{layout.name}: expected pins first; run `python -m builder pin`")
    what = str(layout.pins.relative_to(layout.checkout))
    pins = strictjson.parse(layout.pins.read_bytes(), what)
    pinned = Record(pins, what).record("source")
    raw = fetch_release(target, acquirer, url).raw()
    tree = parse_commit(raw.commit, "the commit").tree
    vllm = {entry.name: entry.id for entry in parse_tree(raw.tree, "the root tree")}.get(b"vllm")
    for name, expected, found in (
        ("commit", target.commit, object_id("commit", raw.commit)),
        ("root tree", pinned.git_id("tree"), tree),
        ("root tree's id", tree, object_id("tree", raw.tree)),
        ("tree of vllm/", pinned.git_id("vllm_tree"), vllm),
    ):
        if expected != found:
            raise PinError(
                f"{target.name}: {name}: expected {expected} as pinned, the commit has {found}: "
                "the sdist was not made from this commit alone; compare the two before you "
                "pin either"
            )
    assert isinstance(pins, dict)
    pins["commit"] = {"id": target.commit, "status": "proven"}
    written = {
        layout.folder / "objects" / "commit": raw.commit,
        layout.folder / "objects" / "tree": raw.tree,
        layout.pins: strictjson.dump(pins),
    }
    for path, data in written.items():
        write_file(path, methodcaller("write", data))
    return list(written)
