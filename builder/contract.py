"""Generates ``contract.json``: what each vLLM file must be in each named state of a tree.

The schema is in docs/build.md. The contract covers the files that ``target.yaml`` lists,
every file that patches touch, and every module that we add.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping

from builder.compose import Composition
from builder.errors import BuildError
from builder.patcher import Content
from builder.target import Target
from verify import strictjson, symbols
from verify.strictjson import Json

SCHEMA = "sparkcache.contract/v1"
UPSTREAM = "upstream"


class ContractError(BuildError):
    """The contract names something that no state of the tree has.

    Attributes:
        path: the file.
        problem: what was expected and what was found.
    """

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"contract: {path}: {problem}")


def patched_state(target: Target) -> str:
    """The name of the state that our build makes."""
    return f"spark.{target.revision}"


def contract_paths(target: Target, composition: Composition) -> tuple[str, ...]:
    """Every file of the contract, sorted."""
    return tuple(sorted({*target.contract, *composition.changes()}))


def make_contract(
    target: Target, composition: Composition, upstream: Mapping[str, Content]
) -> bytes:
    """Return the bytes of ``contract.json``.

    ``upstream`` holds the release's content of every contract file that the release has.

    Raises:
        ContractError: for a listed file or symbol that exists in no state.
        verify.errors.FormatError: for a file that is not Python.
    """
    state = patched_state(target)
    changes = composition.changes()
    files: list[Json] = []
    for path in contract_paths(target, composition):
        sides = {
            UPSTREAM: upstream.get(path),
            state: changes[path] if path in changes else upstream.get(path),
        }
        if all(content is None for content in sides.values()):
            raise ContractError(path, "expected it in the release or among our modules")
        files.append(
            {
                "path": path,
                "sha256": {
                    name: None if content is None else hashlib.sha256(content.data).hexdigest()
                    for name, content in sides.items()
                },
                "symbols": _symbols(path, target.contract.get(path, ()), sides),
            }
        )
    return strictjson.dump(
        {
            "schema": SCHEMA,
            "target": target.name,
            "version": target.version,
            "states": {
                UPSTREAM: "the release as published",
                state: "with our patch series",
            },
            "files": files,
        }
    )


def _symbols(
    path: str, names: tuple[str, ...], sides: Mapping[str, Content | None]
) -> dict[str, Json]:
    if not names:
        return {}
    found = {
        state: {} if content is None else symbols.fingerprints(content.data, path)
        for state, content in sides.items()
    }
    listed: dict[str, Json] = {}
    for name in names:
        texts = {state: defined.get(name) for state, defined in found.items()}
        if all(text is None for text in texts.values()):
            known = sorted(set().union(*found.values()))
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise ContractError(path, f"expected the symbol {name} in some state{hint}")
        listed[name] = texts
    return listed
