"""An ordinary Transformer, written out slowly and without the library; ``naive`` puts the papers' equations into it.

It reads a config's sizes and a state dict, loops over layers and heads, and forms every attention matrix with an explicit
mask. The rotary cos and sin are given by the caller. Layers are counted from 0, so ``V(0)`` is the papers' V_1.

Legend: B batch, T positions, N layers, d width, h query heads, g key/value heads, e head width, |V| vocabulary. A stream
with heads is a list of one (B, T, e) tensor per head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Heads = list[Tensor]

def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


class Transformer:
    """``h = norm(x); u = softmax(q k^T / sqrt(e) + mask) v; x <- x + u W_o; x <- x + mlp(norm(x))``, ``V'_n = V_n``."""

    def __init__(
        self,
        config: Any,
        state: dict[str, Tensor],
        ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        padding: Sequence[int],
        **options: Any,
    ) -> None:
        self.config, self.state, self.ids, self.cos, self.sin = config, state, ids, cos, sin
        self.B, self.T = ids.shape
        self.N: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.e: int = config.head_dim
        self.eps: float = config.rms_norm_eps
        self.padding = list(padding)
        self.X: list[Tensor] = []  # X_n: the embedding, then every block's output, before anything is mixed into it
        self.h: list[Tensor] = []  # what attention reads in layer n
        self.keys: list[Heads] = []  # finished keys: after mixing, norm and RoPE
        self.values: list[Heads] = []  # V'_n
        self.options(**options)

    def options(self) -> None:
        """An ordinary Transformer has none."""

    # ------------------------------------------------------------------- what a paper's equation may replace
    def enter(self, n: int) -> Tensor:
        """The residual stream on which block n works; n = N is the final norm."""
        return self.X[n]

    def q(self, n: int) -> Heads:
        return self.Q(n)

    def k(self, n: int) -> Heads:
        return self.K(n)

    def v(self, n: int) -> Heads:
        return self.V(n)

    def finished_key(self, n: int) -> Heads:
        return [self.rotate(self.normed("k", n, head)) for head in self.k(n)]

    def A(self, n: int) -> Heads:
        """Attention matrices, one (B, T, S) for each query head."""
        return [self.softmax(score) for score in self.scores(n, self.keys[n])]

    def u(self, n: int) -> Heads:
        """Attention's output before W_o."""
        return self.read(self.A(n), self.values[n])

    def skip_attention(self, n: int) -> float:
        return 1.0

    def skip_mlp(self, n: int) -> float:
        return 1.0

    # ------------------------------------------------------------------------------------------- projections
    def at(self, n: int, name: str) -> Tensor:
        return self.state[f"model.layers.{n}.{name}"]

    def learned(self, n: int, label: str) -> Tensor:
        """The trained weight of a source of layer n's value: a scalar, or one row per head."""
        return self.at(n, f"self_attn.mix_v.coefficients.{label}")

    def linear(self, x: Tensor, n: int, name: str, bias: bool) -> Tensor:
        y = x @ self.at(n, name + ".weight").T
        return y + self.at(n, name + ".bias") if bias else y

    def split(self, x: Tensor, heads: int) -> Heads:
        return [x[..., j * self.e : (j + 1) * self.e] for j in range(heads)]

    def project(self, x: Tensor, n: int, stream: str) -> Heads:
        heads = self.heads if stream == "q" else self.kv_heads
        return self.split(self.linear(x, n, f"self_attn.{stream}_proj", self.config.attention_bias), heads)

    def Q(self, n: int) -> Heads:
        return self.project(self.h[n], n, "q")

    def K(self, n: int) -> Heads:
        return self.project(self.h[n], n, "k")

    def V(self, n: int) -> Heads:
        """V_n = h_n W_V,n"""
        return self.project(self.h[n], n, "v")

    def x0(self) -> Tensor:
        """RMSNorm without gain of the embedding."""
        return rms(self.state["model.embed_tokens.weight"][self.ids], self.eps)

    def x0_W_V(self, n: int) -> Heads:
        return self.project(self.x0(), n, "v")

    def E(self, n: int) -> Heads:
        """E_n[ids]: the rows of layer n's table."""
        return self.split(self.at(n, "self_attn.v_table.weight")[self.ids], self.kv_heads)

    # --------------------------------------------------------------------------------------------- attention
    def normed(self, stream: str, n: int, head: Tensor) -> Tensor:
        kind = self.config.qk_norm
        if kind != "none":
            head = rms(head, self.eps)
        if kind == "gain":
            head = head * self.at(n, f"self_attn.{stream}_norm.weight")
        return head * self.config.qk_norm_scale if kind != "none" else head

    def rotate(self, head: Tensor) -> Tensor:
        """RoPE: the pair (i, i + e/2) is turned by the position's angle."""
        first, second = head[..., : self.e // 2], head[..., self.e // 2 :]
        return head * self.cos + torch.cat([-second, first], -1) * self.sin

    def scores(self, n: int, keys: Heads) -> Heads:
        """``q k^T / sqrt(e) + mask`` of each query head; query head j reads key head j // (h / g)."""
        allowed = self.allowed(n)
        found = []
        for j, query in enumerate(self.q(n)):
            query = self.rotate(self.normed("q", n, query))
            key = keys[j // (self.heads // self.kv_heads)]
            score = query @ key.transpose(-1, -2) / math.sqrt(self.e)
            found.append(score.masked_fill(~allowed, -math.inf))
        return found

    def allowed(self, n: int) -> Tensor:
        """(B, T, S): which key s a query t may read. Padding reads itself, so that no row is empty."""
        window = self.config.layer_windows[n]  # how many positions, its own included; None is all

        def may(b: int, t: int, s: int) -> bool:
            if t < self.padding[b]:
                return s == t
            return self.padding[b] <= s <= t and (window is None or t - s < window)

        rows = [[[may(b, t, s) for s in range(self.T)] for t in range(self.T)] for b in range(self.B)]
        return torch.tensor(rows)

    def softmax(self, scores: Tensor) -> Tensor:
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True)

    def read(self, matrices: Heads, values: Heads) -> Heads:
        return [A @ values[j // (self.heads // self.kv_heads)] for j, A in enumerate(matrices)]

    def repeat(self, values: Heads) -> Heads:
        """One value per query head."""
        return [values[j // (self.heads // self.kv_heads)] for j in range(self.heads)]

    def which(self, layers: list[int] | str) -> set[int]:
        """The layers that an option means: a list, ``last/3`` or a slice."""
        if not isinstance(layers, str):
            return set(layers)
        if layers == "last/3":
            return {n for n in range(self.N) if n >= (2 * self.N) // 3}
        return set(range(self.N)[slice(*(int(part) if part else None for part in layers.split(":")))])

    # --------------------------------------------------------------------------------------------- the model
    def norm(self, x: Tensor, name: str) -> Tensor:
        x = rms(x, self.eps)
        return x * self.state[name + ".weight"] if self.config.norm_gain else x

    def mlp(self, x: Tensor, n: int) -> Tensor:
        bias = self.config.mlp_bias
        up = self.linear(x, n, "mlp.up_proj", bias)
        if self.config.mlp == "relu2":
            hidden = up.clamp(min=0) ** 2
        else:
            gate = self.linear(x, n, "mlp.gate_proj", bias)
            hidden = gate / (1 + (-gate).exp()) * up
        return self.linear(hidden, n, "mlp.down_proj", bias)

    def logits(self) -> Tensor:
        x = self.state["model.embed_tokens.weight"][self.ids]
        self.X.append(rms(x, self.eps) if self.config.normalize_embedding else x)
        for n in range(self.N):
            x = self.enter(n)
            self.h.append(self.norm(x, f"model.layers.{n}.input_layernorm"))
            self.keys.append(self.finished_key(n))
            self.values.append(self.v(n))
            u = torch.cat(self.u(n), -1)
            x = self.skip_attention(n) * x + self.linear(u, n, "self_attn.o_proj", self.config.output_bias)
            x = self.skip_mlp(n) * x + self.mlp(self.norm(x, f"model.layers.{n}.post_attention_layernorm"), n)
            self.X.append(x)
        x = self.norm(self.enter(self.N), "model.norm")
        tied = self.config.tie_word_embeddings
        y = x @ self.state["model.embed_tokens.weight" if tied else "lm_head.weight"].T
        cap = self.config.logit_softcap
        return cap * torch.tanh(y / cap) if cap else y


# ------------------------------------------------------------------------------------------- weighted sums of heads
Weight = float | Tensor
"""A number; a tensor () for the layer, (heads, 1) for each head or (heads, e) for each channel."""


def times(weight: Weight, heads: Heads) -> Heads:
    per_head = isinstance(weight, Tensor) and weight.dim() == 2
    return [(weight[j] if per_head else weight) * head for j, head in enumerate(heads)]  # type: ignore[index]


def plus(first: Heads, second: Heads) -> Heads:
    return [a + b for a, b in zip(first, second, strict=True)]


def mix(a: Weight, first: Heads, b: Weight, second: Heads) -> Heads:
    return plus(times(a, first), times(b, second))
