"""The GPU kernels of token-pooled attention, in Triton; the same functions as ``valuepath.infer.pooled_cpu``.

Three passes, each split over keys or slots so that one sequence fills the device: scores with their running maximum and sum;
weights added to their slots with atomics; the product of the sums with the rows. Sums are in float32.

With ``TRITON_INTERPRET=1`` in the environment before the first call, they run in Triton's interpreter on the CPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

KEYS = 128
"""Keys, or slots, of one block."""
PROGRAMS = 512
"""Programs to aim for, over all heads and splits."""


def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def takes(query: Tensor, keys: Tensor, mask: Tensor | None) -> bool:
    """Whether ``pool`` can take these: on a GPU, in up to 32 bits, no mask or a bool one that is the same for all heads."""
    return (
        query.device.type == "cuda"
        and query.dtype in DTYPES
        and keys.dtype == query.dtype
        and (mask is None or (mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == 1))
        and not torch.is_grad_enabled()
    )


def _kernels() -> Any:
    """Imported when first needed: on a machine without a GPU nobody waits for Triton."""
    from valuepath.infer import triton_kernels

    return triton_kernels


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _splits(rows: int, length: int) -> tuple[int, int]:
    """(splits, their length in whole blocks) for ``rows`` programs a split."""
    blocks = -(-length // KEYS)
    wanted = max(1, min(blocks, PROGRAMS // max(rows, 1)))
    span = -(-blocks // wanted) * KEYS
    return -(-length // span), span


def pool(query: Tensor, keys: Tensor, slots: Tensor, mask: Tensor | None, scaling: float, distinct: int) -> Tensor:
    """softmax(q k^T scaling + mask) added up per slot, float32 (B, g, R, U); see ``valuepath.infer.pooled_cpu.pool``."""
    B, h, Q, e = query.shape
    g, S = keys.shape[1:3]
    R = h // g * Q
    device = query.device
    wide = (query.float() * scaling).reshape(B, g, R, e).contiguous()
    rows = B * g * R
    splits, span = _splits(rows, S)
    scores = torch.empty(rows, S, device=device)
    tops, totals = torch.empty(rows, splits, device=device), torch.empty(rows, splits, device=device)
    strides: tuple[int, ...] = (0, 0, 0)
    seen: Any = scores  # never read without a mask
    if mask is not None:
        seen = mask.expand(B, 1, Q, S).to(torch.uint8)
        strides = (seen.stride(0), seen.stride(2), seen.stride(3))
    _kernels().scores[(rows, splits)](
        wide, keys, seen, scores, tops, totals, g, R, Q, S, e, span, splits, *keys.stride(), *strides,
        HAS_MASK=mask is not None, BLOCK=KEYS, WIDTH=_power_of_two(e),
    )  # fmt: skip
    top = tops.amax(1)
    safe = torch.where(top.isinf(), 0.0, top)
    logs = safe + (totals * torch.exp(tops - safe[:, None])).sum(1).log()
    logs = torch.where(top == -torch.inf, torch.inf, logs)  # nothing is visible: no weight on anything
    sums = torch.zeros(B, g, R, distinct, device=device)
    slots = slots.to(torch.int32)
    slots = slots if slots.stride(1) == 1 else slots.contiguous()
    _kernels().add_up[(rows, -(-S // KEYS))](scores, slots, logs, sums, g * R, S, distinct, slots.stride(0), BLOCK=KEYS)
    return sums


def attend(query: Tensor, keys: Tensor, slots: Tensor, mask: Tensor | None, scaling: float, rows: Tensor) -> Tensor:
    """Token-pooled attention (B, Q, h, e) in the dtype of ``query``; see ``valuepath.infer.pooled_cpu.attend``."""
    B, h, Q, _ = query.shape
    out = product(pool(query, keys, slots, mask, scaling, rows.shape[1]), rows)
    return out.view(B, h, Q, -1).transpose(1, 2).to(query.dtype)


def product(sums: Tensor, rows: Tensor) -> Tensor:
    """``sums rows`` in float32, (B, g, R, e), for sums (B, g, R, U) and rows (g, U, e)."""
    B, g, R, U = sums.shape
    e = rows.shape[2]
    splits, span = _splits(B * g * R, U)
    out = torch.empty(B, g, R, splits, e, device=sums.device)
    _kernels().product[(B * g * R, splits)](
        sums.contiguous(), rows, out, g, R, U, e, span, splits, *rows.stride(), BLOCK=KEYS, WIDTH=_power_of_two(e)
    )
    return out.sum(3)
