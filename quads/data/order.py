"""Random order as a pure function of (seed, position): nothing to save, nothing that depends on the world size.

Everything is drawn from hashes and from the raw bits of a counter-based generator (Philox), both stable across versions
of Python and numpy, so that a resumed run sees the prompts the first one would have seen.
"""

import hashlib

import numpy as np

BLOCK = 1024


def stable_seed(*parts: object) -> int:
    """A 63-bit seed for what `parts` name; any change of a part gives an unrelated seed."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def permutation(size: int, seed: int) -> np.ndarray:
    """int64 [size], a permutation of 0 ... size-1."""
    return np.argsort(np.random.Philox(key=seed).random_raw(size), kind="stable")


class Shuffled:
    """Endless passes over `size` rows, each in an order of its own.

    Example: `[Shuffled(3, seed=0)[i] for i in range(6)]` holds each of 0, 1, 2 once in either half.
    """

    def __init__(self, size: int, seed: int):
        self.size, self.seed = size, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(index, self.size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self.size, stable_seed(self.seed, "epoch", epoch))
        return int(self._order[place])


class Mixture:
    """Which source a position belongs to, and how many positions of that source come before it.

    Positions come in blocks of about 1024 that hold every source in exact proportion to its weight (at least once), in
    an order of their own; so both answers need no history.

    Example: `Mixture([3, 1], seed=0)[5]` -> `(0, 2)`: the third row of source 0.
    """

    def __init__(self, weights: list[float], seed: int):
        total = sum(weights)
        self.counts = np.maximum(1, np.rint(np.array(weights) * (BLOCK / total))).astype(np.int64)
        self.seed = seed
        self._block, self._sources, self._ranks = -1, np.empty(0), np.empty(0)

    def __getitem__(self, position: int) -> tuple[int, int]:
        block, place = divmod(position, int(self.counts.sum()))
        if block != self._block:
            source = np.repeat(np.arange(len(self.counts)), self.counts)
            rank = np.concatenate([np.arange(count) for count in self.counts])
            order = permutation(len(source), stable_seed(self.seed, "mixture", block))
            self._block, self._sources = block, source[order]
            # Within a source, ranks follow positions, so that its rows come in the source's own order.
            self._ranks = np.empty_like(rank)
            for i in range(len(self.counts)):
                self._ranks[self._sources == i] = np.arange(self.counts[i])
        source = int(self._sources[place])
        return source, block * int(self.counts[source]) + int(self._ranks[place])
