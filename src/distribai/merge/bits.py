"""Codes of 2 to 6 or 8 bits in bytes, in groups of whole bytes: the first in the lowest bits.

A group's codes, a byte each, are looked at as one word, in which neighbours are moved together: one
code to one, then pairs to pairs, and so on; unpacking goes back the same way. So all steps run over
whole arrays of words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class _Move:
    """How neighbours come together: the upper one moves down by so many bits. Masks of the lower
    ones, and of the upper ones before and after."""

    by: Any
    lower: Any
    apart: Any
    beside: Any


@dataclass(frozen=True, slots=True)
class _Group:
    """The smallest group of codes that fills whole bytes: ``count`` codes in ``octets`` bytes, a
    ``word`` with a byte for each code, and the moves that pack it."""

    count: int
    octets: int
    word: np.dtype[Any]
    moves: tuple[_Move, ...]


@cache
def _group(bits: int) -> _Group:
    octets = math.lcm(8, bits) // 8
    count = 8 * octets // bits
    word = np.dtype(f"<u{count}")

    def move(codes: int) -> _Move:
        lower = sum((1 << codes * bits) - 1 << at for at in range(0, 8 * count, 16 * codes))
        masks = (lower, lower << 8 * codes, lower << codes * bits)
        return _Move(word.type(codes * (8 - bits)), *map(word.type, masks))

    moves = tuple(move(1 << place) for place in range(count.bit_length() - 1))
    return _Group(count, octets, word, moves)


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """``ceil(bits n / 8)`` bytes of ``n`` codes, each below ``2 ** bits``; bits left over are 0.

    May be ``codes`` itself.
    """
    if bits == 8:
        return codes
    group = _group(bits)
    short = -codes.size % group.count
    whole = np.append(codes, np.zeros(short, np.uint8)) if short else codes
    words = np.ascontiguousarray(whole).view(group.word)
    for move in group.moves:
        words = words & move.lower | words >> move.by & move.beside
    if group.octets == 1:
        return words.astype(np.uint8)
    packed = np.empty((words.size, group.octets), np.uint8)
    octets = words.view(np.uint8).reshape(-1, group.count)
    for place in range(group.octets):  # numpy copies columns faster than short rows
        packed[:, place] = octets[:, place]
    return packed.reshape(-1)[: -(-codes.size * bits // 8)]


def unpack(packed: NDArray[np.uint8], start: int, stop: int, bits: int) -> NDArray[np.uint8]:
    """Codes ``start <= i < stop``; ``start`` is a multiple of 8. May be a view."""
    if bits == 8:
        return packed[start:stop]
    group = _group(bits)
    line = packed[start * bits // 8 : -(-stop * bits // 8)]
    if group.octets == 1:
        words = line.astype(group.word)
    else:
        short = -line.size % group.octets
        whole = np.append(line, np.zeros(short, np.uint8)) if short else line
        octets = np.zeros((whole.size // group.octets, group.count), np.uint8)
        for place in range(group.octets):
            octets[:, place] = whole[place :: group.octets]
        words = octets.view(group.word).reshape(-1)
    for move in reversed(group.moves):
        words = words & move.lower | words << move.by & move.apart
    return words.view(np.uint8)[: stop - start]
