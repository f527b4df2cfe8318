"""``valuepath variants`` and ``valuepath describe``: what an equation amounts to, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from valuepath.cli.common import console_for, options, reported

if TYPE_CHECKING:
    from valuepath.config import ValuePathConfig
    from valuepath.describe import About
    from valuepath.variants import Preset


# -------------------------------------------------------------------------------------------------------- variants
def variants(
    layers: Annotated[int, typer.Option(min=1, help="For how many layers the equation is written.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List every preset: its name, its equation and its paper."""
    from valuepath.variants import variants as presets

    found = presets()
    equations = {name: _equation(preset, layers) for name, preset in found.items()}
    if as_json:
        entries = [
            {
                "name": name,
                "equation": equations[name][0],
                "unavailable": equations[name][1],
                "summary": preset.summary,
                "paper": preset.paper,
                "location": preset.location,
                "options": dict(preset.options),
            }
            for name, preset in found.items()
        ]
        typer.echo(json.dumps(entries, indent=2))
        return
    console = console_for()

    def indented(text: str, style: str) -> None:
        console.print(Padding(Text(text, style=style), (0, 0, 0, 2)))

    for name, preset in found.items():
        equation, unavailable = equations[name]
        console.print(Text(name, style="bold"))
        indented(equation if equation is not None else f"({unavailable})", "cyan")
        indented(preset.summary, "")
        indented(", ".join(part for part in (preset.paper, preset.location) if part), "dim")
        if preset.options:
            indented("options: " + ", ".join(f"{key}={json.dumps(value)}" for key, value in preset.options.items()), "dim")
    console.print(
        f"\n{len(found)} presets; equations written for {layers} layers. Grouped queries go with any of them: --kv-heads."
    )


def _equation(preset: Preset, layers: int) -> tuple[str | None, str | None]:
    """A preset's equation, or why it cannot be written for so few layers."""
    try:
        return preset.equation(layers), None
    except ValueError as wrong:
        return None, str(wrong)


# -------------------------------------------------------------------------------------------------------- describe
def _config(what: str, options: dict[str, Any], fields: dict[str, Any]) -> ValuePathConfig:
    """The configuration of a preset or of an equation, with only the fields that were given."""
    from valuepath.config import ValuePathConfig

    given = {name: value for name, value in fields.items() if value is not None}
    if "=" not in what and not what.isidentifier():
        raise ValueError(f"{what!r} is neither a preset nor an equation; an equation has a '=', e.g. 'v[1:] = tap(0)'")
    if "=" in what:
        if options:
            raise ValueError("--option belongs to a preset; write the numbers into the equation instead")
        return ValuePathConfig(wiring=what, **given)
    return ValuePathConfig(variant=what, variant_options=options or None, **given)


def _about(config: ValuePathConfig) -> About:
    from valuepath.describe import About
    from valuepath.variants import preset

    if config.wiring is not None:
        return About(style=config.style)
    found = preset(config.variant)
    return About(found.name, found.paper, found.location, found.summary, config.style)


def describe(
    what: Annotated[str, typer.Argument(help="A preset (see 'valuepath variants') or an equation such as 'v[1:] = tap(0)'.")],
    layers: Annotated[int | None, typer.Option(help="Number of layers.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; as many as query heads if omitted.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head.")] = None,
    mlp_size: Annotated[int | None, typer.Option(help="Inner width of the MLP.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Number of token ids.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of each sequence; the model is sized for it.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    style: Annotated[str | None, typer.Option(help="llama or nanochat.")] = None,
    dtype: Annotated[str, typer.Option(help="Of keys, values and tables: bf16, fp16, fp32, fp64.")] = "bf16",
    window_pattern: Annotated[str | None, typer.Option(help="Such as SSSL; the last layer is always long.")] = None,
    sliding_window: Annotated[int | None, typer.Option(help="Positions that a short layer sees.")] = None,
    fold: Annotated[str | None, typer.Option(help="auto, none (the published layout), all or factored.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="key=value for the preset; repeatable; value in YAML.")] = None,
    distinct: Annotated[int | None, typer.Option(help="U different tokens: tables with only these rows resident.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; its keys are listed in valuepath.describe.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw bytes over the context to this .png, .svg or .pdf.")] = None,
) -> None:
    """Print a model's layer-by-layer plan, its parameters, FLOPs and cache. Computed, not measured."""
    with reported():
        from valuepath.describe import as_json as to_json
        from valuepath.describe import describe as build
        from valuepath.plot import checked_path, save_plot
        from valuepath.render import render

        if plot is not None:
            checked_path(plot)
        fields = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": mlp_size,
            "vocab_size": vocab,
            "max_position_embeddings": context,
            "style": style,
            "window_pattern": window_pattern,
            "sliding_window": sliding_window,
            "fold": fold,
        }
        config = _config(what, options(option or []), fields)
        description = build(
            config.plan(),
            config.equation(),
            context=config.max_position_embeddings,
            batch=batch,
            dtype=dtype,
            distinct=distinct,
            about=_about(config),
        )
        if plot is not None:
            save_plot(description, plot)
            console_for(stderr=True).print(f"plot written to {plot}", markup=False, soft_wrap=True)
    # outside of the errors above: a closed pipe is not bad input
    if as_json:
        typer.echo(json.dumps(to_json(description), indent=2))
    else:
        render(description, console_for())

