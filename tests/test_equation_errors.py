"""What equations are refused, with which words, and that the caret stands under the place that is wrong.

In the texts below ``¦`` stands before the character at which the caret must be, and ``⟦ ⟧`` around the part in which it must
be; neither is part of the equation.
"""

from __future__ import annotations

import re

import pytest

from valuepath.equations import MAX_LENGTH, MAX_NESTING, parse
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
    WiringError,
)


def refused(text: str, num_layers: int = 8) -> WiringError:
    with pytest.raises(WiringError) as caught:
        parse(text, num_layers)
    return caught.value


def offset(text: str, line: int, column: int) -> int:
    """The index of a place in a text. Lines end as they do in Python source."""
    starts = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", text))]
    return starts[line - 1] + column - 1


def pointed_at(error: WiringError) -> str:
    """The character above the caret of the printed message; '' behind the end of the line."""
    *_, shown, caret = str(error).split("\n")
    assert caret.strip() == "^"
    assert len(caret) <= 80, "the caret leaves the screen"
    return shown[len(caret) - 1 : len(caret)]


def check(marked: str, words: tuple[str, ...], num_layers: int = 8) -> None:
    text = re.sub("[¦⟦⟧]", "", marked)
    error = refused(text, num_layers)
    for word in words:
        assert word in error.reason, f"{word!r} is not in: {error.reason}"
    place = offset(text, error.line, error.column)
    if "¦" in marked:
        assert place == marked.index("¦"), str(error)
    else:
        assert marked.index("⟦") <= place < marked.index("⟧") - 1, str(error)
    character = text[place : place + 1]
    assert pointed_at(error) == ("" if character in "\r\n" else character)
    assert error.text == text
    several = "\n" in text.strip() or error.line > 1
    assert str(error).startswith(f"line {error.line}, column {error.column}: " if several else f"column {error.column}: ")


# each kind of mistake: the equation (for 8 layers unless it says otherwise) and what the message has to say
WORDS = {
    "unknown source": ("v[1:] = ¦owm", ("unknown word 'owm'", "own, tap(i), shared(i), table, embed", "Did you mean 'own'?")),
    "unknown call": ("v[1:] = ¦tab(0)", ("unknown word 'tab'", "tap(i)", "Did you mean")),
    "unknown weight": ("v[1:] = ¦lern(1)*own", ("unknown word 'lern'", "Did you mean 'learn'?")),
    "capitals": ("v[1:] = ¦Own", ("unknown word 'Own'", "Did you mean 'own'?")),
    "nothing near": ("v[1:] = ¦zzzzzz", ("unknown word 'zzzzzz'; expected own",)),
    "second term": ("v[1:] = 0.5*own + 0.5*¦shaerd(0)", ("unknown word 'shaerd'", "Did you mean 'shared'?")),
    "behind an umlaut": ("v[1:] = own  # für alle\nq[1:] = own + ¦größe", ("unknown word 'größe'",)),
    "non-ASCII in the same line": ("¦größe = 1; v = own", ("unknown stream 'größe'",)),
    "the word of another place": ("x = ¦concat(own, shared(0))", ("'concat' does not belong here", "own, tap(i)")),
    "renorm inside a sum": ("v[1:] = 2*¦renorm(own + tap(0))", ("'renorm' does not belong here",)),
    "the words of out on v": ("v[1:] = ¦final(v)", ("'final' does not belong here", "own, tap(i)")),
    "the words of v in out": ("out[1:] = ¦table", ("'table' does not belong here", "own(v), tap(v, i), final(v)")),
    "unknown in out": ("out[1:] = ¦finl(v)", ("unknown word 'finl'", "Did you mean 'final'?")),
    "range as a source": ("v = ¦range(3)", ("'range' does not belong here",)),
    "a stream as a source": ("v[1:] = 0.5*¦q", ("unknown word 'q'", "expected own, tap(i)")),
}
STREAMS = {
    "unknown stream": ("¦w[1:] = tap(0)", ("unknown stream 'w'", "x, q, k, v, a, out, kv, skip_attn, skip_mlp")),
    "near stream": ("¦skip_atn[1:] = 0", ("unknown stream 'skip_atn'", "Did you mean 'skip_attn'?")),
    "capital stream": ("¦V[1:] = tap(0)", ("unknown stream 'V'", "Did you mean 'v'?")),
    "in the second statement": ("v[1:] = tap(0); ¦skip_mpl = 0", ("unknown stream 'skip_mpl'", "Did you mean 'skip_mlp'?")),
    "on another line": ("v[1:] = tap(0)\n# note\n  \n¦ot[1:] = tap(v, 0)", ("unknown stream 'ot'", "Did you mean 'out'?")),
    "two on the left": ("¦v, k = own", ("expected a stream on the left",)),
    "indexed twice": ("¦v[0][1] = own", ("expected a stream on the left",)),
    "attribute": ("¦v.layers = own", ("expected a stream on the left",)),
    "starred": ("¦[v] = own", ("expected a stream on the left",)),
    "no equation": ("¦v[1:]", ("expected an equation 'stream[layers] = ...'",)),
    "no equation, misspelled": ("¦skip_mpl[0]", ("expected an equation", "Did you mean 'skip_mlp'?")),
    "comparison": ("¦v[1:] == tap(0)", ("expected an equation",)),
    "added to": ("¦v[1:] += tap(0)", ("expected an equation",)),
    "annotated": ("¦v: own = own", ("expected an equation",)),
    "statement": ("v = own\n¦import os", ("expected an equation",)),
    "function": ("¦def v(): pass", ("expected an equation",)),
    "call": ("¦__import__('os')", ("expected an equation",)),
    "two equals signs": ("v[1:] = ¦k[1:] = tap(0)", ("expected one '=' per equation", "one equation per line")),
}

LAYERS = {
    "too far": ("v[¦8] = tap(0)", ("layer 8 is out of range", "layers 0 to 7")),
    "too far back": ("v[¦-9] = tap(0)", ("layer -9 is out of range", "layers 0 to 7")),
    "in a list": ("v[[1, ¦9, 3]] = tap(0)", ("layer 9 is out of range",)),
    "x has a site more": ("x[¦9] = 2*own", ("layer 9 is out of range", "layers 0 to 8")),
    "empty slice": ("¦v[8:] = tap(0)", ("no layer is meant", "layers 0 to 7")),
    "empty slice backwards": ("¦v[1:5:-1] = tap(0)", ("no layer is meant",)),
    "empty list": ("¦v[[]] = tap(0)", ("no layer is meant",)),
    "empty on another line": ("q[1:] = tap(0)\n¦v[3:3] = tap(0)", ("no layer is meant",)),
    "twice": ("v[¦[1, 2, 1]] = tap(0)", ("a layer stands twice",)),
    "twice from the end": ("v[¦[7, -1]] = tap(0)", ("a layer stands twice",)),
    "step 0": ("v[::¦0] = tap(0)", ("cannot step by 0",)),
    "step N-N": ("v[1::¦N-N] = tap(0)", ("cannot step by 0",)),
    "fraction": ("v[¦1.5] = tap(0)", ("expected a whole number, not 1.5",)),
    "fraction in a slice": ("v[¦N/3:] = tap(0)", ("expected a whole number", "2.66")),
    "n on the left": ("v[¦n] = tap(0)", ("unknown number 'n'", "N")),
    "last without a share": ("v[¦last] = tap(0)", ("last/3 stands alone",)),
    "a slice from last": ("v[¦last/3:] = tap(0)", ("last/3 stands alone", "[2*N//3:]")),
    "a range with a minus": ("v[¦5-7] = tap(0)", ("this is layer -2", "[5, 6, 7]")),
    "indented, in the second line": ("  v[1:] = tap(0)\n\t k[1:] = ¦tapp(0)", ("unknown word 'tapp'", "'tap'")),
    "last over 0": ("v[last/¦0] = table", ("last/0", "at least 1")),
    "last over a fraction": ("v[last/¦1.5] = table", ("expected a whole number, not 1.5",)),
    "last minus": ("v[¦last-3] = table", ("expected last/3 for the last third",)),
    "a word": ("v[¦first] = table", ("unknown number 'first'",)),
    "text": ("v[¦'1:'] = table", ("expected a number, not '1:'",)),
    "true": ("v[¦True] = table", ("expected a number, not True",)),
    "a slice in a list": ("v[¦1:2, 3] = table", ("expected a number",)),
    "power": ("v[¦2**2] = table", ("expected + - * / // or % between numbers",)),
    "huge": ("v[¦99999999999999999999999999999999:] = table", ("this number is too large",)),
}

NUMBERS = {
    "unknown number": ("v[1:] = own/¦M", ("unknown number 'M'; expected a number, n, N",)),
    "division by zero": ("v[1:] = own/¦0", ("division by zero",)),
    "division by a difference": ("v[1:] = own/(¦N-8)", ("division by zero",)),
    "zero in a coefficient": ("v[1:] = (1/¦0)*own", ("division by zero",)),
    "whole division by zero": ("v[1:] = (1//¦0)*own", ("division by zero",)),
    "rest by zero": ("v[1:] = (1%¦0)*own", ("division by zero",)),
    "division by a source": ("v[1:] = 1/¦own", ("unknown number 'own'",)),
    "too large": ("v[1:] = ¦1e31*own", ("this number is too large",)),
    "infinite": ("v[1:] = ¦1e999*own", ("this number is too large",)),
    "too large product": ("v[1:] = ¦1e30*1e30*own", ("this number is too large",)),
    "complex": ("v[1:] = ¦1j*own", ("expected a number, not 1j",)),
    "text": ("v[1:] = ¦'own'", ("expected a number, not 'own'",)),
    "none": ("v[1:] = ¦None", ("expected a number, not None",)),
    "a layer number that is none": ("v[1:] = tap(¦0.5)", ("expected a whole number, not 0.5",)),
    "a source as layer number": ("v[1:] = tap(¦own)", ("unknown number 'own'", "n, N")),
    "a source as start": ("v[1:] = learn(¦own)*own", ("unknown number 'own'",)),
    "not": ("v[1:] = ¦not 1", ("expected a number",)),
    "inverted": ("v[1:] = tap(¦~0)", ("expected a number",)),
}

TERMS = {
    "zero": ("v[1:] = own + ¦0*tap(0)", ("a weight of 0 reads nothing; leave the term out",)),
    "zero as a difference": ("v[1:] = own + ¦(1-1)*tap(0)", ("a weight of 0 reads nothing",)),
    "zero before a bracket": ("v[1:] = ¦0*(own + tap(0))", ("a weight of 0 reads nothing",)),
    "zero in one layer only": ("v[3:] = own + ¦(n-5)*tap(0)", ("a weight of 0 reads nothing",)),
    "budget of nothing": ("v[1:] = ⟦own + budget(0)*tap(0)⟧", ("a weight of 0 reads nothing",)),
    "gate of nothing": ("v[1:] = ⟦own + gate(0, 3)*table⟧", ("a weight of 0 reads nothing",)),
    "only a number": ("v[1:] = ¦0.5", ("expected a source after the weight", "own, tap(i)")),
    "only a weight": ("v[1:] = ¦learn(1)", ("expected a source after the weight", "own, tap(i)")),
    "only a weight in out": ("out[1:] = ¦learn(1)", ("expected a source after the weight", "own(v), tap(v, i), final(v)")),
    "number after the sum": ("v[1:] = own + ¦1", ("expected a source after the weight",)),
    "two sources in a product": ("v[1:] = own*¦tap(0)", ("a term reads one source; join sources with +",)),
    "bracket times bracket": ("v[1:] = (own + tap(0))*(¦own + tap(0))", ("a term reads one source",)),
    "two weights": ("v[1:] = learn(1)*¦learn(2)*own", ("a term has one weight",)),
    "a number times a learned weight": ("v[1:] = 2*¦learn(1)*own", ("put the number inside", "2 times")),
    "a number before a bracket with one": ("v[1:] = 0.5*(own + ¦learn(1)*tap(0))", ("put the number inside",)),
    "a learned weight before a bracket": ("v[1:] = ¦learn(1)*(own + tap(0))", ("belongs to one source; write it before each",)),
    "a gate before a loop": ("v[1:] = ¦gate(1, 2)*sum(tap(i) for i in range(n))", ("belongs to one source",)),
    "power": ("v[1:] = ¦own**2", ("expected + - * or / between sources",)),
    "whole division": ("v[1:] = ¦own//2", ("expected + - * or / between sources",)),
    "matrix product": ("v[1:] = ¦own@tap(0)", ("expected + - * or / between sources",)),
    "comparison": ("v[1:] = ¦own < tap(0)", ("expected a source",)),
    "condition": ("v = ¦own if n else tap(0)", ("expected a source",)),
    "lambda": ("v = ¦lambda: own", ("expected a source",)),
    "list": ("v[1:] = ¦[own, tap(0)]", ("expected a source", "a number, learn(init), budget(total), gate(range, channels)")),
    "indexed source": ("v[1:] = ¦tap[0]", ("expected a source",)),
    "method": ("v[1:] = ¦own.detach()", ("expected a source",)),
    "evaluation": ("v = ¦().__class__.__bases__", ("expected a source",)),
    "the same source twice": ("v[1:] = ⟦own + own⟧", ("v[1]", "a source stands twice", "write it once with the weights added")),
    "the same source twice by a loop": ("v[2:] = ⟦tap(0) + sum(tap(i) for i in range(n))⟧", ("a source stands twice",)),
    "two tables": ("v[1:] = ⟦table + table(init=uniform)⟧", ("one layer has one table of its own",)),
    "nothing": ("v = ⟦sum(tap(i) for i in range(n))⟧", ("v[0]", "nothing is read here")),
}

CALLS = {
    "tap without a layer": ("v[1:] = ¦tap", ("tap needs a layer: tap(0)", "tap(n-1)")),
    "shared without a layer": ("k[1:] = ¦shared", ("shared needs a layer", "shared(n-1)")),
    "tap of nothing": ("v[1:] = ¦tap()", ("expected tap(i)",)),
    "tap of two": ("v[1:] = ¦tap(0, 1)", ("expected tap(i)",)),
    "tap with an option": ("v[1:] = tap(0, stream=¦v)", ("unknown option 'stream'", "expected tap(i)")),
    "tap of starred": ("v[1:] = ¦tap(*own)", ("expected tap(i)",)),
    "own with an argument": ("v[1:] = ¦own(v)", ("own takes no argument here; write own",)),
    "embed with an argument": ("v[1:] = ¦embed(0)", ("embed takes no argument here; write embed",)),
    "table of a layer": ("v[1:] = table(¦0)", ("expected shared",)),
    "table of a misspelled word": ("v[1:] = table(¦shard)", ("expected shared", "Did you mean 'shared'?")),
    "table of two": ("v[1:] = table(shared, ¦shared)", ("expected table, table(shared) or table(init=uniform)",)),
    "table with an unknown start": (
        "v[1:] = table(init=¦unifrom)",
        ("expected projected or uniform", "Did you mean 'uniform'?"),
    ),
    "table with an unknown option": ("v[1:] = table(inti=¦uniform)", ("unknown option 'inti'", "Did you mean 'init'?")),
    "learn without a start": ("v[1:] = ¦learn()*own", ("expected learn(init, per=layer)",)),
    "learn with two": ("v[1:] = ¦learn(1, head)*own", ("expected learn(init, per=layer)",)),
    "learn per what": ("v[1:] = learn(1, per=¦heads)*own", ("expected layer or head or channel", "Did you mean 'head'?")),
    "learn with an unknown option": ("v[1:] = learn(1, pre=¦head)*own", ("unknown option 'pre'", "Did you mean 'per'?")),
    "learn with starred options": ("v[1:] = learn(1, **¦own)*own", ("expected learn(init, per=layer)",)),
    "learn as a word": ("v[1:] = ¦learn*own", ("'learn' does not belong here",)),
    "budget without a total": ("v[1:] = ¦budget()*own", ("expected budget(total)",)),
    "budget with an option": ("v[1:] = budget(2, per=¦head)*own", ("unknown option 'per'",)),
    "gate with one": ("v[1:] = own + ¦gate(3)*table", ("expected gate(range, channels)",)),
    "gate with a fraction of channels": ("v[1:] = own + gate(3, ¦1.5)*table", ("expected a whole number, not 1.5",)),
    "gate without channels": ("v[1:] = ⟦own + gate(3, 0)*table⟧", ("a whole number of channels of at least 1",)),
    "own in out": ("out[1:] = ¦own", ("out reads values: expected own(v)",)),
    "own of another stream": ("out[1:] = own(¦k)", ("expected v",)),
    "tap in out without its stream": ("out[1:] = ¦tap(0)", ("expected tap(v, i)",)),
    "tap in out of another stream": ("out[1:] = tap(¦q, 0)", ("expected v",)),
    "final without its stream": ("out[1:] = ¦final", ("out reads values: expected final(v)",)),
    "sum of a list": ("v[1:] = ¦sum([own, tap(0)])", ("expected sum(learn(0)*tap(i) for i in range(n))",)),
    "sum of one": ("v[1:] = ¦sum(own)", ("expected sum(",)),
    "sum with an if": ("v[1:] = sum(¦(tap(i) for i in range(n) if i))", ("expected one plain loop",)),
    "sum over two": ("v[1:] = sum(¦(tap(i) for i in range(n) for j in range(i)))", ("expected one plain loop",)),
    "sum over a list": ("v[1:] = sum(tap(i) for i in ¦[0, 1])", ("expected range(stop)",)),
    "sum over four bounds": ("v[1:] = sum(tap(i) for i in ¦range(1, 2, 3, 4))", ("expected range(stop)",)),
    "sum with a step of 0": ("v[1:] = sum(tap(i) for i in range(0, 4, ¦0))", ("cannot step by 0",)),
    "sum over too many": ("v[1:] = sum(tap(i) for i in ¦range(1000))", ("the range leaves the layers", "0 to 7")),
    "sum that hides n": ("v[1:] = sum(tap(0) for ¦n in range(1))", ("'n' already has a meaning; use another letter",)),
    "sum that hides a stream": ("v[1:] = sum(tap(0) for ¦q in range(1))", ("'q' already has a meaning",)),
    "sum that unpacks": ("v[1:] = sum(¦(tap(i) for i, j in range(1)))", ("expected one plain loop",)),
    "the loop's letter outside": ("v[1:] = sum(tap(i) for i in range(1)) + tap(¦i)", ("unknown number 'i'",)),
    "a letter that no loop has": ("v[1:] = sum(tap(¦j) for i in range(1))", ("unknown number 'j'", "n, N, i")),
    "renorm of nothing": ("v[1:] = ¦renorm()", ("expected renorm(sum, to=own, axis=token)",)),
    "renorm to something else": ("v[1:] = renorm(own, to=¦tap(0))", ("expected own",)),
    "renorm to a misspelled word": ("v[1:] = renorm(own, to=¦ow)", ("expected own", "Did you mean 'own'?")),
    "renorm along what": ("v[1:] = renorm(own, axis=¦tokn)", ("expected token or head or tensor", "Did you mean 'token'?")),
    "renorm with an unknown option": ("v[1:] = renorm(own, axes=¦token)", ("unknown option 'axes'", "Did you mean 'axis'?")),
    "kv of a sum": ("kv[1:] = ¦own", ("expected concat(own, shared(i)) or shared(i) for kv",)),
    "concat without own": ("kv[1:] = ¦concat(shared(0), own)", ("this layer's keys and values come first",)),
    "concat of own alone": ("kv[1:] = ¦concat(own)", ("concat needs a second part",)),
    "concat of a raw projection": ("kv[1:] = concat(own, ¦tap(0))", ("expected shared(i)",)),
    "concat with an option": ("kv[1:] = ¦concat(own, shared(0), axis=1)", ("expected concat(own, shared(i), ...)",)),
    "kv of a layer that is not there": ("kv[1:] = concat(own, shared(¦8))", ("there is no layer 8",)),
    "skip of a source": ("skip_attn[0] = ¦own", ("expected a number or learn(init)",)),
    "skip of a gate": ("skip_attn[0] = ¦gate(1, 2)", ("expected a number or learn(init)",)),
    "skip per head": ("skip_mlp[0] = ⟦learn(1, per=head)⟧", ("skip_mlp[0]", "it has no heads")),
}

# what each stream may read, and what a layer may read of another
READS = {
    "table on k": ("k[1:] = ¦table", ("table cannot be read by stream k", "own, tap, shared")),
    "embed on q": ("q[1:] = ¦embed", ("embed cannot be read by stream q", "own, tap, shared")),
    "shared on x": ("x[1:] = ¦shared(0)", ("shared cannot be read by stream x", "own, tap")),
    "table on a": ("a[1:] = ¦table", ("table cannot be read by stream a",)),
    "no such layer": ("v[1:] = own + tap(¦8)", ("there is no layer 8", "0 to 7")),
    "no such layer, negative": ("v[1:] = own + tap(¦-1)", ("there is no layer -1",)),
    "no such layer from n": ("v[0:] = own + shared(¦n-1)", ("there is no layer -1",)),
    "no such layer in out": ("out[1:] = ⟦tap(v, 8)⟧", ("there is no layer 8",)),
    "a later layer": ("v[1:3] = ⟦own + tap(3)⟧", ("v[1]", "tap(3)", "a later layer", "before 1")),
    "a later layer by n": ("v[:3] = ⟦own + tap(n+2)⟧", ("v[0]", "a later layer", "start the equation at layer 1")),
    "itself": (
        "v[2:] = ⟦own + tap(2)⟧",
        (
            "v[2]",
            "tap(2) makes layer 2 read itself",
        ),
    ),
    "a later layer in out": ("out[1:] = ⟦tap(v, 5)⟧", ("out[1]", "a later layer")),
    "a later state": ("x[1:] = ⟦own + tap(5)⟧", ("x[1]", "a later layer")),
    "an output that nothing reads": ("x[3] = ⟦tap(0)⟧", ("x[3]", "nothing reads the output of layer 2; add own", "tap(3)")),
    "an embedding that nothing reads": ("x[1:] = own; x[0] = ¦table", ("table cannot be read by stream x", "own, tap")),
    "the last output that nothing reads": ("x[N] = ⟦tap(3)⟧", ("x[8]", "nothing reads the output of layer 7")),
    "attention that nothing reads": ("a[2] = ⟦tap(0)⟧", ("a[2]", "add own")),
    "a later layer's attention": ("a[1:] = ⟦own + tap(5)⟧", ("a[1]", "a later layer")),
    "a cycle of one": ("v[3] = ⟦shared(3)⟧", ("v[3]", "shared(3)", "itself", "cycle")),
    "a cycle of two": ("v[2] = ⟦shared(3)⟧; v[3] = shared(2)", ("v[2]", "a later layer", "cycle")),
    "a cycle of two on k, on two lines": ("# a\nk[2] = ⟦shared(3)⟧\nk[3] = shared(2)", ("k[2]", "a later layer", "cycle")),
    "a cycle through kv": ("kv[3] = ⟦concat(own, shared(3))⟧", ("kv[3]", "itself", "cycle")),
    "the first layer": ("v = ⟦tap(0)⟧", ("v[0]", "itself", "start the equation at layer 1")),
    "concat twice": ("kv[3] = ⟦concat(own, shared(0), shared(0))⟧", ("kv[3]", "names a layer twice")),
    "a projection that is not there": (
        "v[1] = tap(0); v[2] = ⟦own + tap(1)⟧",
        ("v[2]", "no projection of its own", "shared(1)"),
    ),
    "a key projection that is not there": ("k[1] = shared(0); k[2] = ⟦tap(1)⟧", ("k[2]", "no projection of its own")),
    "a projection that is not there, in out": (
        "v[1] = table; out[2] = ⟦tap(v, 1)⟧",
        ("out[2]", "no value projection of its own"),
    ),
    "own in out without a projection": ("v[1] = tap(0); out[1] = ⟦own(v)⟧", ("out[1]", "use final(v)")),
    "renorm without own": ("v[1:] = ⟦renorm(tap(0) + table)⟧", ("v[1]", "needs own in its sum")),
    "renorm on k": ("k[1:] = ⟦renorm(own + tap(0))⟧", ("k[1]", "renorm rescales values; use it on v")),
    "finished and raw keys": ("k[1:] = ⟦own + shared(0)⟧", ("k[1]", "already normed and rotated", "use tap(...)")),
    "finished and raw queries": ("q[2:] = ⟦tap(0) + shared(1)⟧", ("q[2]", "already normed and rotated", "use tap(...)")),
    "a gate on x": ("x[1:] = ⟦gate(1, 2)*own⟧", ("x[1]", "a gate reads the attention input", "use it on q, k, v or out")),
    "a gate on a": ("a[1:] = ⟦own + gate(1, 2)*tap(0)⟧", ("a[1]", "a gate reads the attention input")),
    "heads on x": ("x[1:] = ⟦learn(1, per=head)*own⟧", ("x[1]", "has no heads")),
    "channels on a": ("a[1:] = ⟦own + learn(1, per=channel)*tap(0)⟧", ("a[1]", "no channels")),
    "attention over a concatenation": ("kv[1] = concat(own, shared(0)); a[1] = ⟦own + tap(0)⟧", ("a[1]", "another width")),
    "a budget at the final norm": ("x[1:] = ⟦own + budget(2)*tap(0)⟧", ("x[8]", "a budget is shared out over the layers")),
    "a budget of two totals": ("v[1:] = ⟦own + budget(n)*tap(0)⟧", ("v[2]", "changes from layer to layer", "a number or N")),
}

SYNTAX = {
    "open bracket": ("v[1:] = ¦(own + tap(0)", ("never closed", "expected e.g. v[1:] =")),
    "closed too often": ("v[1:] = own¦)", ("expected e.g.",)),
    "sum not finished": ("v[1:] = own +¦", ("expected e.g.",)),
    "no equals sign": ("v[1:] ¦0.5*own", ("expected e.g.",)),
    "no right side": ("v[1:] =¦", ("expected e.g.",)),
    "two words": ("v[1:] = 0.5 ¦own", ("expected e.g.",)),
    "dollar": ("v[1:] = ¦$own", ("expected e.g.",)),
    "on the third line": ("v[1:] = own\n\nq[1:] = 0.5 ¦own\n", ("expected e.g.",)),
    "behind a comment that is not ASCII": ("# größer ist besser 🙂\nq[1:] = 0.5 ¦own", ("expected e.g.",)),
    "text never closed": ("v = ¦'own", ("expected e.g.",)),
    "option before argument": ("v = table(init=uniform, shared¦)", ("positional argument follows keyword argument",)),
}

ALL = {
    f"{name}: {kind}": case
    for name, cases in {
        "words": WORDS,
        "streams": STREAMS,
        "layers": LAYERS,
        "numbers": NUMBERS,
        "terms": TERMS,
        "calls": CALLS,
        "reads": READS,
        "syntax": SYNTAX,
    }.items()
    for kind, case in cases.items()
}


@pytest.mark.parametrize(("marked", "words"), ALL.values(), ids=ALL)
def test_a_mistake_is_named_and_the_caret_stands_under_it(marked, words):
    check(marked, words)


# --------------------------------------------------------------------------------------------- the rest of the message
def test_the_message_of_one_line():
    assert str(refused("v[1:] = 0.5*owm", 4)) == (
        "column 13: unknown word 'owm'; expected own, tap(i), shared(i), table, embed. Did you mean 'own'?\n"
        "  v[1:] = 0.5*owm\n"
        "              ^"
    )


def test_the_message_of_several_lines_shows_the_line_that_is_wrong():
    assert str(refused("q[1:] = own\nv[1:] = 0.5*owm  # größer\nk = own", 4)) == (
        "line 2, column 13: unknown word 'owm'; expected own, tap(i), shared(i), table, embed. Did you mean 'own'?\n"
        "  v[1:] = 0.5*owm  # größer\n"
        "              ^"
    )


def test_columns_are_counted_in_characters_where_characters_take_several_bytes():
    error = refused("v = own; größer_als = own; v = 0.5*own + 值", 4)
    assert error.column == len("v = own; ") + 1
    error = refused("v[1:] = sum(tap(ä) for ä in range(n)) + 0.5*größe", 4)
    assert error.column == len("v[1:] = sum(tap(ä) for ä in range(n)) + 0.5*") + 1
    assert pointed_at(error) == "g"
    error = refused("v[1:] = tap('🙂🙂') + own", 4)
    assert pointed_at(error) == "'"


@pytest.mark.parametrize("place", [1, 50, 59, 60, 61, 75, 76, 77, 120, 500])
def test_the_caret_stays_on_the_screen_and_under_its_character_in_long_lines(place):
    text = "v[1:]" + " " * place + "= ⊥" if place > 1 else "v=⊥"
    text = text.replace("⊥", "Ωwm") + "  # and so on" * 20
    error = refused(text, 4)
    assert error.column == text.index("Ω") + 1
    assert pointed_at(error) == "Ω"
    assert max(len(line) for line in str(error).split("\n")[1:]) <= 80


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c", "\x0b", "\x1c", "\x1d", "\x1e"])
def test_only_newlines_count_as_lines(separator):
    """Python source has three line ends; ``str.splitlines`` knows many more, which may stand in a comment."""
    error = refused(f"# one{separator}still one\nv[1:] = 0.5*owm", 4)
    assert (error.line, error.column) == (2, 13)
    assert pointed_at(error) == "o"


def test_the_caret_is_under_its_character_behind_a_tab():
    """A tab moves the text on the screen, so it has to move the caret as well, or be shown as something else."""
    error = refused("v[1:]\t=\t0.5*owm", 4)
    *_, shown, caret = str(error).split("\n")
    assert shown.expandtabs()[len(caret.expandtabs()) - 1] == "o"


def test_an_error_of_a_reader_names_stream_and_layer():
    reason = refused("v[1:] = own + tap(1)", 4).reason
    assert reason.startswith("v[1]: ")


def test_the_statement_that_is_to_blame_is_the_one_that_holds():
    """An overridden statement is not where the error is."""
    check("v[2] = own; v[2] = ⟦tap(5)⟧; v[3] = own", ("v[2]", "a later layer"))
    check("v[5] = own\nv[2:] = ⟦tap(5)⟧\nv[2] = own", ("v[3]", "a later layer"))


def test_a_condition_of_python_is_not_given_as_advice():
    """``0.5*own = v`` is a swapped equation; Python's own advice here would be ``==``."""
    assert "==" not in refused("0.5*own = v").reason


def test_an_option_given_twice_is_refused():
    refused("v[1:] = learn(1, per=head, per=layer)*own")


def test_one_shared_table_cannot_start_in_two_ways():
    refused("v[1] = table(shared, init=uniform); v[2] = table(shared)")


# ------------------------------------------------------------------------------------------------- the size of a text
@pytest.mark.parametrize("text", ["v" * (MAX_LENGTH + 1), "#" * (MAX_LENGTH + 1), "v = own\n" * MAX_LENGTH])
def test_a_text_longer_than_the_limit_is_not_read(text):
    error = refused(text)
    assert "10,000" in error.reason
    assert f"{len(text):,}" in error.reason
    assert len(str(error)) < 500


def test_a_text_as_long_as_the_limit_is_read():
    text = "v[1:] = tap(0)\n#"
    parse(text + "x" * (MAX_LENGTH - len(text)), 3)


@pytest.mark.parametrize(("opening", "closing"), ["()", "[]", "{}"])
def test_brackets_deeper_than_the_limit_are_not_read(opening, closing):
    error = refused(f"v = {opening * (MAX_NESTING + 1)}own{closing * (MAX_NESTING + 1)}")
    assert f"{MAX_NESTING + 1} deep" in error.reason
    refused("v = " + opening * 5000 + closing * 5000)
    refused("v = " + opening * 9990)


def test_brackets_as_deep_as_the_limit_are_read():
    assert parse("v = " + "(" * MAX_NESTING + "own" + ")" * MAX_NESTING, 2) == parse("", 2)


def test_too_many_terms_are_refused():
    nested = "v = sum(sum(sum(own for i in range(20)) for j in range(20)) for l in range(20))"
    assert "more than 4096" in refused(nested, 20).reason


@pytest.mark.parametrize("text", [None, 3, b"v = own", ["v = own"]])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(WiringError, match="an equation is text such as"):
        parse(text, 4)


@pytest.mark.parametrize("num_layers", [0, -1, 1.0, True, None, "4"])
def test_what_is_no_number_of_layers_is_refused(num_layers):
    with pytest.raises(WiringError, match="the number of layers must be a whole number of at least 1"):
        parse("v = own", num_layers)


def test_one_layer_is_enough_and_its_message_speaks_of_it():
    assert parse("v[0] = 2*own", 1).num_layers == 1
    assert "layer 0 only" in refused("v[1:] = tap(0)", 1).reason


# -------------------------------------------------------------------------------- wirings that were not written as text
def term(source, weight=Fixed(1.0)) -> Mix:  # noqa: B008 - a frozen value
    return Mix((Term(source, weight),))


DATA = {
    "no layer": ((), "at least one layer"),
    "nothing read": ([LayerWiring(v=Mix(()))], "nothing is read here"),
    "fraction of a layer": ([LayerWiring(), LayerWiring(v=term(Tap(0.5)))], "whole layer number, not 0.5"),
    "true as a layer": ([LayerWiring(), LayerWiring(v=term(Tap(False)))], "whole layer number, not False"),
    "negative layer": ([LayerWiring(), LayerWiring(v=term(Tap(-1)))], "there is no layer -1"),
    "infinite": ([LayerWiring(v=term(Own(), Fixed(float("inf"))))], "finite number"),
    "not a number": ([LayerWiring(v=term(Own(), Learn(float("nan"))))], "finite number"),
    "text as a number": ([LayerWiring(v=term(Own(), Fixed("1")))], "finite number, not '1'"),
    "true as a number": ([LayerWiring(v=term(Own(), Fixed(True)))], "finite number, not True"),
    "zero": ([LayerWiring(v=term(Own(), Fixed(0)))], "a weight of 0"),
    "per what": ([LayerWiring(v=term(Own(), Learn(1.0, "heads")))], "expected layer, head or channel"),
    "fraction of a channel": ([LayerWiring(v=term(Own(), Gate(1.0, 1.5)))], "whole number of channels"),
    "along what": ([LayerWiring(v=Mix((Term(Own()),), "channel"))], "expected token, head or tensor"),
    "final on v": ([LayerWiring(v=term(Final()))], "final cannot be read by stream v"),
    "embed on k": ([LayerWiring(k=term(Embed()))], "embed cannot be read by stream k"),
    "table in out": ([LayerWiring(out=term(Table()))], "table cannot be read by stream out"),
    "two budgets in one group": (
        [LayerWiring(), LayerWiring(v=Mix((Term(Own(), Budget(1.0)), Term(Tap(0), Budget(2.0)))))],
        "changes from layer to layer",
    ),
    "a skip that is a gate": ([LayerWiring(skip_attn=Gate(1.0, 2))], "a skip is a number"),
    "a skip that is a budget": ([LayerWiring(skip_mlp=Budget(1.0))], "a skip is a number"),
    "a skip that is infinite": ([LayerWiring(skip_mlp=Fixed(float("inf")))], "finite number"),
    "a concatenation of a later layer": ([LayerWiring(kv=(1,)), LayerWiring()], "a later layer"),
    "a cycle": ([LayerWiring(v=term(Shared(1))), LayerWiring(v=term(Shared(0)))], "cycle"),
}


@pytest.mark.parametrize(("layers", "reason"), DATA.values(), ids=DATA)
def test_a_wiring_built_as_data_is_checked_as_well(layers, reason):
    with pytest.raises(WiringError) as caught:
        Wiring(tuple(layers))
    assert reason in str(caught.value)


def test_the_state_that_feeds_the_final_norm_is_checked_as_well():
    with pytest.raises(WiringError) as caught:
        Wiring((LayerWiring(),), final_x=Mix((Term(Own()), Term(Tap(1)))))
    assert (caught.value.stream, caught.value.layer) == ("x", 1)
    Wiring((LayerWiring(),), final_x=Mix((Term(Own()), Term(Tap(0)))))


def test_a_default_wiring_is_an_ordinary_transformer():
    layer = LayerWiring()
    assert all(layer.mix(stream) == OWN for stream in "xqkva")
    assert (layer.out.terms, layer.kv, layer.skip_attn, layer.skip_mlp) == ((), (), Fixed(1.0), Fixed(1.0))
