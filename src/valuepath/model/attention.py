"""One attention layer: its own projections, the mixes of q, k, v and a, and the terms added after attention.

Shape suffixes: B batch, T new positions, S keys, h query heads, g key/value heads, e head width, d model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from valuepath.infer.attend import attend_stored, attend_tokens
from valuepath.infer.cache import TokenRead, ValuePathCache
from valuepath.model.combine import Factor, Mixer, multiply, rescale, times
from valuepath.model.norm import RMSNorm, compute_dtype
from valuepath.model.rope import rotate
from valuepath.plan import LayerPlan, Plan, item_key
from valuepath.wiring import Embed, Final, Mix, Own, Shared, Source, Table, Tap

if TYPE_CHECKING:
    from transformers import Cache

    from valuepath.config import ValuePathConfig

Env = dict[str, Tensor]
"""What a layer receives: items of earlier layers by key, "x0", "table" (rows of the shared table), "budget.<group>"."""


def repeat_heads(x: Tensor, times_: int, dim: int) -> Tensor:
    """Each key/value head once per query head that reads it: query head j reads head j // (h / g)."""
    return x if times_ == 1 else x.repeat_interleave(times_, dim=dim)


def attention_weights(q_BhTe: Tensor, k_BgSe: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """softmax(q k^T scaling + mask), (B, h, T, S), in at least float32, then in the dtype of q.

    Without a mask, attention is causal with the last query at the last key.
    """
    groups = q_BhTe.shape[1] // k_BgSe.shape[1]
    scores = torch.matmul(q_BhTe, repeat_heads(k_BgSe, groups, 1).transpose(2, 3)) * scaling
    if mask is None:
        T, S = scores.shape[-2:]
        allowed = torch.ones(T, S, dtype=torch.bool, device=scores.device).tril(S - T)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    elif mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    return scores.softmax(-1, dtype=compute_dtype(scores.dtype)).to(q_BhTe.dtype)


def apply_weights(a_BhTS: Tensor, v_BgSe: Tensor) -> Tensor:
    """a v, (B, T, h, e)."""
    groups = a_BhTS.shape[1] // v_BgSe.shape[1]
    return torch.matmul(a_BhTS, repeat_heads(v_BgSe, groups, 1)).transpose(1, 2)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The attention function of transformers' interface that forms the attention matrix and never casts it down."""
    weights = attention_weights(query, key, attention_mask, scaling)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return apply_weights(weights, value), weights


class Attention(nn.Module):
    """Attention of layer ``layer`` as the plan lays it out.

    ``forward`` returns the output (B, T, d), the attention weights if they were formed, and what later layers receive.
    """

    is_causal = True
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    v_table: nn.Embedding
    mix_v: Mixer

    def __init__(self, config: ValuePathConfig, plan: Plan, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer
        self.wiring = plan.wiring.layers[layer]
        self.plan: LayerPlan = plan.layers[layer]
        self.parts = plan.readers(self.plan)
        shape = plan.shape
        self.heads = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
        self.head_dim = shape.head_dim
        self.num_key_value_groups = shape.num_heads // shape.num_kv_heads
        self.scaling = shape.head_dim**-0.5
        self.qk_scale = float(config.qk_norm_scale or 1.0)
        self.budgets = tuple(plan.budgets)
        self.forms_matrix = not self.wiring.a.is_plain or any(item.stream == "a" for item in self.plan.provides)
        d = shape.hidden_size
        for stream in self.plan.projections:
            width = self.heads[stream] * shape.head_dim
            setattr(self, f"{stream}_proj", nn.Linear(d, width, bias=shape.attention_bias))
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, d, bias=shape.output_bias)
        if shape.qk_norm is not None:
            for stream in ("q", "k"):
                if not self.wiring.mix(stream).has(Shared):
                    norm = RMSNorm(shape.head_dim, config.rms_norm_eps, gain=shape.qk_norm == "gain")
                    setattr(self, f"{stream}_norm", norm)
        if Table() in _unshared_tables(self.wiring.v):
            self.v_table = nn.Embedding(shape.vocab_size, shape.kv_width)
        for stream in ("q", "k", "v", "a", "out"):
            mix = self.wiring.mix(stream)
            if mix.terms and (stream == "out" or not mix.is_plain):
                setattr(self, f"mix_{stream}", Mixer(mix, stream, layer, shape))

    # ------------------------------------------------------------------------------------------------- projections
    def project(self, stream: str, x: Tensor) -> Tensor:
        """x W, (B, T, heads, e)."""
        return getattr(self, f"{stream}_proj")(x).unflatten(-1, (self.heads[stream], self.head_dim))

    def finish(self, stream: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Norm, scale and RoPE of a raw query or key."""
        norm = getattr(self, f"{stream}_norm", None)
        x = x if norm is None else norm(x)
        return times(self.qk_scale, rotate(x, cos, sin))

    def _mixer(self, stream: str) -> Mixer:
        return getattr(self, f"mix_{stream}")

    def _sum(self, stream: str, sources: list[Tensor], budgets: Mapping[int, Tensor], h: Tensor | None) -> Tensor:
        return sources[0] if self.wiring.mix(stream).is_plain else self._mixer(stream)(sources, budgets, h)

    def _query_or_key(
        self, stream: str, h: Tensor, env: Env, budgets: Mapping[int, Tensor], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Factor | None, Tensor | None]:
        """The finished stream (B, T, heads, e), its outside weight, and the raw projection if there is one."""
        mix = self.wiring.mix(stream)
        raw = self.project(stream, h) if mix.has(Own) else None
        if mix.has(Shared):
            if stream == "k" and mix.lone is not None:
                source = mix.terms[0].source
                assert isinstance(source, Shared)
                weight = self._mixer("k").weight(mix.terms[0], budgets)
                outside = multiply(weight, env.get(item_key("scale", "k", source.layer)))
                return env[item_key("shared", "k", source.layer)], (outside if self.plan.k_scale else None), raw
            sources = [self._shared(stream, term.source, env) for term in mix]
            return self._sum(stream, sources, budgets, h), None, raw
        sources = [raw if isinstance(term.source, Own) else env[item_key("tap", stream, term.source.layer)] for term in mix]  # type: ignore[union-attr,misc]
        return self.finish(stream, self._sum(stream, sources, budgets, h), cos, sin), None, raw

    def _shared(self, stream: str, source: Source, env: Env) -> Tensor:
        """Another layer's finished stream with its outside weight."""
        assert isinstance(source, Shared)
        return times(env.get(item_key("scale", stream, source.layer)), env[item_key("shared", stream, source.layer)])

    # ------------------------------------------------------------------------------------------------------ values
    def value(
        self, h: Tensor | None, env: Env, budgets: Mapping[int, Tensor], ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The value core (B, T, g, e) without its outside weight, and this layer's raw V_n if it has one.

        ``h`` is the normalised attention input; None will do for a mix that does not read it.
        """
        mix = self.wiring.v
        if self.plan.fuses_embed:
            assert h is not None
            return self._fused_value(h, env, budgets, ids), None
        raw = None
        if mix.has(Own):
            assert h is not None
            raw = self.project("v", h)
        sources = [self._value_source(term.source, raw, env, ids) for term in mix]
        if mix.lone is not None:
            return sources[0], raw
        total = self._sum("v", sources, budgets, h)
        if mix.renorm is not None:
            assert raw is not None
            total = rescale(total, raw, mix.renorm)
        return total, raw

    def _value_source(self, source: Source, raw: Tensor | None, env: Env, ids: Tensor | None) -> Tensor:
        match source:
            case Own():
                assert raw is not None
                return raw
            case Tap(layer):
                return env[item_key("tap", "v", layer)]
            case Shared(layer):
                # a lone shared value leaves the other layer's weight outside too
                return env[item_key("shared", "v", layer)] if self.wiring.v.lone else self._shared("v", source, env)
            case Embed():
                return self.project("v", env["x0"])
            case Table(True):
                return env["table"]
            case Table():
                if "rows" in env:  # looked up already
                    return env["rows"]
                return self.v_table(ids).unflatten(-1, (self.heads["v"], self.head_dim))
        raise AssertionError(source)

    def _fused_value(self, h: Tensor, env: Env, budgets: Mapping[int, Tensor], ids: Tensor | None) -> Tensor:
        """``(a h + b x0) W + (a + b) bias``: one product for ``a V_n + b x0 W_V``; other terms are added after it."""
        mixer, total, rest = self._mixer("v"), None, []
        bias: Factor = 0.0
        for term in self.wiring.v:
            weight = mixer.weight(term, budgets, h)
            if isinstance(term.source, Own | Embed):
                part = times(weight, h if isinstance(term.source, Own) else env["x0"])
                total, bias = part if total is None else total + part, bias + weight
            else:
                rest.append(times(weight, self._value_source(term.source, None, env, ids)))
        assert total is not None
        value = self.v_proj(total)  # through the module, so that an adapter around it takes part
        if self.v_proj.bias is not None:
            value = value + (bias - 1.0) * self.v_proj.bias
        value = value.unflatten(-1, (self.heads["v"], self.head_dim))
        for part in rest:
            value = value + part
        return value

    def value_scale(self, env: Env, budgets: Mapping[int, Tensor]) -> Factor | None:
        """The weight that stays outside: this layer's own, times that of the layer it shares."""
        term = self.wiring.v.lone
        if term is None or not self.plan.v_scale:
            return None
        own = None if self.wiring.v.is_plain else self._mixer("v").weight(term, budgets)
        return multiply(own, env.get(item_key("scale", "v", term.source.layer)) if isinstance(term.source, Shared) else None)

    # ----------------------------------------------------------------------------------------------------- forward
    def forward(
        self,
        h: Tensor,
        cos: Tensor,
        sin: Tensor,
        env: Env,
        ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Env]:
        """
        Args:
            h: normalised attention input (B, T, d).
            cos, sin: rotation angles (B or 1, T, e).
            env: what earlier layers hand on.
            ids: token ids (B, T), where a table needs them.
            attention_mask: as the attention function wants it; keys of ``concat`` parts come after the layer's own.
            cache: a ``ValuePathCache`` of this model, or a transformers ``DynamicCache``.
        """
        budgets = {group: env[f"budget.{group}"] for group in self.budgets}
        q, _, raw_q = self._query_or_key("q", h, env, budgets, cos, sin)
        k, k_scale, raw_k = self._query_or_key("k", h, env, budgets, cos, sin)
        own_cache = cache if isinstance(cache, ValuePathCache) else None
        v_scale = self.value_scale(env, budgets)
        v, raw_v = None, None
        if own_cache is None or not own_cache.reads_table(self.layer_idx) or self._value_is_read():
            v, raw_v = self.value(h, env, budgets, ids)
        given = {
            item_key("tap", "q", self.layer_idx): raw_q,
            item_key("tap", "k", self.layer_idx): raw_k,
            item_key("tap", "v", self.layer_idx): raw_v,
            item_key("shared", "q", self.layer_idx): q,
            item_key("shared", "k", self.layer_idx): k,
            item_key("shared", "v", self.layer_idx): v,
            item_key("scale", "k", self.layer_idx): k_scale,
            item_key("scale", "v", self.layer_idx): v_scale,
        }
        keys, values, k_outside, v_outside = self._keys_and_values(k, v, k_scale, v_scale, env, cache)
        query = q.transpose(1, 2)
        if k_outside is not None:  # (g . k) q = k (g . q)
            query = times(self._per_query_head(k_outside, 1), query)
        out, weights = self._attend(query, keys, values, attention_mask, env, budgets, given, **kwargs)
        if v_outside is not None:
            out = times(self._per_query_head(v_outside, 0), out)
        if self.wiring.out.terms:
            out = out + self._added(h, v, raw_v, v_scale, env, budgets)
        out = self.o_proj(out.flatten(2))
        provides = {}
        for item in self.plan.provides:
            tensor = given[item.key]
            assert isinstance(tensor, Tensor | float), item
            provides[item.key] = tensor if isinstance(tensor, Tensor) else torch.tensor(tensor, dtype=h.dtype, device=h.device)
        return out, weights, provides

    def _value_is_read(self) -> bool:
        """Whether somebody needs the value of the new positions besides attention."""
        return bool(self.wiring.out.terms) or any(item.stream == "v" and item.kind != "scale" for item in self.plan.provides)

    def _per_query_head(self, factor: Factor, dims_after: int) -> Factor:
        """A weight per key/value head or channel as it multiplies query heads: (h, 1) or (h, e); with ``dims_after`` 1 as
        (h, 1, e)."""
        if not isinstance(factor, Tensor) or factor.ndim == 0:
            return factor
        factor = repeat_heads(factor, self.num_key_value_groups, 0)
        return factor.unsqueeze(1) if dims_after else factor

    def _keys_and_values(
        self,
        k: Tensor,
        v: Tensor | None,
        k_scale: Factor | None,
        v_scale: Factor | None,
        env: Env,
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor | TokenRead, Factor | None, Factor | None]:
        """Keys and values (B, g, S, e) to attend over, past ones included, and the weights that are still outside."""
        key, value = k.transpose(1, 2), None if v is None else v.transpose(1, 2)
        if cache is not None and not isinstance(cache, ValuePathCache):
            assert value is not None
            per_head = [s.unsqueeze(1) if isinstance(s, Tensor) and s.ndim else s for s in (k_scale, v_scale)]
            finished = cache.update(times(per_head[0], key), times(per_head[1], value), self.layer_idx)
            return *finished, None, None
        values: Tensor | TokenRead | None = value
        keys = key
        if cache is not None:
            keys, values = cache.attended(key, value, self.layer_idx)
        assert values is not None
        if len(self.parts) == 1:
            return keys, values, k_scale, v_scale
        values = values.gather() if isinstance(values, TokenRead) else values
        scales = [(k_scale, v_scale)]
        pairs = [(keys, values)]
        for part in self.parts[1:]:
            i = part.layer
            scales.append((env.get(item_key("scale", "k", i)), env.get(item_key("scale", "v", i))))
            if cache is not None:
                pairs.append(cache.read(i, window=self.plan.window, new=k.shape[1]))
            else:
                pairs.append((env[item_key("shared", "k", i)].transpose(1, 2), env[item_key("shared", "v", i)].transpose(1, 2)))
        # each part has its own weights, so that they cannot stay outside of the joint softmax
        scaled = [
            [times(s.unsqueeze(1) if isinstance(s, Tensor) and s.ndim else s, x) for s, x in zip(scale, pair, strict=True)]
            for scale, pair in zip(scales, pairs, strict=True)
        ]
        return torch.cat([pair[0] for pair in scaled], 2), torch.cat([pair[1] for pair in scaled], 2), None, None

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor | TokenRead,
        mask: Tensor | None,
        env: Env,
        budgets: Mapping[int, Tensor],
        given: dict[str, Any],
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention output (B, T, h, e), and the weights if they were formed."""
        dropout = self.config.attention_dropout if self.training else 0.0
        implementation = self.config._attn_implementation
        if not self.forms_matrix:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
            options = {"dropout": dropout, "scaling": self.scaling, "sliding_window": self.plan.window, **kwargs}
            # other functions may return the weights, or be somebody's own: they get what they expect
            ours = implementation == "sdpa" and not dropout and not torch.is_grad_enabled()
            if isinstance(values, TokenRead):
                if ours:
                    return attend_tokens(attend, self, query, keys, values, mask, **options)
                values = values.gather()
            if ours and query.shape[2] == 1 and query.device.type == "cpu":
                return attend_stored(attend, self, query, keys, values, mask, **options)
            return attend(self, query, keys, values, mask, **options)
        values = values.gather() if isinstance(values, TokenRead) else values
        raw = attention_weights(query, keys, mask, self.scaling)
        sources = []
        for term in self.wiring.a:
            match term.source:
                case Own():
                    sources.append(raw)
                case Tap(layer):
                    sources.append(env[item_key("tap", "a", layer)])
                case Shared(layer):
                    sources.append(env[item_key("shared", "a", layer)])
        weights = self._sum("a", sources, budgets, None)
        given[item_key("tap", "a", self.layer_idx)] = raw
        given[item_key("shared", "a", self.layer_idx)] = weights
        return apply_weights(F.dropout(weights, p=dropout, training=self.training), values), weights

    def _added(
        self,
        h: Tensor,
        v: Tensor | None,
        raw_v: Tensor | None,
        v_scale: Factor | None,
        env: Env,
        budgets: Mapping[int, Tensor],
    ) -> Tensor:
        """The ``out`` terms at the query's own position, (B, T, h, e)."""
        sources: list[Tensor] = []
        for term in self.wiring.out:
            match term.source:
                case Final():
                    assert v is not None
                    sources.append(times(v_scale, v))
                case Own():
                    assert raw_v is not None
                    sources.append(raw_v)
                case Tap(layer):
                    sources.append(env[item_key("tap", "v", layer)])
        return repeat_heads(self._mixer("out")(sources, budgets, h), self.num_key_value_groups, 2)


def _unshared_tables(mix: Mix) -> list[Table]:
    return [Table() for term in mix if isinstance(term.source, Table) and not term.source.shared]
