"""Text to wiring: the grammar of equations and its errors.

::

    text      = statement { (newline | ";") statement }            "#" starts a comment; later statements override
    statement = stream [ "[" layers "]" ] "=" right
    layers    = a Python slice, a layer number, a list of them, or last/3 (n >= (2N)//3); omitted: all
    right     = sum | renorm(sum, to=own, axis=token|head|tensor)    for v
              | concat(own, shared(i), ...) | shared(i)              for kv
              | number | learn(init)                                 for skip_attn, skip_mlp
    sum       = [-] term { (+|-) term } | sum(term for i in range(...))
    term      = source | weight*source | number*(sum) | term/number
    weight    = number | learn(init, per=layer|head|channel) | budget(total) | gate(range, channels)
    source    = own | tap(i) | shared(i) | table | table(shared, init=projected|uniform) | embed
              | own(v) | tap(v, i) | final(v)                        for out
    number    = arithmetic on numbers, n (this layer) and N (how many there are): + - * / // %

Layers are counted from 0. ``x`` has N + 1 sites; site N feeds the final norm. The text is parsed with Python's ``ast``
and never evaluated. Whatever is wrong raises ``WiringError`` with the column.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
import warnings
from dataclasses import replace
from typing import Any

from valuepath.wiring import (
    NOTHING,
    OWN,
    SOURCES,
    STREAMS,
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
    WiringError,
    source_lines,
)

MAX_LENGTH = 10_000
MAX_NESTING = 40
MAX_DEPTH = 400
MAX_TERMS = 4096

_WEIGHT_WORDS = ("learn", "budget", "gate")
_SOURCE_WORDS = ("own", "tap", "shared", "table", "embed")
_OUT_WORDS = ("own", "tap", "final")
_OTHER_WORDS = ("renorm", "concat", "sum", "range", "last", "n", "N")
_EXPECTED = {
    "source": "own, tap(i), shared(i), table, embed",
    "out": "own(v), tap(v, i), final(v)",
    "weight": "a number, learn(init), budget(total), gate(range, channels)",
}

Scope = dict[str, int]


def parse(text: str, num_layers: int) -> Wiring:
    """The wiring that ``text`` describes for a model of ``num_layers`` layers.

    Args:
        text: equations as in the module's grammar; the empty text is an ordinary Transformer.
        num_layers: N.

    Raises:
        WiringError: with the text, a caret at the column, what was expected and the nearest valid word.
    """
    if not isinstance(text, str):
        raise WiringError(f"an equation is text such as 'v[1:] = 0.5*own + 0.5*tap(0)', not {type(text).__name__}")
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
        raise WiringError(f"the number of layers must be a whole number of at least 1, not {num_layers!r}")
    try:
        return _Parser(text, num_layers).wiring()
    except RecursionError:
        raise WiringError("the equation is nested too deeply to be read; shorten its sums", text=text) from None


def nearest(word: str, words: tuple[str, ...] | list[str]) -> str:
    """'. Did you mean ...?' for the closest of ``words``, or nothing if none is close."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6) or difflib.get_close_matches(
        word.lower(), words, n=1, cutoff=0.6
    )
    return f". Did you mean {close[0]!r}?" if close else ""


class _Parser:
    def __init__(self, text: str, num_layers: int) -> None:
        self.text, self.N = text, num_layers
        lines = source_lines(text)
        # statements do not nest, so that indentation means nothing: it is taken off, and put back in columns
        self.lines = [line.lstrip(" \t\f") for line in lines]
        self.indents = [len(line) - len(bare) for line, bare in zip(lines, self.lines, strict=True)]
        self.budgets: dict[tuple[int, int], int] = {}
        """Place in the text -> group."""
        self.loops = 0
        self.numeric: dict[tuple[int, tuple[str, ...]], bool] = {}

    # ------------------------------------------------------------------------------------------------- errors
    def error(self, node: ast.AST | None, reason: str) -> WiringError:
        line, column = 1, 1
        if node is not None and hasattr(node, "lineno"):
            line = node.lineno
            row = self.lines[line - 1] if line <= len(self.lines) else ""
            # ast counts bytes of UTF-8; people count characters
            column = self.indent(line) + len(row.encode(errors="replace")[: node.col_offset].decode(errors="ignore")) + 1  # type: ignore[attr-defined]
        return WiringError(reason, text=self.text, line=line, column=column)

    def syntax_error(self, line: int, column: int, reason: str) -> WiringError:
        return WiringError(reason, text=self.text, line=max(line, 1), column=self.indent(line) + max(column, 1))

    def indent(self, line: int) -> int:
        return self.indents[line - 1] if 1 <= line <= len(self.indents) else 0

    # --------------------------------------------------------------------------------------------- statements
    def wiring(self) -> Wiring:
        layers = [LayerWiring() for _ in range(self.N)]
        final_x = OWN
        origin: dict[tuple[str, int], ast.AST] = {}
        for statement in self.statements():
            stream, sites = self.target(statement)
            for n in sites:
                for name, value in self.right(stream, n, statement.value).items():
                    origin[name, n] = statement.value
                    if name == "x" and n == self.N:
                        assert isinstance(value, Mix)
                        final_x = value
                    else:
                        layers[n] = replace(layers[n], **{name: value})
        try:
            return Wiring(tuple(layers), final_x)
        except WiringError as wrong:
            if wrong.stream is None or wrong.layer is None:
                raise self.error(None, wrong.reason) from None
            node = origin.get((wrong.stream, wrong.layer))
            raise self.error(node, f"{wrong.stream}[{wrong.layer}]: {wrong.reason}") from None

    def statements(self) -> list[ast.Assign]:
        if len(self.text) > MAX_LENGTH:
            raise WiringError(f"the equation has {len(self.text):,} characters; at most {MAX_LENGTH:,} are read")
        depth = deepest = 0
        for character in self.text:
            depth += (character in "([{") - (character in ")]}")
            deepest = max(deepest, depth)
        if deepest > MAX_NESTING:
            raise self.error(None, f"brackets are nested {deepest} deep; at most {MAX_NESTING} are read")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = ast.parse("\n".join(self.lines))
        except SyntaxError as wrong:
            reason = re.split(r"\. (?:Perhaps|Maybe)", wrong.msg or "not an equation")[0]  # Python's advice is for Python
            raise self.syntax_error(
                wrong.lineno or 1, wrong.offset or 1, f"{reason}; expected e.g. v[1:] = 0.5*own + 0.5*tap(0)"
            ) from None
        except (ValueError, RecursionError, MemoryError, OverflowError) as wrong:
            raise self.error(None, f"cannot be read ({wrong or type(wrong).__name__})") from None
        self.check_depth(module)
        found = []
        for node in module.body:
            if not isinstance(node, ast.Assign):
                raise self.error(node, "expected an equation 'stream[layers] = ...'" + self.maybe_stream(node))
            if len(node.targets) != 1:
                raise self.error(node.targets[1], "expected one '=' per equation; write one equation per line")
            found.append(node)
        return found

    def check_depth(self, module: ast.Module) -> None:
        """Bound what recurses over the tree: long chains of signs, products and sums nest as deep as they are long."""
        level: list[ast.AST] = list(module.body)
        for _ in range(MAX_DEPTH):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
            if not level:
                return
        raise self.error(
            next((node for node in level if hasattr(node, "lineno")), None),
            f"nested more than {MAX_DEPTH} deep; write a long sum as sum(... for i in range(n))",
        )

    def maybe_stream(self, node: ast.AST) -> str:
        inner = getattr(node, "value", None)
        while isinstance(inner, ast.Subscript | ast.Attribute | ast.Call):
            inner = inner.func if isinstance(inner, ast.Call) else inner.value
        return nearest(inner.id, STREAMS) if isinstance(inner, ast.Name) and inner.id not in STREAMS else ""

    def target(self, statement: ast.Assign) -> tuple[str, list[int]]:
        target = statement.targets[0]
        name = target.value if isinstance(target, ast.Subscript) else target
        if not isinstance(name, ast.Name):
            raise self.error(target, f"expected a stream on the left: {', '.join(STREAMS)}")
        if name.id not in STREAMS:
            raise self.error(name, f"unknown stream {name.id!r}; expected {', '.join(STREAMS)}{nearest(name.id, STREAMS)}")
        count = self.N + 1 if name.id == "x" else self.N
        if not isinstance(target, ast.Subscript):
            return name.id, list(range(count))
        sites = self.layers(target.slice, count)
        if not sites:
            raise self.error(target, f"no layer is meant by these layers; {name.id} has {self.span(count)}")
        return name.id, sites

    def span(self, count: int) -> str:
        return f"layers 0 to {count - 1}" if count > 1 else "layer 0 only"

    def layers(self, node: ast.expr, count: int) -> list[int]:
        scope = {"N": self.N}
        if isinstance(node, ast.Slice):
            parts = [None if p is None else self.whole(p, scope) for p in (node.lower, node.upper, node.step)]
            if parts[2] == 0:
                raise self.error(node.step, "a slice cannot step by 0")
            return list(range(count))[slice(*parts)]
        if isinstance(node, ast.List | ast.Tuple):
            found = [self.layer(element, count, scope) for element in node.elts]
            if len(set(found)) < len(found):
                raise self.error(node, "a layer stands twice in this list")
            return found
        if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name) and node.left.id == "last":
            if not isinstance(node.op, ast.Div):
                raise self.error(node, "expected last/3 for the last third, or a slice such as [1:]")
            part = self.whole(node.right, scope)
            if part < 1:
                raise self.error(node.right, f"last/{part}: expected a whole number of at least 1")
            return list(range((part - 1) * self.N // part, count if count == self.N else self.N))
        return [self.layer(node, count, scope)]

    def layer(self, node: ast.expr, count: int, scope: Scope) -> int:
        n = self.whole(node, scope)
        if n < 0 and isinstance(node, ast.BinOp):
            raise self.error(node, f"this is layer {n}; for several layers write [5, 6, 7] or 5:8")
        if not -count <= n < count:
            raise self.error(node, f"layer {n} is out of range; there are {self.span(count)}")
        return n % count

    # ----------------------------------------------------------------------------------------------- numbers
    def is_number(self, node: ast.expr, scope: Scope) -> bool:
        if isinstance(node, ast.UnaryOp):
            return self.is_number(node.operand, scope)
        if isinstance(node, ast.BinOp):
            key = id(node), tuple(scope)
            if key not in self.numeric:
                self.numeric[key] = self.is_number(node.right, scope) and self.is_number(node.left, scope)
            return self.numeric[key]
        return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in scope)

    def number(self, node: ast.expr, scope: Scope) -> int | float:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, bool) or not isinstance(node.value, int | float):
                raise self.error(node, f"expected a number, not {node.value!r}")
            return self.finite(node, node.value)
        if isinstance(node, ast.Name):
            if node.id in scope:
                return scope[node.id]
            if node.id == "last":
                raise self.error(node, "last/3 stands alone in the brackets: v[last/3]; a slice is [2*N//3:]")
            expected = f"a number, {', '.join(scope)}{nearest(node.id, [*scope])}"
            raise self.error(node, f"unknown number {node.id!r}; expected {expected}")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            value = self.number(node.operand, scope)
            return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.BinOp):
            left, right = self.number(node.left, scope), self.number(node.right, scope)
            try:
                match node.op:
                    case ast.Add():
                        value = left + right
                    case ast.Sub():
                        value = left - right
                    case ast.Mult():
                        value = left * right
                    case ast.Div():
                        value = left / right
                    case ast.FloorDiv():
                        value = left // right
                    case ast.Mod():
                        value = left % right
                    case _:
                        raise self.error(node, "expected + - * / // or % between numbers")
            except ZeroDivisionError:
                raise self.error(node.right, "division by zero") from None
            except OverflowError:
                raise self.error(node, "this number is too large") from None
            return self.finite(node, value)
        raise self.error(node, "expected a number; numbers, n, N and + - * / // % may be used")

    def finite(self, node: ast.expr, value: int | float) -> int | float:
        if abs(value) > 1e30 or not math.isfinite(value):
            raise self.error(node, "this number is too large")
        return value

    def whole(self, node: ast.expr, scope: Scope) -> int:
        value = self.number(node, scope)
        if isinstance(value, float):
            if not value.is_integer():
                raise self.error(node, f"expected a whole number, not {value}")
            value = int(value)
        return value

    # -------------------------------------------------------------------------------------------- right sides
    def right(self, stream: str, n: int, node: ast.expr) -> dict[str, Any]:
        scope: Scope = {"n": n, "N": self.N}
        self.loops = 0
        if stream == "kv":
            return self.keys_and_values(node, scope)
        if stream.startswith("skip"):
            if self.is_number(node, scope):
                return {stream: Fixed(float(self.number(node, scope)))}
            call = self.call_name(node)
            if call == "learn":
                return {stream: self.weight(node, scope)}
            raise self.error(node, "expected a number or learn(init): the factor on this skip connection")
        renorm = None
        if self.call_name(node) == "renorm":
            assert isinstance(node, ast.Call)
            options = self.arguments(node, 1, ("to", "axis"), "renorm(sum, to=own, axis=token)")
            self.word(options.get("to", node), ("own",)) if "to" in options else None
            renorm = self.word(options["axis"], ("token", "head", "tensor")) if "axis" in options else "token"
            node = node.args[0]
        terms: list[Term] = []
        self.terms(stream, node, scope, 1.0, terms)
        return {stream: Mix(tuple(terms), renorm) if terms else NOTHING}  # type: ignore[arg-type]

    def keys_and_values(self, node: ast.expr, scope: Scope) -> dict[str, Any]:
        if self.call_name(node) == "shared":
            source = self.source("k", node, scope)
            return {"k": Mix((Term(source),)), "v": Mix((Term(source),)), "kv": ()}
        if self.call_name(node) == "concat":
            assert isinstance(node, ast.Call)
            if node.keywords or not node.args or not (isinstance(node.args[0], ast.Name) and node.args[0].id == "own"):
                raise self.error(node, "expected concat(own, shared(i), ...): this layer's keys and values come first")
            extra = []
            for argument in node.args[1:]:
                if self.call_name(argument) != "shared":
                    raise self.error(argument, "expected shared(i): the finished keys and values of layer i")
                source = self.source("k", argument, scope)
                assert isinstance(source, Shared)
                extra.append(source.layer)
            if not extra:
                raise self.error(node, "concat needs a second part; expected concat(own, shared(i))")
            return {"kv": tuple(extra)}
        raise self.error(node, "expected concat(own, shared(i)) or shared(i) for kv")

    # --------------------------------------------------------------------------------------------------- sums
    def terms(self, stream: str, node: ast.expr, scope: Scope, factor: float, into: list[Term]) -> None:
        """Append the terms of ``factor * node``. Chains of + are walked, not recursed into: they may be long."""
        chain: list[tuple[ast.expr, float]] = []
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            chain.append((node.right, -factor if isinstance(node.op, ast.Sub) else factor))
            node = node.left
        chain.append((node, factor))
        for part, sign in reversed(chain):
            self.product(stream, part, scope, sign, into)
            if len(into) > MAX_TERMS:
                raise self.error(part, f"more than {MAX_TERMS} terms in one sum")

    def product(self, stream: str, node: ast.expr, scope: Scope, factor: float, into: list[Term]) -> None:
        """Append ``factor * node`` where node is one term: a product of numbers, at most one weight and one source."""
        weight_node: ast.expr | None = None
        source_node: ast.expr | None = None
        pending = [node]
        while pending:
            part = pending.pop()
            if self.is_number(part, scope):
                factor = float(self.finite(part, factor * self.number(part, scope)))
            elif isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub | ast.UAdd):
                factor = -factor if isinstance(part.op, ast.USub) else factor
                pending.append(part.operand)
            elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
                pending += [part.right, part.left]
            elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div):
                divisor = self.number(part.right, scope)
                if divisor == 0:
                    raise self.error(part.right, "division by zero")
                factor = float(self.finite(part, factor / divisor))
                pending.append(part.left)
            elif self.call_name(part) in _WEIGHT_WORDS:
                if weight_node is not None:
                    raise self.error(part, "a term has one weight; expected one of " + _EXPECTED["weight"])
                weight_node = part
            elif source_node is not None:
                for each in (source_node, part):  # a misspelled weight looks like a second source
                    name = each.id if isinstance(each, ast.Name) else self.call_name(each)
                    if name is not None and name not in (*_SOURCE_WORDS, *_OUT_WORDS):
                        self.source(stream, each, scope)
                raise self.error(part, "a term reads one source; join sources with +")
            else:
                source_node = part
        if factor == 0:
            raise self.error(node, "a weight of 0 reads nothing; leave the term out")
        if source_node is None:
            what = "out" if stream == "out" else "source"
            raise self.error(weight_node or node, f"expected a source after the weight: {_EXPECTED[what]}")
        if isinstance(source_node, ast.BinOp) or self.call_name(source_node) == "sum":
            if weight_node is not None:
                raise self.error(weight_node, "a learned weight or gate belongs to one source; write it before each")
            if isinstance(source_node, ast.BinOp):
                if not isinstance(source_node.op, ast.Add | ast.Sub):
                    raise self.error(source_node, "expected + - * or / between sources")
                self.terms(stream, source_node, scope, factor, into)
            else:
                self.generator(stream, source_node, scope, factor, into)
            return
        source = self.source(stream, source_node, scope)
        weight: Weight = Fixed(factor)
        if weight_node is not None:
            if abs(factor) != 1:
                raise self.error(
                    weight_node, f"put the number inside: a learned weight starts at its own value, not {factor:g} times it"
                )
            weight = self.weight(weight_node, scope, factor)
        into.append(Term(source, weight))

    def generator(self, stream: str, node: ast.expr, scope: Scope, factor: float, into: list[Term]) -> None:
        assert isinstance(node, ast.Call)
        form = "sum(learn(0)*tap(i) for i in range(n))"
        if len(node.args) != 1 or node.keywords or not isinstance(node.args[0], ast.GeneratorExp):
            raise self.error(node, f"expected {form}")
        inner = node.args[0]
        loop = inner.generators[0]
        if len(inner.generators) > 1 or loop.ifs or loop.is_async or not isinstance(loop.target, ast.Name):
            raise self.error(inner, f"expected one plain loop: {form}")
        if loop.target.id in STREAMS or loop.target.id in (*_SOURCE_WORDS, *_WEIGHT_WORDS, *_OTHER_WORDS):
            raise self.error(loop.target, f"{loop.target.id!r} already has a meaning; use another letter, e.g. i")
        over = loop.iter
        if self.call_name(over) != "range" or not isinstance(over, ast.Call) or over.keywords or not 1 <= len(over.args) <= 3:
            raise self.error(over, "expected range(stop), range(start, stop) or range(start, stop, step)")
        bounds = [self.whole(argument, scope) for argument in over.args]
        if len(bounds) == 3 and bounds[2] == 0:
            raise self.error(over.args[2], "a range cannot step by 0")
        values = range(*bounds)
        if values and max(abs(values[0]), abs(values[-1])) > self.N:
            raise self.error(over, f"the range leaves the layers, which are counted from 0 to {self.N - 1}")
        for i in values:
            self.loops += 1
            if self.loops > MAX_TERMS:
                raise self.error(node, f"more than {MAX_TERMS} rounds of loops in one sum")
            self.terms(stream, inner.elt, scope | {loop.target.id: i}, factor, into)

    # ------------------------------------------------------------------------------------ sources and weights
    def call_name(self, node: ast.AST) -> str | None:
        return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None

    def source(self, stream: str, node: ast.expr, scope: Scope) -> Source:
        expected = _EXPECTED["out" if stream == "out" else "source"]
        name = node.id if isinstance(node, ast.Name) else self.call_name(node)
        if name is None:
            if isinstance(node, ast.Constant):
                raise self.error(node, f"expected a source: {expected}")
            raise self.error(node, f"expected a source ({expected}) or a weight before it ({_EXPECTED['weight']})")
        words = _OUT_WORDS if stream == "out" else _SOURCE_WORDS
        if name not in words:
            known = name in (*_SOURCE_WORDS, *_WEIGHT_WORDS, *_OTHER_WORDS, "final")
            reason = f"{name!r} does not belong here" if known else f"unknown word {name!r}"
            hint = "" if known else nearest(name, [*words, *_WEIGHT_WORDS, *_OTHER_WORDS])
            raise self.error(node, f"{reason}; expected {expected}{hint}")
        source = self.out_source(name, node, scope) if stream == "out" else self.plain_source(name, node, scope)
        if not isinstance(source, SOURCES[stream]):
            may = ", ".join(kind.__name__.lower() for kind in SOURCES[stream])
            raise self.error(node, f"{name} cannot be read by stream {stream}, which may read {may}")
        return source

    def plain_source(self, name: str, node: ast.expr, scope: Scope) -> Source:
        if name in ("own", "embed"):
            if isinstance(node, ast.Call):
                raise self.error(node, f"{name} takes no argument here; write {name}")
            return Own() if name == "own" else Embed()
        if name == "table":
            if isinstance(node, ast.Name):
                return Table()
            assert isinstance(node, ast.Call)
            form = "table, table(shared) or table(init=uniform)"
            if len(node.args) > 1:
                raise self.error(node.args[1], f"expected {form}")
            shared = bool(node.args) and self.word(node.args[0], ("shared",)) == "shared"
            options = self.arguments(node, len(node.args), ("init",), form)
            init = self.word(options["init"], ("projected", "uniform")) if "init" in options else "projected"
            return Table(shared, init)  # type: ignore[arg-type]
        if not isinstance(node, ast.Call):
            raise self.error(node, f"{name} needs a layer: {name}(0) for the first, {name}(n-1) for the one before")
        self.arguments(node, 1, (), f"{name}(i)")
        layer = self.whole(node.args[0], scope)
        if not 0 <= layer < self.N:
            reason = f"{name}({layer}): there is no layer {layer}; layers are counted from 0 to {self.N - 1}"
            raise self.error(node.args[0], reason)
        return Tap(layer) if name == "tap" else Shared(layer)

    def out_source(self, name: str, node: ast.expr, scope: Scope) -> Source:
        form = {"own": "own(v)", "tap": "tap(v, i)", "final": "final(v)"}[name]
        if not isinstance(node, ast.Call):
            raise self.error(node, f"out reads values: expected {form}")
        self.arguments(node, 2 if name == "tap" else 1, (), form)
        self.word(node.args[0], ("v",))
        if name != "tap":
            return Own() if name == "own" else Final()
        return Tap(self.whole(node.args[1], scope))

    def weight(self, node: ast.expr, scope: Scope, sign: float = 1.0) -> Weight:
        """A minus sign turns the start around: ``-learn(c)`` is ``learn(-c)``, the same family of functions."""
        assert isinstance(node, ast.Call)
        match self.call_name(node):
            case "learn":
                options = self.arguments(node, 1, ("per",), "learn(init, per=layer)")
                per = self.word(options["per"], ("layer", "head", "channel")) if "per" in options else "layer"
                return Learn(sign * float(self.number(node.args[0], scope)), per)  # type: ignore[arg-type]
            case "budget":
                self.arguments(node, 1, (), "budget(total), e.g. budget(N)")
                group = self.budgets.setdefault((node.lineno, node.col_offset), len(self.budgets))
                return Budget(sign * float(self.number(node.args[0], scope)), group)
            case _:
                self.arguments(node, 2, (), "gate(range, channels)")
                return Gate(sign * float(self.number(node.args[0], scope)), self.whole(node.args[1], scope))

    def arguments(self, node: ast.Call, positional: int, keywords: tuple[str, ...], form: str) -> dict[str, ast.expr]:
        """The keyword arguments by name, after checking that the call has the given form."""
        if len(node.args) != positional or any(isinstance(argument, ast.Starred) for argument in node.args):
            raise self.error(node, f"expected {form}")
        found: dict[str, ast.expr] = {}
        for keyword in node.keywords:
            if keyword.arg not in keywords:
                hint = nearest(keyword.arg or "", list(keywords))
                raise self.error(keyword.value, f"unknown option {keyword.arg!r}; expected {form}{hint}")
            if keyword.arg in found:
                raise self.error(keyword.value, f"option {keyword.arg!r} is given twice")
            found[keyword.arg] = keyword.value
        return found

    def word(self, node: ast.AST, words: tuple[str, ...]) -> str:
        value = node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
        if not isinstance(value, str) or value not in words:
            hint = nearest(value, list(words)) if isinstance(value, str) else ""
            raise self.error(node, f"expected {' or '.join(words)}{hint}")
        return value
