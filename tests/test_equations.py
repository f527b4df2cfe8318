"""The grammar of equations: every form against wirings written by hand as data.

What is refused, and where the caret then stands, is tested in ``test_equation_errors``.
"""

from __future__ import annotations

import pytest

from valuepath.equations import parse
from valuepath.wiring import (
    NOTHING,
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

PLAIN = LayerWiring()
HALF = Fixed(0.5)


def mix(*terms: Term, renorm: str | None = None) -> Mix:
    return Mix(terms, renorm)  # type: ignore[arg-type]


def lone(source, weight=Fixed(1.0)) -> Mix:  # noqa: B008 - a frozen value
    return Mix((Term(source, weight),))


def changed(text: str, num_layers: int, stream: str) -> list[int]:
    """The sites of a stream that an equation changed."""
    wiring = parse(text, num_layers)
    sites = range(num_layers + 1 if stream == "x" else num_layers)
    return [
        n for n in sites if (wiring.x_site(n) if stream == "x" else getattr(wiring.layers[n], stream)) != getattr(PLAIN, stream)
    ]


# ----------------------------------------------------------------------------------------------------- whole wirings
WHOLE = {
    "nothing": ("", 3, Wiring((PLAIN,) * 3)),
    "only a comment": ("# an ordinary Transformer\n\n", 2, Wiring((PLAIN,) * 2)),
    "first value mixed in": (
        "v[1:] = 0.5*own + 0.5*tap(0)",
        3,
        Wiring((PLAIN, *[LayerWiring(v=mix(Term(Own(), HALF), Term(Tap(0), HALF)))] * 2)),
    ),
    "first value only": ("v[1:] = tap(0)", 3, Wiring((PLAIN, *[LayerWiring(v=lone(Tap(0)))] * 2))),
    "table in the last third": (
        "v[last/3] = learn(1)*table",
        4,
        Wiring((PLAIN, PLAIN, *[LayerWiring(v=lone(Table(), Learn(1.0)))] * 2)),
    ),
    "one table for all": (
        "v[last/3] = learn(1)*table(shared)",
        3,
        Wiring((PLAIN, PLAIN, LayerWiring(v=lone(Table(shared=True), Learn(1.0))))),
    ),
    "budget": (
        "v[1:] = learn(0.5)*own + budget(N)*tap(0)",
        3,
        Wiring((PLAIN, *[LayerWiring(v=mix(Term(Own(), Learn(0.5)), Term(Tap(0), Budget(3.0))))] * 2)),
    ),
    "dense": (
        "v[1:] = learn(1)*own + sum(learn(0)*tap(i) for i in range(n))",
        3,
        Wiring(
            (
                PLAIN,
                LayerWiring(v=mix(Term(Own(), Learn(1.0)), Term(Tap(0), Learn(0.0)))),
                LayerWiring(v=mix(Term(Own(), Learn(1.0)), Term(Tap(0), Learn(0.0)), Term(Tap(1), Learn(0.0)))),
            )
        ),
    ),
    "rescaled": (
        "v[1:] = renorm(0.5*own + 0.5*tap(0), to=own, axis=token)",
        2,
        Wiring((PLAIN, LayerWiring(v=mix(Term(Own(), HALF), Term(Tap(0), HALF), renorm="token")))),
    ),
    "gated table on every second layer, the last included": (
        "v[::-2] = own + gate(3, 12)*table",
        4,
        Wiring(
            (
                PLAIN,
                LayerWiring(v=mix(Term(Own()), Term(Table(), Gate(3.0, 12)))),
                PLAIN,
                LayerWiring(v=mix(Term(Own()), Term(Table(), Gate(3.0, 12)))),
            )
        ),
    ),
    "added after attention": (
        "out[1:] = 0.4*tap(v, 0) - 0.4*own(v)",
        2,
        Wiring((PLAIN, LayerWiring(out=mix(Term(Tap(0), Fixed(0.4)), Term(Own(), Fixed(-0.4)))))),
    ),
    "added after attention, less the mixed value": (
        "v[1:] = 0.5*own + 0.5*tap(0); out[1:] = 0.2*tap(v, 0) - 0.2*final(v)",
        2,
        Wiring(
            (
                PLAIN,
                LayerWiring(
                    v=mix(Term(Own(), HALF), Term(Tap(0), HALF)),
                    out=mix(Term(Tap(0), Fixed(0.2)), Term(Final(), Fixed(-0.2))),
                ),
            )
        ),
    ),
    "keys and values of the layer before": (
        "k[1::2] = shared(n-1); v[1::2] = shared(n-1)",
        4,
        Wiring(
            (PLAIN, LayerWiring(k=lone(Shared(0)), v=lone(Shared(0))), PLAIN, LayerWiring(k=lone(Shared(2)), v=lone(Shared(2))))
        ),
    ),
    "the same as one equation": (
        "kv[1::2] = shared(n-1)",
        4,
        Wiring(
            (PLAIN, LayerWiring(k=lone(Shared(0)), v=lone(Shared(0))), PLAIN, LayerWiring(k=lone(Shared(2)), v=lone(Shared(2))))
        ),
    ),
    "keys concatenated": (
        "kv[1:] = concat(own, shared(0))",
        3,
        Wiring((PLAIN, LayerWiring(kv=(0,)), LayerWiring(kv=(0,)))),
    ),
    "several parts concatenated": (
        "kv[2] = concat(own, shared(1), shared(0))",
        3,
        Wiring((PLAIN, PLAIN, LayerWiring(kv=(1, 0)))),
    ),
    "weighted average of all states": (
        "x[1:N+1] = learn(1)*own + sum(learn(0)*tap(i) for i in range(n))",
        2,
        Wiring(
            (PLAIN, LayerWiring(x=mix(Term(Own(), Learn(1.0)), Term(Tap(0), Learn(0.0))))),
            final_x=mix(Term(Own(), Learn(1.0)), Term(Tap(0), Learn(0.0)), Term(Tap(1), Learn(0.0))),
        ),
    ),
    "no skip around the first attention": ("skip_attn[:1] = 0", 2, Wiring((LayerWiring(skip_attn=Fixed(0.0)), PLAIN))),
    "learned skips": (
        "skip_attn = learn(1); skip_mlp[1] = learn(0.5, per=channel)",
        2,
        Wiring(
            (
                LayerWiring(skip_attn=Learn(1.0)),
                LayerWiring(skip_attn=Learn(1.0), skip_mlp=Learn(0.5, "channel")),
            )
        ),
    ),
    "query, key and attention mixed": (
        "q[1:] = 0.5*own + 0.5*tap(0)\nk[1:] = 0.5*own + 0.5*tap(0)\na[1:] = 0.5*own + 0.5*tap(0)",
        2,
        Wiring((PLAIN, LayerWiring(**{s: mix(Term(Own(), HALF), Term(Tap(0), HALF)) for s in "qka"}))),
    ),
}


@pytest.mark.parametrize(("text", "num_layers", "expected"), WHOLE.values(), ids=WHOLE)
def test_a_whole_equation_becomes_the_wiring_written_by_hand(text, num_layers, expected):
    assert parse(text, num_layers) == expected


# ------------------------------------------------------------------------------------------------------------ layers
LAYERS = [
    # text, N, sites
    ("v", 4, [0, 1, 2, 3]),
    ("v[:]", 4, [0, 1, 2, 3]),
    ("v[1:]", 4, [1, 2, 3]),
    ("v[:2]", 4, [0, 1]),
    ("v[1:3]", 5, [1, 2]),
    ("v[-2:]", 5, [3, 4]),
    ("v[:-1]", 4, [0, 1, 2]),
    ("v[::2]", 5, [0, 2, 4]),
    ("v[1::2]", 5, [1, 3]),
    ("v[::-1]", 3, [0, 1, 2]),
    ("v[::-2]", 4, [1, 3]),
    ("v[::-2]", 5, [0, 2, 4]),
    ("v[4:1:-2]", 5, [2, 4]),
    ("v[-1:-4:-1]", 6, [3, 4, 5]),
    ("v[2:99]", 4, [2, 3]),
    ("v[0]", 4, [0]),
    ("v[3]", 4, [3]),
    ("v[-1]", 4, [3]),
    ("v[-4]", 4, [0]),
    ("v[[1, 3]]", 4, [1, 3]),
    ("v[1, 3]", 4, [1, 3]),
    ("v[[3, 0]]", 4, [0, 3]),
    ("v[[0, -1]]", 4, [0, 3]),
    ("v[[2]]", 4, [2]),
    ("v[N-1]", 4, [3]),
    ("v[N//2:]", 5, [2, 3, 4]),
    ("v[N % 3]", 5, [2]),
    ("v[[N//4, N//2, 3*N//4]]", 8, [2, 4, 6]),
    ("v[6/2]", 4, [3]),
    ("v[1.0]", 4, [1]),
    ("v[last/1]", 3, [0, 1, 2]),
    # last/2: n >= N//2, last/3: n >= (2N)//3
    ("v[last/2]", 4, [2, 3]),
    ("v[last/2]", 5, [2, 3, 4]),
    ("v[last/3]", 1, [0]),
    ("v[last/3]", 2, [1]),
    ("v[last/3]", 3, [2]),
    ("v[last/3]", 4, [2, 3]),
    ("v[last/3]", 5, [3, 4]),
    ("v[last/3]", 6, [4, 5]),
    ("v[last/3]", 8, [5, 6, 7]),
    ("v[last/3]", 12, [8, 9, 10, 11]),
    ("v[last/99]", 4, [3]),
    # x has a site more than there are layers: the one that feeds the final norm
    ("x", 2, [0, 1, 2]),
    ("x[:]", 2, [0, 1, 2]),
    ("x[1:]", 2, [1, 2]),
    ("x[-1]", 2, [2]),
    ("x[N]", 2, [2]),
    ("x[-3]", 2, [0]),
    ("x[:N]", 2, [0, 1]),
    ("x[1:N+1]", 3, [1, 2, 3]),
    ("x[::-2]", 3, [1, 3]),
    ("x[last/3]", 3, [2]),  # a share of the layers, not of the sites
    ("x[last/1]", 2, [0, 1]),
]


@pytest.mark.parametrize(("left", "num_layers", "expected"), LAYERS, ids=[f"{left} of {n}" for left, n, _ in LAYERS])
def test_layers_are_python_slices_numbers_lists_or_the_last_share(left, num_layers, expected):
    assert changed(f"{left} = 3*own", num_layers, left[0]) == expected


def test_the_last_share_is_the_published_last_third_for_every_number_of_layers():
    for num_layers in range(1, 50):
        assert changed("v[last/3] = 3*own", num_layers, "v") == [n for n in range(num_layers) if n >= (2 * num_layers) // 3]


# ------------------------------------------------------------------------------------------------- sums and weights
SUMS = {
    # right side -> mix of layer 5 of 8
    "own": OWN,
    "+own": OWN,
    "(own)": OWN,
    "-own": lone(Own(), Fixed(-1.0)),
    "--own": OWN,
    "-(-own)": OWN,
    "tap(3)": lone(Tap(3)),
    "shared(4)": lone(Shared(4)),
    "table": lone(Table()),
    "table()": lone(Table()),
    "table(shared)": lone(Table(shared=True)),
    "table(init=uniform)": lone(Table(init="uniform")),
    "table(init='uniform')": lone(Table(init="uniform")),
    "table(init=projected)": lone(Table()),
    "table(shared, init=uniform)": lone(Table(shared=True, init="uniform")),
    "embed": lone(Embed()),
    # numbers
    "2*own": lone(Own(), Fixed(2.0)),
    "own*2": lone(Own(), Fixed(2.0)),
    "2*own*3": lone(Own(), Fixed(6.0)),
    "own/4": lone(Own(), Fixed(0.25)),
    "3*own/4": lone(Own(), Fixed(0.75)),
    "(3/4)*own": lone(Own(), Fixed(0.75)),
    "own/4*2": lone(Own(), Fixed(0.5)),
    "own/(4*2)": lone(Own(), Fixed(0.125)),
    "own/-4": lone(Own(), Fixed(-0.25)),
    "1e-3*own": lone(Own(), Fixed(1e-3)),
    "-0.5*own": lone(Own(), Fixed(-0.5)),
    "(1 + 2*3 - 4)*own": lone(Own(), Fixed(3.0)),
    "(7 // 2)*own": lone(Own(), Fixed(3.0)),
    "(7 % 4)*own": lone(Own(), Fixed(3.0)),
    "-(7 // -2)*own": lone(Own(), Fixed(4.0)),
    "n*own": lone(Own(), Fixed(5.0)),
    "N*own": lone(Own(), Fixed(8.0)),
    "(n+1)/N*own": lone(Own(), Fixed(0.75)),
    "own*(n+1)/N": lone(Own(), Fixed(0.75)),
    "(1 - n/N)*own": lone(Own(), Fixed(0.375)),
    # layer numbers
    "tap(n-1)": lone(Tap(4)),
    "tap(N//2 - 1)": lone(Tap(3)),
    "tap(4/2)": lone(Tap(2)),
    "tap(n % 2)": lone(Tap(1)),
    "shared(2*(n//2) - 2)": lone(Shared(2)),
    # weights
    "learn(1)*own": lone(Own(), Learn(1.0)),
    "own*learn(1)": lone(Own(), Learn(1.0)),
    "learn(-0.5)*own": lone(Own(), Learn(-0.5)),
    "learn(1/N)*own": lone(Own(), Learn(0.125)),
    "learn(0)*own": lone(Own(), Learn(0.0)),
    "learn(2, per=layer)*own": lone(Own(), Learn(2.0)),
    "learn(2, per=head)*own": lone(Own(), Learn(2.0, "head")),
    "learn(2, per=channel)*own": lone(Own(), Learn(2.0, "channel")),
    "learn(2, per='head')*own": lone(Own(), Learn(2.0, "head")),
    "budget(N)*tap(0)": lone(Tap(0), Budget(8.0)),
    "budget(2.5)*tap(0)": lone(Tap(0), Budget(2.5)),
    "gate(3, 12)*table": lone(Table(), Gate(3.0, 12)),
    "gate(0.5, N+1)*table": lone(Table(), Gate(0.5, 9)),
    # a sign in front of a weight turns its start around
    "-learn(0.3)*own": lone(Own(), Learn(-0.3)),
    "-1*learn(0.3)*own": lone(Own(), Learn(-0.3)),
    "learn(0.3)*-own": lone(Own(), Learn(-0.3)),
    "-budget(4)*tap(0)": lone(Tap(0), Budget(-4.0)),
    "-gate(3, 2)*table": lone(Table(), Gate(-3.0, 2)),
    "own - learn(0.3)*tap(0)": mix(Term(Own()), Term(Tap(0), Learn(-0.3))),
    # sums
    "own + tap(0)": mix(Term(Own()), Term(Tap(0))),
    "own - tap(0)": mix(Term(Own()), Term(Tap(0), Fixed(-1.0))),
    "-own - tap(0)": mix(Term(Own(), Fixed(-1.0)), Term(Tap(0), Fixed(-1.0))),
    "own + 2*tap(0) - tap(1)/4": mix(Term(Own()), Term(Tap(0), Fixed(2.0)), Term(Tap(1), Fixed(-0.25))),
    "own + table + table(shared) + embed": mix(Term(Own()), Term(Table()), Term(Table(shared=True)), Term(Embed())),
    "tap(0) + shared(0)": mix(Term(Tap(0)), Term(Shared(0))),
    # numbers are given out over brackets
    "0.5*(own + 4*tap(0))": mix(Term(Own(), HALF), Term(Tap(0), Fixed(2.0))),
    "(own + 4*tap(0))*0.5": mix(Term(Own(), HALF), Term(Tap(0), Fixed(2.0))),
    "(own + 4*tap(0))/2": mix(Term(Own(), HALF), Term(Tap(0), Fixed(2.0))),
    "-(own - tap(0))": mix(Term(Own(), Fixed(-1.0)), Term(Tap(0))),
    "own - (tap(0) - tap(1))": mix(Term(Own()), Term(Tap(0), Fixed(-1.0)), Term(Tap(1))),
    "own - 2*(tap(0) - (tap(1) + tap(2)))": mix(
        Term(Own()), Term(Tap(0), Fixed(-2.0)), Term(Tap(1), Fixed(2.0)), Term(Tap(2), Fixed(2.0))
    ),
    "-(learn(1)*own + tap(0))": mix(Term(Own(), Learn(-1.0)), Term(Tap(0), Fixed(-1.0))),
    # written out by a loop
    "sum(tap(i) for i in range(3))": mix(Term(Tap(0)), Term(Tap(1)), Term(Tap(2))),
    "sum(tap(i) for i in range(1, 3))": mix(Term(Tap(1)), Term(Tap(2))),
    "sum(tap(i) for i in range(0, n, 2))": mix(Term(Tap(0)), Term(Tap(2)), Term(Tap(4))),
    "sum(tap(i) for i in range(2, -1, -1))": mix(Term(Tap(2)), Term(Tap(1)), Term(Tap(0))),
    "sum(2*tap(j) for j in range(2))": mix(Term(Tap(0), Fixed(2.0)), Term(Tap(1), Fixed(2.0))),
    "0.5*sum(tap(i) for i in range(2))": mix(Term(Tap(0), HALF), Term(Tap(1), HALF)),
    "own - sum(tap(i) for i in range(2))": mix(Term(Own()), Term(Tap(0), Fixed(-1.0)), Term(Tap(1), Fixed(-1.0))),
    "sum((i+1)*tap(i) for i in range(2))": mix(Term(Tap(0)), Term(Tap(1), Fixed(2.0))),
    "sum(learn(1/(i+1))*tap(i) for i in range(2))": mix(Term(Tap(0), Learn(1.0)), Term(Tap(1), Learn(0.5))),
    "sum(tap(2*i) - shared(n-1-i) for i in range(2))": mix(
        Term(Tap(0)), Term(Shared(4), Fixed(-1.0)), Term(Tap(2)), Term(Shared(3), Fixed(-1.0))
    ),
    "own + sum(tap(i) for i in range(0))": OWN,
    "sum(sum(tap(3*i + j) for i in range(2)) for j in range(2))": mix(Term(Tap(0)), Term(Tap(3)), Term(Tap(1)), Term(Tap(4))),
    # rescaled
    "renorm(own + tap(0))": mix(Term(Own()), Term(Tap(0)), renorm="token"),
    "renorm(own + tap(0), to=own)": mix(Term(Own()), Term(Tap(0)), renorm="token"),
    "renorm(own + tap(0), axis=head)": mix(Term(Own()), Term(Tap(0)), renorm="head"),
    "renorm(own + tap(0), axis=tensor, to=own)": mix(Term(Own()), Term(Tap(0)), renorm="tensor"),
}


@pytest.mark.parametrize(("right", "expected"), SUMS.items(), ids=SUMS)
def test_a_right_side_becomes_the_sum_written_by_hand(right, expected):
    wiring = parse(f"v[5] = {right}", 8)
    assert wiring.layers[5] == LayerWiring(v=expected)
    assert [wiring.layers[n] for n in range(8) if n != 5] == [PLAIN] * 7


OUT = {
    "own(v)": lone(Own()),
    "tap(v, 2)": lone(Tap(2)),
    "final(v)": lone(Final()),
    "tap(v, n-1)": lone(Tap(4)),
    "0.4*(tap(v, 0) - final(v))": mix(Term(Tap(0), Fixed(0.4)), Term(Final(), Fixed(-0.4))),
    "gate(2, 7)*tap(v, 0)": lone(Tap(0), Gate(2.0, 7)),
    "learn(0, per=head)*own(v)": lone(Own(), Learn(0.0, "head")),
    "budget(3)*final(v)": lone(Final(), Budget(3.0)),
    "sum(tap(v, i) for i in range(2))": mix(Term(Tap(0)), Term(Tap(1))),
    "sum(tap(v, i) for i in range(0))": NOTHING,
}


@pytest.mark.parametrize(("right", "expected"), OUT.items(), ids=OUT)
def test_what_is_added_after_attention(right, expected):
    assert parse(f"out[5] = {right}", 8).layers[5] == LayerWiring(out=expected)


@pytest.mark.parametrize("text", ["skip_attn[2] = 1 - n/N", "skip_attn[2] = 0.5", "skip_attn[2] = 1/2"])
def test_a_skip_is_a_number_and_may_use_arithmetic(text):
    assert parse(text, 4).layers[2] == LayerWiring(skip_attn=HALF)


def test_a_sum_written_by_a_loop_follows_the_layer():
    wiring = parse("v[1:] = own + sum(tap(i) for i in range(n))", 6)
    for n in range(1, 6):
        assert wiring.layers[n].v == mix(Term(Own()), *(Term(Tap(i)) for i in range(n)))


# ----------------------------------------------------------------------------------------- statements and overriding
def test_later_statements_override_earlier_ones_site_by_site():
    wiring = parse("v[1:] = tap(0)\nv[2] = own + tap(1)\nv[1] = own\nv[3:] = 2*own\nv[4] = own", 5)
    assert [layer.v for layer in wiring.layers] == [OWN, OWN, mix(Term(Own()), Term(Tap(1))), lone(Own(), Fixed(2.0)), OWN]


def test_only_the_last_statement_for_a_site_has_to_make_sense():
    assert parse("v = tap(0)\nv[0] = own", 2) == parse("v[1] = tap(0)", 2)


def test_the_order_of_the_layers_in_a_list_does_not_matter():
    assert parse("v[[3, 1]] = tap(0)", 4) == parse("v[[1, 3]] = tap(0)", 4) == parse("v[1::2] = tap(0)", 4)


@pytest.mark.parametrize(
    "text",
    [
        "q[1:] = tap(0); v[1:] = tap(0)",
        "q[1:] = tap(0);v[1:] = tap(0);",
        "q[1:] = tap(0)\nv[1:] = tap(0)",
        "q[1:] = tap(0)\r\nv[1:] = tap(0)\r\n",
        "\n\nq[1:] = tap(0)   # queries; and\n   # v[0] = this is a comment\nv[1:] = tap(0)  # values: größer, 値, 🙂\n",
        "v[1:]=tap(0);q[1:]=tap(0)",
        "v [ 1 : ]  =  tap ( 0 ) ;  q[1:]\t=\ttap(0)",
        "q[1:] = (\n  tap(0)\n)\nv[1:] = tap(\n0)",
        "q[1:] = \\\n  tap(0)\nv[1:] = tap(0)",
        "v = own; q = own; v[1:] = tap(0); q[1:] = tap(0)",
    ],
)
def test_statements_stand_on_lines_or_behind_semicolons_with_comments(text):
    layer = LayerWiring(q=lone(Tap(0)), v=lone(Tap(0)))
    assert parse(text, 3) == Wiring((PLAIN, layer, layer))


def test_kv_shared_undoes_a_concatenation_and_can_itself_be_overridden_stream_by_stream():
    wiring = parse("kv[1:] = concat(own, shared(0)); kv[2:] = shared(0); v[3] = own; k[3] = own", 4)
    both = lone(Shared(0))
    assert wiring == Wiring((PLAIN, LayerWiring(kv=(0,)), LayerWiring(k=both, v=both), PLAIN))


def test_concat_joins_the_layers_own_keys_and_values_whatever_they_are_made_of():
    wiring = parse("v[1:] = 0.5*own + 0.5*tap(0); kv[1:] = concat(own, shared(0))", 2)
    assert wiring.layers[1] == LayerWiring(v=mix(Term(Own(), HALF), Term(Tap(0), HALF)), kv=(0,))


def test_a_state_may_pass_a_site_by_if_a_later_one_reads_it():
    wiring = parse("x[1] = tap(0); x[2] = own + tap(1)", 2)
    assert wiring == Wiring((PLAIN, LayerWiring(x=lone(Tap(0)))), final_x=mix(Term(Own()), Term(Tap(1))))


# ----------------------------------------------------------------------------------------------------------- budgets
def groups(wiring: Wiring) -> dict[tuple[str, int, object], int]:
    """(stream, layer, source) -> budget group"""
    return {
        (stream, n, term.source): term.weight.group
        for stream, n, terms in wiring.mixes()
        for term in terms
        if isinstance(term.weight, Budget)
    }


def test_one_place_in_the_text_is_one_budget_over_all_layers():
    assert set(groups(parse("v[1:] = own + budget(2)*tap(0)", 6)).values()) == {0}
    found = groups(parse("v[1:] = own + sum(budget(2)*tap(i) for i in range(n))", 4))
    assert len(found) == 1 + 2 + 3
    assert len(set(found.values())) == 1


def test_two_places_in_the_text_are_two_budgets():
    found = groups(parse("v[1:] = budget(2)*own + budget(3)*tap(0); k[1:] = own + budget(4)*tap(0)", 3))
    places = [
        {found["v", n, Own()] for n in (1, 2)},
        {found["v", n, Tap(0)] for n in (1, 2)},
        {found["k", n, Tap(0)] for n in (1, 2)},
    ]
    assert all(len(place) == 1 for place in places)
    assert len(set.union(*places)) == 3


def test_two_budgets_stay_two_where_a_loop_around_one_of_them_is_empty_for_some_layer():
    found = groups(parse("v[1:] = own + sum(budget(2)*tap(i) for i in range(1, n)) + budget(2)*tap(0)", 3))
    loop, single = {found["v", 2, Tap(1)]}, {found["v", n, Tap(0)] for n in (1, 2)}
    assert len(single) == 1, "the same place has two budgets in two layers"
    assert loop != single


def test_two_budgets_stay_two_whatever_the_order_of_the_layers():
    found = groups(parse("v[::-1] = own + sum(budget(2)*tap(i) for i in range(n)); k[1:] = own + budget(2)*tap(0)", 3))
    assert {group for (stream, _, _), group in found.items() if stream == "v"}.isdisjoint(
        group for (stream, _, _), group in found.items() if stream == "k"
    )
    parse("v[::-1] = own + sum(budget(2)*tap(i) for i in range(n)); k[1:] = own + budget(3)*tap(0)", 3)  # two totals


def test_a_wiring_is_a_value():
    """Equal texts give equal, hashable wirings, so that plans can be remembered by them."""
    first, second = (parse("v[1:] = learn(1)*own + gate(3, 5)*table", 3) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != parse("v[1:] = learn(1)*own + gate(3, 7)*table", 3)


def test_indentation_means_nothing():
    text = """
        v[1:] = tap(0)   # the first value
      k[1:] = (own +
          tap(0))
    """
    assert parse(text, 4) == parse("v[1:] = tap(0); k[1:] = own + tap(0)", 4)
    assert parse(" v[1:] = tap(0)", 4) == parse("v[1:] = tap(0)", 4)
