"""Attention at inference over stored values and over values by token: which way is fastest here.

Ways (the names that ``chooser.only`` takes):

* stored values: ``fused`` (the attention function in use), ``explicit`` (two matrix products; few queries on a CPU);
* values by token: ``gather`` (the value of every position is put together first), ``pooled`` (weights are added up per
  distinct token, PyTorch's operations), ``kernel`` (the same in one kernel, for few queries).

All give the same result up to rounding. What is faster depends on the machine, the precision and the sizes, and is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from valuepath.infer import pooled_cpu, pooled_triton
from valuepath.infer.choose import bucket, chooser
from valuepath.infer.pooled import (
    BLOCK_BYTES,
    Product,
    add_up,
    check_shapes,
    grouped,
    multiply,
    query_blocks,
    weights,
)
from valuepath.model.norm import compute_dtype

if TYPE_CHECKING:
    from valuepath.infer.cache import TokenRead

FEW = 32
"""Rows of one key/value head (queries times heads of a group) up to which a kernel for few queries is considered."""

Function = Callable[..., tuple[Tensor, Tensor | None]]
"""An attention function: (module, query, keys, values, mask, ...) -> ((B, Q, h, e), weights or None)."""


def kernel_for(query: Tensor, keys: Tensor, mask: Tensor | None) -> ModuleType | None:
    """The module with ``pool`` and ``product`` for these inputs, if one of ours takes them."""
    rows = query.shape[1] // keys.shape[1] * query.shape[2]
    if rows > FEW:
        return None
    for module in (pooled_cpu, pooled_triton):
        if module.takes(query, keys, mask) and module.available():
            return module
    return None


def _key(kind: str, query: Tensor, keys: Tensor, mask: Tensor | None, *more: Any) -> tuple[Any, ...]:
    B, h, Q, e = query.shape
    where = (query.device, query.dtype, torch.get_num_threads())
    return (kind, *where, B, h, keys.shape[1], bucket(Q), e, bucket(keys.shape[2]), None if mask is None else mask.dtype, *more)


# ------------------------------------------------------------------------------------------------------ stored values
def explicit(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """softmax(q k^T) v as two products, (B, Q, h, e); the scores in the precision of the product, softmax in float32."""
    B, h, Q, _ = query.shape
    g, S = keys.shape[1:3]
    wide = compute_dtype(query.dtype)
    scores = torch.matmul(grouped(query, g), keys.mT).view(B, h, Q, S).to(wide) * scaling
    if mask is not None:
        low = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, low) if mask.dtype == torch.bool else scores + mask
    found = scores.softmax(-1).to(values.dtype)
    return torch.matmul(found.view(B, g, -1, S), values).view(B, h, Q, -1).transpose(1, 2)


def attend_stored(
    function: Function, module: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention over stored values, one query on a CPU: the faster of the fused function and explicit products."""
    candidates: dict[str, Callable[[], tuple[Tensor, Tensor | None]]] = {
        "fused": lambda: function(module, query, keys, values, mask, **options),
        "explicit": lambda: (explicit(query, keys, values, mask, options["scaling"]), None),
    }
    return chooser.run(_key("stored", query, keys, mask), candidates, query.device)


# ---------------------------------------------------------------------------------------------------- values by token
def attend_tokens(
    function: Function, module: Any, query: Tensor, keys: Tensor, read: TokenRead, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention over values by token, (B, Q, h, e), and the weights if the way that is taken forms them."""
    B, h, Q, _ = query.shape
    distinct, scaling = read.distinct, options["scaling"]
    # projecting B Q h sums costs less than projecting U rows
    late = read.is_summed_first and B * Q * h <= distinct
    rows = None if late else read.rows()

    def finish(sums: Tensor, product: Product) -> tuple[Tensor, None]:
        return read.product(sums, rows, product).to(query.dtype), None

    def by_blocks() -> tuple[Tensor, None]:
        parts = []
        for start, end in query_blocks(B, h, Q, keys.shape[2], compute_dtype(query.dtype).itemsize):
            part = mask if mask is None else mask[:, :, start:end]
            found = weights(query[:, :, start:end], keys, part, scaling, after=Q - end)
            parts.append(finish(add_up(found, read.slots, distinct), multiply)[0])
        return torch.cat(parts, 1), None

    candidates: dict[str, Callable[[], tuple[Tensor, Tensor | None]]] = {}
    if not late:
        candidates["gather"] = lambda: _gathered(function, module, query, keys, read.slots, rows, mask, **options)
    candidates["pooled"] = by_blocks
    kernel = kernel_for(query, keys, mask)
    if kernel is not None and rows is not None and rows.dtype == query.dtype:
        candidates["kernel"] = lambda: (kernel.attend(query, keys, read.slots, mask, scaling, rows), None)
    elif kernel is not None and read.dtype == query.dtype:
        candidates["kernel"] = lambda: finish(kernel.pool(query, keys, read.slots, mask, scaling, distinct), kernel.product)
    return chooser.run(_key("tokens", query, keys, mask, bucket(distinct), late), candidates, query.device)


def _gathered(
    function: Function,
    module: Any,
    query: Tensor,
    keys: Tensor,
    slots: Tensor,
    rows: Tensor | None,
    mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with the value of every position put together first, for as many heads at a time as fit into a block."""
    assert rows is not None
    g, groups = keys.shape[1], query.shape[1] // keys.shape[1]
    step = max(1, BLOCK_BYTES // max(slots.numel() * rows.shape[2] * rows.element_size(), 1))
    index = slots.long()
    found = []
    for start in range(0, g, step):
        end = min(start + step, g)
        values = rows[start:end][:, index].transpose(0, 1)
        part = query[:, start * groups : end * groups]
        found.append(function(module, part, keys[:, start:end], values, mask, **options))
    if len(found) == 1:
        return found[0]
    formed = [weights for _, weights in found]
    whole = None if None in formed else torch.cat([w for w in formed if w is not None], 1)
    return torch.cat([out for out, _ in found], 2), whole


def pooled_attention(
    query: Tensor,
    keys: Tensor,
    slots: Tensor,
    rows: Tensor,
    mask: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    """Token-pooled attention, ``softmax(q k^T scaling + mask) rows[slots]``, exactly and without putting the values of all
    positions together.

    A kernel computes it where there is one for the device, the dtype and so few queries; else PyTorch's operations, for a
    block of queries at a time.

    Args:
        query: (B, h, Q, e).
        keys: (B, g, S, e); h is a multiple of g.
        slots: (B, S) whole numbers from 0 below U: the row of each position.
        rows: (g, U, w).
        mask: None for causal attention with the last query at the last key; bool (B or 1, 1 or h, Q, S), true where a key is
            seen; or numbers of that shape that are added to the scores.
        scaling: 1 / sqrt(e) by default.

    Returns:
        (B, h, Q, w) in the dtype of ``query``; sums are in at least float32.

    Raises:
        ValueError: for shapes that do not fit together, and for slots outside of the rows.
    """
    check_shapes(query, keys, slots, rows)
    e, distinct = query.shape[3], rows.shape[1]
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < distinct:
        raise ValueError(f"slots from {int(slots.min())} to {int(slots.max())}: expected 0 to {distinct - 1}, one per row")
    return pooled_unchecked(query, keys, slots, rows, mask, e**-0.5 if scaling is None else scaling)


def pooled_unchecked(
    query: Tensor, keys: Tensor, slots: Tensor, rows: Tensor, mask: Tensor | None, scaling: float, by_kernel: bool = True
) -> Tensor:
    """``pooled_attention`` for inputs that are known to fit together.

    Args:
        by_kernel: whether a kernel may compute it.
    """
    B, h, Q, _ = query.shape
    distinct = rows.shape[1]
    kernel = kernel_for(query, keys, mask) if by_kernel and rows.dtype == query.dtype else None
    if kernel is not None:
        if rows.shape[2] == query.shape[3]:
            return kernel.attend(query, keys, slots, mask, scaling, rows).transpose(1, 2)
        sums = kernel.pool(query, keys, slots, mask, scaling, distinct)
        return kernel.product(sums, rows).reshape(B, h, Q, -1).to(query.dtype)
    parts = []
    for start, end in query_blocks(B, h, Q, keys.shape[2], compute_dtype(query.dtype).itemsize):
        found = weights(query[:, :, start:end], keys, mask if mask is None else mask[:, :, start:end], scaling, after=Q - end)
        parts.append(multiply(add_up(found, slots, distinct), rows).reshape(B, h, end - start, -1))
    return torch.cat(parts, 2).to(query.dtype)
