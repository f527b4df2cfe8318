"""The command ``valuepath``: one verb a job. Heavy imports wait until a verb needs them.

Whatever is wrong with an equation, a preset, an option, a file or a size is printed once, without a traceback, and ends with
exit code 2.
"""

import typer

from valuepath.cli import bench, data, generate, plans, study, train

app = typer.Typer(
    name="valuepath",
    help="Write where each layer's value comes from as an equation; get the model, its cache, its costs and a comparison.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(plans.variants)
app.command()(plans.describe)
app.add_typer(data.app, name="data")
app.command()(train.train)
app.add_typer(study.app, name="study")
app.command()(generate.generate)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the command ``valuepath``."""
    app()
