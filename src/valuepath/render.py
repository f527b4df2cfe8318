"""A description as text for people: plain tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from valuepath.counts import BreakEven, CacheCounts, Comparison, Place
from valuepath.describe import Description, reads_text
from valuepath.plan import Alias, Core, Embedded, Finished, Plan, Projected, Rows, Tokens

ROLES = {
    "embedding": "input embedding",
    "head": "output head",
    "matrix": "layer matrices",
    "table": "value tables",
    "gate": "gates",
    "coefficient": "coefficients",
    "norm": "norm gains",
    "bias": "biases",
}
"""Parameter roles in words, in the order in which they are shown."""

CLOSING = "All figures are computed from the equation and the sizes; none is measured."


def render(description: Description, console: Console) -> None:
    """Print everything; the console decides the width."""
    for block in _blocks(description):
        console.print(block)
        console.print()
    console.print(Text(CLOSING, style="italic"))


def _blocks(description: Description) -> Iterable[RenderableType]:
    yield _head(description)
    yield _layers(description)
    reads = _reads(description.plan)
    if reads is not None:
        yield reads
    yield _parameters(description)
    yield _flops(description)
    if not description.caches:
        yield _section("Cache: none", Text(f"Generation is refused: {description.plan.generation_refusal}."))
        return
    yield _cache(description)
    for both in description.caches:
        yield _kept(description, both)
    yield _break_even(description)


# ----------------------------------------------------------------------------------------------------- small parts
def size(count: int) -> str:
    """Bytes in binary units with four significant digits."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}" if abs(value) < 1000 else f"{value:.0f} {unit}"


def ranges(numbers: Sequence[int]) -> str:
    """Layer numbers with runs shortened: ``0, 2-5``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _table(*columns: str | tuple[str, str]) -> Table:
    """A table without lines. A column is its heading, or (heading, justify)."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        heading, justify = (column, "left") if isinstance(column, str) else column
        table.add_column(Text(heading), justify=justify, overflow="fold", vertical="top")  # type: ignore[arg-type]
    return table


def _row(table: Table, *cells: str) -> None:
    """Add a row of plain text: brackets in equations are not markup."""
    table.add_row(*(Text(cell) for cell in cells))


def _section(title: str, *parts: RenderableType) -> Group:
    return Group(Text(title, style="bold"), *parts)


def _window(window: int | None) -> str:
    return "all" if window is None else f"{window:,}"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


# ---------------------------------------------------------------------------------------------------- what it is
def _head(description: Description) -> Group:
    about, shape, plan = description.about, description.plan.shape, description.plan
    title = Text(about.name or "your own equation", style="bold")
    lines: list[RenderableType] = [title]
    if description.equation.strip():
        lines += [Padding(Text(line.strip()), (0, 0, 0, 2)) for line in description.equation.splitlines() if line.strip()]
    else:
        lines.append(Text("  (no equation: an ordinary Transformer)"))
    for text in (about.summary, ", ".join(part for part in (about.paper, about.location) if part)):
        if text:
            lines.append(Text(text))
    heads = f"{shape.num_heads} heads of {shape.head_dim}"
    if shape.num_kv_heads != shape.num_heads:
        heads += f", {_plural(shape.num_kv_heads, 'key/value head')}"
    style = [f"{about.style} style"] if about.style else []
    parts = [
        f"{_plural(shape.num_layers, 'layer')} of width {shape.hidden_size:,}",
        heads,
        f"{shape.mlp} MLP of {shape.intermediate_size:,}",
        f"vocabulary {shape.vocab_size:,}" + (", tied" if shape.tied else ""),
        *style,
        f"fold={plan.fold}",
    ]
    lines += [Text(), Text(", ".join(parts))]
    if plan.needs_attention_matrix:
        lines.append(Text("Mixes softmaxed attention: needs the attention matrix, no fused attention."))
    return Group(*lines)


def _key_text(place: Place) -> str:
    return f"as layer {place.residency.layer}" if isinstance(place.residency, Alias) else "stored"


def _table_text(core: Core, n: int) -> str:
    """A token-determined content, without the layer's number where it is the reader's own."""
    match core:
        case Projected(layer):
            return f"V_{layer}"
        case Rows(None):
            return "shared table"
        case Rows(layer):
            return "table" if layer == n else f"table of {layer}"
        case Embedded(layer):
            return "x0 W_V" if layer == n else f"x0 W_V of {layer}"
        case Finished(layer):
            return "mix" if layer == n else f"mix of {layer}"
    raise AssertionError(core)


def _value_text(place: Place, n: int) -> str:
    match place.residency:
        case Tokens(core):
            return f"ids -> {_table_text(core, n)}"
        case Alias(layer):
            return f"as layer {layer}"
    return "stored"


def _merged(rows: Iterable[tuple[int, tuple[str, ...]]]) -> list[tuple[str, tuple[str, ...]]]:
    """Consecutive layers with equal cells, as one row with a range of layers."""
    found: list[tuple[list[int], tuple[str, ...]]] = []
    for n, cells in rows:
        if found and found[-1][1] == cells:
            found[-1][0].append(n)
        else:
            found.append(([n], cells))
    return [(ranges(layers), cells) for layers, cells in found]


def _layers(description: Description) -> Group:
    plan = description.plan
    if description.caches:
        cache = description.caches[0].cache
        table = _table("layers", "sees", "projects", "keys", ("bytes each", "right"), "values", ("bytes each", "right"))

        def held(place: Place, window: int | None) -> tuple[str, str]:
            longer = place.positions > min(window or cache.context, cache.context)
            return (f" ({place.positions:,})" if longer else "", size(place.bytes) if place.bytes else "-")

        def cells(n: int) -> tuple[str, ...]:
            k, v, window = cache.layers[n].k, cache.layers[n].v, plan.layers[n].window
            (k_more, k_size), (v_more, v_size) = held(k, window), held(v, window)
            return (
                _window(window),
                " ".join(plan.layers[n].projections),
                _key_text(k) + k_more,
                k_size,
                _value_text(v, n) + v_more,
                v_size,
            )
    else:
        table = _table("layers", "sees", "projects")

        def cells(n: int) -> tuple[str, ...]:
            return (_window(plan.layers[n].window), " ".join(plan.layers[n].projections))

    for layers, row in _merged((n, cells(n)) for n in range(plan.num_layers)):
        _row(table, layers, *row)
    return _section("Layers: what they project, and where the cache keeps keys and values", table)


def _reads(plan: Plan) -> Group | None:
    """What each layer reads, only where it differs from an ordinary Transformer."""
    table = _table("layers", "reads")

    def cells(n: int) -> tuple[str, ...]:
        return ("\n".join(f"{stream} = {text}" for stream, text in reads_text(plan, n).items()),)

    for layers, (text,) in _merged((n, cells(n)) for n in range(plan.num_layers + 1)):
        if text:
            _row(table, layers, text)
    if not table.row_count:
        return None
    note = [Text(f"x[{plan.num_layers}] is what the final norm reads.")] if reads_text(plan, plan.num_layers) else []
    return _section("What differs from an ordinary Transformer", table, *note)


# ------------------------------------------------------------------------------------------------- what it costs
def _difference(mine: int, reference: int) -> str:
    if mine == reference:
        return "-"
    percent = f" ({100 * (mine - reference) / reference:+.2f} %)" if reference else ""
    return f"{mine - reference:+,}{percent}"


def _against_transformer(first: str, rows: Iterable[tuple[str, int, int]]) -> Table:
    table = _table(
        f"\n{first}", ("\nthis model", "right"), ("\nTransformer", "right"), ("difference\n(of Transformer)", "right")
    )
    for label, mine, reference in rows:
        _row(table, label, f"{mine:,}", f"{reference:,}", _difference(mine, reference))
    return table


def _parameters(description: Description) -> Group:
    mine, reference = description.parameters
    rows = [("stored", mine.total, reference.total)]
    rows += [
        (f"  {words}", mine.by_role.get(role, 0), reference.by_role.get(role, 0))
        for role, words in ROLES.items()
        if role in mine.by_role or role in reference.by_role
    ]
    rows.append(("in matrix products", mine.in_products, reference.in_products))
    if mine.multiplied != mine.in_products:
        rows.append(("  as often as used", mine.multiplied, reference.multiplied))
    optimizers = _table("optimiser state, float32", ("elements", "right"), ("bytes", "right"), ("Transformer's", "right"))
    for own, other in zip(*description.optimizers, strict=True):
        _row(optimizers, own.name, f"{own.elements:,}", size(own.bytes), size(other.bytes))
    return _section("Parameters", _against_transformer("elements", rows), Text(), optimizers)


def _flops(description: Description) -> Group:
    mine, reference = description.flops
    rows = [("training", mine.training, reference.training)]
    rows.append(("  matrix products", mine.matrix_training, reference.matrix_training))
    rows.append(("  attention", mine.attention_training, reference.attention_training))
    rows.append(("forward", mine.forward, reference.forward))
    return _section(f"FLOPs per token at a context of {description.context:,}", _against_transformer("", rows))


def _cache(description: Description) -> Group:
    cache, reference = description.caches[0].cache, description.caches[0].reference
    table = _table("", ("grows with sequences", "right"), ("shared by all", "right"), ("Transformer", "right"))

    def shown(count: int) -> str:
        return size(count) if count else "-"

    _row(table, "keys", shown(cache.key_bytes), "-", shown(reference.key_bytes))
    _row(table, "values", shown(cache.value_bytes), "-", shown(reference.value_bytes))
    if cache.ids:
        _row(table, "token ids (4 bytes each)", shown(cache.id_bytes), "-", "-")
    if cache.tables:
        _row(table, _plural(len(cache.tables), "table"), "-", shown(cache.shared_bytes), "-")
    _row(table, "total", size(cache.growing_bytes), shown(cache.shared_bytes), size(reference.growing_bytes))
    if cache.row_bytes and description.distinct is not None:
        _row(
            table,
            f"  with {_plural(description.distinct, 'row')} in use",
            "",
            size(cache.rows_in_use_bytes(description.distinct)),
            "",
        )
    title = (
        f"Cache of {_plural(cache.batch, 'sequence')} of {_plural(cache.context, 'token')} in {description.dtype} "
        f"({cache.bytes_per_element} bytes)"
    )
    return _section(title, table, *(Text(line) for line in _table_notes(cache)))


def _table_notes(cache: CacheCounts) -> Iterable[str]:
    for trained, words in (
        (True, "trained: already counted among the parameters"),
        (False, "folded from weights for inference"),
    ):
        found = [table for table in cache.tables if table.trained is trained]
        if found:
            names = found[0].name if len(found) == 1 else _plural(len(found), "table")
            yield f"{names}: {found[0].rows:,} rows, {size(found[0].bytes)}{' each' if len(found) > 1 else ''}, {words}."


def _kept(description: Description, both: Comparison) -> Group:
    table = _table(
        "",
        (f"K+V, {size(both.reference.held_bytes('kv'))}\nkept", "right"),
        ("\nsaved", "right"),
        (f"V alone, {size(both.reference.held_bytes('v'))}\nkept", "right"),
        ("\nsaved", "right"),
    )
    for saving in description.savings(both):
        cells = [f"{part.value:.2f} %" for kept in (saving.kv, saving.v) for part in (kept, kept.complement)]
        _row(table, saving.quantity, *cells)
    notes = ["Of V alone: values and what stands in for them (ids, tables)."] if both.cache.ids else []
    return _section(f"Cache as a share of that of the {both.reference_name}", table, *(Text(note) for note in notes))


def _break_even(description: Description) -> Group:
    title = "Break-even: growing bytes saved equal the bytes of the tables"
    if not description.break_evens:
        return _section(title, Text("No table is shared, so there is nothing to pay for."))
    table = _table("tokens in flight", ("tables", "right"), ("ids counted", "right"), ("ids ignored", "right"))
    pairs: dict[int | None, list[BreakEven]] = {}
    for even in description.break_evens:
        pairs.setdefault(even.distinct, []).append(even)
    for distinct, (counted, ignored) in pairs.items():
        label = "whole tables" if distinct is None else f"{_plural(distinct, 'row')} in use"
        _row(
            table,
            label,
            size(counted.shared_bytes),
            *("never" if e.tokens is None else f"{e.tokens:,}" for e in (counted, ignored)),
        )
    batch, at = description.batch, description.break_even_context
    pays = f"{_plural(batch, 'sequence')} {'pays' if batch == 1 else 'pay'} for whole tables"
    notes = [f"{pays} from {_plural(at, 'token')}{' each' if batch > 1 else ''} on." if at else f"{pays} at no length."]
    if any(window is not None for window in description.plan.shape.windows):
        notes.insert(
            0, f"In flight as sequences of {_plural(description.context, 'token')}: with sliding windows longer ones save less."
        )
    if description.distinct is None:
        notes.append("Give --distinct U for tables with only the rows of U different tokens.")
    return _section(title, table, *(Text(note) for note in notes))
