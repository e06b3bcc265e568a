"""Codes of 2, 3, 4 or 8 bits in bytes, in groups of whole bytes: the first in the lowest bits."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_WORD: Final[dict[int, np.dtype[Any]]] = {1: np.dtype(np.uint8), 3: np.dtype("<u4")}
"""What a group of so many bytes is worked on in."""


def _group(bits: int) -> tuple[int, int, np.dtype[Any]]:
    """Codes and bytes of the smallest group, and the number that holds it."""
    together = math.lcm(8, bits)
    return together // bits, together // 8, _WORD[together // 8]


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """``ceil(bits n / 8)`` bytes of ``n`` codes, each below ``2 ** bits``; bits left over are 0.

    May be ``codes`` itself.
    """
    if bits == 8:
        return codes
    count, octets, word = _group(bits)
    short = -codes.size % count
    rows = np.append(codes, np.zeros(short, np.uint8)) if short else codes
    rows = rows.reshape(-1, count)
    words = rows[:, 0].astype(word)
    for place in range(1, count):
        words |= rows[:, place].astype(word) << word.type(place * bits)
    if octets == word.itemsize:
        return words
    packed = words.view(np.uint8).reshape(-1, word.itemsize)[:, :octets].reshape(-1)
    return packed[: -(-codes.size * bits // 8)]


def unpack(packed: NDArray[np.uint8], start: int, stop: int, bits: int) -> NDArray[np.uint8]:
    """Codes ``start <= i < stop``; ``start`` is a multiple of 8. May be a view."""
    if bits == 8:
        return packed[start:stop]
    count, octets, word = _group(bits)
    line = packed[start * bits // 8 : -(-stop * bits // 8)]
    if octets == word.itemsize:
        words = line
    else:
        short = -line.size % octets
        whole = np.append(line, np.zeros(short, np.uint8)) if short else line
        wide = np.zeros((whole.size // octets, word.itemsize), np.uint8)
        wide[:, :octets] = whole.reshape(-1, octets)
        words = wide.view(word).reshape(-1)
    codes = np.empty((words.size, count), np.uint8)
    mask = word.type((1 << bits) - 1)
    for place in range(count):
        codes[:, place] = words >> word.type(place * bits) & mask
    return codes.reshape(-1)[: stop - start]
