"""Every way in which this vLLM changes the weights of a running engine is noticed."""

from __future__ import annotations

import pytest

vllm = pytest.importorskip("vllm", reason="needs the engine environment (`make engine`)")

from vllm.model_executor.models.utils import AutoWeightsLoader  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402
from vllm.v1.worker.gpu_worker import Worker  # noqa: E402

from sparkcache_connector.worker.weights_watch import WeightsWatch  # noqa: E402


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (Worker, "reload_weights"),
        (CPUWorker, "reload_weights"),
        (Worker, "start_weight_update"),
        (Worker, "start_draft_weight_update"),
        (Worker, "update_weights"),
        (Worker, "update_config"),
        (AutoWeightsLoader, "load_weights"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_change_is_noticed_even_if_it_fails_and_only_by_those_who_watched(owner, method):
    watch = WeightsWatch()
    assert not watch.changed()
    with pytest.raises((AttributeError, TypeError)):
        getattr(owner, method)(object(), object())
    assert watch.changed()
    assert not WeightsWatch().changed()


def test_watching_twice_wraps_once():
    WeightsWatch()
    once = Worker.reload_weights
    WeightsWatch()
    assert Worker.reload_weights is once
    assert once.__name__ == "reload_weights"
