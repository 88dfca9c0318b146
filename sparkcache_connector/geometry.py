"""Which bytes of the engine's memory belong to a context, in any layout the engine uses.

Reads the KV cache configuration and the registered tensors, and describes each layer as
extents (:mod:`.worker.placement_layout`). Nothing is guessed from sizes: the token dimension
is found by asking the attention backend for its shape with two block sizes, and the extents
must add up to exactly the bytes that the spec says a page has. What does not add up, or is
not of a known kind, refuses by layer name.

The CPU backend's shape says nothing about the inside of a block: its kernels keep K by
column, and for some instruction sets tiled. Where the inside is known, positions are told
apart; where it is not, a page is one piece, and boundaries must not fall inside of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpecKind,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from sparkcache_connector.errors import GeometryError
from sparkcache_connector.identity import GroupIdentity
from sparkcache_connector.pages import FULL, RECURRENT, SLIDING, GroupShape
from sparkcache_connector.worker.placement import region_of_tensor
from sparkcache_connector.worker.placement_layout import Extent, LayerPages, PageLayout

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

_KINDS = {
    KVCacheSpecKind.FULL_ATTENTION: FULL,
    KVCacheSpecKind.MLA_ATTENTION: FULL,
    KVCacheSpecKind.SLIDING_WINDOW: SLIDING,
    KVCacheSpecKind.MAMBA: RECURRENT,
}

TokenDimension = Callable[[str, "AttentionSpec", int], int]
"""Which dimension of a layer's tensor counts tokens, for a kernel block of so many tokens."""

CPU_BY_COLUMN = frozenset({"vec", "vec16"})
"""Instruction sets whose kernels keep, per head, K as (dimension, token), then V as (token, …)."""


@dataclass(frozen=True)
class Geometry:
    """One rank's memory.

    Attributes:
        layout: every layer, for the placement.
        shapes: every group, for the arithmetic of pages.
        groups: every group, for the identity.
    """

    layout: PageLayout
    shapes: tuple[GroupShape, ...]
    groups: tuple[GroupIdentity, ...]


def group_shapes(kv_cache_config: KVCacheConfig) -> tuple[GroupShape, ...]:
    """What the scheduler's side needs; no tensors.

    Raises:
        GeometryError: a group of a kind whose pages are not a function of the context.
    """
    return tuple(_shape(i, g) for i, g in enumerate(kv_cache_config.kv_cache_groups))


def describe(
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    token_dimension: TokenDimension,
    cpu_isa: Mapping[str, str],
) -> Geometry:
    """Describe the registered tensors.

    Args:
        kv_cache_config: the groups.
        kv_caches: the registered tensor of each layer.
        token_dimension: see there.
        cpu_isa: per layer of the CPU backend the instruction set of its kernels.

    Raises:
        GeometryError: naming the layer whose bytes cannot be told apart.
    """
    shapes = group_shapes(kv_cache_config)
    layers: list[LayerPages] = []
    groups: list[GroupIdentity] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        described = [
            _layer(
                index,
                name,
                _layer_spec(group, name),
                _registered(kv_caches, name),
                kv_cache_config.num_blocks,
                token_dimension,
                cpu_isa.get(name, ""),
            )
            for name in group.layer_names
        ]
        if not described:
            raise _refused(f"group {index}", "at least one layer on this rank", "none")
        layers.extend(described)
        groups.append(_identity(shapes[index], group, described, kv_caches))
    return Geometry(PageLayout(tuple(layers)), shapes, tuple(groups))


def token_dimension_of_backends(backends: Mapping[str, Any], cache_dtype: str) -> TokenDimension:
    """Find token dimensions by asking each layer's attention backend for its shape twice."""

    def find(name: str, spec: AttentionSpec, block: int) -> int:
        backend = backends[name]

        def shape(tokens: int) -> tuple[int, ...]:
            dims: tuple[int, ...] = backend.get_kv_cache_shape(
                7, tokens, spec.num_kv_heads, spec.head_size, cache_dtype_str=cache_dtype
            )
            return dims

        one, two = shape(block), shape(2 * block)
        moved = [i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
        if len(moved) != 1 or two[moved[0]] != 2 * one[moved[0]] or one[moved[0]] != block:
            raise _refused(
                f"layer {name}", "one dimension that counts tokens", f"shapes {one} and {two}"
            )
        return moved[0]

    return find


def pages_are_divisible(vllm_config: VllmConfig) -> bool:
    """Whether positions inside a page can be told apart, so that boundaries may fall there."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return True
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = vllm_config.model_config, vllm_config.cache_config
    isa = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return isa in CPU_BY_COLUMN


def _shape(index: int, group: KVCacheGroupSpec) -> GroupShape:
    spec = group.kv_cache_spec
    kind = _KINDS.get(get_kv_cache_spec_kind(spec))
    if kind is None:
        raise _refused(
            f"KV cache group {index}",
            "full attention, sliding window or recurrent state",
            type(spec).__name__,
        )
    window = 0
    if kind == SLIDING:
        window = get_kv_cache_spec_sliding_window(spec) or 0
        if window < 1:
            raise _refused(f"KV cache group {index}", "one window for all layers", "several")
    return GroupShape(kind, spec.block_size, window)


def _layer_spec(group: KVCacheGroupSpec, name: str) -> KVCacheSpec:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _registered(kv_caches: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    tensor: Any = kv_caches.get(name)
    if tensor is None or not hasattr(tensor, "untyped_storage"):
        raise _refused(f"layer {name}", "one registered tensor", type(tensor).__name__)
    return tensor


def _layer(
    group: int,
    name: str,
    spec: KVCacheSpec,
    tensor: torch.Tensor,
    num_blocks: int,
    token_dimension: TokenDimension,
    isa: str,
) -> LayerPages:
    if isinstance(spec, MambaSpec):
        return _recurrent_layer(group, name, spec, tensor, num_blocks)
    if isinstance(spec, AttentionSpec) and isa:
        return _cpu_attention_layer(group, name, spec, tensor, num_blocks, isa)
    if isinstance(spec, AttentionSpec):
        return _attention_layer(group, name, spec, tensor, num_blocks, token_dimension)
    raise _refused(f"layer {name}", "attention or recurrent state", type(spec).__name__)


def _recurrent_layer(
    group: int, name: str, spec: MambaSpec, tensor: torch.Tensor, num_blocks: int
) -> LayerPages:
    """States lie packed from the page's first byte; what follows is padding, never ours."""
    if tensor.shape[0] != num_blocks:
        raise _refused(f"layer {name}", f"{num_blocks} pages", str(tuple(tensor.shape)))
    state = sum(
        math.prod(shape) * dtype.itemsize
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    size = tensor.element_size()
    inner = math.prod(tensor.shape[1:]) * size
    if inner < state or not tensor[0].is_contiguous():
        raise _refused(f"layer {name}", f"{state} contiguous bytes of state", f"{inner}")
    return LayerPages(
        name,
        group,
        region_of_tensor(tensor),
        tensor.storage_offset() * size,
        tensor.stride(0) * size,
        num_blocks,
        (Extent(offset=0, positions=1, position_bytes=state),),
    )


def _attention_layer(
    group: int,
    name: str,
    spec: AttentionSpec,
    tensor: torch.Tensor,
    num_blocks: int,
    token_dimension: TokenDimension,
) -> LayerPages:
    if spec.storage_block_size != spec.block_size:
        raise _refused(f"layer {name}", "one position per token", "a compressed cache")
    ratio, kernel_block = _kernel_blocks(name, spec, tensor, num_blocks)
    size = tensor.element_size()
    tokens = token_dimension(name, spec, kernel_block)
    block = _block_dimension(name, tensor, num_blocks * ratio, tokens)
    if tensor.shape[tokens] != kernel_block:
        raise _refused(f"layer {name}", f"{kernel_block} tokens", str(tuple(tensor.shape)))
    dims = [
        (tensor.shape[d], tensor.stride(d) * size)
        for d in range(tensor.dim())
        if d not in (tokens, block) and tensor.shape[d] > 1
    ]
    token_stride = tensor.stride(tokens) * size
    inner, outer = _split(dims, token_stride, size)
    if inner != token_stride:
        raise _refused(
            f"layer {name}",
            "the bytes of one token next to those of the following one",
            f"{inner} bytes every {token_stride}",
        )
    kernel_stride = tensor.stride(block) * size
    extents = tuple(
        extent
        for k in range(ratio)
        for extent in _extents(outer, k * kernel_stride, kernel_block, inner, k * kernel_block)
    )
    total = sum(e.positions * e.position_bytes * e.repeat for e in extents)
    if total != spec.unpadded_page_size_bytes:
        raise _refused(
            f"layer {name}", f"pages of {spec.unpadded_page_size_bytes} bytes", f"{total}"
        )
    return LayerPages(
        name,
        group,
        region_of_tensor(tensor),
        tensor.storage_offset() * size,
        kernel_stride * ratio,
        num_blocks,
        extents,
    )


def _cpu_attention_layer(
    group: int, name: str, spec: AttentionSpec, tensor: torch.Tensor, num_blocks: int, isa: str
) -> LayerPages:
    """(block, head, token, K and V), of which only block and head mean what they say."""
    size = tensor.element_size()
    ratio, tokens = _kernel_blocks(name, spec, tensor, num_blocks)
    shape = (num_blocks * ratio, spec.num_kv_heads, tokens, 2 * spec.head_size)
    if tuple(tensor.shape) != shape or not tensor[0, 0].is_contiguous():
        raise _refused(f"layer {name}", f"shape {shape}", str(tuple(tensor.shape)))
    block_stride, head_stride = tensor.stride(0) * size, tensor.stride(1) * size
    plane = tokens * spec.head_size * size
    extents: list[Extent] = []
    for k in range(ratio):
        for head in range(spec.num_kv_heads):
            at = k * block_stride + head * head_stride
            if isa in CPU_BY_COLUMN:
                column = tokens * size
                first = k * tokens
                extents.append(Extent(at, tokens, size, first, spec.head_size, column))
                extents.append(Extent(at + plane, tokens, spec.head_size * size, first))
            else:
                extents.append(Extent(at, 1, 2 * plane))
    return LayerPages(
        name,
        group,
        region_of_tensor(tensor),
        tensor.storage_offset() * size,
        block_stride * ratio,
        num_blocks,
        tuple(extents),
    )


def _kernel_blocks(
    name: str, spec: AttentionSpec, tensor: torch.Tensor, num_blocks: int
) -> tuple[int, int]:
    """How many kernel blocks make up a block of the manager, and their tokens."""
    for dimension in tensor.shape[:2]:
        ratio, rest = divmod(dimension, num_blocks)
        if not rest and ratio and spec.block_size % ratio == 0:
            return ratio, spec.block_size // ratio
    raise _refused(f"layer {name}", f"a multiple of {num_blocks} blocks", str(tuple(tensor.shape)))


def _block_dimension(name: str, tensor: torch.Tensor, blocks: int, tokens: int) -> int:
    for dimension in (0, 1):
        if dimension != tokens and tensor.shape[dimension] == blocks:
            return dimension
    raise _refused(f"layer {name}", f"a dimension of {blocks} blocks", str(tuple(tensor.shape)))


def _split(
    dims: Sequence[tuple[int, int]], token_stride: int, size: int
) -> tuple[int, list[tuple[int, int]]]:
    """Contiguous bytes of one token, and the dimensions that repeat rows of tokens."""
    inner = size
    outer = []
    for length, stride in sorted(dims, key=lambda d: d[1]):
        if stride == inner and stride < token_stride:
            inner *= length
        else:
            outer.append((length, stride))
    return inner, outer


def _extents(
    outer: Sequence[tuple[int, int]], offset: int, positions: int, size: int, first: int
) -> Iterator[Extent]:
    """Rows of one kernel block: the innermost outer dimension repeats, others enumerate."""
    if not outer:
        yield Extent(offset, positions, size, first)
        return
    (repeat, stride), *rest = outer
    if not rest:
        yield Extent(offset, positions, size, first, repeat, stride)
        return
    length, step = rest[-1]
    for index in range(length):
        yield from _extents(
            [(repeat, stride), *rest[:-1]], offset + index * step, positions, size, first
        )


def _identity(
    shape: GroupShape,
    group: KVCacheGroupSpec,
    layers: Sequence[LayerPages],
    kv_caches: Mapping[str, torch.Tensor],
) -> GroupIdentity:
    return GroupIdentity(
        kind=shape.kind,
        spec=type(group.kv_cache_spec).__name__,
        block_tokens=shape.block_tokens,
        window_tokens=shape.window_tokens,
        page_bytes=sum(
            e.positions * e.position_bytes * e.repeat for layer in layers for e in layer.extents
        ),
        layers=tuple(layer.name for layer in layers),
        layout=tuple(_layout_text(layer, group, kv_caches[layer.name]) for layer in layers),
    )


def _layout_text(layer: LayerPages, group: KVCacheGroupSpec, tensor: torch.Tensor) -> str:
    """Order and meaning of a page's bytes; not where the page lies, which may differ."""
    rows = ";".join(
        f"{e.first_position}+{e.positions}x{e.position_bytes}*{e.repeat}" for e in layer.extents
    )
    spec = _layer_spec(group, layer.name)
    if isinstance(spec, MambaSpec):
        states = ",".join(f"{d}{list(s)}" for s, d in zip(spec.shapes, spec.dtypes, strict=True))
        return f"{spec.mamba_type} {states} {rows}"
    return f"{tensor.dtype} {list(tensor.shape[1:])} {rows}"


def _refused(thing: str, expected: str, found: str) -> GeometryError:
    return GeometryError(
        thing,
        expected=expected,
        found=found,
        next_step="this layout is not supported; serve the model without the connector",
    )
