"""``valuepath bench``: measurements on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from valuepath.cli.common import console_for, reported

app = typer.Typer(help="Measure on this machine, side by side.", no_args_is_help=True)


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part.replace("_", "")) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {text!r}: expected whole numbers separated by commas, e.g. {flag} 512,4096") from None


@app.command()
def decode(
    level: Annotated[str, typer.Option(help="kernel (attention of one layer), model (whole models) or both.")] = "both",
    context: Annotated[
        str, typer.Option(help="Tokens of each sequence, separated by commas.")
    ] = "512,2048,8192,16384,32768,65536",
    batch: Annotated[str, typer.Option(help="Sequences, separated by commas.")] = "1,4,16",
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, separated by commas.")] = "fp32,bf16",
    heads: Annotated[int, typer.Option(help="Query and key/value heads.")] = 12,
    head_dim: Annotated[str, typer.Option(help="Widths of a head for kernels, separated by commas.")] = "64,128",
    layers: Annotated[int, typer.Option(help="Of whole models.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of whole models.")] = 768,
    rounds: Annotated[int, typer.Option(help="Turns of which the median is taken.")] = 15,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 as PyTorch is set.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder that `valuepath data prepare` made, for its token ids; by default Python's own sources, with a "
            "tokenizer of 32,768 trained on them (half a minute)."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write everything measured to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw time and bytes over the context: .png, .svg or .pdf.")] = None,
) -> None:
    """Decode steps with stored, gathered and pooled values: time, tokens/s and bytes.

    All ways are taken in turns in one process. Cells that would need over 40 % of the memory are skipped.
    """
    with reported():
        from valuepath import files
        from valuepath.bench import decode as bench
        from valuepath.bench import show, text
        from valuepath.plot import checked_path

        settings = bench.Settings(
            level=level,  # type: ignore[arg-type]  # checked by run
            contexts=_numbers("--context", context),
            batches=_numbers("--batch", batch),
            dtypes=tuple(dtype.split(",")),
            heads=heads,
            head_dims=_numbers("--head-dim", head_dim),
            layers=layers,
            hidden=hidden,
            rounds=rounds,
            device=device,
            threads=threads,
        )
        settings.check()
        if plot is not None:
            checked_path(plot)
        if out is not None and out.is_dir():
            raise ValueError(f"--out {out} is a folder; name a file")
        errors = console_for(stderr=True)
        with errors.status("...") as status:

            def tell(what: str) -> None:
                status.update(Text(what))

            result = bench.run(settings, text.load(data, tell), tell)
        if out is not None:
            files.write_json(out, result)
            errors.print(f"written to {out}", markup=False, soft_wrap=True)
        if plot is not None:
            show.plot(result, plot)
            errors.print(f"plot written to {plot}", markup=False, soft_wrap=True)
    show.show(result, console_for())
