"""The order of samples: a pure function of (seed, epoch), without a table (A8).

Position ``p`` of a data set with ``n`` training sequences is entry ``p mod n`` of epoch
``p div n``; the entry's sequence is a permutation of ``0..n-1`` that a Feistel network makes
(Luby and Rackoff, "How to construct pseudorandom permutations", 1988). The network permutes the
smallest even power of two that holds ``n``; a value beyond ``n`` goes through it again until it
falls inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002;
four passes at most are expected). Its round function is the output function of SplitMix64
(Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).

Everything is integer arithmetic modulo 2^64 in numpy: the same on any machine.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from distribai.core.ranges import Ranges

Int64s = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

MAX_SEQUENCES: Final = 1 << 62
"""Largest data set that the permutation serves."""

_ROUNDS: Final = 8
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)


def positions_of(ranges: Ranges) -> Int64s:
    """All positions of ``ranges``, in their order: shape (total,)."""
    if not ranges:
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(r.start, r.stop, dtype=np.int64) for r in ranges])


def sequence_of(positions: Int64s, sequences: int, seed: int) -> Int64s:
    """Which training sequence each position is.

    Args:
        positions: sample positions, counting on over epochs; shape (k,).
        sequences: training sequences of the data set, ``n``.
        seed: the job's seed; only its lowest 64 bits count.

    Returns:
        Numbers in ``[0, n)``, shape (k,); each epoch's ``n`` positions yield each number once.

    Raises:
        ValueError: a negative position, or a data set that is empty or beyond
            :data:`MAX_SEQUENCES`.
    """
    if positions.size and int(positions.min()) < 0:
        raise ValueError("sample positions are not negative")
    if sequences < 1:
        raise ValueError("the data set has no training sequence")
    return permute(positions % sequences, positions // sequences, sequences, seed)


def permute(entries: Int64s, epochs: Int64s, size: int, seed: int) -> Int64s:
    """Images of ``entries`` under the permutation of ``0..size-1`` of (seed, epoch).

    ``entries`` (in ``[0, size)``) and ``epochs`` have the same shape (k,).

    Raises:
        ValueError: ``size`` is not in ``[1, MAX_SEQUENCES]``.
    """
    if not 1 <= size <= MAX_SEQUENCES:
        raise ValueError(f"no permutation of {size} entries")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(epochs.astype(np.uint64), seed)
    values = _feistel(entries.astype(np.uint64), keys, half)
    outside = np.flatnonzero(values >= np.uint64(size))
    while outside.size:
        values[outside] = _feistel(values[outside], keys[outside], half)
        outside = outside[values[outside] >= np.uint64(size)]
    return values.astype(np.int64)


def _keys(epochs: _Words, seed: int) -> _Words:
    """One key per entry, from the seed and its epoch."""
    start = np.full(epochs.shape, seed & _MASK, np.uint64)
    return _mix(_mix(start + np.uint64(_GOLDEN)) ^ (epochs * np.uint64(_GOLDEN)))


def _feistel(values: _Words, keys: _Words, half: int) -> _Words:
    """A balanced network over ``2 * half`` bits; a bijection for each key."""
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for number in range(1, _ROUNDS + 1):
        step = np.uint64(number * _GOLDEN & _MASK)
        # The top bits of the mixed word: SplitMix64's are as good as its low ones, and a shift
        # keeps `half` = 31 and `half` = 1 alike.
        image = _mix(right ^ (keys + step)) >> np.uint64(64 - half)
        left, right = right, left ^ image
    return (left << shift) | right


def _mix(words: _Words) -> _Words:
    """SplitMix64's output function, elementwise modulo 2^64."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    mixed: _Words = words ^ (words >> np.uint64(31))
    return mixed
