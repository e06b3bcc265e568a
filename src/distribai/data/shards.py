"""Documents into token shards, and the split that training never touches.

The tokens of all documents make one stream, each document followed by the tokenizer's end id. The
stream is cut into *windows* of ``seq_len`` predicted tokens: window ``i`` holds
``tokens[i * L : (i + 1) * L + 1]`` (``L = seq_len``), whose first ``L`` are inputs and whose last
``L`` are targets; neighbours share one token. What is left over at the end is dropped.

**Held-out split.** At most :data:`HELD_OUT_BLOCKS` blocks of consecutive windows, one in each of
as many equal stretches of the stream, at a place that a hash of the seed chooses. The window after
a block starts with the block's last target, so it belongs to neither side. A window before a block
shares only the block's first *input* with it. Hence no token that the held-out split predicts is
an input or a target of any training window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from distribai.core.spec import BlobRef
from distribai.data import shardfile
from distribai.data.formats import Piece
from distribai.data.shardfile import ITEM_SIZE, TokenDType
from distribai.data.tokenizers import Tokenizer
from distribai.errors import InvalidData

SHARD_BYTES: Final = 32 << 20
"""Upper bound of a shard's data; a shard holds at least one window."""

HELD_OUT_BLOCKS: Final = 64
"""Blocks that the held-out split is spread over: enough to see all of a data set, few enough that
the windows lost behind them do not count."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One token shard: its blob, its windows and its ``windows * seq_len + 1`` tokens.

    The last token of a shard is the first of the next one, so that no window lies in two.
    """

    blob: BlobRef
    windows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class WindowBlock:
    """Windows ``start <= i < stop`` of the whole stream."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    """A prepared data set; its canonical JSON is a blob that every task refers to.

    ``tokenizer``: ``bytes``, or ``json`` with the file in ``tokenizer_blob``. ``tokens`` counts
    the whole stream. ``held_out`` are the blocks of the split, sorted; the window after each is
    dropped. ``seed`` chose the blocks and the order in which held-out windows are read.
    """

    tokenizer: Literal["bytes", "json"]
    tokenizer_blob: BlobRef | None
    vocab_size: int
    seq_len: int
    dtype: TokenDType
    tokens: int
    shards: tuple[Shard, ...]
    held_out: tuple[WindowBlock, ...]
    train_sequences: int
    held_out_sequences: int
    seed: int
    format: Literal[1] = 1

    @property
    def windows(self) -> int:
        """All windows: training, held-out and dropped."""
        return sum(s.windows for s in self.shards)


def prepare(
    documents: Iterable[Piece],
    tokenizer: Tokenizer,
    seq_len: int,
    held_out: float,
    seed: int,
    out_dir: Path,
    *,
    tokenizer_blob: BlobRef | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> tuple[DatasetManifest, list[Path]]:
    """Write the token shards of ``documents`` into ``out_dir``.

    The same documents, tokenizer and arguments make the same manifest and the same bytes on any
    machine. Memory: a shard, and a document's piece.

    Args:
        documents: pieces of text, see :mod:`distribai.data.formats` and
            :mod:`distribai.data.builtin`.
        tokenizer: what makes the ids; ``tokenizer_blob`` is its file, None for bytes.
        seq_len: tokens that each sequence predicts.
        held_out: share of windows in the held-out split, in (0, 0.5].
        seed: the job's seed; chooses the held-out blocks.
        out_dir: an existing directory.
        shard_bytes: upper bound of a shard's data.

    Returns:
        The manifest, and the shards' files, named ``<sha256>.safetensors``, in its order. Equal
        shards are one file, named twice.

    Raises:
        InvalidData: ``data.empty`` or ``data.too_short``, and what reading the documents raises.
        ValueError: ``seq_len`` or ``held_out`` is out of bounds.
        OSError: ``out_dir`` cannot be written.
    """
    if seq_len < 1 or not 0 < held_out <= 0.5:
        raise ValueError(f"cannot split with seq_len={seq_len}, held_out={held_out}")
    dtype = shardfile.dtype_for(tokenizer.vocab_size)
    writer = _ShardWriter(out_dir, dtype, seq_len, shard_bytes)
    for ids in _token_pieces(documents, tokenizer):
        writer.add(ids)
    writer.finish()
    windows = sum(s.windows for s in writer.shards)
    if not writer.tokens:
        raise InvalidData(
            "data.empty", "The data has no text in it.", "Check the files and `data.field`."
        )
    blocks = held_out_blocks(windows, held_out, seed)
    apart = sum(b.stop - b.start for b in blocks)
    training = windows - apart - sum(b.stop < windows for b in blocks)
    if not blocks or training < 1:
        raise InvalidData(
            "data.too_short",
            f"The data has {writer.tokens} tokens: one training sequence and one held-out "
            f"sequence of {seq_len} take {2 * seq_len + 1}.",
            "Give more data, or a smaller `seq_len`.",
            field="seq_len",
        )
    manifest = DatasetManifest(
        tokenizer="bytes" if tokenizer_blob is None else "json",
        tokenizer_blob=tokenizer_blob,
        vocab_size=tokenizer.vocab_size,
        seq_len=seq_len,
        dtype=dtype,
        tokens=writer.tokens,
        shards=tuple(writer.shards),
        held_out=blocks,
        train_sequences=training,
        held_out_sequences=apart,
        seed=seed,
    )
    return manifest, writer.paths


def held_out_blocks(windows: int, share: float, seed: int) -> tuple[WindowBlock, ...]:
    """The blocks of the held-out split; none when there are fewer than two windows.

    About ``share * windows`` windows (at least one) in equal blocks, each in its own stretch with
    room for the dropped window and a training window beside it.
    """
    if windows < 2:
        return ()
    wanted = max(1, round(share * windows))
    count = min(wanted, HELD_OUT_BLOCKS)
    length = -(-wanted // count)
    while count > 1 and windows // count < length + 2:
        count //= 2
        length = -(-wanted // count)
    if count == 1 and windows < length + 2:
        # Nothing to choose: the end of the stream has no window after it to drop.
        length = min(length, windows - 1)
        return (WindowBlock(windows - length, windows),)
    stretch = windows // count
    places = stretch - length
    starts = [i * stretch + _draw(seed, i, places) for i in range(count)]
    return tuple(WindowBlock(s, s + length) for s in starts)


def _draw(seed: int, number: int, places: int) -> int:
    """A number in ``[0, places)`` from a hash; the bias of the modulus is below 2^-64 places."""
    digest = hashlib.sha256(f"held-out {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:16], "big") % places


def _token_pieces(
    documents: Iterable[Piece], tokenizer: Tokenizer
) -> Iterator[npt.NDArray[np.int64]]:
    """Ids of each piece; the end id after each document that has any text."""
    end = tokenizer.end_of_document
    has_text = False
    for piece in documents:
        if piece.text:
            has_text = True
            yield tokenizer.encode(piece.text)
        if piece.last:
            if has_text and end is not None:
                yield np.array([end], np.int64)
            has_text = False


class _ShardWriter:
    """Collects ids until a shard is full; keeps its last token as the next one's first."""

    def __init__(self, out_dir: Path, dtype: TokenDType, seq_len: int, shard_bytes: int) -> None:
        self.shards: list[Shard] = []
        self.paths: list[Path] = []
        self.tokens = 0
        self._out_dir, self._dtype, self._seq_len = out_dir, dtype, seq_len
        windows = max(1, (shard_bytes // ITEM_SIZE[dtype] - 1) // seq_len)
        self._capacity = windows * seq_len + 1
        self._waiting: list[npt.NDArray[np.int64]] = []
        self._size = 0

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        """Append ``ids``, shape (n,); writes every shard that fills up."""
        self.tokens += ids.size
        while ids.size:
            part = ids[: self._capacity - self._size]
            self._waiting.append(part)
            self._size += part.size
            ids = ids[part.size :]
            if self._size == self._capacity:
                self._write(np.concatenate(self._waiting))

    def finish(self) -> None:
        """Write the whole windows that are left."""
        windows = (self._size - 1) // self._seq_len
        if windows > 0:
            self._write(np.concatenate(self._waiting)[: windows * self._seq_len + 1])

    def _write(self, tokens: npt.NDArray[np.int64]) -> None:
        blob, path = shardfile.write(self._out_dir, self._dtype, tokens)
        self.shards.append(Shard(blob, (tokens.size - 1) // self._seq_len, tokens.size))
        self.paths.append(path)
        self._waiting = [tokens[-1:]]
        self._size = 1
