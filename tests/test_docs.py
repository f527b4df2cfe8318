"""What the documentation shows is what the parser does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from valuepath.equations import parse
from valuepath.plan import Shape, make_plan
from valuepath.wiring import STREAMS, LayerWiring, WiringError

TEXT = (Path(__file__).parents[1] / "docs" / "equations.md").read_text(encoding="utf-8")
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
BLOCKS = [block for language, block in FENCED if not language]
EQUATIONS = [line for block in BLOCKS for line in block.splitlines() if re.match(rf"({'|'.join(STREAMS)})(\[.*\])? = ", line)]


@pytest.mark.parametrize("text", EQUATIONS)
def test_every_equation_shown_can_be_built(text):
    shape = Shape(
        hidden_size=13, intermediate_size=17, num_heads=6, num_kv_heads=3, head_dim=5, vocab_size=11, windows=(None,) * 8
    )
    assert make_plan(parse(text, 8), shape).layers


def test_there_are_equations_to_check():
    assert len(EQUATIONS) > 25


def test_the_layers_of_the_table_are_the_layers_that_are_meant():
    row = r"^\| (?:`(\[[^`]*\])`(?: or `(\[[^`]*\])`)?|\(nothing\)) \| [^|]* \| ([\d ]+) \|$"
    rows = re.findall(row, TEXT, flags=re.MULTILINE)
    assert len(rows) == 6
    for *forms, expected in rows:
        for form in forms if any(forms) else [""]:
            if form or not any(forms):
                layers = parse(f"v{form} = 2*own", 8).layers
                assert [n for n, layer in enumerate(layers) if layer != LayerWiring()] == [int(n) for n in expected.split()]


def test_the_error_shown_is_the_error_raised():
    with pytest.raises(WiringError) as caught:
        parse("v[1:] = 0.5*owm", 8)
    assert f"{caught.value}\n" in BLOCKS
