"""Options: extra-config keys, then environment, then defaults; nothing unknown passes.

An option named ``<name>`` is written ``spark_cache_<name>`` in ``kv_connector_extra_config``
or ``SPARK_CACHE_<NAME>`` in the environment. A few options also have a legacy spelling
(``spark_cache_native_*``), and every option a legacy environment variable
(``SPARK_CONTEXT_CACHE_*``). How they combine:

1. Within one vocabulary an extra-config key wins over an environment variable.
2. Two legacy spellings of one option must agree.
3. If both vocabularies name an option, the parsed values must be equal; otherwise startup
   is refused and both spellings are named.
4. A legacy spelling alone is accepted and warned about, once per process.
5. A name of ours that is unknown, or retired, is refused with what to write instead.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from sparkcache_connector import option_values as values
from sparkcache_connector.errors import ConfigError

KEY_PREFIX: Final = "spark_cache_"
ENVIRONMENT_PREFIX: Final = "SPARK_CACHE_"
LEGACY_ENVIRONMENT_PREFIX: Final = "SPARK_CONTEXT_CACHE_"

MIB: Final = 1 << 20

# Keys of vLLM's own that may stand beside ours in kv_connector_extra_config.
ENGINE_KEYS: Final = frozenset({"enable_cross_layers_blocks"})

# Options of the public SparkCache that have no counterpart, and why none is needed.
RETIRED: Final[Mapping[str, str]] = {
    "model_profile": "layouts are read from the engine; remove it",
    "draft_policy": "draft layers are ordinary groups of the engine's KV cache; remove it",
    "publication_schema": "every root may reference the pages of a base; remove it",
    "scheduler_probe": "ranks report what they hold at startup; remove it",
    "page_snapshot_interval_tokens": "write spark_cache_checkpoint_interval_tokens",
    "streaming_snapshots": "capture never runs on the model's thread; remove it",
    "async_page_capture": "capture never runs on the model's thread; remove it",
    "shared_prefix_lease_ttl_seconds": "concurrent requests share one read; remove it",
    "clear_once": "stop the engine and delete its directory under spark_cache_root",
}


def _option(
    default: Any,
    parse: Callable[[object], Any],
    *,
    legacy_key: str = "",
    legacy_environment: tuple[str, ...] = (),
) -> Any:
    return field(
        default=default,
        metadata={
            "parse": parse,
            "legacy_key": legacy_key,
            "legacy_environment": legacy_environment,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every option, parsed. Units are in the names; 0 and None are explained where they mean more.

    Attributes:
        root: directory that holds this machine's cache roots, one per rank.
        namespace: free text inside the identity; different texts never share a byte.
        access_mode: ``read-write``, ``restore-only``, ``store-only`` or ``disabled``.
        store: overrides publishing of ``access_mode``.
        restore: overrides restoring of ``access_mode``.
        chunk_tokens: tokens per link of the context digest.
        checkpoint_interval_tokens: largest distance between two published boundaries.
        min_span_tokens: shorter contexts are recomputed faster than they are looked up.
        max_span_tokens: longer contexts are not published; 0 is the model's own limit.
        max_bytes: allocated bytes kept on disk; unset is four fifths of what the disk has for us,
            0 no limit.
        low_watermark_bytes: what eviction goes down to; 0 is nine tenths of ``max_bytes``.
        ttl_seconds: roots unused for so long are removed; 0 keeps them.
        key_file: secret that authenticates manifests; empty makes one in the cache root.
        target_checkpoint_sha256: names the target's weights instead of reading them.
        draft_checkpoint_sha256: names the draft's weights instead of reading them.
        trust_multimodal_ids: caller-supplied multimodal ids count as content.
        load_threads: restores that run at the same time on one rank.
        restore_deadline_seconds: a restore that takes longer is given up and recomputed.
        max_pending_restores: requests that may wait for a restore; further ones recompute.
        max_delayed_stores: publications whose blocks may be held at the same time.
        max_pending_publications: publication attempts that may wait for proof.
        publication_max_age_seconds: an attempt without proof for so long is dropped.
        cuda_restore: ``auto`` places pages by the native library where it can serve, ``on``
            refuses startup where it cannot, ``off`` places them by torch.
        cuda_placement_library: absolute path of another library than the packaged one.
        cuda_placement_library_sha256: SHA-256 that this other library must have.
        cuda_placement_arena_bytes: size of a staging arena; 0 fits it to the pages.
        cuda_restore_io_workers: threads that read and authenticate pages of one root.
    """

    root: str = _option("", values.absolute_path)
    namespace: str = _option("", values.text)
    access_mode: str = _option(
        "read-write", values.one_of("read-write", "restore-only", "store-only", "disabled")
    )
    store: bool | None = _option(None, values.boolean)
    restore: bool | None = _option(None, values.boolean)
    chunk_tokens: int = _option(256, values.integer(16, 65_536))
    checkpoint_interval_tokens: int = _option(2_048, values.integer(16, 1 << 24))
    min_span_tokens: int = _option(
        1_024, values.integer(1, 1 << 30), legacy_environment=("SPARK_CONTEXT_CACHE_MIN_SPAN",)
    )
    max_span_tokens: int = _option(
        0, values.integer(0, 1 << 30), legacy_environment=("SPARK_CONTEXT_CACHE_MAX_SPAN",)
    )
    max_bytes: int | None = _option(None, values.integer(0, 1 << 62))
    low_watermark_bytes: int = _option(0, values.integer(0, 1 << 62))
    ttl_seconds: int = _option(0, values.integer(0, 1 << 40))
    key_file: str = _option("", values.absolute_path)
    target_checkpoint_sha256: str = _option("", values.sha256)
    draft_checkpoint_sha256: str = _option("", values.sha256)
    trust_multimodal_ids: bool = _option(False, values.boolean)
    load_threads: int = _option(2, values.integer(1, 8))
    restore_deadline_seconds: int = _option(30, values.integer(1, 86_400))
    max_pending_restores: int = _option(64, values.integer(1, 65_536))
    max_delayed_stores: int = _option(16, values.integer(1, 65_536))
    max_pending_publications: int = _option(1_024, values.integer(1, 1 << 20))
    publication_max_age_seconds: int = _option(600, values.integer(1, 86_400))
    cuda_restore: str = _option(
        "auto",
        values.auto_or_switch,
        legacy_key="native_restore",
        legacy_environment=("SPARK_CONTEXT_CACHE_NATIVE_RESTORE",),
    )
    cuda_placement_library: str = _option(
        "",
        values.absolute_path,
        legacy_key="native_library",
        legacy_environment=("SPARK_CONTEXT_CACHE_NATIVE_LIBRARY",),
    )
    cuda_placement_library_sha256: str = _option(
        "",
        values.sha256,
        legacy_key="native_library_sha256",
        legacy_environment=("SPARK_CONTEXT_CACHE_NATIVE_LIBRARY_SHA256",),
    )
    cuda_placement_arena_bytes: int = _option(
        0,
        values.one_of_integers(0, 64 * MIB, 128 * MIB, 256 * MIB),
        legacy_key="native_arena_bytes",
        legacy_environment=("SPARK_CONTEXT_CACHE_NATIVE_ARENA_BYTES",),
    )
    cuda_restore_io_workers: int = _option(
        8,
        values.integer(1, 32),
        legacy_key="native_io_workers",
        legacy_environment=("SPARK_CONTEXT_CACHE_NATIVE_IO_WORKERS",),
    )

    @property
    def publishes(self) -> bool:
        """Whether new roots are written."""
        if self.store is not None:
            return self.store
        return self.access_mode in ("read-write", "store-only")

    @property
    def restores(self) -> bool:
        """Whether stored roots are offered."""
        if self.restore is not None:
            return self.restore
        return self.access_mode in ("read-write", "restore-only")

    @property
    def cuda_restore_enabled(self) -> bool:
        """The public SparkCache's Python name: whether the native library is not ruled out."""
        return self.cuda_restore != "off"

    @property
    def cuda_placement_library_path(self) -> str:
        """The public SparkCache's Python name of ``cuda_placement_library``."""
        return self.cuda_placement_library

    @property
    def native_restore_enabled(self) -> bool:
        """Legacy Python name of ``cuda_restore_enabled``."""
        return self.cuda_restore_enabled

    @property
    def native_library_path(self) -> str:
        """Legacy Python name of ``cuda_placement_library``."""
        return self.cuda_placement_library

    @property
    def native_library_sha256(self) -> str:
        """Legacy Python name of ``cuda_placement_library_sha256``."""
        return self.cuda_placement_library_sha256

    @property
    def native_arena_bytes(self) -> int:
        """Legacy Python name of ``cuda_placement_arena_bytes``."""
        return self.cuda_placement_arena_bytes

    @property
    def native_io_workers(self) -> int:
        """Legacy Python name of ``cuda_restore_io_workers``."""
        return self.cuda_restore_io_workers


@dataclass(frozen=True, slots=True)
class Resolution:
    """A configuration and, for ``sparkcache doctor``, where each value came from.

    Attributes:
        config: the parsed options.
        sources: per option the spelling that set it, or ``default``.
        legacy: the legacy spellings that were used alone.
    """

    config: Config
    sources: Mapping[str, str]
    legacy: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Spelling:
    spelling: str
    value: Any


def resolve(extra_config: Mapping[str, object], environ: Mapping[str, str]) -> Resolution:
    """Combine both sources by the five rules of this module.

    Raises:
        ConfigError: naming the option as the user spelled it.
    """
    _refuse_unknown(extra_config, environ)  # (5)
    chosen: dict[str, Any] = {}
    sources: dict[str, str] = {}
    legacy: list[str] = []
    for option in fields(Config):
        parse = option.metadata["parse"]
        canonical = _first(_canonical(option.name, extra_config, environ), parse)  # (1)
        old = _legacy(option.name, option.metadata, extra_config, environ, parse)  # (2)
        if canonical and old and canonical.value != old.value:  # (3)
            raise ConfigError(
                f"{canonical.spelling} and {old.spelling}",
                expected="equal values, because both name one option",
                found=f"{canonical.value!r} and {old.value!r}",
                next_step=f"remove {old.spelling}",
            )
        if old and not canonical:  # (4)
            legacy.append(old.spelling)
        decided = canonical or old
        sources[option.name] = decided.spelling if decided else "default"
        if decided:
            chosen[option.name] = decided.value
    config = Config(**chosen)
    _refuse_contradictions(config)
    return Resolution(config, sources, tuple(legacy))


_warned: set[str] = set()


def warn_legacy(resolution: Resolution) -> None:
    """Warn about legacy spellings, each once in the life of this process."""
    for spelling in resolution.legacy:
        if spelling not in _warned:
            _warned.add(spelling)
            warnings.warn(
                f"{spelling} is a legacy name of a SparkCache option and will be removed; "
                f"write {canonical_spelling(spelling)}",
                FutureWarning,
                stacklevel=2,
            )


def canonical_spelling(legacy_spelling: str) -> str:
    """The key or variable that replaces a legacy one."""
    for option in fields(Config):
        if legacy_spelling == KEY_PREFIX + option.metadata["legacy_key"]:
            return KEY_PREFIX + option.name
        if legacy_spelling in _legacy_variables(option.name, option.metadata):
            return ENVIRONMENT_PREFIX + option.name.upper()
    raise ValueError(f"{legacy_spelling} is not a legacy spelling")


def _canonical(
    name: str, extra_config: Mapping[str, object], environ: Mapping[str, str]
) -> Iterator[tuple[str, object]]:
    if KEY_PREFIX + name in extra_config:
        yield KEY_PREFIX + name, extra_config[KEY_PREFIX + name]
    if ENVIRONMENT_PREFIX + name.upper() in environ:
        variable = ENVIRONMENT_PREFIX + name.upper()
        yield variable, environ[variable]


def _legacy_variables(name: str, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    return (LEGACY_ENVIRONMENT_PREFIX + name.upper(), *metadata["legacy_environment"])


def _legacy(
    name: str,
    metadata: Mapping[str, Any],
    extra_config: Mapping[str, object],
    environ: Mapping[str, str],
    parse: Callable[[object], Any],
) -> _Spelling | None:
    key = KEY_PREFIX + metadata["legacy_key"]
    if metadata["legacy_key"] and key in extra_config:
        return _first(iter([(key, extra_config[key])]), parse)
    found = [
        _Spelling(variable, _parsed(variable, environ[variable], parse))
        for variable in _legacy_variables(name, metadata)
        if variable in environ
    ]
    for other in found[1:]:
        if other.value != found[0].value:
            raise ConfigError(
                f"{found[0].spelling} and {other.spelling}",
                expected="equal values, because both name one option",
                found=f"{found[0].value!r} and {other.value!r}",
                next_step=f"write {ENVIRONMENT_PREFIX + name.upper()} instead of both",
            )
    return found[0] if found else None


def _first(
    spellings: Iterator[tuple[str, object]], parse: Callable[[object], Any]
) -> _Spelling | None:
    for spelling, raw in spellings:
        return _Spelling(spelling, _parsed(spelling, raw, parse))
    return None


def _parsed(spelling: str, raw: object, parse: Callable[[object], Any]) -> Any:
    try:
        return parse(raw)
    except values.RefusedValueError as refused:
        raise ConfigError(
            spelling,
            expected=refused.expected,
            found=repr(raw),
            next_step="correct it or remove it to get the default",
        ) from None


def _known_names() -> tuple[set[str], set[str]]:
    keys: set[str] = set()
    variables: set[str] = set()
    for option in fields(Config):
        keys.add(KEY_PREFIX + option.name)
        if option.metadata["legacy_key"]:
            keys.add(KEY_PREFIX + option.metadata["legacy_key"])
        variables.add(ENVIRONMENT_PREFIX + option.name.upper())
        variables.update(_legacy_variables(option.name, option.metadata))
    return keys, variables


def _refuse_unknown(extra_config: Mapping[str, object], environ: Mapping[str, str]) -> None:
    keys, variables = _known_names()
    for key in extra_config:
        if key not in keys and key not in ENGINE_KEYS:
            raise _unknown(key, key.removeprefix(KEY_PREFIX), keys)
    for variable in sorted(environ):
        for prefix in (ENVIRONMENT_PREFIX, LEGACY_ENVIRONMENT_PREFIX):
            if variable.startswith(prefix) and variable not in variables:
                raise _unknown(variable, variable.removeprefix(prefix).lower(), variables)


def _unknown(spelling: str, name: str, valid: set[str]) -> ConfigError:
    if name in RETIRED:
        return ConfigError(
            spelling,
            expected="an option that exists",
            found="one that is no longer needed",
            next_step=RETIRED[name],
        )
    nearest = difflib.get_close_matches(spelling, sorted(valid), n=1, cutoff=0.0)
    return ConfigError(
        spelling,
        expected="an option that exists",
        found="an unknown name",
        next_step=f"the nearest valid name is {nearest[0]}",
    )


def _refuse_contradictions(config: Config) -> None:
    if config.max_bytes and config.low_watermark_bytes > config.max_bytes:
        raise ConfigError(
            "spark_cache_low_watermark_bytes",
            expected=f"at most spark_cache_max_bytes ({config.max_bytes})",
            found=str(config.low_watermark_bytes),
            next_step="lower it, or remove it to get nine tenths of the capacity",
        )
    if config.max_span_tokens and config.max_span_tokens < config.min_span_tokens:
        raise ConfigError(
            "spark_cache_max_span_tokens",
            expected=f"at least spark_cache_min_span_tokens ({config.min_span_tokens})",
            found=str(config.max_span_tokens),
            next_step="raise it, or write 0 for the model's own limit",
        )
    if bool(config.cuda_placement_library) != bool(config.cuda_placement_library_sha256):
        raise ConfigError(
            "spark_cache_cuda_placement_library and spark_cache_cuda_placement_library_sha256",
            expected="both or neither",
            found="one of them",
            next_step="give the library together with its SHA-256",
        )
