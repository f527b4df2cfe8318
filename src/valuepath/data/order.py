"""Which training sequence comes when: endless, and a function of the corpus, the length, the seed and the weights alone.

So two models that are trained with one seed see the same text in the same order, and a longer run begins like a shorter one.
Numbers come from ``PCG64``'s raw output, which numpy keeps as it is from version to version.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import PCG64, SeedSequence
from numpy.typing import NDArray

from valuepath.data.layout import check_weights

if TYPE_CHECKING:
    from valuepath.data.corpus import Corpus

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: its multiples, modulo 2**64, fill the range most evenly."""


class TrainingOrder:
    """The order of training sequences. A sequence is T inputs and the tokens after them: ``train[kT : kT + T + 1]``.

    Sequence s comes from the domain whose share holds the s-th point of a golden-ratio sequence with a seeded start: the number
    drawn from each domain stays within a few of its weight times s. Within a domain each epoch is a fresh permutation.

    Args:
        length: T, inputs of a sequence; independent of the block that the text is stored in.
        seed: a whole number of at least 0.
        weights: by domain, in any unit; by default the prepared ones, else by the number of sequences.

    Raises:
        ValueError: if a domain has no sequence of that length; for weights that do not match the domains.
    """

    def __init__(self, corpus: Corpus, length: int, seed: int, weights: Mapping[str, float] | None = None) -> None:
        if length < 1:
            raise ValueError(f"length {length}: expected at least 1 token")
        if seed < 0:
            raise ValueError(f"seed {seed}: expected at least 0")
        self.corpus, self.length, self.seed = corpus, length, seed
        self.names = list(corpus.domains)
        self.counts = [(len(domain.train) - 1) // length for domain in corpus.domains.values()]
        for name, count in zip(self.names, self.counts, strict=True):
            if count < 1:
                lengths = [len(domain.train) for domain in corpus.domains.values()]
                raise ValueError(
                    f"length {length}: the domain {name!r} has {lengths[self.names.index(name)]} training tokens, too few for "
                    f"one; the longest that every domain has is {min(lengths) - 1}"
                )
        given = check_weights(weights, self.names, "weights")
        if not given:
            prepared = {name: domain.weight for name, domain in corpus.domains.items() if domain.weight is not None}
            given = check_weights(prepared, self.names, f"{corpus.path}: weights")
        shares = [given[name] for name in self.names] if given else [float(count) for count in self.counts]
        ends = np.cumsum(np.array(shares) / max(shares))
        self._ends = np.array([min(int(end / ends[-1] * 2.0**64), 2**64 - 1) for end in ends[:-1]], dtype=np.uint64)
        """Where the share of each domain but the last ends, of 2**64."""
        self._streams = [domain.train for domain in corpus.domains.values()]

    def _random(self, *words: int, count: int) -> NDArray[np.uint64]:
        raw: NDArray[np.uint64] = PCG64(SeedSequence([self.seed, *words])).random_raw(count)
        return raw

    @cached_property
    def _keys(self) -> list[int]:
        """A number for each domain's name: its permutations do not change when another domain is added."""
        return [int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") for name in self.names]

    def _domains(self, n: int) -> NDArray[np.int16]:
        points = np.arange(n, dtype=np.uint64)
        points *= np.uint64(_GOLDEN)  # modulo 2**64
        points += self._random(0, count=1)
        return np.searchsorted(self._ends, points, side="right").astype(np.int16)

    def take(self, n: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """The first ``n`` sequences; the same whatever ``n`` is.

        Returns:
            Index of the domain, shape (n,), and where in its training stream the sequence starts, shape (n,).
        """
        if n < 0:
            raise ValueError(f"{n} sequences: expected at least 0")
        domains = self._domains(n)
        starts = np.empty(n, dtype=np.int64)
        for d, count in enumerate(self.counts):
            at = np.flatnonzero(domains == d)
            for epoch, begin in enumerate(range(0, len(at), count)):
                now = at[begin : begin + count]
                order = np.argsort(self._random(1, self._keys[d], epoch, count=count), kind="stable")
                starts[now] = order[: len(now)] * self.length
        return domains, starts

    def epochs(self, n: int) -> dict[str, float]:
        """How often each domain's sequences have been seen after ``n``, by name."""
        drawn = np.bincount(self._domains(n), minlength=len(self.names))
        return {name: int(drawn[d]) / self.counts[d] for d, name in enumerate(self.names)}

    def read(self, domain_index: int, start: int) -> NDArray[np.int64]:
        """The tokens of one sequence, shape (T + 1,)."""
        return self._streams[domain_index].read(start, start + self.length + 1)
