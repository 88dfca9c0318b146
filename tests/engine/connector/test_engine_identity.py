"""What of a real engine's configuration an identity covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip("vllm", reason="needs the engine environment (`make engine`)")

from transformers import LlamaConfig  # noqa: E402
from vllm.config import MultiModalConfig  # noqa: E402

from sparkcache_connector.engine_identity import _model_text  # noqa: E402
from sparkcache_connector.errors import IdentityError  # noqa: E402


def text(**options: Any) -> str:
    return _model_text(LlamaConfig(), MultiModalConfig(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
        {"mm_processor_kwargs": {"image_mean": [0.25, 0.25, 0.25]}},
        {"mm_device_do_normalize": False},
        {"mm_encoder_attn_backend": "TORCH_SDPA"},
        {"video_pruning_rate": 0.5},
        {"video_pruning_method": "vidcom2"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_prepares_multimodal_items_is_identity(options: dict[str, Any]):
    assert text(**options) != text()


def test_how_many_items_an_engine_keeps_is_not():
    assert text(mm_processor_cache_gb=0, limit_per_prompt={"image": 2}) == text()


def test_setting_that_is_no_plain_data_refuses():
    with pytest.raises(IdentityError, match="identity field model"):
        text(mm_processor_kwargs={"size": object()})


def test_text_model_has_no_such_settings():
    assert _model_text(LlamaConfig(), None) != text()


def test_encoder_whose_scales_depend_on_earlier_requests_refuses():
    with pytest.raises(IdentityError, match="scales calibrated at run time"):
        text(mm_encoder_attn_dtype="fp8")


def test_fixed_scales_of_the_encoder_are_identity_by_content(tmp_path: Path):
    one, copy, other = (tmp_path / name for name in ("one.json", "copy.json", "other.json"))
    for path, scales in ((one, "{}"), (copy, "{}"), (other, "{ }")):
        path.write_text(scales)

    def with_scales(path: Path) -> str:
        return text(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(path))

    assert with_scales(one) == with_scales(copy)
    assert len({with_scales(one), with_scales(other), text()}) == 3
