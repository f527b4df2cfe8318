"""Counts against closed forms, published figures and a simulation that lists every cached row one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from valuepath import counts
from valuepath.config import ValuePathConfig
from valuepath.equations import parse
from valuepath.model.modeling import ValuePathForCausalLM
from valuepath.plan import Plan, Shape, make_plan
from valuepath.variants import variants

BOV = "v[last/3] = learn(1)*table"
SVFORMER = "v[1:] = tap(0)"


def shape(layers: int, **changes: object) -> Shape:
    """A small model in which every dimension is another prime (times the head structure)."""
    base = Shape(
        hidden_size=37, intermediate_size=53, num_heads=6, num_kv_heads=3, head_dim=14, vocab_size=101, windows=(None,) * layers
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def nanochat(layers: int, width: int, heads: int, *, window: int | None = None, vocab: int = 32768) -> Shape:
    """ReLU squared MLP of 4d, norms without gain, every fourth layer and the last one long."""
    windows = tuple(None if n % 4 == 3 or n == layers - 1 else window for n in range(layers))
    return Shape(
        hidden_size=width, intermediate_size=4 * width, num_heads=heads, num_kv_heads=heads, head_dim=width // heads,
        vocab_size=vocab, windows=windows, mlp="relu2", norm_gain=False, qk_norm="plain",
    )  # fmt: skip


def plan_of(text: str, model: Shape, fold: str = "auto") -> Plan:
    return make_plan(parse(text, model.num_layers), model, fold)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ parameters
@pytest.mark.parametrize(
    ("layers", "width", "heads", "ffn", "published"),
    [(8, 512, 8, 1792, 81_901_056), (12, 768, 12, 2688, 179_874_048), (24, 1024, 16, 3584, 467_921_920)],
)
def test_the_three_llama_shapes_have_the_published_number_of_parameters(layers, width, heads, ffn, published):
    model = Shape(width, ffn, heads, heads, width // heads, 50_277, (None,) * layers)
    found = counts.parameter_counts(plan_of("", model))
    closed = 2 * 50_277 * width + layers * (4 * width**2 + 3 * width * ffn + 2 * width) + width
    assert found.total == closed == published
    assert found.by_role == {
        "embedding": 50_277 * width,
        "head": 50_277 * width,
        "matrix": layers * (4 * width**2 + 3 * width * ffn),
        "norm": (2 * layers + 1) * width,
    }
    assert found.in_products == found.multiplied == closed - 50_277 * width - (2 * layers + 1) * width


def test_bov_adds_383_778_816_parameters_and_8_scalars_and_768_mib_of_tables():
    model = nanochat(24, 1536, 12)
    plain, bov = (counts.parameter_counts(plan_of(text, model)) for text in ("", BOV))
    assert bov.total - plain.total == 8 * (32768 * 1536 - 1536**2) + 8 == 383_778_816 + 8
    assert bov.by_role["coefficient"] == 8
    assert "coefficient" not in plain.by_role
    assert (plain.tables, bov.tables) == (0, 8 * 32768 * 1536)
    cache = counts.cache_counts(plan_of(BOV, model), context=2048)
    assert cache.shared_bytes == cache.shared_trained_bytes == 768 * 2**20
    assert plain.in_products - bov.in_products == 8 * 1536**2


def test_a_matrix_that_a_token_meets_twice_is_one_parameter_and_two_products():
    model = shape(5)
    width, rows = 37, 3 * 14
    once = counts.parameter_counts(plan_of("v[2] = own + embed", model))
    twice = counts.parameter_counts(plan_of("v[2] = learn(1, per=head)*own + embed", model))
    assert once.multiplied == once.in_products == twice.in_products
    assert twice.multiplied - twice.in_products == rows * width


def test_tied_embeddings_are_stored_once_and_multiplied_once():
    tied = counts.parameter_counts(plan_of("", shape(3, tied=True)))
    untied = counts.parameter_counts(plan_of("", shape(3)))
    assert untied.total - tied.total == 101 * 37
    assert untied.multiplied == tied.multiplied


def test_optimiser_state_by_hand():
    layers, d, f, q, kv, vocab = 4, 37, 53, 6 * 14, 3 * 14, 101
    plan = plan_of("v[1] = learn(1)*table; v[3] = own + gate(3, 5)*table", shape(layers, attention_bias=True))
    matrices = layers * (d * q + d * kv + q * d + 3 * d * f) + (layers - 1) * d * kv  # layer 1 has no W_V
    biases = layers * (q + kv) + (layers - 1) * kv
    rest = 2 * vocab * d + (2 * layers + 1) * d + biases + 2 * vocab * kv + 1 + 3 * 5
    assert counts.parameter_counts(plan).total == matrices + rest
    adamw, muon = counts.optimizer_states(plan, bytes_per_element=4)
    assert adamw.elements == 2 * (matrices + rest)
    assert adamw.bytes == 4 * adamw.elements
    assert muon.elements == matrices + 2 * rest
    assert muon.bytes == 4 * muon.elements


# ----------------------------------------------------------------------------------------------------------- FLOPs
def test_the_published_pair_of_training_flops_comes_out_exactly():
    model = nanochat(24, 1536, 12, window=512)
    assert (model.windows.count(512), model.windows.count(None)) == (18, 6)
    matrices = 24 * (4 * 1536**2 + 2 * 1536 * 6144) + 32768 * 1536
    attention = 12 * 1536 * (18 * 512 + 6 * 2048)
    plain = counts.flops_per_token(plan_of("", model), 2048)
    bov = counts.flops_per_token(plan_of(BOV, model), 2048)
    assert plain.training == 6 * matrices + attention == 4_775_215_104
    assert bov.training == 6 * (matrices - 8 * 1536**2) + attention == 4_661_968_896
    assert plain.forward * 3 == plain.training
    assert bov.forward * 3 == bov.training
    assert counts.Percent(plain.training - bov.training, plain.training, "").value == pytest.approx(2.37, abs=0.005)


def test_flops_of_windows_concatenation_and_a_second_value_product():
    model = shape(4, windows=(7, None, 7, None), num_kv_heads=2)
    plain = counts.flops_per_token(plan_of("", model), 23)
    assert plain.attention_training == 12 * 6 * 14 * (7 + 23 + 7 + 23)
    short = counts.flops_per_token(plan_of("", model), 5)
    assert short.attention_training == 12 * 6 * 14 * (5 * 4)
    wider = counts.flops_per_token(
        plan_of("kv[2] = concat(own, shared(0)); kv[3] = concat(own, shared(0), shared(1))", model), 23
    )
    assert wider.attention_training == 12 * 6 * 14 * (7 + 23 + 2 * 7 + 3 * 23)
    assert wider.matrix_training == plain.matrix_training
    both = counts.flops_per_token(plan_of("v[1] = learn(1, per=channel)*own + embed", model), 23)
    assert both.training - plain.training == 6 * 37 * 2 * 14
    assert counts.flops_per_token(plan_of("v[1] = embed", model), 23) == plain  # x0 W_V saves nothing
    gated = counts.flops_per_token(plan_of("v[1] = own + gate(3, 5)*table", model), 23)
    assert gated.training - plain.training == 6 * 2 * 5


# ------------------------------------------------------------------------------------- cache: row by row simulation
def simulated(labels, windows, concat, context: int, batch: int, row: int) -> tuple[int, int, int]:
    """(key elements, value elements, ids): list every row that any reader will ask for at the next step, and count it once.

    ``labels(n)`` names the content of layer n's key and value; None for the value means that the token id is enough.
    """
    keys, values, ids = set(), set(), set()
    for n, window in enumerate(windows):
        for b in range(batch):
            for t in range(context):
                if window is not None and context - t > window:
                    continue
                for source in (n, *concat(n)):
                    key, value = labels(source)
                    keys.add((key, b, t))
                    if value is None:
                        ids.add((b, t))
                    else:
                        values.add((value, b, t))
    return len(keys) * row, len(values) * row, len(ids)


def own(n: int) -> tuple[object, object]:
    return n, ("V", n)


SIMULATED = {
    "ordinary": ("", "auto", own),
    "everything folded": ("", "all", lambda n: (n, None if n == 0 else ("V", n))),
    "svformer as published": (SVFORMER, "none", lambda n: (n, "V0")),
    "svformer folded": (SVFORMER, "auto", lambda n: (n, None)),
    "bov": (BOV, "none", lambda n: (n, None) if n >= 4 else own(n)),
    "mix and reuse": (
        "v[2:5] = 0.5*own + 0.5*tap(1); v[5] = 3*shared(3)", "auto", lambda n: (n, ("mix", {5: 3}.get(n, n)) if n > 1 else n)
    ),
    "pairs": (
        "k[1::2] = shared(n-1); v[1::2] = shared(n-1)", "none", lambda n: (n - n % 2, ("V", n - n % 2))
    ),
    "pairs folded": (
        "k[1::2] = shared(n-1); v[1::2] = shared(n-1)", "auto", lambda n: (n - n % 2, ("V", n - n % 2) if n > 1 else None)
    ),
    "embedding on every second layer": ("v[1::2] = embed", "auto", lambda n: (n, None) if n % 2 else own(n)),
    "gate keeps the mix": ("v[2:] = own + gate(3, 5)*table", "auto", own),
    "token mix": ("v[3:] = tap(0) + learn(2, per=head)*table", "auto", lambda n: (n, None) if n >= 3 or n == 0 else own(n)),
    "changed embedding": ("x[0] = 2*own; v[1:] = tap(0)", "auto", lambda n: (n, "V0")),
    "keys of a plain layer": ("k[3:] = tap(1); k[2] = learn(1)*shared(0)", "auto", lambda n: ((0, 1, 0, 1, 1, 1)[n], n)),
    "concatenated": ("kv[2:] = concat(own, shared(1))", "auto", own),
    "concatenated with the first": ("kv[2:] = concat(own, shared(0))", "all", lambda n: (n, None if n == 0 else ("V", n))),
}  # fmt: skip


@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("seed", range(4))
def test_cache_counts_equal_the_rows_listed_one_by_one(name, seed):
    text, fold, labels = SIMULATED[name]
    draw = random.Random(f"{name} {seed}")
    windows = tuple(draw.choice((None, 3, 5, 11)) for _ in range(6)) if seed else (None,) * 6
    context, batch = draw.randint(1, 17), draw.randint(1, 3)
    plan = plan_of(text, shape(6, windows=windows), fold)
    found = counts.cache_counts(plan, context, batch, bytes_per_element=2)
    keys, values, ids = simulated(labels, windows, lambda n: plan.wiring.layers[n].kv, context, batch, row=3 * 14)
    assert (found.key_elements, found.value_elements, found.ids) == (keys, values, ids)
    assert found.growing_bytes == 2 * (keys + values) + 4 * ids


def test_a_lone_raw_key_is_stored_again_under_a_key_norm_with_gain():
    plain, gain = (counts.cache_counts(plan_of("k[1:] = tap(0)", shape(3, qk_norm=q)), 13) for q in ("plain", "gain"))
    assert (plain.key_elements, gain.key_elements) == (13 * 42, 3 * 13 * 42)
    assert [layer.k.kind for layer in plain.layers] == ["store", "alias", "alias"]


def test_each_layer_says_where_its_keys_and_values_are():
    plan = plan_of("v[1:3] = own; v[3:] = shared(1); v[5] = table", shape(6, windows=(5, 5, None, None, 5, 5)))
    cache = counts.cache_counts(plan, context=11, batch=2, bytes_per_element=4)
    assert [layer.v.kind for layer in cache.layers] == ["store", "store", "store", "alias", "alias", "tokens"]
    assert [layer.v.positions for layer in cache.layers] == [
        5,
        11,
        11,
        0,
        0,
        0,
    ]  # layer 1's buffer serves layer 3, which sees all
    assert [layer.k.positions for layer in cache.layers] == [5, 5, 11, 11, 5, 5]
    assert [layer.v.bytes for layer in cache.layers] == [4 * 2 * p * 42 for p in (5, 11, 11, 0, 0, 0)]
    assert cache.ids == 2 * 5
    assert cache.id_bytes == 4 * cache.ids
    assert [(t.name, t.readers, t.rows, t.bytes, t.trained) for t in cache.tables] == [
        ("table of layer 5", (5,), 101, 101 * 42 * 4, True)
    ]


def test_a_shared_table_is_one_table_and_a_folded_one_is_no_parameter():
    shared = counts.cache_counts(plan_of("v[2:] = learn(1)*table(shared)", shape(6)), 7)
    assert [(t.name, t.readers) for t in shared.tables] == [("shared table", (2, 3, 4, 5))]
    folded = plan_of(SVFORMER, shape(6))
    cache = counts.cache_counts(folded, 7)
    assert [(t.name, t.readers, t.trained) for t in cache.tables] == [("V_0", (0, 1, 2, 3, 4, 5), False)]
    assert cache.shared_bytes == 2 * 101 * 42
    assert cache.shared_trained_bytes == 0
    assert counts.parameter_counts(folded).tables == 0


# ------------------------------------------------------------------------------------------ cache: published figures
@pytest.mark.parametrize(("layers", "published"), [(8, 56.25), (24, 52.08)])
def test_svformer_as_published_keeps_n_plus_1_of_2n(layers, published):
    both = counts.compare_cache(plan_of(SVFORMER, nanochat(layers, 512, 8), "none"), context=2048)
    kept = both.kept()
    assert Fraction(kept.numerator, kept.denominator) == Fraction(layers + 1, 2 * layers)
    assert round(kept.value, 2) == published
    assert kept.of == "the K+V cache of the Transformer with 8 key/value heads"
    alone = both.kept("v")
    assert Fraction(alone.numerator, alone.denominator) == Fraction(1, layers)
    assert "V cache alone" in alone.of


def test_svformer_with_grouped_queries_is_held_against_full_heads():
    model = replace(nanochat(8, 512, 8), num_kv_heads=2)
    kept = counts.compare_cache(plan_of(SVFORMER, model, "none"), 2048, num_kv_heads=8).kept()
    assert Fraction(kept.numerator, kept.denominator) == Fraction(9, 2 * 8 * 4)
    assert round(kept.value, 2) == 14.06
    assert "8 key/value heads" in kept.of
    same = counts.compare_cache(plan_of(SVFORMER, model, "none"), 2048).kept()
    assert same.value == 56.25
    assert "2 key/value heads" in same.of


def test_folded_svformer_holds_keys_and_ids_only():
    cache = counts.cache_counts(plan_of(SVFORMER, nanochat(8, 512, 8)), context=1000, batch=3)
    assert cache.value_bytes == 0
    assert cache.growing_bytes == 3 * (8 * 1000 * 512 * 2 + 4 * 1000)


@pytest.mark.parametrize(("context", "published"), [(256 * 1024, 7.0), (1024 * 1024, 14.3)])
def test_bov_saves_the_published_share_of_the_kv_cache(context, published):
    both = counts.compare_cache(plan_of(BOV, nanochat(12, 768, 6, vocab=151_936)), context)
    saved = both.saved(ids=False, tables=True)
    assert Fraction(saved.numerator, saved.denominator) == Fraction(context - 151_936, 6 * context)
    # the note rounds 14.252 to 14.3: compare within half a unit of its last digit
    assert saved.value == pytest.approx(published, abs=0.05)
    alone = both.saved("v", ids=False, tables=True)
    assert Fraction(alone.numerator, alone.denominator) == Fraction(context - 151_936, 3 * context)
    with_ids = both.saved(ids=True, tables=True)
    assert saved.numerator - with_ids.numerator == 4 * context


def test_bov_limits_are_a_sixth_of_the_kv_cache_and_a_third_of_the_v_cache():
    both = counts.compare_cache(plan_of(BOV, nanochat(12, 768, 6, vocab=151_936)), 10**12)
    assert both.saved(ids=False, tables=True).value == pytest.approx(100 / 6, abs=1e-4)
    assert both.saved("v", ids=False, tables=True).value == pytest.approx(100 / 3, abs=1e-4)
    growing = both.saved(ids=False)
    assert Fraction(growing.numerator, growing.denominator) == Fraction(1, 6)


def test_one_sequence_of_as_many_tokens_as_the_vocabulary():
    vocab = 32768
    sv = counts.compare_cache(plan_of(SVFORMER, nanochat(8, 512, 8)), vocab).kept(ids=False, tables=True)
    assert Fraction(sv.numerator, sv.denominator) == Fraction(9, 16)  # (N T + |V|) / 2 N T = 0.56
    bov = counts.compare_cache(plan_of(BOV, nanochat(12, 768, 6)), vocab).kept(ids=False, tables=True)
    assert bov.numerator == bov.denominator


# ------------------------------------------------------------------------------------------------------ break-even
def test_bov_breaks_even_at_the_vocabulary_if_ids_are_ignored():
    plan = plan_of(BOV, nanochat(12, 768, 6))
    for context in (1, 100, 2048, 32768, 10**6):
        assert counts.break_even(plan, context, ids=False).exact == 32768
    counted = counts.break_even(plan, 2048)
    saved = 4 * 768 * 2 - 4  # bytes a token: four values of 768 in two bytes, less one id
    assert counted.exact == Fraction(4 * 32768 * 768 * 2, saved)
    assert counted.tokens == 32790
    assert counted.sequences == pytest.approx(float(counted.exact) / 2048)


def test_break_even_of_the_rows_in_use():
    plan = plan_of(SVFORMER, nanochat(8, 512, 8))
    saved = 8 * 512 * 2 - 4
    assert counts.break_even(plan, 2048).exact == Fraction(32768 * 512 * 2, saved)
    assert counts.break_even(plan, 2048, distinct=4000).exact == Fraction(4000 * 512 * 2, saved)
    cache = counts.cache_counts(plan, 2048)
    assert cache.rows_in_use_bytes(4000) == 4000 * 512 * 2
    assert cache.rows_in_use_bytes(32768) == cache.shared_bytes
    with pytest.raises(ValueError, match="the vocabulary has only 32,768"):
        cache.rows_in_use_bytes(32769)


def test_at_break_even_both_caches_are_equally_large():
    plan = plan_of(BOV, nanochat(12, 768, 6, window=64))
    even = counts.break_even(plan, 500)
    sequences = even.exact / 500
    one = counts.compare_cache(plan, 500)
    assert sequences * one.cache.growing_bytes + one.cache.shared_bytes == sequences * one.reference.growing_bytes


def test_break_even_of_what_saves_nothing():
    plain = plan_of("", shape(4))
    assert counts.break_even(plain, 10).exact == 0  # no table to pay for
    folded_first = plan_of("kv[1:] = concat(own, shared(0))", shape(4, windows=(3, None, None, None)), "all")
    even = counts.break_even(folded_first, 1000)  # layer 0's short buffer has to be kept whole
    assert even.saved_per_sequence < 0
    assert even.exact is None
    assert even.tokens is None
    assert even.sequences is None


@pytest.mark.parametrize("windows", [(None,) * 6, (7, 7, 7, None, 7, None), (40, 40, 40, 40, 100, None), (9,) * 6])
@pytest.mark.parametrize("text", [BOV, SVFORMER, "v[1:4] = tap(0); v[5] = embed"])
@pytest.mark.parametrize("batch", [1, 3])
def test_break_even_context_is_the_first_context_that_pays(windows, text, batch):
    plan = plan_of(text, shape(6, windows=windows))

    def pays(context: int) -> bool:
        both = counts.compare_cache(plan, context, batch)
        return both.saved(tables=True).numerator >= 0

    scanned = next((t for t in range(1, 500) if pays(t)), None)
    assert counts.break_even_context(plan, batch) == scanned


# ----------------------------------------------------------------------------------------------------------- others
def test_a_percentage_names_its_denominator():
    share = counts.Percent(1, 3, "the cake")
    assert str(share) == "33.33 % of the cake"
    assert share.complement == counts.Percent(2, 3, "the cake")
    assert counts.Percent(5, 4, "the cake").complement.value == -25.0


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "2"])
def test_sizes_that_are_no_sizes(bad):
    plan = plan_of("", shape(2))
    for call in (
        lambda: counts.flops_per_token(plan, bad),
        lambda: counts.cache_counts(plan, bad),
        lambda: counts.cache_counts(plan, 1, bad),
        lambda: counts.cache_counts(plan, 1, 1, bad),
        lambda: counts.optimizer_states(plan, bad),
    ):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            call()


def test_the_reference_is_the_plain_model_of_the_same_shape():
    model = shape(4, windows=(3, None, 3, None))
    plan = plan_of("v[1:] = tap(0)", model, "all")
    reference = counts.reference_plan(plan)
    assert reference == plan_of("", model, "none")
    assert counts.reference_plan(plan, 6).shape == replace(model, num_kv_heads=6)
    cache = counts.cache_counts(reference, 10, 2)
    assert cache.key_elements == cache.value_elements == 2 * (3 + 10 + 3 + 10) * 42
    assert cache.ids == 0
    assert cache.tables == ()


# -------------------------------------------------------------------------------------------------- the built model
@pytest.mark.parametrize("style", ["llama", "nanochat"])
@pytest.mark.parametrize("name", variants())
def test_counts_are_those_of_the_built_model(name, style):
    """Parameters by name and size, and FLOPs as torch counts them (math attention, which it can see), to the last one."""
    config = ValuePathConfig(
        variant=name, style=style, window_pattern="L", num_hidden_layers=6, hidden_size=58, num_attention_heads=6,
        num_key_value_heads=3, head_dim=14, vocab_size=101, intermediate_size=53,
    )  # fmt: skip
    plan, model, tokens = config.plan(), ValuePathForCausalLM(config), 37
    assert {p.name: p.shape for p in plan.parameters} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert counts.parameter_counts(plan).total == model.num_parameters()
    expected = counts.flops_per_token(plan, tokens)
    ids = torch.arange(tokens).unsqueeze(0)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = model(ids, use_cache=False).logits
        assert counter.get_total_flops() == expected.forward * tokens
        logits.sum().backward()
    assert counter.get_total_flops() == expected.training * tokens
