"""Sequences of a prepared data set, by sample position.

Shards are memory-mapped: a batch touches only its own pages. Whether a shard's bytes match their
hash is the caller's business (the node's blob cache checks); that the file is the shard which the
manifest means, and that no id lies outside the vocabulary, is checked here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from distribai.core.ranges import Ranges
from distribai.data import shardfile
from distribai.data.order import Int64s, permute, positions_of, sequence_of
from distribai.data.shardfile import Tokens
from distribai.data.shards import DatasetManifest
from distribai.errors import Integrity

__all__ = ["SampleReader", "positions_of"]

_MAX_OPEN: Final = 64
"""Shards mapped at once: a map holds a file descriptor."""

_READ_AHEAD_IDS: Final = 1 << 17


class SampleReader:
    """Reads training and held-out sequences.

    Args:
        manifest: the prepared data set.
        paths: each shard's file by its SHA-256 (hex).
        seed: the job's seed, which decides the order of training sequences.

    Raises:
        Integrity: ``tensor.format``; a shard's file is missing or is another one's.
    """

    def __init__(self, manifest: DatasetManifest, paths: Mapping[str, Path], seed: int) -> None:
        self._manifest = manifest
        self._seed = seed
        try:
            self._paths = [paths[s.blob.sha256] for s in manifest.shards]
        except KeyError as missing:
            raise Integrity(
                "tensor.format", f"There is no file of token shard {missing}."
            ) from None
        for shard, path in zip(manifest.shards, self._paths, strict=True):
            shardfile.check(path, manifest.dtype, shard.tokens)
        self._open: OrderedDict[int, Tokens] = OrderedDict()
        self._first_windows = np.cumsum([0, *(s.windows for s in manifest.shards)])
        windows = int(self._first_windows[-1])
        starts = np.array([b.start for b in manifest.held_out], np.int64)
        stops = np.array([b.stop for b in manifest.held_out], np.int64)
        lengths = stops - starts
        # With the dropped window after each block, which the last one may lack.
        apart = np.minimum(stops + 1, windows) - starts
        self._held_out_starts = starts
        self._held_out_before = np.cumsum(lengths) - lengths
        self._train_apart = np.cumsum(apart)
        self._train_before = starts - (self._train_apart - apart)
        if (windows - apart.sum(), lengths.sum()) != (
            manifest.train_sequences,
            manifest.held_out_sequences,
        ):
            raise Integrity(
                "tensor.format", "The data set's manifest contradicts itself about its sequences."
            )

    def batch(self, positions: Int64s) -> Int64s:
        """Training sequences at ``positions``, shape (k,).

        Returns:
            ids, shape (k, seq_len + 1): ``[:, :-1]`` are inputs, ``[:, 1:]`` targets.

        Raises:
            Integrity: ``tensor.format``; an id lies outside the vocabulary.
            ValueError: a position is negative.
        """
        sequences = sequence_of(positions, self._manifest.train_sequences, self._seed)
        # Block j moves every training sequence from `_train_before[j]` on behind its windows.
        passed = np.searchsorted(self._train_before, sequences, side="right")
        return self._windows(sequences + np.concatenate([[0], self._train_apart])[passed])

    def batches(self, ranges: Ranges, size: int) -> Iterator[Int64s]:
        """Training sequences of ``ranges`` in their order, ``size`` at a time.

        The way for a training loop: about a megabyte is read ahead at once, so that a batch costs
        some microseconds.

        Yields:
            ids, shape (size, seq_len + 1), see :meth:`batch`; the last may have fewer rows. The
            arrays are views that nothing else writes to.

        Raises:
            Integrity: see :meth:`batch`.
        """
        steps = max(1, _READ_AHEAD_IDS // (size * (self._manifest.seq_len + 1)))
        positions = positions_of(ranges)
        for first in range(0, positions.size, steps * size):
            ahead = self.batch(positions[first : first + steps * size])
            for start in range(0, len(ahead), size):
                yield ahead[start : start + size]

    def held_out_batch(self, start: int, count: int) -> Int64s:
        """Held-out sequences ``start <= i < start + count``, in an order mixed over all blocks.

        The order depends on the data set alone, so the first ``n`` are a fair sample of the split
        and the same for every node and version.

        Returns:
            ids, shape (count, seq_len + 1), as :meth:`batch` has them.

        Raises:
            Integrity: see :meth:`batch`.
            ValueError: the split has no such sequences.
        """
        total = self._manifest.held_out_sequences
        if start < 0 or count < 0 or start + count > total:
            raise ValueError(f"held-out sequences {start}..{start + count} of {total}")
        entries = np.arange(start, start + count, dtype=np.int64)
        entries = permute(entries, np.zeros_like(entries), total, self._manifest.seed)
        block = np.searchsorted(self._held_out_before, entries, side="right") - 1
        return self._windows(self._held_out_starts[block] + entries - self._held_out_before[block])

    def _windows(self, windows: Int64s) -> Int64s:
        length = self._manifest.seq_len
        out = np.empty((windows.size, length + 1), np.int64)
        shards = np.searchsorted(self._first_windows, windows, side="right") - 1
        columns = np.arange(length + 1)
        for number in np.unique(shards):
            rows = np.flatnonzero(shards == number)
            firsts = (windows[rows] - self._first_windows[number]) * length
            out[rows] = self._shard(int(number))[firsts[:, None] + columns]
        if out.size and not 0 <= int(out.min()) <= int(out.max()) < self._manifest.vocab_size:
            raise Integrity(
                "tensor.format",
                f"A token shard holds ids outside the vocabulary of {self._manifest.vocab_size}.",
            )
        return out

    def _shard(self, number: int) -> Tokens:
        tokens = self._open.get(number)
        if tokens is None:
            shard = self._manifest.shards[number]
            tokens = shardfile.open_mapped(self._paths[number], self._manifest.dtype, shard.tokens)
            self._open[number] = tokens
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        return tokens
