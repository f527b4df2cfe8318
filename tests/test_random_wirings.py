"""Random wirings, not only presets: the cache gives what the uncached model gives, and nothing exists without a use."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import valuepath as vp
from models import VOCABULARY, in_pieces, left_padding, randomise, tokens
from valuepath.wiring import (
    OWN,
    Budget,
    Embed,
    Final,
    Fixed,
    Gate,
    LayerWiring,
    Learn,
    Mix,
    Own,
    Shared,
    Table,
    Tap,
    Term,
    Wiring,
)

T = 11
NUMBERS = st.sampled_from([1.0, 0.5, -0.7, 2.0])


def weights(stream: str, layer_only: bool = False) -> st.SearchStrategy[Any]:
    per = {"x": ["layer", "channel"], "a": ["layer", "head"]}.get(stream, ["layer", "head", "channel"])
    learned = st.builds(Learn, NUMBERS, st.just("layer") if layer_only else st.sampled_from(per))
    kinds = [st.builds(Fixed, NUMBERS), learned, st.builds(Budget, st.just(3.0), st.just(0))]
    if stream not in ("x", "a"):
        kinds.append(st.builds(Gate, NUMBERS, st.sampled_from([2, 5])))
    return st.one_of(kinds)


@st.composite
def mixes(draw: st.DrawFn, stream: str, n: int, wired: list[LayerWiring], may: dict[str, list[int]]) -> Mix:
    """A mix of one stream at layer n that the earlier layers allow."""
    of = "v" if stream == "out" else stream
    taps = [Tap(i) for i in range(n) if of in ("x", "a") or wired[i].mix(of).has(Own)]
    shared = [Shared(i) for i in may["shared"]] if stream in ("q", "k", "v", "a") else []
    if stream == "a":
        taps, shared = [t for t in taps if t.layer in may["shared"]], shared
    pool: list[Any] = [Own(), *taps]
    if stream == "v":
        pool += [*shared, Table(), Table(shared=True), Embed()]
    elif stream == "a":
        pool += shared
    elif stream in ("q", "k") and shared and draw(st.booleans()):
        pool = shared
    count = draw(st.integers(1, min(3, len(pool))))
    sources = draw(st.permutations(pool))[:count]
    if stream in ("x", "a") and Own() not in sources:
        sources = [Own(), *sources[1:]]  # an output or a query that nothing reads is refused
    terms = tuple(Term(source, draw(weights(stream))) for source in sources)
    renorm = None
    if stream == "v" and any(isinstance(s, Own) for s in sources) and draw(st.integers(0, 5)) == 0:
        renorm = draw(st.sampled_from(["token", "head"]))
    return Mix(terms, renorm)


@st.composite
def wirings(draw: st.DrawFn) -> tuple[Wiring, tuple[int | None, ...]]:
    """A wiring of 2 to 5 layers with every kind of term, and the layers' windows."""
    count = draw(st.integers(2, 5))
    windows = tuple(draw(st.sampled_from([None, None, 3, 5])) for _ in range(count))
    wired: list[LayerWiring] = []
    for n in range(count):
        fields: dict[str, Any] = {}
        everything = {"shared": list(range(n))}
        for stream in ("x", "q", "k", "v"):
            if draw(st.integers(0, 2 if stream == "v" else 5)) > (0 if stream == "v" else 3):
                fields[stream] = draw(mixes(stream, n, wired, everything))
        if n and draw(st.integers(0, 5)) == 0:
            fields["kv"] = tuple(draw(st.permutations(range(n)))[: draw(st.integers(1, min(2, n)))])
        equal = [i for i in range(n) if windows[i] == windows[n] and not wired[i].kv]
        if equal and "kv" not in fields and draw(st.integers(0, 7)) == 0:
            fields["a"] = draw(mixes("a", n, wired, {"shared": equal}))
        if n and draw(st.integers(0, 3)) == 0:
            pool: list[Any] = [Final(), *(Tap(i) for i in range(n) if wired[i].v.has(Own))]
            if fields.get("v", OWN).has(Own):
                pool.append(Own())
            chosen = draw(st.permutations(pool))[: draw(st.integers(1, 2))]
            fields["out"] = Mix(tuple(Term(source, draw(weights("out"))) for source in chosen))
        for name in ("skip_attn", "skip_mlp"):
            if draw(st.integers(0, 7)) == 0:
                fields[name] = draw(st.sampled_from([Fixed(0.0), Fixed(0.5), Learn(1.0), Learn(1.0, "channel")]))
        wired.append(LayerWiring(**fields))
    final = OWN
    if draw(st.integers(0, 4)) == 0:
        pool = [Own(), *(Tap(i) for i in range(count))]  # the scale of a lone own would vanish in the norm
        final = Mix(tuple(Term(s, draw(st.builds(Learn, NUMBERS))) for s in (Own(), draw(st.sampled_from(pool[1:])))))
    return Wiring(tuple(wired), final), windows


def build(wiring: Wiring, windows: tuple[int | None, ...], kv_heads: int, qk_norm: str, fold: str, bias: bool) -> Any:
    """A model of a wiring given as data: the config takes text, so the plan is put in its place."""
    config = vp.ValuePathConfig(
        vocab_size=VOCABULARY,
        hidden_size=28,
        num_hidden_layers=wiring.num_layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=6,
        intermediate_size=13,
        layer_windows=list(windows),
        qk_norm=qk_norm,
        attention_bias=bias,
    )
    shape = config.shape()
    config.plan = lambda other=None: vp.make_plan(wiring, shape, other or fold)  # type: ignore[method-assign]
    model = vp.ValuePathForCausalLM(config).double().eval()
    randomise(model)
    return model


@settings(max_examples=300, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    wirings(),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "plain", "gain"]),
    st.sampled_from(["auto", "none", "all"]),
    st.booleans(),
    st.lists(st.integers(1, 4), min_size=T, max_size=T),
)
def test_cached_equals_uncached_for_random_wirings(
    drawn: tuple[Wiring, tuple[int | None, ...]], kv_heads: int, qk_norm: str, fold: str, bias: bool, steps: list[int]
) -> None:
    wiring, windows = drawn
    model = build(wiring, windows, kv_heads, qk_norm, fold, bias)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {p.name: p.shape for p in model.model.plan.parameters}
    ids, (mask, positions) = tokens(2, T), left_padding(2, T)
    real = mask.bool()
    sizes, left = [], T
    for step in steps:
        if left:
            sizes.append(min(step, left))
            left -= sizes[-1]
    with torch.no_grad():
        # random wirings make logits of any size: bring them to that of a trained model's
        model.lm_head.weight.div_(model(ids, use_cache=False).logits.abs().max().clamp_min(10) / 10)
        full = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[real]
        pieces, cache = in_pieces(model, ids, sizes, mask, positions)
        assert (pieces[real] - full).abs().max() <= 1e-10
        # never more than an ordinary Transformer of the same windows, ids aside
        held = sum(min(T, w or T) for w in windows) * 2 * kv_heads * 6 * 2 * 8
        ids_held = 0 if cache.slots is None else cache.slots.nbytes()[0]
        longest = T if None in windows else max(w for w in windows if w)
        bound = held if len(set(windows)) == 1 else wiring.num_layers * min(T, longest) * 2 * kv_heads * 6 * 2 * 8
        assert cache.nbytes().logical - ids_held <= bound


@settings(max_examples=120, derandomize=True, suppress_health_check=list(HealthCheck))
@given(wirings(), st.sampled_from([2, 4]))
def test_every_parameter_of_a_random_wiring_is_used(drawn: tuple[Wiring, tuple[int | None, ...]], kv_heads: int) -> None:
    """Whatever the plan names takes part in the logits, with a cache or without."""
    wiring, windows = drawn
    model = build(wiring, windows, kv_heads, "none", "auto", False)
    ids = tokens(2, T)
    functional = torch.randn(2, T, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (model(ids, use_cache=False).logits * functional).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
