"""``valuepath train``: one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from valuepath.cli.common import console_for, options, reported


def train(
    settings: Annotated[Path, typer.Argument(help="YAML: model, data, optimiser, budget, seed. See docs/studies.md.")],
    out: Annotated[Path, typer.Option(help="The run's folder; an interrupted run in it goes on.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="a.b=c, e.g. optimiser.lr=2e-3; repeatable.")
    ] = None,
) -> None:
    """Train one model; held-out loss and bits per byte by domain."""
    with reported():
        from filelock import FileLock, Timeout
        from rich.table import Table
        from rich.text import Text

        from valuepath.data.corpus import Corpus
        from valuepath.settings import read_yaml
        from valuepath.train.folder import RunFolder
        from valuepath.train.result import Diverged
        from valuepath.train.run import train as train_run
        from valuepath.train.settings import RunSettings

        document = read_yaml(settings).with_overrides(options(overrides or [], "--set", "optimiser.lr=2e-3"))
        run_settings = RunSettings.of(document)
        corpus = Corpus.load(Path(run_settings.data.path))
        try:
            run = run_settings.resolve(corpus.vocab_size, corpus.fingerprint, corpus.eos)
        except ValueError as wrong:
            raise ValueError(f"{document.place(('model',))}: {wrong}") from None
        folder = RunFolder(out)
        folder.check(run.id)
        console = console_for(stderr=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(out.parent / f".{out.name}.lock").acquire(timeout=0):
                checkpoint = folder.last_checkpoint()
                if folder.result_file.exists():
                    console.print("finished before", markup=False)
                elif checkpoint is not None:
                    console.print(f"going on from step {checkpoint[0]:,} of {run.steps:,}", markup=False)
                result = train_run(run, corpus, out, progress=console.is_terminal)
        except Timeout:
            raise ValueError(f"{out}: another process is training this run; wait for it or choose another --out") from None
        except Diverged as wrong:
            failure = folder.failure()
            assert failure is not None
            last = "there is no checkpoint yet"
            if failure.checkpoint is not None:
                last = f"last good checkpoint: {out / failure.checkpoint}"
            raise ValueError(f"{wrong}; {last}; {failure.hint}") from None
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from the last checkpoint", markup=False)
            raise typer.Exit(130) from None
    table = Table(box=None, pad_edge=False)
    table.add_column("held-out text")
    table.add_column("loss", justify="right")
    table.add_column("bits per byte", justify="right")
    final = result.final
    for name in final.loss.domains:
        table.add_row(Text(name), f"{final.loss.domains[name]:.4f}", f"{final.bpb.domains[name]:.4f}")
    table.add_row("mean over domains", f"{final.loss.mean:.4f}", f"{final.bpb.mean:.4f}")
    table.add_row("all text as one", f"{final.loss.token_weighted:.4f}", f"{final.bpb.token_weighted:.4f}")
    out_console = console_for()
    out_console.print(table)
    out_console.print(f"model: {out / 'model'}", markup=False, soft_wrap=True)
