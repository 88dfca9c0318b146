"""Real vLLM requests in the connector's words: what is content, and what has no digest."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

vllm = pytest.importorskip("vllm", reason="needs the engine environment (`make engine`)")

import torch  # noqa: E402
from vllm.config import CacheConfig, MultiModalConfig  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # noqa: E402
from vllm.pooling_params import PoolingParams  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from sparkcache_connector.config import Config  # noqa: E402
from sparkcache_connector.context import ContextChain  # noqa: E402
from sparkcache_connector.request_content import Adapters, content_of, items_are_numbered  # noqa: E402

CHUNK = 256
PROMPT = list(range(4 * CHUNK))
TRUSTING = Config(trust_multimodal_ids=True)


def request(**more: Any) -> Request:
    arguments: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": PROMPT,
        "sampling_params": SamplingParams(max_tokens=4),
        "pooling_params": None,
    }
    return Request(**arguments | more)


def image(identifier: str, offset: int = 300, length: int = 100) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))


def digests(made: Request, config: Config = TRUSTING, adapters: Adapters | None = None) -> list:
    content = content_of(made, config, adapters or Adapters())
    assert not isinstance(content, str), content
    chain = ContextChain(content.scope, content.items)
    chain.extend(content.prompt)
    return [chain.digest(boundary) for boundary in range(CHUNK, len(PROMPT) + 1, CHUNK)]


def test_another_image_behind_the_same_tokens_is_another_context_from_its_chunk_on():
    one, other = (digests(request(mm_features=[image(name)])) for name in ("one", "other"))
    assert one[0] == other[0] == digests(request())[0]
    assert not set(one[1:]) & set(other[1:])
    assert digests(request(mm_features=[image("one")])) == one


@pytest.mark.parametrize(
    "moved", [image("one", offset=301), image("one", length=101)], ids=["offset", "length"]
)
def test_the_same_image_at_another_place_is_another_context(moved: MultiModalFeatureSpec):
    assert (
        digests(request(mm_features=[moved]))[1] != digests(request(mm_features=[image("one")]))[1]
    )


def test_images_are_not_cached_unless_the_operator_trusts_their_ids():
    made = request(mm_features=[image("one")])
    assert content_of(made, Config(), Adapters()) == "caller_supplied_id"
    assert content_of(request(mm_features=[image("")]), TRUSTING, Adapters()) == (
        "item_without_digest"
    )


def test_numbers_of_requests_are_no_digests_of_items():
    content = content_of(request(mm_features=[image("one")]), TRUSTING, Adapters(), numbered=True)
    assert content == "item_without_digest"
    assert not isinstance(content_of(request(), TRUSTING, Adapters(), numbered=True), str)


@pytest.mark.parametrize(
    ("multimodal", "prefix_caching", "numbered"),
    [
        (MultiModalConfig(mm_processor_cache_gb=0), False, True),
        (MultiModalConfig(mm_processor_cache_gb=0), True, False),
        (MultiModalConfig(), False, False),
        (None, False, False),
    ],
    ids=["both caches off", "prefix cache on", "processor cache on", "text model"],
)
def test_engine_numbers_items_when_it_reuses_none(
    multimodal: MultiModalConfig | None, prefix_caching: bool, numbered: bool
):
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        cache_config=CacheConfig(enable_prefix_caching=prefix_caching),
    )
    assert items_are_numbered(vllm_config) is numbered


def test_embeddings_have_no_digest():
    embedded = request(prompt_token_ids=None, prompt_embeds=torch.zeros(4, 8))
    assert content_of(embedded, TRUSTING, Adapters()) == "embeddings_without_digest"


@pytest.mark.parametrize(
    ("made", "may_read"),
    [
        (request(), True),
        (request(sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0)), False),
        (request(sampling_params=None, pooling_params=PoolingParams(task="embed")), True),
        (
            request(
                sampling_params=None,
                pooling_params=PoolingParams(task="embed", skip_reading_prefix_cache=True),
            ),
            False,
        ),
    ],
    ids=["plain", "prompt_logprobs", "pooling", "pooling of all tokens"],
)
def test_requests_that_must_see_every_token_may_not_read(made: Request, may_read: bool):
    content = content_of(made, TRUSTING, Adapters())
    assert not isinstance(content, str)
    assert content.may_read is may_read
    assert made.skip_reading_prefix_cache in (not may_read, None)


def test_salts_and_adapters_and_neither_never_meet(tmp_path: Path):
    lora = _adapter(tmp_path, b"one")
    made = [
        request(),
        request(cache_salt="a"),
        request(cache_salt="b"),
        request(lora_request=lora),
        request(lora_request=lora, cache_salt="a"),
    ]
    first = [digests(each)[0] for each in made]
    assert len(set(first)) == len(made)


def test_adapter_is_its_files_and_one_whose_files_change_is_not_cached_any_more(tmp_path: Path):
    adapters = Adapters()
    lora = _adapter(tmp_path, b"one")
    one = digests(request(lora_request=lora), adapters=adapters)
    _adapter(tmp_path, b"two")
    changed = content_of(request(lora_request=lora), TRUSTING, adapters)
    assert changed == "adapter_changed"
    # Under another number the engine reads the files again, and so it does after a restart.
    again = LoRARequest("adapter", 2, str(tmp_path))
    two = digests(request(lora_request=again), adapters=adapters)
    assert two == digests(request(lora_request=lora), adapters=Adapters())
    assert not set(one) & set(two)


def test_number_that_is_given_to_other_files_is_not_cached(tmp_path: Path):
    adapters = Adapters()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        _adapter(tmp_path / name, name.encode())
    first, second = (LoRARequest(n, 1, str(tmp_path / n)) for n in ("first", "second"))
    digests(request(lora_request=first), adapters=adapters)
    content = content_of(request(lora_request=second), TRUSTING, adapters)
    assert content == "adapter_changed"


def test_adapter_without_files_or_loaded_in_place_is_not_cached(tmp_path: Path):
    lora = LoRARequest("adapter", 1, str(tmp_path / "nowhere"))
    assert content_of(request(lora_request=lora), TRUSTING, Adapters()) == "adapter_without_files"
    lora = LoRARequest("adapter", 1, str(tmp_path), load_inplace=True)
    assert content_of(request(lora_request=lora), TRUSTING, Adapters()) == (
        "adapter_loaded_in_place"
    )


def _adapter(place: Path, weights: bytes) -> LoRARequest:
    file = place / "adapter_model.safetensors"
    file.write_bytes(weights)
    (place / "adapter_config.json").write_text("{}")
    # A file system's clock may not have moved on since the last version.
    os.utime(file, ns=(0, int.from_bytes(weights, "big") % 10**9))
    return LoRARequest("adapter", 1, str(place))
