"""Token shards, the held-out split and their reader."""

import hashlib
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from distribai.core.plain import canonical_json, from_plain
from distribai.core.ranges import SampleRange
from distribai.core.spec import BlobRef
from distribai.data import reader as reader_module
from distribai.data import shardfile
from distribai.data.formats import Piece
from distribai.data.reader import SampleReader, positions_of
from distribai.data.shards import (
    HELD_OUT_BLOCKS,
    DatasetManifest,
    held_out_blocks,
    prepare,
)
from distribai.data.tokenizers import ByteTokenizer
from distribai.errors import Integrity, InvalidData


class NumberTokenizer:
    """One token per character: its ordinal. Text with all characters apart numbers the stream."""

    end_of_document = None

    def __init__(self, vocab_size: int = 1 << 20) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.array([ord(c) for c in text], np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        return "".join(map(chr, np.asarray(ids).tolist()))


def numbers(count: int) -> list[Piece]:
    """A stream whose token ``i`` is ``i + 1``."""
    return [Piece("".join(chr(i + 1) for i in range(count)), last=True)]


def open_reader(manifest: DatasetManifest, files: list[Path], seed: int = 0) -> SampleReader:
    """A reader over freshly written files, which must carry their hashes as names."""
    paths = {p.name.removesuffix(".safetensors"): p for p in files}
    return SampleReader(manifest, paths, seed)


@settings(max_examples=60, deadline=None)
@given(
    windows=st.integers(2, 300),
    spare=st.integers(0, 3),
    seq_len=st.integers(1, 5),
    share=st.floats(0.001, 0.5),
    shard_windows=st.integers(1, 40),
    seed=st.integers(0, 5),
)
@example(windows=2, spare=0, seq_len=1, share=0.5, shard_windows=1, seed=0)
@example(windows=3, spare=0, seq_len=2, share=0.5, shard_windows=9, seed=0)
def test_training_never_touches_what_is_held_out(
    tmp_path_factory: pytest.TempPathFactory,
    windows: int,
    spare: int,
    seq_len: int,
    share: float,
    shard_windows: int,
    seed: int,
) -> None:
    spare = min(spare, seq_len - 1)
    count = windows * seq_len + 1 + spare
    manifest, files = prepare(
        numbers(count),
        NumberTokenizer(),
        seq_len,
        share,
        seed,
        tmp_path_factory.mktemp("shards"),
        shard_bytes=4 * (shard_windows * seq_len + 1),
    )
    assert (manifest.tokens, manifest.windows) == (count, windows)
    reader = open_reader(manifest, files, seed)
    train = reader.batch(np.arange(manifest.train_sequences, dtype=np.int64))
    apart = reader.held_out_batch(0, manifest.held_out_sequences)
    for batch in (train, apart):
        assert len(batch) >= 1
        assert np.array_equal(
            batch - batch[:, :1], np.tile(np.arange(seq_len + 1), (len(batch), 1))
        )
        assert not ((batch[:, 0] - 1) % seq_len).any(), "windows start at multiples of seq_len"
        assert np.unique(batch[:, 0]).size == len(batch), "each window is one sequence"
    assert not np.intersect1d(train, apart[:, 1:]).size
    dropped = windows - len(train) - len(apart)
    assert dropped == sum(b.stop < windows for b in manifest.held_out)
    assert dropped <= len(manifest.held_out) <= HELD_OUT_BLOCKS


@settings(max_examples=100, deadline=None)
@given(windows=st.integers(2, 10**9), share=st.floats(1e-6, 0.5), seed=st.integers(0, 9))
def test_the_split_has_about_the_share_that_was_asked(
    windows: int, share: float, seed: int
) -> None:
    blocks = held_out_blocks(windows, share, seed)
    size = sum(b.stop - b.start for b in blocks)
    wanted = max(1, round(share * windows))
    assert size <= wanted + len(blocks)
    assert size >= min(wanted, windows - 1)
    ends = [0, *(b.stop + 1 for b in blocks)]
    assert all(b.start >= end for b, end in zip(blocks, ends, strict=False))
    assert blocks[-1].stop <= windows


def test_the_same_data_makes_the_same_bytes_everywhere(tmp_path: Path) -> None:
    """Golden: the manifest's hash covers the shards' hashes and the split."""
    text = "".join(f"line {i} of a text that goes on\n" for i in range(400))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    whole = [Piece(text, last=True)]
    cut = [Piece(text[:5000], last=False), Piece(text[5000:], last=False), Piece("", last=True)]
    first, _ = prepare(whole, ByteTokenizer(), 32, 0.05, 3, tmp_path / "one", shard_bytes=4096)
    second, _ = prepare(cut, ByteTokenizer(), 32, 0.05, 3, tmp_path / "two", shard_bytes=4096)
    assert first == second
    assert hashlib.sha256(canonical_json(first).encode()).hexdigest() == GOLDEN_MANIFEST
    assert from_plain(DatasetManifest, json.loads(canonical_json(first))) == first


def test_shards_are_safetensors_named_by_their_hash(tmp_path: Path) -> None:
    text = "0123456789" * 500
    manifest, files = prepare(
        [Piece(text, last=True)], ByteTokenizer(), 10, 0.1, 0, tmp_path, shard_bytes=2048
    )
    assert len(files) > 2
    stream = [load_file(f)["tokens"] for f in files]
    assert all(t.dtype == np.uint16 for t in stream)
    joined = np.concatenate([*(t[:-1] for t in stream[:-1]), stream[-1]])
    assert joined.tolist() == [*text.encode(), 256][: joined.size]
    for shard, file in zip(manifest.shards, files, strict=True):
        raw = file.read_bytes()
        assert shard.blob == BlobRef(hashlib.sha256(raw).hexdigest(), len(raw))
        assert file.name == f"{shard.blob.sha256}.safetensors"
        assert len(raw) <= 2048 + 128
    assert sorted(tmp_path.iterdir()) == sorted(set(files)), "nothing else is left behind"


def test_each_document_with_text_ends_with_the_end_id(tmp_path: Path) -> None:
    pieces = [
        Piece("ab", last=False),
        Piece("", last=True),
        Piece("", last=True),
        Piece("c", last=True),
    ]
    manifest, files = prepare(pieces, ByteTokenizer(), 1, 0.1, 0, tmp_path)
    assert load_file(files[0])["tokens"].tolist() == [97, 98, 256, 99, 256]
    assert manifest.tokens == 5


def test_a_large_vocabulary_takes_wider_ids(tmp_path: Path) -> None:
    manifest, files = prepare(numbers(100), NumberTokenizer(1 << 17), 4, 0.1, 0, tmp_path)
    assert manifest.dtype == "I32"
    assert load_file(files[0])["tokens"].dtype == np.int32
    assert shardfile.dtype_for(1 << 16) == "U16"


def test_data_without_text_is_empty(tmp_path: Path) -> None:
    for pieces in ([], [Piece("", last=True)]):
        with pytest.raises(InvalidData) as caught:
            prepare(pieces, ByteTokenizer(), 8, 0.1, 0, tmp_path)
        assert caught.value.code == "data.empty"


@pytest.mark.parametrize("tokens", [1, 8, 9, 16])
def test_data_shorter_than_one_sequence_for_each_side_is_too_short(
    tmp_path: Path, tokens: int
) -> None:
    with pytest.raises(InvalidData) as caught:
        prepare(numbers(tokens), NumberTokenizer(), 8, 0.1, 0, tmp_path)
    assert caught.value.code == "data.too_short"
    assert f"{tokens} tokens" in caught.value.message
    assert "take 17" in caught.value.message


def test_the_least_data_has_one_sequence_for_each_side(tmp_path: Path) -> None:
    manifest, _ = prepare(numbers(17), NumberTokenizer(), 8, 0.1, 0, tmp_path)
    assert (manifest.train_sequences, manifest.held_out_sequences) == (1, 1)


def test_impossible_arguments_are_refused(tmp_path: Path) -> None:
    for seq_len, share in ((0, 0.1), (8, 0.0), (8, 0.6)):
        with pytest.raises(ValueError, match="cannot split"):
            prepare(numbers(99), NumberTokenizer(), seq_len, share, 0, tmp_path)


def test_held_out_sequences_are_mixed_over_all_blocks(tmp_path: Path) -> None:
    manifest, files = prepare(numbers(4001), NumberTokenizer(), 2, 0.2, 0, tmp_path)
    reader = open_reader(manifest, files)
    first = (reader.held_out_batch(0, 60)[:, 0] - 1) // 2
    block = np.searchsorted([b.start for b in manifest.held_out], first, side="right")
    assert np.unique(block).size > 25
    whole = reader.held_out_batch(0, manifest.held_out_sequences)
    assert np.array_equal(whole[10:20], reader.held_out_batch(10, 10))
    with pytest.raises(ValueError, match="held-out sequences"):
        reader.held_out_batch(manifest.held_out_sequences, 1)


def test_a_loop_gets_the_sequences_of_its_ranges_batch_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_READ_AHEAD_IDS", 40)
    manifest, files = prepare(numbers(400), NumberTokenizer(), 2, 0.1, 0, tmp_path)
    reader = open_reader(manifest, files)
    ranges = (SampleRange(3, 50), SampleRange(170, 301))
    batches = list(reader.batches(ranges, 4))
    assert {len(b) for b in batches[:-1]} == {4}
    assert np.array_equal(np.concatenate(batches), reader.batch(positions_of(ranges)))
    assert list(reader.batches((), 4)) == []


def test_a_reader_keeps_few_shards_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_MAX_OPEN", 2)
    manifest, files = prepare(numbers(400), NumberTokenizer(), 2, 0.1, 0, tmp_path, shard_bytes=84)
    assert len(files) > 10
    reader = open_reader(manifest, files)
    positions = np.arange(2 * manifest.train_sequences, dtype=np.int64)
    first, second = np.split(reader.batch(positions), 2)
    assert not np.array_equal(first, second)
    assert np.array_equal(np.sort(first[:, 0]), np.sort(second[:, 0]))
    assert len(reader._open) == 2


def test_files_that_are_not_the_manifests_are_refused(tmp_path: Path) -> None:
    manifest, files = prepare(numbers(99), NumberTokenizer(), 4, 0.1, 0, tmp_path)
    raw = files[0].read_bytes()
    for bad in (raw[:-1], raw + b"\0", b"", raw.replace(b"I32", b"F32"), b"\xff" * len(raw)):
        files[0].write_bytes(bad)
        with pytest.raises(Integrity) as caught:
            open_reader(manifest, files)
        assert caught.value.code == "tensor.format"
    files[0].unlink()
    with pytest.raises(Integrity, match="cannot be read"):
        open_reader(manifest, files)
    with pytest.raises(Integrity, match="no file of token shard"):
        SampleReader(manifest, {}, 0)


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    manifest, files = prepare(numbers(99), NumberTokenizer(50), 4, 0.1, 0, tmp_path)
    reader = open_reader(manifest, files)
    with pytest.raises(Integrity, match="outside the vocabulary of 50"):
        reader.batch(np.arange(manifest.train_sequences, dtype=np.int64))


def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    manifest, files = prepare(numbers(99), NumberTokenizer(), 4, 0.1, 0, tmp_path)
    plain = json.loads(canonical_json(manifest)) | {"train_sequences": 2}
    with pytest.raises(Integrity, match="contradicts itself"):
        open_reader(from_plain(DatasetManifest, plain), files)


def test_a_full_disk_leaves_no_half_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        prepare(numbers(99), NumberTokenizer(), 4, 0.1, 0, tmp_path)
    assert not list(tmp_path.iterdir())


GOLDEN_MANIFEST = "d1dd2dc97e52074e3f6d0d9d786a42dbcba4c46754fb21d76be8f485148d7560"
