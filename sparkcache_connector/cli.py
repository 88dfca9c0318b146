"""The ``sparkcache`` command: look at, check and clean a cache root, without a GPU.

Results go to stdout, everything else to stderr. Exit codes are listed in
``docs/exit-codes.md``: 0 done, 1 damage found, 2 usage or a cache root that cannot be used, 3
not possible while an engine owns the cache root, 4 a bug of ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from sparkcache_connector.doctor import examine
from sparkcache_connector.store import Manifest, Options, Reason, Store, StoreError
from sparkcache_connector.store.benchmark import measure
from sparkcache_connector.store.catalog import CatalogDamaged, RootRow
from sparkcache_connector.store.fsck import check, read_manifest
from sparkcache_connector.store.manifest import DIGEST_BYTES
from sparkcache_connector.store.view import View
from sparkcache_connector.store.workers import Workers

OK, DAMAGED, UNUSABLE, OWNED, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 4, 130
NOBODY: Final = bytes(DIGEST_BYTES)
"""The identity under which the command opens a cache root: it never publishes."""
_PROGRESS_AFTER_SECONDS: Final = 2.0


class _Usage(Exception):  # noqa: N818 -- not an error of the program
    """The command line asks for something that is not there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except _Usage as usage:
        print(f"sparkcache: {usage}", file=sys.stderr)
        return UNUSABLE
    except StoreError as error:
        print(f"sparkcache: {error}", file=sys.stderr)
        return OWNED if error.reason is Reason.OWNED else UNUSABLE
    except (OSError, CatalogDamaged) as error:
        print(f"sparkcache: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        print("sparkcache: a bug of ours; please report the lines above", file=sys.stderr)
        return INTERNAL


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparkcache", description="Look at, check and clean a cache root."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("root", type=Path, metavar="ROOT", help="the cache root's directory")
        sub.add_argument("--format", choices=("text", "json"), default="text")
        sub.set_defaults(run=run)
        if name != "bench":
            sub.add_argument("--key-file", help="the operator's key ring, if there is one")
        return sub

    ls = command("ls", _ls, "list the roots, most recently used first")
    ls.add_argument("--identity", default="", help="only identities that begin with this")
    show = command("show", _show, "describe one root")
    show.add_argument("context", help="the context digest, or its beginning")
    command("verify", _verify, "read and check every page (exit code 1: damage)")
    gc = command("gc", _gc, "remove debris, expired and surplus roots; no engine may run")
    gc.add_argument("--high-bytes", type=_size, help="capacity, e.g. 500G")
    gc.add_argument("--low-bytes", type=_size, help="evict down to this if above the capacity")
    gc.add_argument("--ttl", type=float, metavar="SECONDS", help="expire roots unused for so long")
    gc.add_argument("--rotate-key", action="store_true", help="replace the key by a new one")
    gc.add_argument("--destroy-key", metavar="ID", help="revoke a key and every root under it")
    command("stats", _stats, "sizes, owner and keys")
    command("identity", _identity, "list the identities that have roots")
    command("doctor", _doctor, "why nothing hits; ROOT is spark_cache_root itself")
    bench = command("bench", _bench, "measure this disk: save, cold load, hot load")
    bench.add_argument("--page", type=_size, default=1 << 20, help="page size (default 1M)")
    bench.add_argument("--total", type=_size, default=512 << 20, help="bytes (default 512M)")
    bench.add_argument("--repeat", type=int, default=3)
    return parser


def _size(text: str) -> int:
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or int(number) == 0 or (unit and unit not in units):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 512M or 2T")
    return int(number) << units.get(unit, 0)


def _print(arguments: argparse.Namespace, value: dict[str, Any], lines: Iterable[str]) -> None:
    if arguments.format == "json":
        json.dump(value, sys.stdout, indent=2, sort_keys=True)
        sys.stdout.write("\n")
        return
    for line in lines:
        print(line)


def _progress(what: str) -> Callable[[int, int], None]:
    """Return a progress line on a terminal's stderr, for work over two seconds."""
    start = time.monotonic()

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty() and time.monotonic() - start > _PROGRESS_AFTER_SECONDS:
            end = "\n" if done == total else ""
            share = 100 * done // max(total, 1)
            sys.stderr.write(f"\r{what}: {share:3d} %{end}")
            sys.stderr.flush()

    return show


def _when(nanoseconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(nanoseconds / 1e9))


def _human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _root_json(row: RootRow) -> dict[str, Any]:
    return {
        "identity": row.identity.hex(),
        "context": row.context.hex(),
        "boundary": row.boundary,
        "rank": row.rank,
        "pages": row.pages,
        "bytes": row.bytes,
        "usable": row.usable,
        "created": _when(row.created_ns),
        "used": _when(row.used_ns),
    }


def _view(arguments: argparse.Namespace) -> View:
    return View.open(arguments.root, arguments.key_file)


def _ls(arguments: argparse.Namespace) -> int:
    with _view(arguments) as view:
        rows = [
            row
            for row in reversed(view.catalog.roots())
            if row.identity.hex().startswith(arguments.identity)
        ]
    lines = [
        f"{row.identity.hex()[:12]}  {row.context.hex()[:16]}  {row.boundary:>9}"
        f"  {row.pages:>7} pages  {_human(row.bytes):>10}  {_when(row.used_ns)}"
        f"{'' if row.usable else '  key not in the ring'}"
        for row in rows
    ]
    lines.append(f"{len(rows)} roots")
    _print(arguments, {"roots": [_root_json(row) for row in rows]}, lines)
    return OK


def _show(arguments: argparse.Namespace) -> int:
    with _view(arguments) as view:
        rows = view.find(arguments.context.lower())
        if len(rows) != 1:
            found = "no root" if not rows else f"{len(rows)} roots"
            raise _Usage(f"{found} with a context that begins with {arguments.context!r}")
        manifest = read_manifest(view.area, view.keys, rows[0].identity, rows[0].context)
    value = _root_json(rows[0]) | _manifest_json(manifest)
    lines = [f"{key}: {part}" for key, part in value.items() if key not in ("groups", "packs")]
    lines += [
        f"group {number}: {group['kind']}, {group['pages']} pages of {group['page_bytes']} bytes"
        f" from block {group['first']}, in {group['runs']} runs"
        for number, group in enumerate(value["groups"])
    ]
    lines += [f"pack {pack['id']}: {_human(pack['bytes'])}" for pack in value["packs"]]
    _print(arguments, value, lines)
    return OK


def _manifest_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "groups": [
            {
                "kind": group.kind.name.lower().replace("_", "-"),
                "page_bytes": group.page_bytes,
                "first": group.first,
                "pages": group.count,
                "runs": len(group.runs),
            }
            for group in manifest.groups
        ],
        "packs": [{"id": pack.pack_id.hex(), "bytes": pack.size} for pack in manifest.packs],
    }


def _verify(arguments: argparse.Namespace) -> int:
    workers = Workers(4)
    try:
        with _view(arguments) as view:
            checked, findings = check(view.area, view.keys, workers, _progress("verify"))
    finally:
        workers.close()
    damage = [finding for finding in findings if not finding.harmless]
    value = {
        "checked": asdict(checked),
        "findings": [asdict(finding) for finding in findings],
        "damaged": len(damage),
    }
    lines = [
        f"{'note' if finding.harmless else 'DAMAGE'}  {finding.subject}: {finding.found}"
        f" ({finding.reason})"
        for finding in findings
    ]
    lines.append(
        f"{checked.roots} roots, {checked.packs} packs, {checked.pages} pages,"
        f" {_human(checked.bytes)} checked: {len(damage)} damaged"
    )
    _print(arguments, value, lines)
    return DAMAGED if damage else OK


def _gc(arguments: argparse.Namespace) -> int:
    options = Options(
        high_bytes=arguments.high_bytes,
        low_bytes=arguments.low_bytes,
        ttl_seconds=arguments.ttl,
        key_file=arguments.key_file,
    )
    if not arguments.root.is_dir():
        raise _Usage(f"there is no cache root at {arguments.root}")
    revoked = rewritten = 0
    with Store.open(arguments.root, identity=NOBODY, options=options) as store:
        if arguments.destroy_key is not None:
            revoked = store.destroy_key(_key_id(arguments.destroy_key))
        if arguments.rotate_key:
            rewritten = store.rotate_key()
        report = store.maintain(look_around=True)
        stats = store.stats()
    value = asdict(report) | {
        "revoked": revoked,
        "rewritten": rewritten,
        "roots": stats.roots,
        "allocated_bytes": stats.allocated_bytes,
    }
    line = (
        f"{report.expired} expired, {report.evicted} evicted, {report.compacted} packs compacted,"
        f" {report.swept} swept, {_human(report.freed_bytes)} freed;"
        f" {stats.roots} roots in {_human(stats.allocated_bytes)}"
    )
    if arguments.rotate_key or arguments.destroy_key is not None:
        line += f"; {rewritten} rewritten under a new key, {revoked} revoked"
    _print(arguments, value, [line])
    return OK


def _key_id(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise _Usage(f"{text!r} is no key id; `sparkcache stats` lists them") from error


def _stats(arguments: argparse.Namespace) -> int:
    with _view(arguments) as view:
        totals = view.catalog.totals()
        value: dict[str, Any] = {
            "roots": totals.roots,
            "packs": totals.packs,
            "allocated_bytes": totals.allocated,
            "owner_pid": view.owner,
            "catalog": "rebuilt from manifests" if view.from_files else "in use",
            "keys": [key.key_id.hex() for key in view.keys.keys],
            "quarantined": len(view.area.quarantine.names()),
        }
    lines = [
        f"{totals.roots} roots in {totals.packs} packs, {_human(totals.allocated)} allocated",
        f"owner: {'nobody' if value['owner_pid'] is None else value['owner_pid']}",
        f"catalog: {value['catalog']}",
        f"keys, current first: {' '.join(value['keys'])}",
        f"in quarantine: {value['quarantined']}",
    ]
    _print(arguments, value, lines)
    return OK


def _identity(arguments: argparse.Namespace) -> int:
    with _view(arguments) as view:
        rows = view.catalog.identities()
    value = {
        "identities": [
            {"identity": digest.hex(), "roots": roots, "bytes": size, "used": _when(used)}
            for digest, roots, size, used in rows
        ]
    }
    lines = [
        f"{digest.hex()}  {roots:>7} roots  {_human(size):>10} restorable  {_when(used)}"
        for digest, roots, size, used in rows
    ]
    lines.append(f"{len(rows)} identities")
    _print(arguments, value, lines)
    return OK


def _doctor(arguments: argparse.Namespace) -> int:
    if not arguments.root.is_dir():
        raise _Usage(f"there is no directory {arguments.root}")
    diagnosis = examine(arguments.root, arguments.key_file)
    _print(arguments, diagnosis.as_json(), diagnosis.as_text())
    return OK


def _bench(arguments: argparse.Namespace) -> int:
    if not arguments.root.is_dir():
        raise _Usage(f"there is no directory {arguments.root}")
    if arguments.total < arguments.page or arguments.repeat < 1:
        raise _Usage("the total must hold a page, and there must be one repetition")
    result = measure(
        arguments.root,
        arguments.page,
        arguments.total,
        arguments.repeat,
        progress=_progress("bench"),
    )
    value = result.as_json()
    lines = [
        f"{name:20} best {summary['best_gb_s']:7.2f} GB/s  median"
        f" {summary['median_gb_s']:7.2f} GB/s  {summary['cpu_s_per_gb']:.2f} CPU s/GB"
        for name, summary in ((name, series.summary()) for name, series in result.series.items())
    ]
    _print(arguments, value, lines)
    return OK


if __name__ == "__main__":
    sys.exit(main())
