"""``valuepath generate``: text from a saved model, on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from valuepath.cli.common import console_for, reported

if TYPE_CHECKING:
    from valuepath.infer.generate import Stats


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder with a model and its tokenizer: <run>/model.")],
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; standard input if left out.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most so many new tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from so many of the likeliest tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest with this probability.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(min=0.01, help="Above 1 makes what was there less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the draws; another text each time if left out.")] = None,
    eos: Annotated[
        bool, typer.Option("--eos/--no-eos", help="Put the end token before the prompt, as before texts in training.")
    ] = True,
    fold: Annotated[str | None, typer.Option(help="auto, none, all or factored; see docs/cache.md.")] = None,
    table_device: Annotated[
        str | None, typer.Option(help="Where value tables live: cpu or mmap; with the model if left out.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64; as saved if left out.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    prefill_chunk: Annotated[int, typer.Option(min=0, help="Run the prompt in pieces of so many tokens; 0: whole.")] = 0,
    stats: Annotated[bool, typer.Option("--stats", help="Then print times, tokens/s and cache bytes to stderr.")] = False,
) -> None:
    """Continue a text, streaming to the terminal."""
    with reported():
        if prompt is None:
            if sys.stdin.isatty():
                raise ValueError("no prompt: give it as the second argument, or pipe text into the command")
            prompt = sys.stdin.buffer.read().decode("utf-8", errors="replace")
        import torch
        from transformers.utils import logging

        from valuepath.infer import generate as run

        logging.disable_progress_bar()  # standard error is for what went wrong, and for --stats

        if "/" not in model and not Path(model).exists():
            raise ValueError(f"{model}: no such folder; expected one with a saved model, such as <run>/model")
        made, tokenizer = run.load(model, dtype=dtype, device=device, table_device=table_device)
        torch.manual_seed(torch.seed() if seed is None else seed)
        sampling = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}  # type: ignore[dict-item]
        pieces = {"prefill_chunk_size": prefill_chunk} if prefill_chunk else {}

        def write(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        try:
            found = run.generate(
                made,
                tokenizer,
                prompt,
                write,
                fold=fold,
                after_eos=eos,
                max_new_tokens=max_new_tokens,
                repetition_penalty=repetition_penalty,
                **sampling,
                **pieces,
            )
        except KeyboardInterrupt:
            write("\n")
            raise typer.Exit(130) from None
        write("\n")
    if stats:
        _print(found)


def _print(found: Stats) -> None:
    from rich.table import Table

    from valuepath.render import size

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    rate = found.tokens_per_second
    cache = found.cache
    table.add_row("prompt", f"{found.prompt_tokens:,} tokens")
    table.add_row("time to first token", f"{found.first_token_seconds:.3f} s")
    table.add_row("new", f"{found.new_tokens:,} tokens")
    table.add_row("after the first", "-" if rate is None else f"{rate:.1f} tokens/s")
    table.add_row("cache that grows with the text", size(cache.logical))
    table.add_row("  allocated", size(cache.allocated))
    if found.distinct:
        table.add_row(f"rows of {found.distinct:,} distinct tokens", size(cache.rows))
        table.add_row("tables that all texts share", size(cache.shared))
    console_for(stderr=True).print(table)
