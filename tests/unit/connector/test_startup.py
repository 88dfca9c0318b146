import dataclasses

import pytest

from sparkcache_connector.errors import ConfigError
from sparkcache_connector.startup import EngineFacts, refuse_unsafe

RIGHT = EngineFacts(
    kv_role="kv_both",
    load_failure_policy="recompute",
    prefix_caching=True,
    recurrent=True,
    mamba_cache_mode="align",
    pipeline_parallel=1,
    decode_context_parallel=1,
    prefill_context_parallel=1,
)


def test_right_options_start():
    refuse_unsafe(RIGHT)


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        ({"kv_role": "kv_producer"}, "kv_role"),
        ({"kv_role": "kv_consumer"}, "kv_role"),
        ({"load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"prefix_caching": False}, "enable_prefix_caching"),
        ({"mamba_cache_mode": "none"}, "mamba_cache_mode"),
        ({"mamba_cache_mode": "all"}, "mamba_cache_mode"),
        ({"pipeline_parallel": 2}, "pipeline_parallel_size"),
        ({"decode_context_parallel": 2}, "decode_context_parallel_size"),
        ({"prefill_context_parallel": 2}, "prefill_context_parallel_size"),
    ],
)
def test_what_would_be_silently_wrong_is_refused_by_option_name(wrong, option):
    with pytest.raises(ConfigError) as caught:
        refuse_unsafe(dataclasses.replace(RIGHT, **wrong))
    assert caught.value.thing == option
    assert caught.value.next_step


@pytest.mark.parametrize("allowed", [{"prefix_caching": False}, {"mamba_cache_mode": "none"}])
def test_rules_for_recurrent_state_do_not_bind_attention_only_models(allowed):
    refuse_unsafe(dataclasses.replace(RIGHT, recurrent=False, **allowed))
