"""The order of samples."""

import hashlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distribai.core.ranges import SampleRange
from distribai.data.order import MAX_SEQUENCES, permute, positions_of, sequence_of


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 2**40))
@example(n=1, seed=0, epoch=0)
@example(n=2, seed=0, epoch=0)
@example(n=1024, seed=0, epoch=0)
@example(n=1025, seed=0, epoch=0)
def test_an_epoch_holds_every_sequence_once(n: int, seed: int, epoch: int) -> None:
    positions = np.arange(epoch * n, (epoch + 1) * n, dtype=np.int64)
    assert np.array_equal(np.sort(sequence_of(positions, n, seed)), np.arange(n))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, MAX_SEQUENCES), seed=st.integers(0, 2**32))
@example(n=MAX_SEQUENCES, seed=0)
def test_huge_data_sets_are_permuted_without_a_table(n: int, seed: int) -> None:
    entries = np.unique(np.linspace(0, n - 1, 50).astype(np.uint64).astype(np.int64) % n)
    images = permute(entries, np.zeros_like(entries), n, seed)
    assert np.unique(images).size == entries.size
    assert 0 <= images.min() <= images.max() < n


def test_the_order_is_the_recorded_one() -> None:
    """Golden values: a change here makes old jobs irreproducible."""
    assert sequence_of(np.arange(12, dtype=np.int64), 10, 7).tolist() == GOLDEN_SMALL
    big = np.array([0, 1, 2**40, 2**50 + 3], np.int64)
    assert sequence_of(big, 10**12 + 39, 2**63 + 5).tolist() == GOLDEN_BIG
    epoch = sequence_of(np.arange(100_000, dtype=np.int64), 99_991, 0).astype("<i8")
    assert hashlib.sha256(epoch.tobytes()).hexdigest() == GOLDEN_HASH


def test_a_batch_may_straddle_epochs() -> None:
    n = 37
    together = sequence_of(np.arange(3 * n, dtype=np.int64), n, 5)
    apart = [sequence_of(np.arange(e * n, (e + 1) * n, dtype=np.int64), n, 5) for e in range(3)]
    assert np.array_equal(together, np.concatenate(apart))


def test_seeds_and_epochs_give_other_orders() -> None:
    p = np.arange(200, dtype=np.int64)
    orders = {tuple(sequence_of(p + e * 200, 200, s).tolist()) for s in range(5) for e in range(5)}
    assert len(orders) == 25


def test_places_are_spread_evenly() -> None:
    """Each entry lands everywhere equally often: chi-square over 8 cells, far from the tail."""
    n, epochs = 8, 4000
    p = np.arange(n * epochs, dtype=np.int64)
    images = sequence_of(p, n, 3).reshape(epochs, n)
    for entry in range(n):
        counts = np.bincount(images[:, entry], minlength=n)
        assert ((counts - epochs / n) ** 2 / (epochs / n)).sum() < 40


def test_neighbours_do_not_stay_together() -> None:
    images = sequence_of(np.arange(10_000, dtype=np.int64), 10_000, 1)
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.05


def test_negative_positions_and_empty_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        sequence_of(np.array([-1], np.int64), 5, 0)
    with pytest.raises(ValueError, match="no training sequence"):
        sequence_of(np.array([0], np.int64), 0, 0)
    with pytest.raises(ValueError, match="no permutation"):
        sequence_of(np.array([0], np.int64), MAX_SEQUENCES + 1, 0)


def test_positions_come_in_the_order_of_their_ranges() -> None:
    assert positions_of(()).shape == (0,)
    found = positions_of((SampleRange(3, 5), SampleRange(9, 10)))
    assert found.tolist() == [3, 4, 9]
    assert found.dtype == np.int64


GOLDEN_SMALL = [3, 7, 5, 9, 0, 2, 8, 4, 6, 1, 9, 2]
GOLDEN_BIG = [704631891453, 100759964947, 916477733613, 307004775165]
GOLDEN_HASH = "15877135b0f0fb89cd503c09a7d63f3b3725ce52e5bc5ee9772f910660a78800"
