from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distribai.core.spec import BlobRef
from distribai.errors import Integrity
from distribai.node.cache import STALE_S, BlobCache
from tests.node.helpers import ref_of


def cache_at(root: Path, limit: int = 1000, start: int = 1) -> BlobCache:
    ticks = itertools.count(start)
    return BlobCache(root, limit, lambda: float(next(ticks)))


def put(cache: BlobCache, data: bytes) -> BlobRef:
    ref = ref_of(data)
    cache.partial(ref).write_bytes(data)
    cache.take(cache.partial(ref), ref)
    return ref


def test_a_blob_is_found_by_hash_and_read_only(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    ref = put(cache, b"abc")
    path = cache.find(ref)
    assert path is not None
    assert path.read_bytes() == b"abc"
    assert path.stat().st_mode & 0o222 == 0
    assert cache.find(ref_of(b"other")) is None


@pytest.mark.parametrize(("data", "code"), [(b"abX", "blob.hash"), (b"ab", "blob.size")])
def test_other_bytes_than_the_hash_promises_are_refused_and_removed(
    tmp_path: Path, data: bytes, code: str
) -> None:
    cache = cache_at(tmp_path)
    ref = ref_of(b"abc")
    cache.partial(ref).write_bytes(data)
    with pytest.raises(Integrity) as caught:
        cache.take(cache.partial(ref), ref)
    assert caught.value.code == code
    assert not cache.partial(ref).exists()
    assert cache.find(ref) is None


def test_the_least_recently_used_blob_goes_first(tmp_path: Path) -> None:
    cache = cache_at(tmp_path, limit=9)
    first, second, third = (put(cache, bytes([n]) * 3) for n in range(3))
    assert cache.find(first) is not None
    fourth = put(cache, b"xyz")
    assert cache.find(second) is None
    assert cache.newest(10) == [fourth.sha256, first.sha256, third.sha256]
    assert cache.newest(1) == [fourth.sha256]


def test_a_pinned_blob_stays_until_it_is_let_go(tmp_path: Path) -> None:
    cache = cache_at(tmp_path, limit=3)
    held = put(cache, b"abc")
    with cache.pinned() as pins:
        assert pins.add(held.sha256)
        assert pins.add(held.sha256)
        assert not pins.add("0" * 64)
        put(cache, b"xyz")
        assert cache.find(held) is not None
    assert cache.size <= 3


def test_a_blob_larger_than_the_cache_is_there_once(tmp_path: Path) -> None:
    cache = cache_at(tmp_path, limit=2)
    ref = put(cache, b"abc")
    assert cache.find(ref) is not None
    put(cache, b"de")
    assert cache.find(ref) is None


def test_blobs_and_their_order_survive_a_restart(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    first, second = put(cache, b"abc"), put(cache, b"def")
    cache.find(first)
    again = cache_at(tmp_path, start=100)
    assert again.newest(10) == [first.sha256, second.sha256]
    assert again.find(second) is not None


def test_a_torn_file_is_dropped_at_the_start(tmp_path: Path) -> None:
    ref = put(cache_at(tmp_path), b"abc")
    path = tmp_path / f"{ref.sha256}.3"
    path.chmod(0o644)
    path.write_bytes(b"ab")
    assert cache_at(tmp_path).newest(10) == []
    assert not path.exists()


def test_a_file_that_rotted_on_disk_is_dropped_at_its_first_use(tmp_path: Path) -> None:
    ref = put(cache_at(tmp_path), b"abc")
    path = tmp_path / f"{ref.sha256}.3"
    path.chmod(0o644)
    path.write_bytes(b"abX")
    cache = cache_at(tmp_path)
    assert cache.find(ref) is None
    assert not path.exists()


def test_a_file_that_somebody_deleted_is_not_found(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    ref = put(cache, b"abc")
    (tmp_path / f"{ref.sha256}.3").unlink()
    assert cache.find(ref) is None


def test_only_old_unfinished_downloads_are_cleared_away(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    partial = cache.partial(ref_of(b"abc"))
    partial.write_bytes(b"a")
    now = partial.stat().st_mtime
    BlobCache(tmp_path, 10, lambda: now + STALE_S - 1)
    assert partial.exists()
    BlobCache(tmp_path, 10, lambda: now + STALE_S + 1)
    assert not partial.exists()


@settings(max_examples=40, deadline=None)
@given(
    limit=st.integers(1, 12),
    script=st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=25),
)
def test_the_limit_holds_and_what_is_there_is_right(
    tmp_path_factory: pytest.TempPathFactory, limit: int, script: list[tuple[bool, int]]
) -> None:
    cache = cache_at(tmp_path_factory.mktemp("cache"), limit)
    newest = 0
    for fill, n in script:
        data = bytes([n]) * (n % 4 + 1)
        if fill:
            put(cache, data)
            newest = len(data)
            assert cache.find(ref_of(data)) is not None
        path = cache.find(ref_of(data))
        assert path is None or path.read_bytes() == data
        assert cache.size <= max(limit, newest)
