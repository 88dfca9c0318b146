"""Notices that the weights of the running engine are changed under its cache.

vLLM tells a connector nothing of it, so the engine's own ways to do it are wrapped, once per
process and without a change of what they do:

* ``Worker.reload_weights``: from disk or an iterator, also of another checkpoint;
* ``Worker.start_weight_update``, ``start_draft_weight_update``, ``update_weights``: a trainer's
  transfer, into the target or the draft;
* ``Worker.update_config``: another model configuration;
* ``AutoWeightsLoader.load_weights``: an extension of the worker that calls the model's own.

Sleeping and waking, and every reset of the connector's cache, reach the scheduler's side by
themselves. What an extension does to parameters with its own hands is seen by nobody.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.v1.worker.gpu_worker import Worker

_METHODS = (
    (Worker, "reload_weights"),
    (Worker, "start_weight_update"),
    (Worker, "start_draft_weight_update"),
    (Worker, "update_weights"),
    (Worker, "update_config"),
    (AutoWeightsLoader, "load_weights"),
)
_changes = 0


class WeightsWatch:
    """Whether weights were changed since this was made."""

    def __init__(self) -> None:
        for owner, name in _METHODS:
            _wrap(owner, name)
        self._seen = _changes

    def changed(self) -> bool:
        """Whether a change has begun; what it changed is not known."""
        return _changes != self._seen


def _wrap(owner: type[Any], name: str) -> None:
    method = getattr(owner, name)
    if hasattr(method, "__sparkcache__"):
        return

    @functools.wraps(method)
    def noticed(*arguments: Any, **keywords: Any) -> Any:
        global _changes
        _changes += 1
        return method(*arguments, **keywords)

    noticed.__sparkcache__ = True  # type: ignore[attr-defined]
    setattr(owner, name, noticed)
