"""Token-pooled attention: weights are added up per distinct token, then each distinct row is read once.

``sum_t p_t E[id_t] = sum_u (sum_{t: id_t = u} p_t) E[u]``, which is exact. Value-side work for one query falls from T e to
T + U e per head, U the number of distinct tokens.

Shape suffixes: B batch, Q queries, S keys, h query heads, g key/value heads, R = Q h / g rows of one key/value head, U distinct
tokens, e head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from valuepath.model.norm import compute_dtype

BLOCK_BYTES = 64 * 2**20
"""Memory for attention weights of one block of queries."""

Product = Callable[[Tensor, Tensor], Tensor]
"""``(B, g, R, U), (g or 1, U, width) -> (B, g, R, width)``"""


def grouped(query_BhQe: Tensor, groups: int) -> Tensor:
    """(B, g, R, e): the queries that read one key/value head; row r Q + i is query head r of the group at query i."""
    B, h, Q, e = query_BhQe.shape
    return query_BhQe.reshape(B, groups, h // groups * Q, e)


def weights(query_BhQe: Tensor, keys_BgSe: Tensor, mask: Tensor | None, scaling: float, after: int = 0) -> Tensor:
    """softmax(q k^T scaling + mask), (B, g, R, S), in at least float32.

    Args:
        mask: None for causal attention with the last query at the last key; bool (B or 1, 1 or h, Q, S), true where a key is
            seen; or numbers that are added.
        after: queries that come after these, for a block out of the middle of causal ones.
    """
    B, h, Q, _ = query_BhQe.shape
    g, S = keys_BgSe.shape[1:3]
    wide = compute_dtype(query_BhQe.dtype)
    # a product in bfloat16 would round the scores
    scores = torch.matmul(grouped(query_BhQe.to(wide) * scaling, g), keys_BgSe.to(wide).mT).to(wide)  # autocast narrows
    scores = scores.view(B, h, Q, S)
    if mask is None:
        if Q > 1 or after:
            seen = torch.ones(Q, S, dtype=torch.bool, device=scores.device).tril(S - Q - after)
            scores = scores.masked_fill(~seen, torch.finfo(wide).min)
    elif mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(wide).min)
    else:
        scores = scores + mask
    return scores.softmax(-1).view(B, g, -1, S)


def add_up(weights_BgRS: Tensor, slots_BS: Tensor, distinct: int) -> Tensor:
    """Weights per distinct token, (B, g, R, U)."""
    B, g, R, S = weights_BgRS.shape
    index = slots_BS.long()[:, None, None, :].expand(B, g, R, S)
    return weights_BgRS.new_zeros(B, g, R, distinct).scatter_add_(3, index, weights_BgRS)


def multiply(sums_BgRU: Tensor, rows_gUe: Tensor) -> Tensor:
    """``sums rows`` in the wider of the two dtypes: one matrix product a head over the whole batch."""
    B, g, R, U = sums_BgRU.shape
    dtype = torch.promote_types(sums_BgRU.dtype, rows_gUe.dtype)
    flat = sums_BgRU.transpose(0, 1).reshape(g, B * R, U).to(dtype)
    return torch.matmul(flat, rows_gUe.to(dtype)).view(g, B, R, -1).transpose(0, 1)


def query_blocks(batch: int, heads: int, queries: int, keys: int, itemsize: int) -> list[tuple[int, int]]:
    """Ranges of queries whose attention weights take at most ``BLOCK_BYTES``."""
    size = max(1, BLOCK_BYTES // max(batch * heads * keys * itemsize, 1))
    return [(start, min(start + size, queries)) for start in range(0, queries, size)]


def check_shapes(query: Tensor, keys: Tensor, slots: Tensor, rows: Tensor) -> None:
    """
    Raises:
        ValueError: for shapes that do not fit together.
    """
    shapes = f"query {tuple(query.shape)}, keys {tuple(keys.shape)}, slots {tuple(slots.shape)}, rows {tuple(rows.shape)}"
    if query.ndim != 4 or keys.ndim != 4 or slots.ndim != 2 or rows.ndim != 3:
        raise ValueError(f"{shapes}: expected (B, h, Q, e), (B, g, S, e), (B, S) and (g, U, w)")
    (B, h, _, e), (Bk, g, S, ek) = query.shape, keys.shape
    if B != Bk or e != ek or h % g or slots.shape != (B, S) or rows.shape[0] != g:
        expected = "(B, h, Q, e), (B, g, S, e), (B, S) and (g, U, w) with h a multiple of g"
        raise ValueError(f"{shapes} do not fit together: expected {expected}")
