"""The plan of any wiring, against a simulation that knows nothing of plans.

The simulation gives every raw projection, table and weight random numbers, computes each layer's keys and values from the
wiring alone, and looks at the numbers: a value that only depends on the token id is the same wherever the id is the same;
two layers whose content is the same up to outside weights have values whose ratio is the same at every position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from valuepath.plan import (
    Alias,
    Embedded,
    Finished,
    Fold,
    Plan,
    Projected,
    Rows,
    Shape,
    Store,
    Tokens,
    make_plan,
)
from valuepath.wiring import (
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
    Source,
    Table,
    Tap,
    Term,
    Weight,
    Wiring,
)

HEADS, WIDTH, VOCABULARY = 3, 5, 4
SEQUENCES = (np.array([0, 1, 2, 3, 0, 1, 2, 3, 3, 0, 0]), np.array([2, 0, 2, 1, 1, 3, 0]))
IDS = np.concatenate(SEQUENCES)
BOUNDS = np.cumsum([0, *map(len, SEQUENCES)])
FOLDS: tuple[Fold, ...] = ("auto", "none", "all")


# ---------------------------------------------------------------------------------------------------- random wirings
@st.composite
def weights(draw: st.DrawFn, stream: str) -> Weight:
    kinds = ["number", "number", "learn", "budget"] + ["gate"] * (stream not in "xa")
    match draw(st.sampled_from(kinds)):
        case "number":
            return Fixed(draw(st.sampled_from([1.0, 1.0, 0.5, -2.0])))
        case "learn":
            per = ["layer", "layer", *([] if stream == "x" else ["head"]), *([] if stream == "a" else ["channel"])]
            return Learn(1.0, draw(st.sampled_from(per)))
        case "budget":
            return Budget(2.0)
    return Gate(3.0, 2)


@st.composite
def mixes(draw: st.DrawFn, stream: str, n: int, raw: list[int], extra: tuple[Source, ...] = ()) -> Mix:
    """A sum for layer n that the rules allow; ``raw`` are the earlier layers whose projection exists."""
    kinds: list[list[Source]] = [list(extra), [Tap(i) for i in raw], [Shared(i) for i in range(n)] if stream in "qkv" else []]
    source = st.sampled_from([kind for kind in kinds if kind]).flatmap(st.sampled_from)
    most = draw(st.sampled_from([1, 1, 2, 3]))
    chosen = draw(st.lists(source, min_size=1, max_size=most, unique=True))
    if stream == "x" and Own() not in chosen:
        chosen.append(Own())  # else nothing might read what arrives
    if stream in "qk" and any(isinstance(s, Shared) for s in chosen):
        chosen = [s for s in chosen if isinstance(s, Shared)]
    if sum(isinstance(s, Table) and not s.shared for s in chosen) > 1:
        chosen = [s for s in chosen if s != Table(init="uniform")]
    renorm = None
    # rescaling a lone source gives it back, which a plan need not see
    if stream == "v" and Own() in chosen and len(chosen) > 1 and draw(st.integers(0, 4)) == 0:
        renorm = draw(st.sampled_from(["token", "head", "tensor"]))
    return Mix(tuple(Term(source, draw(weights(stream))) for source in chosen), renorm)


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    """Any wiring of up to 6 layers; about a third of the streams are left as they are."""
    layers: list[LayerWiring] = []
    concatenates = draw(st.booleans())
    for n in range(draw(st.sampled_from([1, 2, 3, 4, 5, 6, 6]))):
        streams: dict[str, object] = {}
        for stream in ("q", "k", "v"):
            raw = [i for i, layer in enumerate(layers) if layer.mix(stream).has(Own)]
            extra: tuple[Source, ...] = (Own(),) if stream != "v" else (Own(), Table(), Table(shared=True), Embed())
            if draw(st.integers(0, 3)) < (3 if stream == "v" else 2):
                streams[stream] = draw(mixes(stream, n, raw, extra))
        if draw(st.integers(0, 5)) == 0:
            streams["x"] = draw(mixes("x", n, list(range(n)), (Own(),)))
        if draw(st.integers(0, 5)) == 0:
            v = streams.get("v", Mix())
            assert isinstance(v, Mix)
            own: tuple[Source, ...] = (Own(),) if v.has(Own) else ()
            raw = [i for i, layer in enumerate(layers) if layer.v.has(Own)]
            streams["out"] = draw(mixes("out", n, raw, (Final(), *own)))
        if concatenates and n and draw(st.integers(0, 3)) == 0:
            streams["kv"] = tuple(draw(st.lists(st.integers(0, n - 1), max_size=2, unique=True)))
        layers.append(LayerWiring(**streams))  # type: ignore[arg-type]
    return Wiring(tuple(layers))


@st.composite
def shapes(draw: st.DrawFn, num_layers: int) -> Shape:
    windows = draw(st.lists(st.sampled_from([None, 3, 7]), min_size=num_layers, max_size=num_layers))
    return Shape(
        hidden_size=13, intermediate_size=17, num_heads=2 * HEADS, num_kv_heads=HEADS, head_dim=WIDTH, vocab_size=VOCABULARY,
        windows=tuple(windows), qk_norm=draw(st.sampled_from([None, "plain", "gain"])),
    )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn, folds: tuple[Fold, ...] = FOLDS) -> Plan:
    wiring = draw(wirings())
    return make_plan(wiring, draw(shapes(wiring.num_layers)), draw(st.sampled_from(folds)))


# -------------------------------------------------------------------------------------------------------- simulation
@dataclass
class Simulation:
    """Keys and values (positions of both sequences, heads, width) of every layer, from the wiring alone."""

    wiring: Wiring
    qk_norm: str | None
    seed: int = 0
    changed_source_of: int | None = None
    """Draw the raw sources that belong to this layer anew, everything else as before."""
    drawn: dict[object, np.ndarray] = field(default_factory=dict)
    collapsing: list[np.ndarray] = field(default_factory=list)
    """Sums whose terms all have the same content: they are proportional to it, which a plan need not see."""

    def __post_init__(self) -> None:
        layers = range(self.wiring.num_layers)
        self.values: list[np.ndarray] = []
        self.keys: list[np.ndarray] = []
        for n in layers:
            self.values.append(self.value(n))
            self.keys.append(self.key(n))

    def random(self, key: object, *extents: int, layer: int | None = None) -> np.ndarray:
        """Positive numbers that depend on the key alone: of a source, of a weight."""
        if key not in self.drawn:
            again = layer is not None and layer == self.changed_source_of
            rng = np.random.default_rng([self.seed + 1000 * again, *repr(key).encode()])
            self.drawn[key] = rng.uniform(0.5, 2.0, extents) * rng.choice([-1.0, 1.0], extents)
        return self.drawn[key]

    # ------------------------------------------------------------------------------------------------- sources
    def by_token(self, key: object, layer: int | None) -> np.ndarray:
        return self.random(key, VOCABULARY, HEADS, WIDTH, layer=layer)[IDS]

    def projected(self, stream: str, n: int) -> np.ndarray:
        """Layer 0 sees the embedding, which is a function of the token, unless x is changed; later layers see context."""
        if n == 0 and self.wiring.layers[0].x == Mix():
            return self.by_token(("projected", stream, n), n)
        return self.random(("projected", stream, n), len(IDS), HEADS, WIDTH, layer=n)

    def weight(self, stream: str, n: int, term: Term) -> np.ndarray:
        """Numbers are drawn as well, so that nothing is equal by accident; only 1 stays 1."""
        key = ("weight", stream, n, term.source)
        match term.weight:
            case Fixed(1.0):
                return np.ones(())
            case Learn(_, "head"):
                return self.random(key, HEADS, 1)
            case Learn(_, "channel"):
                return self.random(key, HEADS, WIDTH)
            case Gate():  # of the attention input, which differs from position to position
                return self.random(key, len(IDS), HEADS, 1)
        return self.random(key)

    # ------------------------------------------------------------------------------------------------- streams
    def value_source(self, n: int, source: Source) -> np.ndarray:
        match source:
            case Own():
                return self.projected("v", n)
            case Tap(i):
                return self.projected("v", i)
            case Shared(i):
                return self.values[i]
            case Embed():
                return self.by_token(("embed", n), n)
            case Table(True):
                return self.by_token("rows of all", None)
            case Table():
                return self.by_token(("rows", n), n)
        raise AssertionError(source)

    def value(self, n: int) -> np.ndarray:
        mix = self.wiring.layers[n].v
        parts = [self.weight("v", n, term) * self.value_source(n, term.source) for term in mix]
        total = np.sum(parts, axis=0)
        if mix.renorm is not None:
            own = self.projected("v", n)
            axes = {"token": (1, 2), "head": (2,), "tensor": (0, 1, 2)}[mix.renorm]
            pieces = []
            for start, end in pairwise(BOUNDS):
                size = [np.sqrt((a[start:end] ** 2).sum(axis=axes, keepdims=True)) for a in (own, total)]
                pieces.append(total[start:end] * size[0] / size[1])
            return np.concatenate(pieces)
        if len(parts) > 1 and all(proportional(part, total) for part in parts):
            self.collapsing.append(total)
        return total

    def finish(self, n: int, raw: np.ndarray) -> np.ndarray:
        """A stand-in for norm and RoPE: per head, nonlinear, linear in nothing, different at every position."""
        if self.qk_norm is not None:
            raw = raw / np.sqrt((raw**2).mean(axis=-1, keepdims=True))
        if self.qk_norm == "gain":
            raw = raw * self.random(("gain", n), WIDTH)
        angle = 0.3 * np.concatenate([np.arange(len(s)) for s in SEQUENCES])[:, None]
        first, second, rest = raw[..., 0], raw[..., 1], raw[..., 2:]
        cos, sin = np.cos(angle), np.sin(angle)
        turned = np.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
        return np.concatenate([turned, rest], axis=-1)

    def key(self, n: int) -> np.ndarray:
        mix = self.wiring.layers[n].k
        if mix.has(Shared):
            return np.sum([self.weight("k", n, t) * self.keys[t.source.layer] for t in mix], axis=0)  # type: ignore[union-attr]
        raw = [self.weight("k", n, t) * self.projected("k", n if isinstance(t.source, Own) else t.source.layer) for t in mix]  # type: ignore[union-attr]
        return self.finish(n, np.sum(raw, axis=0))

    # ----------------------------------------------------------------------------------------------- questions
    def core(self, core: object) -> np.ndarray:
        match core:
            case Projected(i):
                return self.projected("v", i)
            case Embedded(i):
                return self.by_token(("embed", i), i)
            case Rows(None):
                return self.by_token("rows of all", None)
            case Rows(i):
                return self.by_token(("rows", i), i)
            case Finished(i):
                return self.values[i]
        raise AssertionError(core)

    def outside(self, stream: str, layers: tuple[int, ...]) -> np.ndarray:
        product = np.ones(())
        for n in layers:
            (term,) = self.wiring.layers[n].mix(stream).terms
            product = product * self.weight(stream, n, term)
        return product

    def determined(self) -> set[int]:
        """The layers whose value is the same at every position, of either sequence, that holds the same token."""
        found = set()
        for n, value in enumerate(self.values):
            if all(np.allclose(value[IDS == token], value[IDS == token][0], rtol=1e-9, atol=0) for token in range(VOCABULARY)):
                found.add(n)
        return found


def proportional(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether a / b is the same at every position, for each channel."""
    ratio = a / b
    return bool(np.allclose(ratio, ratio[0], rtol=1e-7, atol=0))


def simulate(plan: Plan, **options: int) -> Simulation:
    return Simulation(plan.wiring, plan.shape.qk_norm, **options)


# -------------------------------------------------------------------------------------------------------- properties
@given(plans(("all",)))
@settings(max_examples=200)
def test_ids_replace_exactly_the_values_that_the_token_determines(plan):
    """A gate in layer 0, and x changed before layer 0, are left out: the plan takes both for context."""
    assert {n for n, layer in enumerate(plan.layers) if isinstance(layer.v, Tokens)} == simulate(plan).determined()


@given(plans(("auto", "none")))
@settings(max_examples=200)
def test_by_default_layer_0_is_folded_where_a_later_folded_layer_reads_it(plan):
    before = simulate(plan)
    determined = before.determined()
    lone_tables = {n for n in determined if isinstance(plan.layers[n].v_core, Rows)}
    if plan.fold == "none":
        expected = lone_tables
    else:
        expected = (determined - {0}) | lone_tables
        after = simulate(plan, changed_source_of=0)
        if any(not np.allclose(before.values[n], after.values[n]) for n in determined - {0}):
            expected |= {0} & determined
    assert {n for n, layer in enumerate(plan.layers) if isinstance(layer.v, Tokens)} == expected


@given(plans())
@settings(max_examples=200)
def test_layers_share_a_value_exactly_where_their_contents_are_proportional(plan):
    simulation = simulate(plan)
    values = simulation.values
    for n, layer in enumerate(plan.layers):
        assert np.allclose(values[n], simulation.outside("v", layer.v_scale) * simulation.core(layer.v_core), rtol=1e-9)
    seen_through = [any(proportional(value, sum_) for sum_ in simulation.collapsing) for value in values]
    for n, layer in enumerate(plan.layers):
        for m, other in enumerate(plan.layers[:n]):
            if layer.v_core == other.v_core:
                assert proportional(values[n], values[m])
            elif not (seen_through[n] or seen_through[m]):
                assert not proportional(values[n], values[m])


@given(plans())
@settings(max_examples=200)
def test_a_key_that_is_read_elsewhere_is_the_same_key(plan):
    simulation = simulate(plan)
    for layer in plan.layers:
        expected = simulation.outside("k", layer.k_scale) * simulation.keys[layer.k_core]
        assert np.allclose(simulation.keys[layer.layer], expected, rtol=1e-9)


@given(plans())
@settings(max_examples=200)
def test_an_alias_points_to_an_earlier_layer_that_stores_the_same(plan):
    for layer in plan.layers:
        if isinstance(layer.v, Alias):
            owner = plan.layers[layer.v.layer]
            assert owner.layer < layer.layer
            assert owner.v == Store()
            assert owner.v_core == layer.v_core
        if isinstance(layer.v, Tokens):
            assert layer.v.core == layer.v_core
        if isinstance(layer.k, Alias):
            assert layer.k.layer < layer.layer
            assert plan.layers[layer.k.layer].k == Store()
            assert layer.k.layer == layer.k_core
    stored = [layer.v_core for layer in plan.layers if layer.v == Store()]
    assert len(set(stored)) == len(stored), "one content is stored twice"


def positions(window: int | None, context: int) -> int:
    return context if window is None else min(window, context)


@given(plans(), st.sampled_from([1, 5, 101]))
@settings(max_examples=200)
def test_no_plan_stores_more_than_an_ordinary_transformer(plan, context):
    """Without concatenation, which reads twice the keys, each buffer is paid for by the reader of its longest window."""
    ordinary = [positions(window, context) for window in plan.shape.windows]
    for windows in (plan.key_windows, plan.value_windows):
        if any(layer.kv for layer in plan.wiring.layers):
            assert len(windows) <= plan.num_layers
            assert sum(positions(window, context) for window in windows.values()) <= len(windows) * max(ordinary)
        else:
            assert sum(positions(window, context) for window in windows.values()) <= sum(ordinary)


@given(plans())
@settings(max_examples=200)
def test_buffers_belong_to_layers_that_store_and_are_long_enough_for_each_reader(plan):
    assert set(plan.key_windows) == {layer.layer for layer in plan.layers if layer.k == Store()}
    assert set(plan.value_windows) == {layer.layer for layer in plan.layers if layer.v == Store()}
    for n, wired in enumerate(plan.wiring.layers):
        needed = positions(plan.shape.windows[n], 10**6)
        for i in (n, *wired.kv):
            key, value = plan.layers[i].k, plan.layers[i].v
            assert positions(plan.key_windows[key.layer if isinstance(key, Alias) else i], 10**6) >= needed
            if isinstance(value, Tokens):
                assert positions(plan.id_window, 10**6) >= needed
            else:
                assert positions(plan.value_windows[value.layer if isinstance(value, Alias) else i], 10**6) >= needed


@given(plans())
@settings(max_examples=200)
def test_every_source_of_another_layer_is_handed_over(plan):
    for n, layer in enumerate(plan.layers):
        received = {(item.kind, item.stream, item.layer) for item in layer.receives}
        needed = set()
        for stream in ("x", "q", "k", "v", "a", "out"):
            for term in plan.wiring.layers[n].mix(stream):
                of = "v" if stream == "out" else stream
                if isinstance(term.source, Tap):
                    needed.add(("tap", of, term.source.layer))
                if isinstance(term.source, Shared):
                    needed.add(("shared", of, term.source.layer))
        for i in plan.wiring.layers[n].kv:
            needed |= {("shared", "k", i), ("shared", "v", i)}
        for kind, stream, i in list(needed):
            if kind == "shared" and {"k": plan.layers[i].k_scale, "v": plan.layers[i].v_scale}.get(stream):
                needed.add(("scale", stream, i))
        assert received == needed
        for item in layer.receives:
            assert item.layer < n
            assert item.stream == "x" or item in plan.layers[item.layer].provides


@given(plans())
@settings(max_examples=200)
def test_a_layer_has_the_parameters_that_its_equation_names_and_no_others(plan):
    names = [parameter.name for parameter in plan.parameters]
    assert len(set(names)) == len(names)
    budgets = {term.weight.group for _, _, mix in plan.wiring.mixes() for term in mix if isinstance(term.weight, Budget)}
    expected = {f"model.budgets.{group}.{part}" for group in budgets for part in ("scale", "logits")}
    for stream, n, mix in plan.wiring.mixes():
        at = f"model.layers.{n}.mix_x" if stream == "x" else f"model.layers.{n}.self_attn.mix_{stream}"
        if n == plan.num_layers:
            at = "model.mix_x"
        for term in mix:
            source = term.source
            label = type(source).__name__.lower()
            if isinstance(source, Tap | Shared):
                label += f"_{source.layer}"
            if isinstance(source, Table):
                label += "_shared" * source.shared
                expected.add("model.v_table.weight" if source.shared else f"model.layers.{n}.self_attn.v_table.weight")
            if isinstance(term.weight, Learn):
                expected.add(f"{at}.coefficients.{label}")
            if isinstance(term.weight, Gate):
                expected.add(f"{at}.gates.{label}.weight")
            if stream in "qkv" and isinstance(source, Own | Embed):
                expected.add(f"model.layers.{n}.self_attn.{stream}_proj.weight")
    special = ("coefficients", "gates", "budgets", "v_table", "q_proj", "k_proj", "v_proj")
    assert {name for name in names if any(part in name for part in special)} == expected
