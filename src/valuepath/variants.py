"""Presets: the published variants, each as an equation with named options. The only home of paper names.

``preset("resformer_sparse").equation(8, layers=[5, 6, 7], first=5.0)`` is the text ``v[5, 6, 7] = own + 5*tap(0)``, which
``valuepath.equations.parse`` turns into a wiring. Nothing else in the package knows these names: a preset can do nothing
that an equation cannot.

What is not a preset of its own:

* GQA and MQA are the config field ``num_key_value_heads`` and go with every preset;
* a single source layer or a single receiving layer is ``resformer_identity`` with ``source=i`` or ``layers=[n]``;
* tables on alternate layers are ``bov`` with ``layers="::-2"``;
* rows that differ only in numbers, layers, learning rate or warm-up are one preset with options and a recipe;
* GPT2 style is not covered; see ``NOT_COVERED``.

Layers are counted from 0; the papers' layer 1 is layer 0 here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from valuepath.equations import nearest, parse
from valuepath.published.reached import NOT_COVERED, PublishedRow, reached
from valuepath.wiring import Fixed, WiringError

__all__ = ["NOT_COVERED", "Option", "Preset", "PublishedRow", "VariantError", "preset", "variants"]

Values = Mapping[str, Any]
"""Option name -> value, every option present and checked."""

Build = Callable[[int, Values], str]
"""(number of layers, options) -> equation; a ValueError says what is wrong with a combination of options."""


class VariantError(ValueError):
    """An unknown variant, an unknown option, or an option's value that means nothing."""


# --------------------------------------------------------------------------------------------------- values of options
def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("expected a finite number")
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _whole(least: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"expected a whole number of at least {least}")
        return value

    return check


def _one_of(*words: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}{nearest(str(value), words)}")
        return value

    return check


def _or_none(check: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else check(value)


_LAYER_TEXT = re.compile(r"(?:last|[\dN:+\-*/%,() ])+")


def _layers(value: object) -> str:
    """Layers as they stand between the brackets of an equation; which of them exist is checked once N is known."""
    if isinstance(value, list | tuple) and value and all(isinstance(n, int) and not isinstance(n, bool) for n in value):
        return ", ".join(str(n) for n in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    # only what can stand between brackets, so that no second statement can slip in
    if isinstance(value, str) and _LAYER_TEXT.fullmatch(value):
        return value.strip()
    raise ValueError("expected a list of layer numbers such as [5, 6, 7], or text such as '1:', 'last/3' or '::-2'")


def _resolve_layers(text: str, num_layers: int) -> list[int]:
    """The layers that ``text`` means in a model of ``num_layers`` layers, in rising order, by the grammar's own rules."""
    try:
        probe = parse(f"skip_mlp[{text}] = 2", num_layers)
    except WiringError as wrong:
        raise ValueError(wrong.reason.replace("skip_mlp", "the model")) from None
    return [n for n, layer in enumerate(probe.layers) if layer.skip_mlp == Fixed(2.0)]


# ------------------------------------------------------------------------------------------------------------- presets
@dataclass(frozen=True)
class Option:
    """What a row leaves settable: its default, one line of meaning, and the check that its values pass through."""

    default: Any
    meaning: str
    check: Callable[[object], Any]


@dataclass(frozen=True)
class Preset:
    """A published variant.

    Attributes:
        name: what goes into ``variant=``.
        paper: title and arXiv id.
        location: section, table or figure.
        summary: one line.
        settings: option name -> Option; ``options`` has the defaults alone, ``meanings`` the explanations.
        config: further config fields that the variant needs.
    """

    name: str
    paper: str
    location: str
    summary: str
    build: Build = field(repr=False)
    settings: Mapping[str, Option] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def options(self) -> Mapping[str, Any]:
        """Option name -> default."""
        return MappingProxyType({name: option.default for name, option in self.settings.items()})

    @property
    def meanings(self) -> Mapping[str, str]:
        """Option name -> what it means, in one line."""
        return MappingProxyType({name: option.meaning for name, option in self.settings.items()})

    @property
    def published(self) -> tuple[PublishedRow, ...]:
        """The published rows that it reproduces, with the options that reach each."""
        return reached(self.name)

    def equation(self, num_layers: int, /, **options: Any) -> str:
        """The equation for a model of ``num_layers`` layers, for ``valuepath.equations.parse``.

        Raises:
            VariantError: for an unknown option (with the nearest and all that exist) or a value that means nothing.
                What only the grammar refuses, e.g. reading layer 0 in layer 0, is left to ``parse``.
        """
        if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
            raise self._error(f": the number of layers must be a whole number of at least 1, not {num_layers!r}")
        for name in options:
            if name not in self.settings:
                raise self._error(f" has no option {name!r}{nearest(name, [*self.settings]) or '.'} {self._choices()}")
        values: dict[str, Any] = {}
        for name, option in self.settings.items():
            given = options.get(name, option.default)
            try:
                values[name] = option.check(given)
                if name == "layers" and values[name] is not None:
                    _resolve_layers(values[name], num_layers)
            except ValueError as wrong:
                raise self._error(f", option {name}={given!r}: {wrong}") from None
        try:
            return self.build(num_layers, values)
        except ValueError as wrong:
            raise self._error(f": {wrong}") from None

    def _error(self, reason: str) -> VariantError:
        return VariantError(f"variant {self.name!r}{reason}")

    def _choices(self) -> str:
        if not self.settings:
            return "It has no options"
        return "Its options: " + ", ".join(f"{name}={option.default!r}" for name, option in self.settings.items())


def variants() -> Mapping[str, Preset]:
    """Every preset by name, in the order of the documentation; read-only."""
    return _PRESETS


def preset(name: str) -> Preset:
    """The preset called ``name``.

    Raises:
        VariantError: with the nearest name, or how a published row of that name is reached, and all names.
    """
    if not isinstance(name, str):
        raise VariantError(f"a variant is named by text such as 'bov', not {name!r}")
    if name in _PRESETS:
        return _PRESETS[name]
    hint = nearest(name, [*_PRESETS]) or "."
    for one, row in [(known, row) for known in _PRESETS.values() for row in known.published]:
        if row.reference.endswith(f"/{name}"):
            heads = f" and num_key_value_heads = num_attention_heads // {row.queries_per_kv_head}"
            hint = f": this published row is variant={one.name!r}, variant_options={dict(row.options)!r}"
            hint += f"{heads if row.queries_per_kv_head > 1 else ''}."
            break
    raise VariantError(f"unknown variant {name!r}{hint} There are: {', '.join(_PRESETS)}")


# --------------------------------------------------------------------------------------------------- text of equations
def _text(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _fixed(value: float, source: str) -> str | None:
    """``value*source``; a coefficient of 0 leaves the source out."""
    return {0.0: None, 1.0: source, -1.0: f"-{source}"}.get(value, f"{_text(value)}*{source}")


def _learn(init: float, source: str, per: str = "layer") -> str:
    return f"learn({_text(init)})*{source}" if per == "layer" else f"learn({_text(init)}, per={per})*{source}"


def _sum(*terms: str | None) -> str:
    kept = [term for term in terms if term is not None]
    if not kept:
        raise ValueError("a coefficient of 0 leaves its source out, and nothing else is read; give another number")
    return " + ".join(kept).replace("+ -", "- ")


def _table(o: Values, shared: bool = False) -> str:
    arguments = ["shared"] * shared + ["init=uniform"] * (o["init"] == "uniform")
    return f"table({', '.join(arguments)})" if arguments else "table"


def _receivers(num_layers: int, o: Values) -> str:
    """The layers that read layer ``source``: those asked for, else all after it."""
    if o["source"] > num_layers - 2:
        fix = f"give a layer from 0 to {num_layers - 2}" if num_layers > 1 else "use at least 2 layers"
        raise ValueError(f"source={o['source']}: no layer comes after it in a model of {num_layers}; {fix}")
    return o["layers"] or f"{o['source'] + 1}:"


# ----------------------------------------------------------------------------------------------------------- equations
def _mixed(num_layers: int, o: Values) -> str:
    own, first = (o["weight"], o["weight"]) if "weight" in o else (o["own"], o["first"])
    tap = f"tap({o['source']})"
    return f"v[{_receivers(num_layers, o)}] = {_sum(_fixed(own, 'own'), _fixed(first, tap))}"


def _learnable(num_layers: int, o: Values) -> str:
    tap = f"tap({o['source']})"
    return f"v[{_receivers(num_layers, o)}] = {_learn(o['own'], 'own', o['per'])} + {_learn(o['first'], tap, o['per'])}"


def _plus(num_layers: int, o: Values) -> str:
    total = "N" if o["total"] is None else _text(o["total"])
    return f"v[{o['layers']}] = {_learn(o['own'], 'own', o['per'])} + budget({total})*tap(0)"


def _dense(num_layers: int, o: Values) -> str:
    source = {"raw": "tap(i)", "mixed": "shared(i)"}[o["history"]]
    return f"v[{o['layers']}] = {_learn(o['own'], 'own')} + sum({_learn(o['past'], source)} for i in range(n))"


def _rescaled(num_layers: int, o: Values) -> str:
    mix = _sum(_fixed(o["own"], "own"), _fixed(o["first"], "tap(0)"))
    return f"v[{o['layers']}] = renorm({mix}, to=own, axis={o['axis']})"


def _regularised(num_layers: int, o: Values) -> str:
    combined = o["combine"] != "transformer"
    weight = (0.2 if combined else 0.4) if o["weight"] is None else o["weight"]
    current = "final(v)" if combined else "own(v)"  # V'_n, the mixed value, once there is one
    out = f"out[{o['layers']}] = {_sum(_fixed(weight, 'tap(v, 0)'), _fixed(-weight, current))}"
    return f"{preset(o['combine']).equation(num_layers)}; {out}" if combined else out


def _depth_averaged(num_layers: int, o: Values) -> str:
    period, dilation = o["period"], o["dilation"]
    if period > num_layers:
        raise ValueError(f"period={period}: a model of {num_layers} layers would average nothing; give 1 to {num_layers}")
    sites = "1:N+1" if period == 1 else f"{period}:N+1:{period}"
    earlier = "range(n)" if dilation == 1 else f"range(n % {dilation}, n, {dilation})"  # i < n with (n - i) % dilation == 0
    return f"x[{sites}] = {_learn(o['own'], 'own')} + sum({_learn(o['past'], 'tap(i)')} for i in {earlier})"


def _hidden_skip(num_layers: int, o: Values) -> str:
    layers = _resolve_layers(o["layers"], num_layers)
    # x has one site more than there are layers: a bare "1:" would reach the final norm
    to_the_end = layers == list(range(layers[0], num_layers))
    sites = f"{layers[0]}:N" if to_the_end else ", ".join(map(str, layers))
    return f"x[{sites}] = {_learn(o['own'], 'own', o['per'])} + {_learn(o['first'], 'tap(0)', o['per'])}"


def _hidden_from(k: int) -> Build:
    def build(num_layers: int, o: Values) -> str:
        if num_layers <= k:
            raise ValueError(f"needs at least {k + 1} layers, so that a layer keeps its skip; there are {num_layers}")
        statements = [f"skip_attn[:{k}] = 0"] + ([] if o["mlp_skip"] else [f"skip_mlp[:{k}] = 0"])
        if o["source"] is not None:
            statements.append(_mixed(num_layers, o))
        elif o["layers"] is not None:
            raise ValueError("layers are those that receive a value; say which one with source")
        return "; ".join(statements)

    return build


def _half_and_half(stream: str) -> Build:
    return lambda num_layers, o: f"{stream}[{o['layers']}] = {_sum(_fixed(o['own'], 'own'), _fixed(o['first'], 'tap(0)'))}"


def _beside_attention(num_layers: int, o: Values) -> str:
    """``0.5 A V_n + 0.5 V_0``; the first half is ``A (0.5 V_n)``."""
    if o["own"] == 0 or o["first"] == 0:
        raise ValueError("a coefficient of 0 leaves attention or the first value out; give another number")
    return f"v[{o['layers']}] = {_fixed(o['own'], 'own')}; out[{o['layers']}] = {_fixed(o['first'], 'tap(v, 0)')}"


def _cross_layer(num_layers: int, o: Values) -> str:
    return f"kv[{_receivers(num_layers, o)}] = concat(own, shared({o['source']}))"


def _pairs(num_layers: int, o: Values) -> str:
    return "; ".join(f"{stream}[1::2] = shared(n-1)" for stream in o["share"])


def _lone(source: str) -> Build:
    """One source alone: ``g * source``."""

    def build(num_layers: int, o: Values) -> str:
        read = _table(o, shared=source == "shared table") if "table" in source else source
        return f"v[{o['layers']}] = {_learn(o['scale'], read, o['per']) if o['learned'] else _sum(_fixed(o['scale'], read))}"

    return build


def _beside_own(option: str, source: str) -> Build:
    """``a V_n + b * source``; a and b start at 1 and 0 if learned, else they are 0.5 and 0.5."""

    def build(num_layers: int, o: Values) -> str:
        a, b = (1.0, 0.0) if o["learned"] else (0.5, 0.5)
        a, b = a if o["own"] is None else o["own"], b if o[option] is None else o[option]
        if o["learned"]:
            return f"v[{o['layers']}] = {_learn(a, 'own', o['per'])} + {_learn(b, source, o['per'])}"
        return f"v[{o['layers']}] = {_sum(_fixed(a, 'own'), _fixed(b, source))}"

    return build


def _own_plus_table(num_layers: int, o: Values) -> str:
    term = _learn(o["scale"], _table(o), o["per"]) if o["learned"] else _fixed(o["scale"], _table(o))
    return f"v[{o['layers']}] = {_sum('own', term)}"


def _gated(num_layers: int, o: Values) -> str:
    if o["range"] == 0:
        raise ValueError("range=0 keeps the gate shut; give another number")
    return f"v[{o['layers']}] = own + gate({_text(o['range'])}, {o['channels']})*{_table(o)}"


# -------------------------------------------------------------------------------------------------- papers and options
_TRANSFORMER = "Attention Is All You Need (arXiv 1706.03762)"
_RESFORMER = "Value Residual Learning (arXiv 2410.17897)"
_BOV = "Do Value Vectors in Deep Layers Need Context from the Residual Stream? (arXiv 2606.02780)"
_NEUTRENO = "Mitigating Over-smoothing in Transformers via Regularized Nonlocal Functionals (arXiv 2312.00751)"
_DENSEFORMER = "DenseFormer: Enhancing Information Flow in Transformers via Depth Weighted Averaging (arXiv 2402.02622)"
_CLA = "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention (arXiv 2405.12981)"

_MIXED = ("transformer", *(f"resformer_{kind}" for kind in ("identity", "constant", "learnable", "plus", "sparse", "dense")))


def _on(default: str) -> Option:
    return Option(default, "layers that the equation holds for: numbers, a slice such as '1:' or '::-2', or 'last/3'", _layers)


def _coefficient(default: float, of: str) -> Option:
    return Option(default, f"coefficient of {of}, or its start if learned", _number)


def _init(default: str) -> Option:
    meaning = "start of the tables: projected (x0 W_V of the initial weights) or uniform in +-sqrt(3/d)"
    return Option(default, meaning, _one_of("projected", "uniform"))


def _learned(default: bool) -> Option:
    return Option(default, "whether the scale is learned; otherwise it stays as it starts", _flag)


def _pair(first: float, own: float) -> dict[str, Option]:
    return {"first": _coefficient(first, "the first layer's content"), "own": _coefficient(own, "the layer's own content")}


_LATER = {"layers": _on("1:")}
_SOURCE = {
    "layers": Option(None, "receiving layers, as numbers or text; default: all after the source", _or_none(_layers)),
    "source": Option(0, "layer whose value is read", _whole(0)),
}
_PER = {"per": Option("layer", "one learned number per layer, head or channel", _one_of("layer", "head", "channel"))}


def _scaled(layers: str, learned: bool = True) -> dict[str, Option]:
    scale = Option(1.0, "scale of the value, or its start if learned", _number)
    return {"layers": _on(layers), "scale": scale, "learned": _learned(learned), **_PER}


# --------------------------------------------------------------------------------------------------------- the presets
def _first_value() -> list[Preset]:
    """The first layer's value mixed into later layers' values."""
    where = "Sec. 3.2 p. 3; Table 3 p. 5"
    total = "start of the sum of the first value's coefficients; default: the number of layers"
    history = "earlier layers' values before (raw) or after (mixed) their own mixing"
    axis = "norm of each token, each head, or the whole tensor (which reads later tokens: no generation)"
    return [
        Preset("transformer", _TRANSFORMER, "baseline of every table", "every layer reads its own value",
               lambda num_layers, o: "v = own"),
        Preset("resformer_identity", _RESFORMER, f"{where}; one source or one receiving layer: Fig. 5 p. 6",
               "half the first layer's value, half the own", _mixed,
               {**_SOURCE, "weight": Option(0.5, "coefficient of both values", _number)}),
        Preset("resformer_constant", _RESFORMER, f"{where}; Fig. 3 p. 5",
               "fixed multiples of the first layer's value and the own, which need not add up to 1", _mixed,
               {**_SOURCE, **_pair(2.0, 1.0)}),
        Preset("resformer_learnable", _RESFORMER, f"{where}; Table 4 p. 7",
               "two learned coefficients a layer, without any constraint", _learnable, {**_SOURCE, **_pair(0.5, 0.5), **_PER}),
        Preset("resformer_plus", _RESFORMER, where,
               "the first value's coefficients share one learned total by a softmax over the layers; its logits start at 0",
               _plus,
               {**_LATER, "own": _coefficient(0.5, "the own value"), "total": Option(None, total, _or_none(_number)), **_PER}),
        Preset("resformer_sparse", _RESFORMER, f"{where}; Tables 10-11 p. 14",
               "a multiple of the first layer's value on a few layers only (own=0: nothing else)", _mixed,
               {**_SOURCE, "layers": _on("last/3"), **_pair(5.0, 1.0)}),
        Preset("resformer_dense", _RESFORMER, f"{where}; Fig. 6 p. 6",
               "a learned combination of the own value and those of all earlier layers", _dense,
               {**_LATER, "own": _coefficient(1.0, "the own value"), "past": _coefficient(0.0, "each earlier value"),
                "history": Option("raw", history, _one_of("raw", "mixed"))}),
        Preset("resformer_identity_rescaled", _RESFORMER, "Table 11 p. 14",
               "half and half, rescaled to the norm of the own value", _rescaled,
               {**_LATER, **_pair(0.5, 0.5), "axis": Option("token", axis, _one_of("token", "head", "tensor"))}),
        Preset("svformer", _RESFORMER, "Sec. 3.3 pp. 3-4; Tables 8-9 p. 9",
               "every later layer reads the first layer's value and nothing else",
               lambda num_layers, o: f"v[{o['layers']}] = tap(0)", _LATER),
    ]


def _elsewhere() -> list[Preset]:
    """Other places than the value for what comes from earlier layers."""
    compared = "compared in Value Residual Learning"
    weight = Option(None, "the multiple; default: 0.4, or 0.2 if combined", _or_none(_number))
    combine = Option("transformer", "preset whose mixed value is regularised, with its defaults", _one_of(*_MIXED))
    residual = {**_LATER, **_pair(0.5, 0.5)}
    return [
        Preset("neutreno", _NEUTRENO, f"{compared}, Sec. 3 Eqs. 3-5 p. 3; Table 3 p. 5",
               "a multiple of (first value - own value) added after attention, at the query's own position", _regularised,
               {**_LATER, "weight": weight, "combine": combine}),
        Preset("denseformer", _DENSEFORMER, f"{compared}, Sec. 4.2 pp. 4-5; Table 3 p. 5",
               "after every block, a learned average of the embedding and all block outputs", _depth_averaged,
               {"period": Option(1, "an average only after every period-th block", _whole(1)),
                "dilation": Option(1, "average only over states a multiple of dilation blocks earlier", _whole(1)),
                "own": _coefficient(1.0, "the current state"), "past": _coefficient(0.0, "each earlier state")}),
        Preset("cla2", _CLA, f"{compared}, Table 1 p. 3; Table 8 p. 9",
               "every second layer reads the finished keys and values of the layer before", _pairs,
               {"share": Option("kv", "what is shared: both (kv), keys (k) or values (v)", _one_of("kv", "k", "v"))}),
        Preset("query_residual", _RESFORMER, "Table 6 p. 7", "half the first layer's query, half the own",
               _half_and_half("q"), residual),
        Preset("key_residual", _RESFORMER, "Table 6 p. 7", "half the first layer's key, half the own",
               _half_and_half("k"), residual),
        Preset("attention_residual", _RESFORMER, "Table 6 p. 7",
               "half the first layer's attention weights, half the own; equal windows, no fused attention",
               _half_and_half("a"), residual),
        Preset("v1_identity_mapping", _RESFORMER, "Table 7 p. 7",
               "the first layer's value added beside attention instead of being read through it", _beside_attention, residual),
        Preset("v1_cross_layer_attention", _RESFORMER, "Table 7 p. 7",
               "attention over the first layer's keys and values behind the own", _cross_layer, _SOURCE),
        Preset("hidden_skip", _RESFORMER, "Table 4 p. 7",
               "a learned multiple of the embedding added to the residual stream that enters every later layer", _hidden_skip,
               {**residual, "per": Option("layer", "one learned number per layer or channel", _one_of("layer", "channel"))}),
        *(Preset(f"hidden_from_h{k}", _RESFORMER, "Table 5 p. 7",
                 f"the first {k} layers lose the skip around attention: the hidden states before H_{k} are not carried on",
                 _hidden_from(k),
                 {**_SOURCE, "source": Option(None, "layer whose value is mixed into those after it; default: none",
                                              _or_none(_whole(0))), **_pair(0.5, 0.5),
                  "mlp_skip": Option(True, "whether these layers keep the skip around the MLP", _flag)})
          for k in (1, 2, 3)),
    ]


def _token_values() -> list[Preset]:
    """Values that depend on the token alone, in deep layers, and their controls."""
    with_table = {"init": _init("projected")}
    channels = "how many channels of the attention input the gate reads, at most hidden_size"

    def beside(name: str, location: str, option: str, source: str, what: str) -> Preset:
        own = Option(None, "coefficient of the own value; default: 1 if learned, else 0.5", _or_none(_number))
        other = Option(None, f"coefficient of {what}; default: 0 if learned, else 0.5", _or_none(_number))
        options = {"layers": _on("last/3"), "own": own, option: other, "learned": _learned(True), **_PER}
        summary = f"the own value and {what}, both weighted, in the last third of the layers"
        return Preset(name, _BOV, location, summary, _beside_own(option, source), options)

    return [
        Preset("v_last_third", _BOV, "Table 1 p. 3",
               "control: a learned scale on the own value in the last third of the layers",
               _lone("own"), _scaled("last/3")),
        Preset("v1_last_third", _BOV, "Table 1 p. 3; Table 3 p. 7",
               "the first layer's value alone, times a learned scale, in the last third of the layers",
               _lone("tap(0)"), _scaled("last/3")),
        Preset("v1_every2", _BOV, "Table 1 of an earlier version",
               "the first layer's value alone on every second layer, the last one included",
               _lone("tap(0)"), _scaled(":0:-2")),  # never layer 0, which is the source
        Preset("x0wv_last_third", _BOV, "Table 1 p. 3; Table 3 p. 7",
               "the normalised embedding through the layer's own W_V, times a learned scale, in the last third of the layers",
               _lone("embed"), _scaled("last/3")),
        Preset("x0wv_every2", _BOV, "Table 1 p. 3",
               "the normalised embedding through the layer's own W_V on every second layer, the last one included",
               _lone("embed"), _scaled("::-2")),
        beside("v_plus_v1", "Table 1 of an earlier version; Fig. 2b p. 4", "first", "tap(0)", "the first layer's value"),
        beside("v_plus_x0wv", "Table 1 p. 3; Fig. 2c p. 4", "embed", "embed", "the normalised embedding through the same W_V"),
        Preset("bov", _BOV, "Sec. 4-5 pp. 5-6; Tables 2-3 pp. 6-7",
               "a learned row per token id instead of the value projection, times a learned scale, in the last third",
               _lone("table"), {**_scaled("last/3"), **with_table}),
        Preset("shared_table", _BOV, "Fig. 5b p. 8", "as bov, with one table for all of its layers",
               _lone("shared table"), {**_scaled("last/3"), **with_table}),
        Preset("table_fixed_scale", _BOV, "Fig. 5b p. 8", "as bov, without a learned scale",
               _lone("table"), {**_scaled("last/3", learned=False), **with_table}),
        Preset("table_all", _BOV, "Fig. 5b p. 8", "as bov, in every layer", _lone("table"), {**_scaled(":"), **with_table}),
        Preset("v_plus_table", _BOV, "Fig. 5b p. 8",
               "the own value plus a table, without a gate, in the last third of the layers",
               _own_plus_table, {**_scaled("last/3", learned=False), **with_table}),
        Preset("v_plus_table_gated", _BOV, "Sec. 5.2; Tables 4 and 7 pp. 7, 13",
               "the own value plus a table behind a gate per head, on every second layer, the last one included", _gated,
               {"layers": _on("::-2"), "range": Option(3.0, "upper end of the gate, which starts near half of it", _number),
                "channels": Option(12, channels, _whole(1)), "init": _init("uniform")}),
    ]


_PRESETS: Mapping[str, Preset] = MappingProxyType(
    {one.name: one for one in (*_first_value(), *_elsewhere(), *_token_values())}
)
