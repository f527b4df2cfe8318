"""Attention masks: one per distinct window, made by transformers for whatever attention function is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from valuepath.compat import CACHE_NAME
from valuepath.plan import Plan

if TYPE_CHECKING:
    from transformers import Cache

    from valuepath.config import ValuePathConfig


class _WindowConfig:
    """The model's config as the mask functions read it, with the window of one group of layers."""

    def __init__(self, config: ValuePathConfig, window: int | None) -> None:
        self.config, self.sliding_window, self.is_causal = config, window, True

    @property
    def _attn_implementation(self) -> Any:
        return self.config._attn_implementation


class Masks:
    """Builds the mask of every layer for one forward.

    Layers with the same window and the same number of concatenated parts share a mask.
    """

    def __init__(self, config: ValuePathConfig, plan: Plan) -> None:
        self.groups: dict[tuple[int | None, int], int] = {}
        self.of_layer = []
        for layer in plan.layers:
            group = (layer.window, len(plan.readers(layer)))
            self.groups.setdefault(group, layer.layer)
            self.of_layer.append(group)
        self.configs = {window: _WindowConfig(config, window) for window, _ in self.groups}

    def __call__(self, inputs: Tensor, attention_mask: Any, cache: Cache | None, position_ids: Tensor) -> list[Tensor | None]:
        """One mask (or None for plain causal attention) per layer.

        Args:
            inputs: embeddings (B, T, d); only sizes, dtype and device are used.
            attention_mask: None, (B, past + T) with 0 for padding, (B, 1, T, S) as it is, or a dictionary with
                ``full_attention`` and ``sliding_attention``.
        """
        made = {
            group: self._mask(group, layer, inputs, attention_mask, cache, position_ids) for group, layer in self.groups.items()
        }
        return [made[group] for group in self.of_layer]

    def _mask(
        self,
        group: tuple[int | None, int],
        layer: int,
        inputs: Tensor,
        attention_mask: Any,
        cache: Cache | None,
        position_ids: Tensor,
    ) -> Tensor | None:
        window, parts = group
        if isinstance(attention_mask, dict):
            mask = attention_mask["full_attention" if window is None else "sliding_attention"]
        else:
            create = create_causal_mask if window is None else create_sliding_window_causal_mask
            mask = create(
                config=self.configs[window],
                inputs_embeds=inputs,
                attention_mask=attention_mask,
                position_ids=position_ids,
                layer_idx=layer,
                # "no mask means causal" does not hold for keys that are concatenated behind each other
                allow_is_causal_skip=parts == 1,
                **{CACHE_NAME: cache},
            )
        if parts > 1:
            if not isinstance(mask, Tensor):
                raise ValueError(
                    "attention over concatenated keys (kv = concat(...)) needs an explicit mask, which "
                    f"attn_implementation={self.configs[window]._attn_implementation!r} does not take; use 'sdpa' or 'eager'"
                )
            mask = torch.cat([mask] * parts, dim=-1)
        return mask
