"""PKG 13 and 14: the connector that is packed or installed is the one that was built.

13. Its source files, and no others, are those of the anchor; version and deployable-source
    SHA-256 are also those of the receipt, where there is one.
14. What a build adds beside the source is pinned: the lease contract by the pins, anything
    else by the anchor. What only a receipt vouches for stays undecided. The native library is
    there exactly when the wheel's tag promises it, for that architecture
    (:mod:`verify.checks.library`).
"""

from __future__ import annotations

from collections.abc import Mapping

from verify import gitobj, receipt
from verify.anchor import PACKAGE, ConnectorAnchor
from verify.checks.library import judge_library
from verify.digest import Digest, ReadError
from verify.holders import Holder
from verify.manifest import is_deployable, mode_of, source_sha256
from verify.report import Recorder

CONTRACT = f"{PACKAGE}/contract.json"


def judge_connector(
    holder: Holder,
    digests: Mapping[str, Digest | ReadError],
    dist_info: str,
    version: str | None,
    anchor: ConnectorAnchor | None,
    claimed: receipt.Connector | None,
    contract_sha256: str | None,
    rec: Recorder,
    *,
    machine: str | None = None,
) -> None:
    """Run steps 13 and 14 on the package of ``holder``, whose metadata are in ``dist_info``.

    ``version`` is what the distribution calls itself; ``contract_sha256`` what the pins say;
    ``machine`` the architecture that the connector must be for, None when any will do.
    """
    found = {
        path: digest
        for path, digest in digests.items()
        if path.startswith(f"{PACKAGE}/") and is_deployable(path) and isinstance(digest, Digest)
    }
    added = {CONTRACT}
    added.update(anchor.generated if anchor is not None else ())
    added.update(claimed.generated if claimed is not None else ())
    if anchor is not None:
        added -= anchor.files.keys()
    library: frozenset[str] = frozenset()
    if anchor is not None and anchor.native is not None:
        claims = claimed.generated if claimed is not None else {}
        library = judge_library(holder, found, dist_info, anchor.native, claims, machine, rec)
        added |= library
    source = {path: digest for path, digest in found.items() if path not in added}
    # (13)
    if anchor is None:
        rec.undecided(
            "PKG-13",
            PACKAGE,
            "nothing outside the thing judged says what the connector's source is",
            expected="a checkout, or a verify.pyz made by the same build",
            actual=f"source {_source(source)}",
        )
    else:
        _judge_source(source, anchor, version, rec)
    if claimed is not None:
        _judge_claims(holder, source, version, claimed, rec)
    rec.passed("PKG-13", f"{len(source)} files, source {_source(source)[:16]}…")
    # (14)
    _judge_contract(found.get(CONTRACT), contract_sha256, claimed, rec)
    for path in sorted(added - library - {CONTRACT}):
        _judge_added(path, found.get(path), anchor, claimed, rec)
    rec.passed("PKG-14", ", ".join(sorted(path for path in added if path in found)))


def _source(source: Mapping[str, Digest]) -> str:
    return source_sha256({path: digest.sha256 for path, digest in source.items()})


def _judge_source(
    source: Mapping[str, Digest], anchor: ConnectorAnchor, version: str | None, rec: Recorder
) -> None:
    # (13)
    for path in sorted(source.keys() | anchor.files.keys()):
        digest = source.get(path)
        actual = digest.sha256 if digest is not None else "no file"
        expected = anchor.files.get(path, "no file")
        if actual != expected:
            message = "not the connector's source"
            rec.fail("PKG-13", path, message, expected=expected, actual=actual)
    if version not in (None, anchor.version):
        message = "the connector has another version"
        rec.fail("PKG-13", PACKAGE, message, expected=anchor.version, actual=version)


def _judge_claims(
    holder: Holder,
    source: Mapping[str, Digest],
    version: str | None,
    claimed: receipt.Connector,
    rec: Recorder,
) -> None:
    # (13) what the receipt claims about the source, recomputed
    claims = [("source_sha256", claimed.source_sha256, _source(source))]
    if version is not None:
        claims.append(("version", claimed.version, version))
    if all(digest.git is not None for digest in source.values()):
        prefix = f"{PACKAGE}/"
        tree = gitobj.tree_id(
            gitobj.File(
                path.removeprefix(prefix), mode_of(holder.items[path].mode), str(digest.git)
            )
            for path, digest in source.items()
        )
        claims.append(("git_tree", claimed.git_tree, tree))
    for name, expected, actual in claims:
        if expected != actual:
            message = f"the receipt claims another {name} of the connector"
            rec.fail("PKG-13", PACKAGE, message, expected=expected, actual=actual)


def _judge_contract(
    found: Digest | None,
    pinned: str | None,
    claimed: receipt.Connector | None,
    rec: Recorder,
) -> None:
    # (14)
    actual = found.sha256 if found is not None else "no file"
    if pinned is not None and actual != pinned:
        message = "the connector does not ship the pinned lease contract"
        rec.fail("PKG-14", CONTRACT, message, expected=pinned, actual=actual)
    elif claimed is not None and claimed.contract_sha256 != actual:
        message = "the receipt claims another lease contract"
        rec.fail("PKG-14", CONTRACT, message, expected=claimed.contract_sha256, actual=actual)


def _judge_added(
    path: str,
    found: Digest | None,
    anchor: ConnectorAnchor | None,
    claimed: receipt.Connector | None,
    rec: Recorder,
) -> None:
    # (14)
    actual = found.sha256 if found is not None else "no file"
    pinned = anchor.generated.get(path) if anchor is not None else None
    claim = claimed.generated.get(path) if claimed is not None else None
    expected = pinned or claim
    if actual != expected:
        message = "not the file that the build adds"
        rec.fail("PKG-14", path, message, expected=expected, actual=actual)
    elif pinned is None:
        rec.undecided(
            "PKG-14",
            path,
            "only the receipt, which lies beside it, vouches for this file",
            expected="a digest from outside the bundle",
            actual=actual,
            hint="use the verify.pyz of the build that made the bundle, or require attestations",
        )
