"""Whatever is handed to the parser and the plan, only ``WiringError`` comes out, and soon.

``python tests/fuzz_equations.py 20000`` does the same with many more.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuzz_equations import LAYER_COUNTS, LIMIT, VALID, WORDS, characters, limited, mutation, read, sentence, words

counts = st.sampled_from(LAYER_COUNTS)
randoms = st.randoms(use_true_random=False)


def held(text: str, num_layers: int) -> bool:
    """``read``, with a guard against hanging; generous, because other processes may hold the machine."""
    with limited(4 * LIMIT):
        return read(text, num_layers)


@given(st.text(st.characters(), max_size=300), counts)
@example("\ufeffv = own", 2)
@example("v = own\x00", 2)
@example("v = own  # \ud800", 2)
@example("v\ud800 = own", 2)
@example("v = \\", 2)
@example("v = own\x0c\n\x0cq = own", 2)
@example("v = '\\N{BULLET}'", 2)
@example("v = '\\N{no such character}'", 2)
@example("v = f'{'", 2)
@example("v = f'{n!r:>{N}}'", 2)
@example("ｖ = ｏｗｎ", 2)
@example("v = " + "9" * 4999 + "*own", 2)
@settings(max_examples=200)
def test_any_text(text, num_layers):
    held(text, num_layers)


@given(st.lists(st.sampled_from(WORDS), max_size=30), st.sampled_from(["", " "]), counts)
@settings(max_examples=200)
def test_the_words_of_the_grammar_in_any_order(found, separator, num_layers):
    held(separator.join(found), num_layers)


@given(st.lists(st.sampled_from(WORDS), max_size=30), counts)
@settings(max_examples=200)
def test_the_words_of_the_grammar_as_a_right_side(found, num_layers):
    held("v[1:] = " + " ".join(found), num_layers)


@given(randoms, counts)
@settings(max_examples=200)
def test_valid_equations_with_a_few_changes(rng, num_layers):
    held(mutation(rng), num_layers)


@given(randoms, counts)
@settings(max_examples=200)
def test_sentences_of_the_grammar_with_any_content(rng, num_layers):
    held(sentence(rng), num_layers)


@pytest.mark.parametrize("num_layers", [4, 8, 24])
@pytest.mark.parametrize("text", VALID)
def test_the_equations_that_are_changed_were_valid(text, num_layers):
    assert held(text, num_layers)


LONG = {
    "minus signs": "v = " + "-" * 900 + "own",
    "minus signs, deeper than python recurses": "v = " + "-" * 1500 + "own",
    "signs of a layer number": "v[1:] = tap(" + "+" * 1500 + "0)",
    "nots": "v = " + "not " * 1500 + "own",
    "a sum of numbers": "v = (" + "+".join(["1"] * 1500) + ")*own",
    "a product of numbers": "v = " + "1*" * 1500 + "own",
    "a product of numbers behind": "v = own" + "*1" * 1500,
    "quotients": "v = own" + "/1" * 1500,
    "a product of numbers as a layer": "v[" + "1*" * 1500 + "0] = own",
    "terms": "v = " + "+".join(["own"] * 2400),
    "differences": "v[1:] = " + "-".join(["tap(0)"] * 1400),
    "statements": "v=own;" * 1600,
    "statements on lines": "\n" * 9000 + "v = own",
    "a list of layers": "v[" + ",".join(["0"] * 4900) + "] = own",
    "a list of layers with brackets": "v[[" + ",".join(str(i) for i in range(2000)) + "]] = own",
    "a power": "v = own" + "**2" * 1500,
    "a power of powers of numbers": "v = (" + "9**" * 40 + "9)*own",
    "products of large numbers": "v = (" + "*".join(["1e29"] * 1000) + ")*own",
    "attributes": "v" + ".a" * 1500 + " = own",
    "calls": "v = own" + "()" * 1500,
    "comparisons": "v = " + "own < " * 1500 + "own",
    "conditions": "v = " + "own if n else " * 600 + "own",
    "lambdas": "v = " + "lambda: " * 1000 + "own",
    "a long name": "v = " + "o" * 9900,
    "a long text": "v = '" + "o" * 9900 + "'",
    "loops": "v = " + " + ".join(["sum(tap(i) for i in range(n))"] * 300),
    "loops in loops that add nothing": "v = own + " + "sum(" * 12 + "tap(0) for i in range(0))" + " for j in range(N))" * 11,
    "loops in loops": "v = own + " + "sum(" * 12 + "tap(0) for i in range(N))" + " for j in range(N))" * 11,
    "a chain of shared": "v[:2] = embed; v[2:] = shared(n-1) + shared(n-2)",
    "a chain of shared that starts with tables": "v[:3] = table; v[3:] = shared(n-1) + shared(n-2) + shared(n-3)",
    "a chain of all shared": "v[0] = own; v[1] = tap(0); v[2:] = sum(learn(1)*shared(i) for i in range(n))",
    "a chain of weights": "v[1:] = learn(1)*shared(n-1); k[1:] = learn(1)*shared(n-1); q[1:] = learn(1)*shared(n-1)",
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_and_deep_equations_are_read_or_refused_at_once(text):
    held(text, 48)


def test_a_model_of_a_thousand_layers_is_planned():
    """Chains from layer to layer are followed without recursion."""
    assert held("k[1:] = 2*shared(n-1); v[0] = own + table; v[1:] = learn(1)*shared(n-1)", 1000)


def test_the_generators_repeat_themselves_for_a_seed():
    for generator in (characters, words, mutation, sentence):
        assert [generator(Random(f"{i}")) for i in range(20)] == [generator(Random(f"{i}")) for i in range(20)]


def test_the_command_counts_what_it_read():
    command = [sys.executable, str(Path(__file__).with_name("fuzz_equations.py")), "200", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200 equations, seed 5: 0 failures" in done.stdout
