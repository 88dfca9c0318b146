"""``receipt.json``: what went into a bundle and what came out (docs/build.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verify import pins, strictjson
from verify.pins import Composed, Module, Named, Native
from verify.strictjson import Record

RECEIPT_SCHEMA = "sparkcache.receipt/v1"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file by SHA-256 and size."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Connector:
    """What the connector wheel was made from."""

    version: str
    filename: str
    git_tree: str
    source_sha256: str
    generated: Mapping[str, str]
    contract_sha256: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """A whole receipt."""

    target: str
    base: str
    local_version: str
    commit: str | None
    proven: bool
    pins_sha256: str
    contract_sha256: str
    inputs: Mapping[str, Artifact]
    patches: tuple[Named, ...]
    modules: tuple[Module, ...]
    composition: Composed
    native: Native
    connector: Connector
    artifacts: Mapping[str, Artifact]

    @classmethod
    def parse(cls, data: bytes, what: str) -> Receipt:
        """Read ``receipt.json``; ``what`` names it in errors.

        Raises:
            FormatError: for anything that the schema does not allow.
        """
        top = Record(strictjson.parse(data, what), what)
        top.expect("schema", RECEIPT_SCHEMA)
        commit = top.record("commit")
        pinned = top.record("pins")
        contract = top.record("contract")
        composition = top.record("composition")
        artifacts = top.record("artifacts")
        inputs: dict[str, Artifact] = {}
        for each in top.records("inputs"):
            name = each.text("name")
            if name in inputs:
                each.fail("name", f"{name!r} is listed twice")
            inputs[name] = Artifact(each.sha256("sha256"), each.integer("size"))
            each.done()
        receipt = cls(
            target=top.text("target"),
            base=top.text("base"),
            local_version=top.text("local_version"),
            commit=commit.text_or_null("id"),
            proven=commit.text("status") == "proven",
            pins_sha256=pinned.sha256("sha256"),
            contract_sha256=contract.sha256("sha256"),
            inputs=inputs,
            patches=tuple(pins.named(each) for each in top.records("patches")),
            modules=tuple(pins.module(each) for each in top.records("modules")),
            composition=Composed(
                composition.git_id("vllm_tree"), composition.sha256("manifest_sha256")
            ),
            native=pins.native(top.record("native")),
            connector=_connector(top.record("connector")),
            artifacts={name: _artifact(artifacts, name) for name in artifacts},
        )
        for part in (commit, pinned, contract, composition, artifacts, top):
            part.done()
        return receipt


def _artifact(artifacts: Record, name: str) -> Artifact:
    each = artifacts.record(name)
    value = Artifact(each.sha256("sha256"), each.integer("size"))
    each.done()
    return value


def _connector(record: Record) -> Connector:
    generated = record.record("generated")
    value = Connector(
        version=record.text("version"),
        filename=pins.path(record, "filename"),
        git_tree=record.git_id("git_tree"),
        source_sha256=record.sha256("source_sha256"),
        generated={path: generated.sha256(path) for path in generated},
        contract_sha256=record.sha256("contract_sha256"),
    )
    generated.done()
    record.done()
    return value
