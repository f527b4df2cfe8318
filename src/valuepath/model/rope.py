"""Rotary position embedding: transformers' frequencies and scaling types, tables in at least float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from valuepath.model.norm import compute_dtype

if TYPE_CHECKING:
    from valuepath.config import ValuePathConfig


class RotaryEmbedding(nn.Module):
    """cos and sin of the rotation angles ``position * theta^(-2 i / e)``, shape (B, T, e) for positions (B, T).

    ``config.rope_parameters`` names the scaling type (default, linear, dynamic, yarn, longrope, llama3). The attribute
    names are those that transformers' ``dynamic_rope_update`` works on.
    """

    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: ValuePathConfig) -> None:
        super().__init__()
        self.config = config
        self.rope_type: str = config.rope_parameters["rope_type"]  # type: ignore[index]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        frequencies, self.attention_scaling = self.frequencies()
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("original_inv_freq", frequencies.clone(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Follow the model to another device, but not to another dtype: bfloat16 would turn far positions by wrong angles."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def frequencies(self) -> tuple[Tensor, float]:
        """Inverse frequencies (e/2,) and the factor on cos and sin."""
        if self.rope_type != "default":
            return ROPE_INIT_FUNCTIONS[self.rope_type](self.config)
        width = self.config.head_dim
        assert width is not None
        exponents = torch.arange(0, width, 2, dtype=torch.float) / width
        return 1.0 / (self.config.rope_parameters["rope_theta"] ** exponents), 1.0  # type: ignore[index]

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(x.dtype)
        angles = position_ids[..., None].to(dtype) * self.inv_freq.to(device=x.device, dtype=dtype)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, T, heads, e) by the angles of cos, sin (B or 1, T, e); channel i is paired with channel i + e/2."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(x.dtype)
