"""Every variant's equation, written out a second time: slowly, in the order of the papers, without the library.

This is what the model is compared with, so it shares nothing with it: no wiring, no plan, no attention kernel. Each class is
one equation of one paper; what it does not override is an ordinary Transformer's. Layers are counted from 0, so ``V(0)`` is
the papers' V_1. The options are those of the presets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from naive_transformer import Heads, Transformer, Weight, mix, plus, times


def naive_logits(
    variant: str,
    options: dict[str, Any],
    config: Any,
    state: dict[str, Tensor],
    ids: Tensor,
    cos: Tensor,
    sin: Tensor,
    padding: Tensor | None = None,
) -> Tensor:
    """Logits (B, T, |V|) of ``variant`` in the dtype of ``state``.

    Args:
        options: the variant's options, as ``variant_options`` of the config.
        config: only its size and style fields are read.
        state: the model's parameters by their names in the checkpoint.
        ids: (B, T) token ids.
        cos, sin: (B or 1, T, e) rotary factors of each position.
        padding: (B,) how many positions at the left of each row are padding. Their own logits mean nothing.
    """
    options = {name: value for name, value in options.items() if name != "per"}  # a coefficient's own shape tells it
    left = [0] * ids.shape[0] if padding is None else [int(p) for p in padding]
    return PAPERS[variant](config, state, ids, cos, sin, left, **options).logits()


# -------------------------------------------------------------- Value Residual Learning (arXiv 2410.17897): the value
class FixedResidual(Transformer):
    """``V'_n = c V_i + b V_n`` with numbers c and b, on the receiving layers (default: all after i)."""

    def receive(self, layers: Any, source: int, first: float, own: float) -> None:
        self.on = self.which(f"{source + 1}:" if layers is None else layers)
        self.source, self.first, self.own = source, first, own

    def v(self, n: int) -> Heads:
        if n not in self.on:
            return self.V(n)
        if self.own == 0:
            return times(self.first, self.V(self.source))
        return mix(self.first, self.V(self.source), self.own, self.V(n))


class ResformerIdentity(FixedResidual):
    """``0.5 V_0 + 0.5 V_n``, n >= 1."""

    def options(self, layers: Any = None, source: int = 0, weight: float = 0.5) -> None:
        self.receive(layers, source, weight, weight)


class ResformerConstant(FixedResidual):
    """``c V_0 + V_n``, n >= 1; the published optimum is c = 2."""

    def options(self, layers: Any = None, source: int = 0, first: float = 2.0, own: float = 1.0) -> None:
        self.receive(layers, source, first, own)


class ResformerSparse(FixedResidual):
    """``c V_0 + V_n`` or ``V_0`` on a few layers."""

    def options(self, layers: Any = "last/3", source: int = 0, first: float = 5.0, own: float = 1.0) -> None:
        self.receive(layers, source, first, own)


class ResformerLearnable(Transformer):
    """``l1 V_0 + l2 V_n``, n >= 1, two scalars a layer."""

    def options(self, layers: Any = None, source: int = 0) -> None:
        self.on, self.source = self.which(f"{source + 1}:" if layers is None else layers), source

    def v(self, n: int) -> Heads:
        if n not in self.on:
            return self.V(n)
        return mix(self.learned(n, f"tap_{self.source}"), self.V(self.source), self.learned(n, "own"), self.V(n))


class ResformerPlus(Transformer):
    """``l1_n V_0 + l2_n V_n`` with ``l1_n = s exp(logit_n) / sum_j exp(logit_j)``, j over all N layers."""

    def options(self, layers: Any = "1:") -> None:
        self.on = self.which(layers)

    def v(self, n: int) -> Heads:
        if n not in self.on:
            return self.V(n)
        share = self.state["model.budgets.0.logits"].exp()
        first = self.state["model.budgets.0.scale"] * share[n] / share.sum()
        return mix(first, self.V(0), self.learned(n, "own"), self.V(n))


class ResformerDense(Transformer):
    """``l_nn V_n + sum_{i<n} l_ni V_i``, n >= 1; with history ``mixed`` the sum takes V'_i."""

    def options(self, history: str = "raw", layers: Any = "1:") -> None:
        self.history, self.on = history, self.which(layers)

    def v(self, n: int) -> Heads:
        if n not in self.on:
            return self.V(n)
        total = times(self.learned(n, "own"), self.V(n))
        for i in range(n):
            if self.history == "raw":
                total = plus(total, times(self.learned(n, f"tap_{i}"), self.V(i)))
            else:
                total = plus(total, times(self.learned(n, f"shared_{i}"), self.values[i]))
        return total


class ResformerIdentityRescaled(Transformer):
    """``V'_n = |V_n| / |M_n| M_n`` with ``M_n = 0.5 V_0 + 0.5 V_n``; | | over a token, a head of it, or the whole matrix."""

    def options(self, axis: str = "token", layers: Any = "1:", first: float = 0.5, own: float = 0.5) -> None:
        self.axis, self.on, self.first, self.own = axis, self.which(layers), first, own

    def length(self, heads: Heads) -> Heads:
        squares = [head.pow(2).sum(-1, keepdim=True) for head in heads]  # (B, T, 1) each
        if self.axis == "head":
            return [square.sqrt() for square in squares]
        square = torch.stack(squares).sum(0)
        if self.axis == "tensor":
            square = square.sum(1, keepdim=True)
        return [square.sqrt()] * len(heads)

    def v(self, n: int) -> Heads:
        own = self.V(n)
        if n not in self.on:
            return own
        mixed = mix(self.first, self.V(0), self.own, own)
        return [a / b * m for a, b, m in zip(self.length(own), self.length(mixed), mixed, strict=True)]


class Svformer(Transformer):
    """``V'_n = V_0``."""

    def options(self, layers: Any = "1:") -> None:
        self.on = self.which(layers)

    def v(self, n: int) -> Heads:
        return self.V(0) if n in self.on else self.V(n)


class Cla2(Transformer):
    """Odd layers read the finished keys (after norm and RoPE) and values of the layer before, or only one of the two."""

    def options(self, share: str = "kv") -> None:
        self.share = share

    def finished_key(self, n: int) -> Heads:
        return self.keys[n - 1] if "k" in self.share and n % 2 == 1 else super().finished_key(n)

    def v(self, n: int) -> Heads:
        return self.values[n - 1] if "v" in self.share and n % 2 == 1 else self.V(n)


# -------------------------------------------------------- the same paper: what it compares the value residual with
class Neutreno(Transformer):
    """``u_n + l (V_0 - V_n)`` at the query's own position, n >= 1, before W_o (arXiv 2312.00751).

    Combined with a ResFormer, ``u_n + l (V_0 - V'_n)`` where V'_n is its mixed value and u_n = A_n V'_n.
    """

    def options(self, combine: str = "transformer", weight: float | None = None, layers: Any = "1:") -> None:
        self.mixed = PAPERS[combine](self.config, self.state, self.ids, self.cos, self.sin, self.padding)
        self.mixed.h, self.mixed.values = self.h, self.values
        self.weight = {"transformer": 0.4}.get(combine, 0.2) if weight is None else weight
        self.on = self.which(layers)

    def v(self, n: int) -> Heads:
        return self.mixed.v(n)

    def u(self, n: int) -> Heads:
        u = super().u(n)
        if n not in self.on:
            return u
        return plus(u, times(self.weight, self.repeat(mix(1.0, self.V(0), -1.0, self.values[n]))))


class Denseformer(Transformer):
    """``x_s = sum_{i<=s} a_si X_i`` over the embedding X_0 and the block outputs X_1, ..., X_N (arXiv 2402.02622).

    X_i is stored before it is averaged. With period p only after every p-th block; with dilation k only the i that are
    s, s - k, s - 2k, ...
    """

    def options(self, period: int = 1, dilation: int = 1) -> None:
        self.period, self.dilation = period, dilation

    def enter(self, n: int) -> Tensor:
        if n == 0 or n % self.period:
            return self.X[n]
        at = "model.mix_x" if n == self.N else f"model.layers.{n}.mix_x"
        total = self.state[f"{at}.coefficients.own"] * self.X[n]
        for i in range(n - self.dilation, -1, -self.dilation):
            total = total + self.state[f"{at}.coefficients.tap_{i}"] * self.X[i]
        return total


class StreamResidual(Transformer):
    def options(self, layers: Any = "1:", first: float = 0.5, own: float = 0.5) -> None:
        self.on, self.first, self.own = self.which(layers), first, own


class QueryResidual(StreamResidual):
    """``0.5 Q_0 + 0.5 Q_n``, n >= 1."""

    def q(self, n: int) -> Heads:
        return mix(self.first, self.Q(0), self.own, self.Q(n)) if n in self.on else self.Q(n)


class KeyResidual(StreamResidual):
    """``0.5 K_0 + 0.5 K_n``, n >= 1."""

    def k(self, n: int) -> Heads:
        return mix(self.first, self.K(0), self.own, self.K(n)) if n in self.on else self.K(n)


class AttentionResidual(StreamResidual):
    """``0.5 A_0 + 0.5 A_n`` of the softmaxed matrices, n >= 1."""

    def A(self, n: int) -> Heads:
        own = super().A(n)
        if n == 0:
            self.A_0 = own
        return mix(self.first, self.A_0, self.own, own) if n in self.on else own


class V1IdentityMapping(StreamResidual):
    """``u_n = 0.5 A_n V_n + 0.5 V_0``, n >= 1."""

    def u(self, n: int) -> Heads:
        u = super().u(n)
        return mix(self.own, u, self.first, self.repeat(self.V(0))) if n in self.on else u


class V1CrossLayerAttention(Transformer):
    """``softmax(q_n [k_n ; k_0]^T / sqrt(e)) [V_n ; V_0]``, n >= 1, both halves causal and under layer n's window."""

    def options(self, layers: Any = None, source: int = 0) -> None:
        self.on, self.source = self.which(f"{source + 1}:" if layers is None else layers), source

    def u(self, n: int) -> Heads:
        if n not in self.on:
            return super().u(n)
        own, first = self.scores(n, self.keys[n]), self.scores(n, self.keys[self.source])
        found = []
        for j, (a, b) in enumerate(zip(own, first, strict=True)):
            m = j // (self.heads // self.kv_heads)
            A = self.softmax(torch.cat([a, b], -1))
            found.append(A @ torch.cat([self.values[n][m], self.values[self.source][m]], 1))
        return found


class HiddenSkip(Transformer):
    """``x_n <- a X_0 + b x_n``, n = 1, ..., N - 1."""

    def options(self, layers: Any = "1:") -> None:
        self.on = self.which(layers)

    def enter(self, n: int) -> Tensor:
        if n not in self.on:
            return self.X[n]
        at = f"model.layers.{n}.mix_x.coefficients"
        return self.state[f"{at}.tap_0"] * self.X[0] + self.state[f"{at}.own"] * self.X[n]


class HiddenFrom(FixedResidual):
    """``x <- u W_o`` instead of ``x + u W_o`` in the first layers; later ones may receive ``0.5 V_i + 0.5 V_n``."""

    cut = 0

    def options(
        self, source: int | None = None, layers: Any = None, first: float = 0.5, own: float = 0.5, mlp_skip: bool = True
    ) -> None:
        self.mlp_skip = mlp_skip
        self.receive([] if source is None else layers, source or 0, first, own)

    def skip_attention(self, n: int) -> float:
        return 0.0 if n < self.cut else 1.0

    def skip_mlp(self, n: int) -> float:
        return 0.0 if n < self.cut and not self.mlp_skip else 1.0


class HiddenFromH1(HiddenFrom):
    cut = 1


class HiddenFromH2(HiddenFrom):
    cut = 2


class HiddenFromH3(HiddenFrom):
    cut = 3


# --------------------------------------------------------------------------------- Bank of Values (arXiv 2606.02780)
class Replaced(Transformer):
    """``V'_n = g content_n`` on some layers; g is learned or a number."""

    label = "own"
    usual = "last/3"
    usually_learned = True

    def options(self, layers: Any = None, scale: float = 1.0, learned: bool | None = None) -> None:
        self.on = self.which(self.usual if layers is None else layers)
        self.scale, self.is_learned = scale, self.usually_learned if learned is None else learned

    def g(self, n: int) -> Weight:
        return self.learned(n, self.label) if self.is_learned else self.scale

    def content(self, n: int) -> Heads:
        return self.V(n)

    def v(self, n: int) -> Heads:
        return times(self.g(n), self.content(n)) if n in self.on else self.V(n)


class VLastThird(Replaced):
    """``g V_n``, n >= (2N)//3."""


class V1LastThird(Replaced):
    """``g V_0``, n >= (2N)//3."""

    label = "tap_0"

    def content(self, n: int) -> Heads:
        return self.V(0)


class V1Every2(V1LastThird):
    """``g V_0`` on every second layer, the last included, layer 0 not."""

    usual = ":0:-2"


class X0WVLastThird(Replaced):
    """``g (x0 W_V,n)``, n >= (2N)//3."""

    label = "embed"

    def content(self, n: int) -> Heads:
        return self.x0_W_V(n)


class X0WVEvery2(X0WVLastThird):
    """``g (x0 W_V,n)`` on every second layer, the last included."""

    usual = "::-2"


class Bov(Replaced):
    """``g E_n[ids]``, n >= (2N)//3."""

    label = "table"

    def content(self, n: int) -> Heads:
        return self.E(n)


class SharedTable(Bov):
    """``g E[ids]`` with one E for all these layers."""

    label = "table_shared"

    def content(self, n: int) -> Heads:
        return self.split(self.state["model.v_table.weight"][self.ids], self.kv_heads)


class TableFixedScale(Bov):
    """``E_n[ids]``, n >= (2N)//3."""

    usually_learned = False


class TableAll(Bov):
    """``g E_n[ids]`` in every layer."""

    usual = "::"


class VPlusTable(Bov):
    """``V_n + E_n[ids]``, n >= (2N)//3."""

    usually_learned = False

    def v(self, n: int) -> Heads:
        return plus(self.V(n), times(self.g(n), self.E(n))) if n in self.on else self.V(n)


class VPlusTableGated(Transformer):
    """``V_n + r sigmoid(w . h[:c]) E_n[ids]`` per head, on every second layer, the last included."""

    def options(self, layers: Any = "::-2", range: float = 3.0, channels: int = 12) -> None:
        self.on, self.range, self.channels = self.which(layers), range, channels

    def v(self, n: int) -> Heads:
        if n not in self.on:
            return self.V(n)
        w = self.at(n, "self_attn.mix_v.gates.table.weight")  # (g, c)
        found = []
        for j, (own, row) in enumerate(zip(self.V(n), self.E(n), strict=True)):
            open_ = self.range / (1 + (-(self.h[n][..., : self.channels] * w[j]).sum(-1, keepdim=True)).exp())
            found.append(own + open_ * row)
        return found


class VPlusV1(Transformer):
    """``a V_n + b V_0``, n >= (2N)//3; a and b learned, or 0.5 and 0.5."""

    label = "tap_0"

    def options(self, layers: Any = "last/3", learned: bool = True, own: float = 0.5, first: float = 0.5) -> None:
        self.on, self.is_learned, self.own, self.rest = self.which(layers), learned, own, first

    def other(self, n: int) -> Heads:
        return self.V(0)

    def v(self, n: int) -> Heads:
        if n not in self.on:
            return self.V(n)
        a, b = (self.learned(n, "own"), self.learned(n, self.label)) if self.is_learned else (self.own, self.rest)
        return mix(a, self.V(n), b, self.other(n))


class VPlusX0WV(VPlusV1):
    """``a V_n + b x0 W_V,n`` with the layer's one W_V."""

    label = "embed"

    def options(self, layers: Any = "last/3", learned: bool = True, own: float = 0.5, embed: float = 0.5) -> None:
        super().options(layers, learned, own, embed)

    def other(self, n: int) -> Heads:
        return self.x0_W_V(n)


PAPERS: dict[str, Callable[..., Transformer]] = {
    "transformer": Transformer,
    "resformer_identity": ResformerIdentity,
    "resformer_constant": ResformerConstant,
    "resformer_learnable": ResformerLearnable,
    "resformer_plus": ResformerPlus,
    "resformer_sparse": ResformerSparse,
    "resformer_dense": ResformerDense,
    "resformer_identity_rescaled": ResformerIdentityRescaled,
    "neutreno": Neutreno,
    "denseformer": Denseformer,
    "svformer": Svformer,
    "cla2": Cla2,
    "query_residual": QueryResidual,
    "key_residual": KeyResidual,
    "attention_residual": AttentionResidual,
    "v1_identity_mapping": V1IdentityMapping,
    "v1_cross_layer_attention": V1CrossLayerAttention,
    "hidden_skip": HiddenSkip,
    "hidden_from_h1": HiddenFromH1,
    "hidden_from_h2": HiddenFromH2,
    "hidden_from_h3": HiddenFromH3,
    "v_last_third": VLastThird,
    "v1_last_third": V1LastThird,
    "v1_every2": V1Every2,
    "x0wv_last_third": X0WVLastThird,
    "x0wv_every2": X0WVEvery2,
    "v_plus_v1": VPlusV1,
    "v_plus_x0wv": VPlusX0WV,
    "bov": Bov,
    "shared_table": SharedTable,
    "table_fixed_scale": TableFixedScale,
    "table_all": TableAll,
    "v_plus_table": VPlusTable,
    "v_plus_table_gated": VPlusTableGated,
}
