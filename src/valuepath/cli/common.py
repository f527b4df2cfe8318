"""What the verbs share: the console, bad input as one message, values given on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

BAD_INPUT = 2
WIDEST = 100
"""Columns: longer lines are hard to read."""


def console_for(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    return Console(stderr=stderr, highlight=False, emoji=False, width=min(console.width, WIDEST))


@contextmanager
def reported() -> Iterator[None]:
    """Bad input as one message on standard error and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as wrong:  # WiringError and VariantError are ValueErrors
        console_for(stderr=True).print(f"[bold red]error:[/] {escape(str(wrong))}", soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from None


def options(pairs: list[str], flag: str = "--option", example: str = "layers=[5, 6, 7]") -> dict[str, Any]:
    """``key=value`` pairs with values in YAML: ``layers=[5, 6, 7]``, ``first=5.0``."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{flag} {pair!r}: expected key=value, e.g. {flag} '{example}'")
        from valuepath.settings import yaml_value

        try:
            found[key.strip()] = yaml_value(text)
        except ValueError:
            raise ValueError(
                f"{flag} {pair!r}: the value is not YAML; expected e.g. 2.0, [5, 6, 7], true or a word"
            ) from None
    return found
