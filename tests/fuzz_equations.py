"""Random equations: text, words, mutations of valid equations, and random sentences of the grammar itself.

    python tests/fuzz_equations.py 20000 [--seed 0]

reads that many of them and plans each that is accepted, with every way of folding. Only ``WiringError`` may come out, and
none may take longer than ``LIMIT`` seconds. Prints the counts and the slowest; the exit status is 1 if either is violated.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import get_args

from valuepath.equations import MAX_LENGTH, parse
from valuepath.plan import Fold, Shape, make_plan
from valuepath.wiring import WiringError

LIMIT = 5.0
"""Seconds of processor time after which an equation counts as hanging (whatever else the machine does meanwhile)."""

VALID = [
    "v[last/3] = learn(1)*table",
    "v[last/3] = learn(1)*table(shared)",
    "v[1:] = tap(0)",
    "v[1:] = 0.5*own + 0.5*tap(0)",
    "v[1:] = learn(0.5)*own + budget(N)*tap(0)",
    "v[1:] = learn(1)*own + sum(learn(0)*tap(i) for i in range(n))",
    "v[1:] = renorm(0.5*own + 0.5*tap(0), to=own, axis=token)",
    "v[::-2] = own + gate(3, 12)*table(init=uniform)",
    "out[1:] = 0.4*tap(v, 0) - 0.4*own(v)",
    "v[1:] = 0.5*own + 0.5*tap(0); out[1:] = 0.2*(tap(v, 0) - final(v))",
    "k[1::2] = shared(n-1); v[1::2] = shared(n-1)",
    "kv[1::2] = shared(n-1)",
    "kv[1:] = concat(own, shared(0))",
    "x[1:N+1] = learn(1)*own + sum(learn(0)*tap(i) for i in range(n))",
    "skip_attn[:1] = 0\nv[1:] = tap(0)\n",
    "q[1:] = 0.5*own + 0.5*tap(0)  # queries\nk[1:] = own/2 + tap(0)/2  # keys",
    "a[1:] = 0.5*own + 0.5*tap(0)",
    "v[[0, 2, -1]] = learn(1, per=head)*embed; skip_mlp = learn(1, per=channel)",
    "v[1:] = shared(n-1)",
    "v[:2] = embed; v[2:] = shared(n-1) + learn(0.5)*shared(n-2)",
    "k[1:] = 2*shared((n-1)//2)",
    "v[N//2:] = -(own - (n+1)/N*tap(n % 2))",
]

WORDS = [
    word
    for line in (
        "x q k v a out kv skip_attn skip_mlp own tap shared table embed final learn budget gate renorm concat sum range",
        "last n N i per layer head channel init projected uniform to axis token tensor",
        "for in if else lambda not and True None import def 'v' \"own\" 0 1 2 3 0.5 -1 1e3 1e400 007 0x1f 10**9 1_0 1j",
        "= == += := + - * / // % ** @ ~ < ( ) [ ] { } , : ; . # \\ \n \t",
    )
    for word in line.split(" ")
]


# ------------------------------------------------------------------------------------------------------- generators
def characters(rng: random.Random) -> str:
    """Any text at all: control characters, half surrogates and bracket heaps included."""
    alphabets = [
        "vkqx[]()=:;,.+-*/0123456789nN \n",
        "()[]{}",
        " \t\n\r\f\v\\#;'\"",
        "".join(map(chr, range(128))),
        "äßΩ値🙂\u2028\u00a0\x00\ud800v=[]1",
    ]
    alphabet = rng.choice(alphabets)
    return "".join(rng.choice(alphabet) for _ in range(rng.choice([1, 5, 20, 80, 400, 3000])))


def words(rng: random.Random) -> str:
    """Words of the grammar in any order."""
    joint = rng.choice(["", " ", " "])
    return rng.choice(["", "v = ", "v[1:] = ", "out = "]) + joint.join(
        rng.choice(WORDS) for _ in range(rng.choice([1, 3, 8, 20, 60]))
    )


def mutation(rng: random.Random) -> str:
    """A valid equation with a few changes: something left out, doubled, exchanged, put in, or repeated very often."""
    text = rng.choice(VALID)
    for _ in range(rng.choice([1, 1, 2, 4])):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([0, 1, 1, 2, 5, 20]))
        piece = text[start:end]
        match rng.randrange(6):
            case 0:
                piece = ""
            case 1:
                piece += piece
            case 2:
                piece = rng.choice(WORDS)
            case 3:
                piece += chr(rng.choice([*range(128), 0xE4, 0x5024, 0x1F642]))
            case 4:
                piece = piece[::-1]
            case 5:
                repeated = rng.choice(
                    ["-", "1*", "(", "1+", "own+", "not ", "2/", "tap(0)-", "n+", piece or "+", rng.choice(WORDS)]
                )
                piece = repeated * min(rng.choice([10, 200, 900, 3000]), (MAX_LENGTH - len(text)) // len(repeated))
        text = (text[:start] + piece + text[end:])[: MAX_LENGTH + 1]
    return text


def sentence(rng: random.Random) -> str:
    """A sentence of the grammar: its form is right, its content may be anything."""

    def number(depth: int = 2) -> str:
        if depth == 0 or rng.random() < 0.7:
            return rng.choice(["1", "1", "2", "2", "3", "0.5", "N", "(n+1)", "N-1", "-1", "1e-3", "1e29", "0", "n"])
        return f"({number(depth - 1)} {rng.choice(['+', '-', '*', '/', '//', '%'])} {number(depth - 1)})"

    def index() -> str:
        return rng.choice(["0", "0", "0", "1", "n-1", "n-1", "n-2", "n//2", "i", number(1)])

    def source(stream: str) -> str:
        if stream == "out":
            return rng.choice(["own(v)", f"tap(v, {index()})", "final(v)"])
        return rng.choice(
            ["own", "own", f"tap({index()})", f"shared({index()})", "table", "table(shared)", "table(init=uniform)", "embed"]
        )

    def weight() -> str:
        return rng.choice([
            number(), number(), f"learn({number()})", f"learn({number(0)}, per={rng.choice(['layer', 'head', 'channel'])})",
            f"budget({number(0)})", f"gate({number(0)}, {number(0)})", "-",
        ])  # fmt: skip

    def term(stream: str, depth: int) -> str:
        kind = rng.random()
        if depth and kind < 0.15:
            return f"{number(1)}*({terms(stream, depth - 1)})"
        if depth and kind < 0.3:
            bounds = rng.choice(["n", "N", f"0, {number(1)}", "n-1, -1, -1", "0"])
            return f"sum({terms(stream, depth - 1)} for {rng.choice('ij')} in range({bounds}))"
        if kind < 0.4:
            return f"{source(stream)}/{number(1)}"
        if kind < 0.6:
            return source(stream)
        return f"{weight()}*{source(stream)}".replace("-*", "-")

    def terms(stream: str, depth: int = 2) -> str:
        return rng.choice(["", "", "-"]) + rng.choice([" + ", " - "]).join(
            term(stream, depth) for _ in range(rng.choice([1, 1, 2, 3]))
        )

    def left(stream: str) -> str:
        third = f"{rng.choice(['', number(1)])}:{rng.choice(['', number(1)])}:{rng.choice(['', '2', '-1', '-2'])}"
        return stream + rng.choice(
            [
                "",
                "[1:]",
                "[1:]",
                "[2:]",
                "[2:]",
                "[3:]",
                f"[{number(1)}]",
                f"[{third}]",
                f"[last/{number(0)}]",
                "[[0, 2]]",
                "[N]",
            ]
        )

    statements = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        stream = rng.choice(["x", "q", "k", "v", "v", "v", "a", "out", "kv", "skip_attn", "skip_mlp"])
        if stream == "kv":
            right = rng.choice(
                [f"shared({index()})", f"concat(own, shared({index()}))", f"concat(own, shared(0), shared({index()}))"]
            )
        elif stream.startswith("skip"):
            right = rng.choice([number(), f"learn({number()})", f"learn({number()}, per=channel)"])
        elif stream == "v" and rng.random() < 0.2:
            right = f"renorm({terms(stream)}, axis={rng.choice(['token', 'head', 'tensor'])})"
        else:
            right = terms(stream)
        statements.append(f"{left(stream)} = {right}")
    return rng.choice(["; ", "\n", "  # and\n"]).join(statements)


GENERATORS: tuple[Callable[[random.Random], str], ...] = (characters, words, mutation, sentence)
LAYER_COUNTS = (1, 2, 3, 5, 8, 12, 24, 48)


# ------------------------------------------------------------------------------------------------------------ running
class Hang(BaseException):
    """An equation that takes longer than it may; no ``Exception``, so that nobody catches it on the way."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``Hang`` in the block when it has computed for so long (main thread, Unix)."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Hang(f"still busy after {seconds:g} s")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def read(text: str, num_layers: int, windows: tuple[int | None, ...] | None = None) -> bool:
    """Read and plan an equation in every way; True if it was accepted, False if it was refused with a whole message.

    Raises:
        whatever else comes out, which is a bug.
    """
    model = Shape(
        hidden_size=13, intermediate_size=17, num_heads=6, num_kv_heads=3, head_dim=5, vocab_size=11,
        windows=windows or (None,) * num_layers,
    )  # fmt: skip
    try:
        wiring = parse(text, num_layers)
        for fold in get_args(Fold):
            plan = make_plan(wiring, model, fold)
            assert len(plan.layers) == num_layers
            names = [parameter.name for parameter in plan.parameters]
            assert len(set(names)) == len(names), "two parameters of one name"
    except WiringError as wrong:
        refusal = wrong
    else:
        return True
    assert refusal.reason
    if refusal.text is not None:
        assert str(refusal).split("\n")[-1].strip() == "^", f"no caret: {refusal}"
    return False


def main() -> int:
    arguments = argparse.ArgumentParser(description="Read random equations; only WiringError may come out.")
    arguments.add_argument("count", type=int, nargs="?", default=20_000)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    outcomes: Counter[tuple[str, bool]] = Counter()
    failures: list[str] = []
    slowest = (0.0, "", 0)
    for number in range(options.count):
        rng = random.Random(f"{options.seed}-{number}")
        generator = GENERATORS[number % len(GENERATORS)]
        text, num_layers = generator(rng), rng.choice(LAYER_COUNTS)
        windows = tuple(rng.choice([None, 7]) for _ in range(num_layers)) if rng.random() < 0.2 else None
        start = time.process_time()
        try:
            with limited(LIMIT):
                outcomes[generator.__name__, read(text, num_layers, windows)] += 1
        except KeyboardInterrupt:
            raise
        except BaseException as wrong:  # anything at all is a finding here
            shown = text if len(text) <= 300 else f"{text[:200]}...{text[-80:]} ({len(text)} characters)"
            failures.append(
                f"#{number} {generator.__name__}, N={num_layers}: {type(wrong).__name__}: {str(wrong)[:200]}\n    {shown!r}"
            )
        slowest = max(slowest, (time.process_time() - start, text, num_layers))
    for generator in GENERATORS:
        accepted, refused = outcomes[generator.__name__, True], outcomes[generator.__name__, False]
        print(f"{generator.__name__:>10}: {accepted:6,} accepted {refused:6,} refused")
    seconds, text, num_layers = slowest
    print(f"{options.count:,} equations, seed {options.seed}: {len(failures)} failures")
    print(f"slowest {seconds:.3f} s, N={num_layers}: {text[:100]!r}".encode(errors="backslashreplace").decode())
    for failure in failures[:20]:
        print(failure.encode(errors="backslashreplace").decode())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
