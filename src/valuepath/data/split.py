"""Which documents are held out: chosen by their content, so that the choice outlives new documents, moves and renames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from valuepath.data.spool import SpooledDomain, reasons

COPIES = "the same text is held out"
MOST_HELD_OUT = 0.5
"""Share of a domain's text above which nothing sensible is left to train on."""


@dataclass(frozen=True)
class Split:
    """Of one domain.

    Attributes:
        held: positions of the held-out documents, each a distinct text.
        wanted: held-out bytes that were asked for; with long documents there may be more.
        copies: documents that repeat an earlier one of the domain.
    """

    held: frozenset[int]
    wanted: int
    copies: int


def choose(domain: SpooledDomain, holdout: float, max_bytes: int) -> Split:
    """The held-out documents: distinct texts in the order of their hashes until there are enough bytes.

    Enough is ``min(holdout * bytes, max_bytes)``. A document that would carry them past twice that, or past half of the text,
    is passed over: one long document must neither become all of the held-out text nor leave nothing to train on. If all
    documents are that long, the shortest is held out.

    Raises:
        ValueError: if the domain has fewer than two distinct documents.
    """
    if not len(domain):
        raise ValueError(f"the domain {domain.name!r}: no document is left: {reasons(domain.skipped)}; expected text")
    order, copies = domain.distinct()
    if len(order) < 2:
        what = f"{len(domain)} documents that are all the same text" if copies else "one document"
        raise ValueError(
            f"the domain {domain.name!r} has {what}, so that none can be held out; give it more documents, cut the text up "
            "(a JSONL line for each part), or join it to another domain by giving both sources one NAME="
        )
    enough = min(holdout * domain.size, max_bytes)
    most = min(2 * enough, MOST_HELD_OUT * domain.size)
    held: list[int] = []
    total = 0
    for n in order:
        if total >= enough or len(held) == len(order) - 1:
            break
        if total + domain.sizes[n] <= most:
            held.append(n)
            total += domain.sizes[n]
    if not held:
        held = [min(order, key=lambda n: (domain.sizes[n], domain.digest_of(n)))]
    return Split(frozenset(held), int(enough), copies)


def held_digests(domains: Mapping[str, SpooledDomain], splits: Mapping[str, Split]) -> frozenset[bytes]:
    """Hashes of all held-out texts: no training document of any domain may be one of them."""
    return frozenset(domains[name].digest_of(n) for name, split in splits.items() for n in split.held)
