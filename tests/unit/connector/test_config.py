import pickle

import pytest

from sparkcache_connector import config as configuration
from sparkcache_connector.config import Config, resolve
from sparkcache_connector.errors import ConfigError

SHA = "0123456789abcdef" * 4
MIB = 1 << 20


def test_no_key_at_all_is_a_working_configuration():
    resolution = resolve({}, {})
    assert resolution.config == Config()
    assert resolution.config.publishes
    assert resolution.config.restores
    assert set(resolution.sources.values()) == {"default"}


def test_extra_config_wins_over_environment_and_environment_over_default():
    resolution = resolve(
        {"spark_cache_load_threads": 3},
        {"SPARK_CACHE_LOAD_THREADS": "4", "SPARK_CACHE_MIN_SPAN_TOKENS": "512"},
    )
    assert resolution.config.load_threads == 3
    assert resolution.config.min_span_tokens == 512
    assert resolution.sources["load_threads"] == "spark_cache_load_threads"
    assert resolution.sources["min_span_tokens"] == "SPARK_CACHE_MIN_SPAN_TOKENS"


@pytest.mark.parametrize("spelling", [True, 1, "1", "true", "True", "TRUE", "yes", "on", " On "])
def test_usual_spellings_of_true(spelling):
    assert resolve({"spark_cache_trust_multimodal_ids": spelling}, {}).config.trust_multimodal_ids


@pytest.mark.parametrize("spelling", [False, 0, "0", "false", "No", "off"])
def test_usual_spellings_of_false(spelling):
    assert not resolve({"spark_cache_store": spelling}, {}).config.publishes


@pytest.mark.parametrize("spelling", ["ja", "", "2", 2, None, 1.0, [], "tru"])
def test_other_booleans_are_refused(spelling):
    with pytest.raises(ConfigError, match=r"spark_cache_store: expected true or false"):
        resolve({"spark_cache_store": spelling}, {})


@pytest.mark.parametrize("spelling", [True, 1.5, "1.5", "0x10", "", None, -1, "9" * 30])
def test_malformed_whole_numbers_are_refused(spelling):
    with pytest.raises(ConfigError, match=r"spark_cache_max_bytes: expected a whole number"):
        resolve({"spark_cache_max_bytes": spelling}, {})


def test_unset_capacity_differs_from_no_limit():
    assert resolve({}, {}).config.max_bytes is None
    assert resolve({"spark_cache_max_bytes": 0}, {}).config.max_bytes == 0


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("spark_cache_rooot", "spark_cache_root"),
        ("spark_cache_checkpoint_interval", "spark_cache_checkpoint_interval_tokens"),
        ("sparkcache_root", "spark_cache_root"),
        ("spark_cache_native_libary", "spark_cache_native_library"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_valid_name(key, nearest):
    with pytest.raises(ConfigError, match=f"{key}: .*nearest valid name is {nearest}$"):
        resolve({key: "x"}, {})


def test_unknown_environment_variable_is_refused_but_foreign_ones_are_ignored():
    assert resolve({}, {"PATH": "/bin", "SPARK_HOME": "/opt"}).config == Config()
    with pytest.raises(ConfigError, match=r"SPARK_CACHE_ROTO: .*SPARK_CACHE_ROOT"):
        resolve({}, {"SPARK_CACHE_ROTO": "/x"})


def test_engine_keys_beside_ours_are_left_alone():
    assert resolve({"enable_cross_layers_blocks": True}, {}).config == Config()


@pytest.mark.parametrize("name", sorted(configuration.RETIRED))
def test_retired_option_is_refused_with_what_replaces_it(name):
    for extra, environ in (
        ({"spark_cache_" + name: "x"}, {}),
        ({}, {"SPARK_CONTEXT_CACHE_" + name.upper(): "x"}),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(extra, environ)
        assert caught.value.next_step == configuration.RETIRED[name]


LEGACY = [
    ("spark_cache_native_restore", "spark_cache_cuda_restore", "1", "0"),
    ("spark_cache_native_library", "spark_cache_cuda_placement_library", "/a.so", "/b.so"),
    (
        "spark_cache_native_library_sha256",
        "spark_cache_cuda_placement_library_sha256",
        SHA,
        SHA[::-1],
    ),
    (
        "spark_cache_native_arena_bytes",
        "spark_cache_cuda_placement_arena_bytes",
        str(128 * MIB),
        256 * MIB,
    ),
    ("spark_cache_native_io_workers", "spark_cache_cuda_restore_io_workers", 2, 3),
]
COMPLETE = {
    "spark_cache_cuda_placement_library": "/a.so",
    "spark_cache_cuda_placement_library_sha256": SHA,
}


@pytest.mark.parametrize(("legacy", "canonical", "value", "other"), LEGACY)
def test_legacy_key_means_the_canonical_option(legacy, canonical, value, other):
    complete = {k: v for k, v in COMPLETE.items() if k != canonical and "library" in canonical}
    alone = resolve({**complete, legacy: value}, {})
    same = resolve({**complete, canonical: value}, {})
    assert alone.config == same.config
    assert alone.legacy == (legacy,)
    assert same.legacy == ()
    assert configuration.canonical_spelling(legacy) == canonical


@pytest.mark.parametrize(("legacy", "canonical", "value", "other"), LEGACY)
def test_equal_legacy_and_canonical_values_are_accepted_without_a_warning(
    legacy, canonical, value, other
):
    both = resolve({**COMPLETE, legacy: value, canonical: value}, {})
    assert both.legacy == ()


@pytest.mark.parametrize(("legacy", "canonical", "value", "other"), LEGACY)
def test_different_legacy_and_canonical_values_refuse_startup_naming_both(
    legacy, canonical, value, other
):
    with pytest.raises(ConfigError, match=f"{canonical} and {legacy}: expected equal values"):
        resolve({**COMPLETE, legacy: value, canonical: other}, {})


def test_values_are_compared_after_parsing():
    both = {"spark_cache_native_restore": "off", "spark_cache_cuda_restore": False}
    assert resolve(both, {}).config.cuda_restore == "off"


@pytest.mark.parametrize(
    ("variable", "value", "option", "parsed"),
    [
        ("SPARK_CONTEXT_CACHE_ROOT", "/cache", "root", "/cache"),
        ("SPARK_CONTEXT_CACHE_MIN_SPAN", "2048", "min_span_tokens", 2048),
        ("SPARK_CONTEXT_CACHE_STORE", "no", "store", False),
        ("SPARK_CONTEXT_CACHE_CUDA_RESTORE_IO_WORKERS", "5", "cuda_restore_io_workers", 5),
        ("SPARK_CONTEXT_CACHE_NATIVE_IO_WORKERS", "5", "cuda_restore_io_workers", 5),
        ("SPARK_CONTEXT_CACHE_KEY_FILE", "/k", "key_file", "/k"),
    ],
)
def test_legacy_environment(variable, value, option, parsed):
    resolution = resolve({}, {variable: value})
    assert getattr(resolution.config, option) == parsed
    assert resolution.legacy == (variable,)
    assert configuration.canonical_spelling(variable) == "SPARK_CACHE_" + option.upper()


def test_canonical_key_and_other_legacy_environment_refuse_startup():
    with pytest.raises(ConfigError, match="spark_cache_root and SPARK_CONTEXT_CACHE_ROOT"):
        resolve({"spark_cache_root": "/a"}, {"SPARK_CONTEXT_CACHE_ROOT": "/b"})


def test_two_legacy_variables_that_differ_refuse_startup():
    with pytest.raises(ConfigError, match="write SPARK_CACHE_CUDA_RESTORE_IO_WORKERS instead"):
        resolve(
            {},
            {
                "SPARK_CONTEXT_CACHE_CUDA_RESTORE_IO_WORKERS": "4",
                "SPARK_CONTEXT_CACHE_NATIVE_IO_WORKERS": "5",
            },
        )


def test_legacy_spelling_warns_once_per_process(monkeypatch, recwarn):
    monkeypatch.setattr(configuration, "_warned", set())
    resolution = resolve({"spark_cache_native_io_workers": 2}, {})
    configuration.warn_legacy(resolution)
    configuration.warn_legacy(resolution)
    assert [str(w.message) for w in recwarn.list] == [
        "spark_cache_native_io_workers is a legacy name of a SparkCache option and will be "
        "removed; write spark_cache_cuda_restore_io_workers"
    ]
    assert recwarn.list[0].category is FutureWarning


def test_python_names_of_the_public_sparkcache_still_work():
    config = resolve(
        {
            **COMPLETE,
            "spark_cache_cuda_restore": True,
            "spark_cache_cuda_placement_arena_bytes": 128 * MIB,
            "spark_cache_cuda_restore_io_workers": 4,
        },
        {},
    ).config
    assert config.native_restore_enabled is config.cuda_restore_enabled is True
    assert config.native_library_path == config.cuda_placement_library_path == "/a.so"
    assert config.native_library_sha256 == SHA
    assert config.native_arena_bytes == 128 * MIB
    assert config.native_io_workers == 4


@pytest.mark.parametrize("key", sorted(COMPLETE))
def test_library_without_digest_and_digest_without_library_are_refused(key):
    with pytest.raises(ConfigError, match="expected both or neither, found one of them"):
        resolve({key: COMPLETE[key]}, {})


@pytest.mark.parametrize(
    ("spelling", "parsed"), [("Auto", "auto"), (True, "on"), ("1", "on"), (0, "off"), ("no", "off")]
)
def test_cuda_restore_is_automatic_or_a_switch(spelling, parsed):
    config = resolve({"spark_cache_cuda_restore": spelling}, {}).config
    assert config.cuda_restore == parsed
    assert config.native_restore_enabled == (parsed != "off")


def test_cuda_restore_that_is_neither_is_refused():
    with pytest.raises(ConfigError, match="expected auto, or true or false"):
        resolve({"spark_cache_cuda_restore": "maybe"}, {})


@pytest.mark.parametrize("path", ["relative", "./x", "/a/../b", "~/cache", "/a\0b", 7])
def test_paths_that_depend_on_something_else_are_refused(path):
    with pytest.raises(ConfigError, match="an absolute path"):
        resolve({"spark_cache_root": path}, {})


@pytest.mark.parametrize(
    ("mode", "publishes", "restores"),
    [
        ("read-write", True, True),
        ("restore_only", False, True),
        ("store-only", True, False),
        ("Disabled", False, False),
    ],
)
def test_access_modes(mode, publishes, restores):
    config = resolve({"spark_cache_access_mode": mode}, {}).config
    assert (config.publishes, config.restores) == (publishes, restores)
    flipped = {"spark_cache_store": not publishes, "spark_cache_restore": not restores}
    config = resolve({"spark_cache_access_mode": mode, **flipped}, {}).config
    assert (config.publishes, config.restores) == (not publishes, not restores)


def test_watermark_above_capacity_is_refused():
    with pytest.raises(ConfigError, match=r"spark_cache_low_watermark_bytes: expected at most"):
        resolve({"spark_cache_max_bytes": 10, "spark_cache_low_watermark_bytes": 11}, {})


def test_span_limits_that_admit_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"spark_cache_max_span_tokens: expected at least"):
        resolve({"spark_cache_max_span_tokens": 100}, {})


def test_errors_survive_the_process_boundary_with_their_fields():
    with pytest.raises(ConfigError) as caught:
        resolve({"spark_cache_nope": 1}, {})
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.thing == "spark_cache_nope"
