"""One attention layer's decode step by itself: stored values, values gathered by position, values pooled by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from valuepath.bench.text import TextIds
from valuepath.bench.timing import alternating
from valuepath.infer.attend import explicit, kernel_for, pooled_unchecked
from valuepath.model.norm import compute_dtype


@dataclass(frozen=True)
class KernelCell:
    """What is measured: one query for each of B sequences over T keys."""

    dtype: torch.dtype
    head_dim: int
    batch: int
    context: int
    heads: int

    def bytes_needed(self, vocab_size: int) -> int:
        """Keys, stored values and the values that gathering puts together, and the table."""
        width = self.heads * self.head_dim * self.dtype.itemsize
        return (3 * self.batch * self.context + 2 * vocab_size) * width


@torch.no_grad()
def measure(cell: KernelCell, text: TextIds, rounds: int, device: torch.device) -> dict[str, Any]:
    """Median milliseconds of each way, the ratios that matter, and the largest difference from stored values."""
    B, T, h, e = cell.batch, cell.context, cell.heads, cell.head_dim
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(cell.dtype)

    ids = text.batch(B, T).to(device)
    distinct, slots = torch.unique(ids, return_inverse=True)
    slots = slots.to(torch.int32)
    table = random(text.vocab_size, h * e)
    query, keys = random(B, h, 1, e), random(B, h, T, e)
    rows = table[distinct].view(-1, h, e).transpose(0, 1).contiguous()
    values = rows[:, slots.long()].transpose(0, 1).contiguous()
    scaling = e**-0.5

    def gathered() -> Tensor:
        return F.embedding(ids, table).view(B, T, h, e).transpose(1, 2)

    def weights(scores: Tensor) -> Tensor:
        return torch.softmax(scores * scaling, -1, dtype=compute_dtype(cell.dtype))

    work = {
        "stored, fused": lambda: F.scaled_dot_product_attention(query, keys, values),
        "stored, two products": lambda: explicit(query, keys, values, None, scaling),
        "gathered, fused": lambda: F.scaled_dot_product_attention(query, keys, gathered()),
        "gathered, two products": lambda: explicit(query, keys, gathered(), None, scaling),
        "pooled, PyTorch": lambda: pooled_unchecked(query, keys, slots, rows, None, scaling, by_kernel=False),
        "keys alone, q k^T": lambda: weights(query @ keys.mT),
        "keys alone, k q^T": lambda: weights((keys @ query.mT).mT),
    }
    kernel = kernel_for(query, keys, None)
    if kernel is not None:
        one_slot = torch.zeros_like(slots)
        work["keys alone, kernel"] = lambda: kernel.pool(query, keys, one_slot, None, scaling, 1)
        work["pooled, kernel"] = lambda: pooled_unchecked(query, keys, slots, rows, None, scaling)
    ms = alternating(work, rounds, 2, device)

    def fastest(prefix: str) -> float:
        return min(time for name, time in ms.items() if name.startswith(prefix))

    stored, pooled, keys_alone = fastest("stored"), fastest("pooled"), fastest("keys")
    difference = pooled_unchecked(query, keys, slots, rows, None, scaling) - work["stored, fused"]()
    return {
        "distinct": len(distinct),
        "distinct_by_sequence": sum(len(torch.unique(row)) for row in ids) / B,
        "kernel": kernel is not None,
        "ms": ms,
        "stored_ms": stored,
        "gathered_ms": fastest("gathered"),
        "pooled_ms": pooled,
        "keys_ms": keys_alone,
        "pooled_over_stored": pooled / stored,
        "pooled_over_gathered": pooled / fastest("gathered"),
        "pooled_over_keys": pooled / keys_alone,
        "largest_difference": difference.abs().max().item(),
    }
