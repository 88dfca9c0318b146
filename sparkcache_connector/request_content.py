"""What a vLLM request consists of, in our words; or why its content has no digest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparkcache_connector.config import Config
from sparkcache_connector.context import ContentItem, Scope, Uncacheable
from sparkcache_connector.errors import IdentityError
from sparkcache_connector.file_memo import DigestMemo
from sparkcache_connector.scheduler.coordinator import RequestContent
from sparkcache_connector.weights import MEMO_ALGORITHM, digest_checkpoint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


class Adapters:
    """What the engine's LoRA adapters consist of.

    The engine reads an adapter's files once and from then on knows it by its number. Files
    that change, or a number that is given to other files, leave open which bytes it uses: that
    number is not cached any more in this life.
    """

    def __init__(self) -> None:
        # Adapters are small; within one process each file is read once.
        self._memo = DigestMemo(Path("/nonexistent/adapters"), MEMO_ALGORITHM)
        self._first: dict[int, bytes] = {}

    def digest(self, lora: LoRARequest) -> bytes | Uncacheable:
        """The digest of an adapter's files, or why it has none."""
        if getattr(lora, "load_inplace", False):
            return Uncacheable.ADAPTER_LOADED_IN_PLACE
        try:
            found = bytes.fromhex(digest_checkpoint(Path(lora.lora_path), "auto", self._memo))
        except IdentityError:
            return Uncacheable.ADAPTER_WITHOUT_FILES
        first = self._first.setdefault(lora.lora_int_id, found)
        return found if found == first else Uncacheable.ADAPTER_CHANGED


def items_are_numbered(vllm_config: VllmConfig) -> bool:
    """Whether multimodal items are named by a count of requests instead of by their content.

    An engine that reuses none itself does not digest them, and replaces callers' names too
    (``BaseRenderer._process_mm_uuids``). The count begins anew with every start.
    """
    multimodal = vllm_config.model_config.multimodal_config
    return (
        multimodal is not None
        and multimodal.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    )


def content_of(
    request: Request, config: Config, adapters: Adapters, *, numbered: bool = False
) -> RequestContent | str:
    """Translate a request; a string is the reason why it is neither stored nor looked up.

    ``numbered``: see :func:`items_are_numbered`.
    """
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return Uncacheable.EMBEDDINGS_WITHOUT_DIGEST.value
    adapter: bytes | None = None
    if request.lora_request is not None:
        digest = adapters.digest(request.lora_request)
        if isinstance(digest, Uncacheable):
            return digest.value
        adapter = digest
    if request.mm_features and not config.trust_multimodal_ids:
        # The engine's identifier is the caller's when the caller gave one, and says so nowhere.
        return Uncacheable.CALLER_SUPPLIED_ID.value
    items = []
    for feature in request.mm_features or ():
        if numbered or not feature.identifier:
            return Uncacheable.ITEM_WITHOUT_DIGEST.value
        items.append(
            ContentItem(
                feature.mm_position.offset,
                feature.mm_position.length,
                feature.modality,
                feature.identifier.encode(),
            )
        )
    return RequestContent(
        prompt=request.prompt_token_ids,
        scope=Scope(config.chunk_tokens, request.cache_salt, adapter),
        items=tuple(items),
        may_read=not request.skip_reading_prefix_cache,
    )
