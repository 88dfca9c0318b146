"""Signature fingerprints: what a Python source promises its callers, read from the syntax tree.

Nothing is imported or run. A fingerprint explains why a file with another hash may no
longer do what the connector relies on; the hash alone decides (docs/build.md).

=====================================  ====================================================
name                                   fingerprint
=====================================  ====================================================
``function``, ``Class.method``         ``def name(arguments) -> annotation`` or ``async def …``,
                                       after one ``@decorator`` each
``Class``                              ``class Name(Bases)``, after its decorators
``NAME``, ``Class.field``              ``name: annotation``; ``name = value`` without one
``Class.attribute``, set by a method   ``self.name: annotation``, or ``self.name``
=====================================  ====================================================

A name that is defined several times (overloads, ``if``/``else`` branches) has all its
fingerprints, in source order, joined by ``; ``.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator

from verify.errors import FormatError

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def fingerprints(source: bytes, what: str) -> dict[str, str]:
    """Return every fingerprint of a module, by ``name`` or ``Class.name``.

    Nested classes are named with all their parts; what functions define inside themselves
    is theirs alone and not listed.

    Raises:
        FormatError: when ``source`` is not Python that this interpreter can parse.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the judged source's style is not our concern
            module = ast.parse(source, filename=what)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        place = f"line {line}" if line else ""
        raise FormatError(what, place, f"not Python source: {error}") from error
    found: dict[str, list[str]] = {}
    for name, text in _definitions(module.body, ""):
        found.setdefault(name, []).append(text)
    return {name: "; ".join(texts) for name, texts in found.items()}


def _definitions(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    declared: set[str] = set()
    assigned: dict[str, str] = {}
    for statement in _statements(body):
        if isinstance(statement, _Function):
            declared.add(statement.name)
            yield prefix + statement.name, _function(statement)
            if prefix:
                for name, text in _instance_attributes(statement):
                    if len(text) > len(assigned.get(name, "")):
                        assigned[name] = text
        elif isinstance(statement, ast.ClassDef):
            declared.add(statement.name)
            yield prefix + statement.name, _class(statement)
            yield from _definitions(statement.body, f"{prefix}{statement.name}.")
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            declared.add(statement.target.id)
            annotation = ast.unparse(statement.annotation)
            yield prefix + statement.target.id, f"{statement.target.id}: {annotation}"
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    declared.add(target.id)
                    value = ast.unparse(statement.value)
                    yield prefix + target.id, f"{target.id} = {value}"
    for name, text in sorted(assigned.items()):
        if name not in declared:
            yield prefix + name, text


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement at this level, also inside ``if``, ``try`` and ``with``."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _statements(statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            yield from _statements(statement.body)
            for handler in statement.handlers:
                yield from _statements(handler.body)
            yield from _statements(statement.orelse + statement.finalbody)
        elif isinstance(statement, ast.With):
            yield from _statements(statement.body)


def _instance_attributes(function: _Function) -> Iterator[tuple[str, str]]:
    """What ``function`` assigns to attributes of its first argument."""
    arguments = function.args.posonlyargs + function.args.args
    if not arguments:
        return
    self_name = arguments[0].arg
    for node in ast.walk(function):
        targets: list[ast.expr]
        if isinstance(node, ast.AnnAssign):
            targets, suffix = [node.target], f": {ast.unparse(node.annotation)}"
        elif isinstance(node, ast.Assign):
            suffix = ""
            targets = [
                part
                for target in node.targets
                for part in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
        else:
            continue
        for target in targets:
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == self_name
            ):
                yield target.attr, f"self.{target.attr}{suffix}"


def _decorators(nodes: list[ast.expr]) -> str:
    return "".join(f"@{ast.unparse(node)} " for node in nodes)


def _function(node: _Function) -> str:
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{keyword} {node.name}({ast.unparse(node.args)}){returns}"
    return _decorators(node.decorator_list) + signature


def _class(node: ast.ClassDef) -> str:
    bases = [ast.unparse(base) for base in node.bases]
    bases += [
        f"{keyword.arg}={ast.unparse(keyword.value)}"
        if keyword.arg
        else f"**{ast.unparse(keyword.value)}"
        for keyword in node.keywords
    ]
    suffix = f"({', '.join(bases)})" if bases else ""
    return f"{_decorators(node.decorator_list)}class {node.name}{suffix}"
