import dataclasses
import json

import pytest

from sparkcache_connector.errors import IdentityError
from sparkcache_connector.identity import (
    GroupIdentity,
    Identity,
    canonical_json,
    difference,
)

GROUP = GroupIdentity(
    kind="recurrent",
    spec="MambaSpec",
    block_tokens=128,
    window_tokens=0,
    page_bytes=36_608,
    layers=("model.layers.0.mixer",),
    layout=("int8[36608]",),
)
IDENTITY = Identity(
    namespace="",
    target_weights="a" * 64,
    draft_weights="",
    model='{"rope_theta":10000.0}',
    quantization="none",
    model_dtype="float32",
    kv_cache_dtype="float32",
    attention_backend="CPU_ATTN",
    engine_version="0.28.0+spark.1",
    overlay="b" * 64,
    tensor_parallel=2,
    decode_context_parallel=1,
    rank=0,
    chunk_tokens=256,
    groups=(GROUP,),
)


def test_digest_is_a_function_of_the_fields_alone_and_pinned():
    assert dataclasses.replace(IDENTITY).digest() == IDENTITY.digest()
    assert IDENTITY.digest().hex() == PINNED


OTHER_VALUES = {
    "namespace": "staging",
    "target_weights": "c" * 64,
    "draft_weights": "d" * 64,
    "model": '{"rope_theta":20000.0}',
    "quantization": "fp8",
    "model_dtype": "bfloat16",
    "kv_cache_dtype": "fp8_e4m3",
    "attention_backend": "FLASH_ATTN HND",
    "engine_version": "0.28.0",
    "overlay": "e" * 64,
    "tensor_parallel": 4,
    "decode_context_parallel": 2,
    "rank": 1,
    "chunk_tokens": 128,
    "groups": (GROUP, GROUP),
}
OTHER_GROUP_VALUES = {
    "kind": "full",
    "spec": "FullAttentionSpec",
    "block_tokens": 64,
    "window_tokens": 512,
    "page_bytes": 65_536,
    "layers": ("model.layers.1.mixer",),
    "layout": ("int8[65536]",),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Identity)])
def test_every_field_separates(field):
    other = dataclasses.replace(IDENTITY, **{field: OTHER_VALUES[field]})
    assert other.digest() != IDENTITY.digest()


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(GroupIdentity)])
def test_every_field_of_a_group_separates(field):
    group = dataclasses.replace(GROUP, **{field: OTHER_GROUP_VALUES[field]})
    assert dataclasses.replace(IDENTITY, groups=(group,)).digest() != IDENTITY.digest()


@pytest.mark.parametrize(
    "field", ["target_weights", "model", "kv_cache_dtype", "attention_backend", "overlay"]
)
@pytest.mark.parametrize("value", ["", "auto", "unknown", None, True, 1.5])
def test_unknown_value_refuses_by_name(field, value):
    with pytest.raises(IdentityError, match=f"identity field {field}: expected a known value"):
        dataclasses.replace(IDENTITY, **{field: value})


def test_unknown_value_of_a_group_refuses_with_its_index():
    group = dataclasses.replace(GROUP, spec="")
    with pytest.raises(IdentityError, match=r"identity field groups\[1\]\.spec"):
        dataclasses.replace(IDENTITY, groups=(GROUP, group))


def test_no_group_and_a_rank_outside_the_topology_refuse():
    with pytest.raises(IdentityError, match="groups"):
        dataclasses.replace(IDENTITY, groups=())
    with pytest.raises(IdentityError, match="rank"):
        dataclasses.replace(IDENTITY, rank=2)


@pytest.mark.parametrize("value", [{"x": float("nan")}, {"x": object()}, {"x": {1, 2}}])
def test_what_is_not_plain_data_has_no_canonical_form(value):
    with pytest.raises(IdentityError):
        canonical_json(value)


def test_canonical_json_does_not_depend_on_the_order_of_keys():
    assert canonical_json({"b": 1, "a": "é"}) == b'{"a":"\\u00e9","b":1}'


def test_stored_identities_are_compared_field_by_field():
    other = dataclasses.replace(IDENTITY, rank=1, namespace="x")
    one, two = (json.loads(i.to_bytes()) for i in (IDENTITY, other))
    assert difference(one, two) == {"namespace": ("", "x"), "rank": (0, 1)}
    assert difference(one, one) == {}


PINNED = "6486721798b24dbd9e0f62b5d99ee4f5787a0964bcb0b3a0bf4817f171c3b679"
