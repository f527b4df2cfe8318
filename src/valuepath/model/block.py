"""One Transformer block: residual mix, attention, MLP, and the factors on the two skip connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from valuepath.model.attention import Attention
from valuepath.model.combine import Mixer, skip_factor, times
from valuepath.model.mlp import Mlp
from valuepath.model.norm import RMSNorm
from valuepath.plan import Plan, item_key
from valuepath.wiring import Embed, Learn, Mix, Own, Table

if TYPE_CHECKING:
    from valuepath.config import ValuePathConfig


def mix_states(mix: Mix, mixer: Mixer | None, own: Tensor, env: dict[str, Tensor]) -> Tensor:
    """The residual stream at a site: a weighted sum of the arriving state and of those that arrived at earlier sites."""
    if mixer is None:
        return own
    sources = [own if isinstance(t.source, Own) else env[item_key("tap", "x", t.source.layer)] for t in mix]  # type: ignore[union-attr]
    budgets = {int(key.removeprefix("budget.")): value for key, value in env.items() if key.startswith("budget.")}
    return mixer(sources, budgets)


class Block(GradientCheckpointingLayer):
    """``x = mix(x); x = s_a x + attention(norm(x)); x = s_m x + mlp(norm(x))``; the factors s are 1 unless wired.

    Tensors of earlier layers come in positionally and those for later layers go out as results: a checkpointed block is
    run again in the backward pass, where a list that it appends to would be wrong and keywords would lose their gradient.
    """

    def __init__(self, config: ValuePathConfig, plan: Plan, layer: int) -> None:
        super().__init__()
        shape, wired = plan.shape, plan.wiring.layers[layer]
        self.wiring = wired
        self.receives = tuple(item.key for item in plan.layers[layer].receives)
        if wired.v.has(Embed):
            self.receives += ("x0",)
        if any(isinstance(t.source, Table) and t.source.shared for t in wired.v):
            self.receives += ("table",)
        self.receives += tuple(f"budget.{group}" for group in plan.budgets)
        self.provides = tuple(item.key for item in plan.layers[layer].provides)
        self.mix_x = None if wired.x.is_plain else Mixer(wired.x, "x", layer, shape)
        reads_input = plan.layers[layer].reads_input
        self.input_layernorm = RMSNorm(shape.hidden_size, config.rms_norm_eps, shape.norm_gain and reads_input)
        self.self_attn = Attention(config, plan, layer)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, config.rms_norm_eps, shape.norm_gain)
        self.mlp = Mlp(shape)
        self.skip_attn = self._learned_skip("skip_attn", shape.hidden_size)
        self.skip_mlp = self._learned_skip("skip_mlp", shape.hidden_size)

    def _learned_skip(self, name: str, width: int) -> nn.Parameter | None:
        weight = getattr(self.wiring, name)
        if not isinstance(weight, Learn):
            return None
        return nn.Parameter(torch.full((width,) if weight.per == "channel" else (), weight.init))

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        *received: Tensor,
        ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        kv: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """The new state (B, T, d), the attention weights or None, then one tensor per name in ``provides``."""
        env = dict(zip(self.receives, received, strict=True))
        x = mix_states(self.wiring.x, self.mix_x, hidden, env)
        out, weights, provided = self.self_attn(
            self.input_layernorm(x), cos, sin, env, ids=ids, attention_mask=attention_mask, cache=kv, **kwargs
        )
        x = self._skip("skip_attn", x, out)
        x = self._skip("skip_mlp", x, self.mlp(self.post_attention_layernorm(x)))
        return (x, weights, *(provided[name] for name in self.provides))

    def _skip(self, name: str, x: Tensor, update: Tensor) -> Tensor:
        factor = skip_factor(getattr(self.wiring, name), getattr(self, name))
        if isinstance(factor, float) and factor == 0.0:
            return update
        return times(factor, x) + update
