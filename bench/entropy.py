"""What an entropy stage would save: the codecs' files of a real training run, compressed further.

For each codec, both ways, a small job over four nodes is trained for some rounds, with the nodes'
side of ``bench learning``. The last round's deltas (up) and its update (down) are then compressed
by what is in the standard library and, where the package ``zstandard`` is installed, by zstd:

- ``packed``: the stored bytes as they are;
- ``symbols``: as a stage of its own would see them, one code a byte; numbers of several bytes byte
  by byte, the first bytes of all, then the second ones; of sparse places the gaps between them.

Streams are cut into pieces of :data:`PIECE` bytes, so that a merge can decode them piece by piece.
``order0`` is the entropy of the symbols, each tensor's by itself, in bits per parameter: without
looking at neighbours no coder does better. Seconds are of CPU, for a million parameters, for the
coder alone. ``link_s`` is what the saved bytes would take on a line of :data:`LINK_MBPS` up. A
stage is worth having (``pays``) where it saves a tenth and takes less time than that.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import common
from bench._training import NODES, Round, one_thread, prepared, rounds, small_model, wide_model
from distribai.api.recipe import recipe_of
from distribai.core.codecs import HIGH, LOW, PARTS, STEP, stored_parts
from distribai.core.plain import to_plain
from distribai.core.plan import parameter_count
from distribai.core.spec import JobSpec
from distribai.core.tensors import ParameterManifest, TensorSpec
from distribai.data import builtin
from distribai.merge.bits import unpack
from distribai.merge.delta import open_delta
from distribai.merge.packed import Packed
from distribai.merge.update import open_update

NAME = "entropy"
HELP = "what compressing the codecs' files of a training run would save, and take"

MODELS = {"small": small_model, "wide": wide_model}

PIECE = 1 << 17
"""Bytes that are compressed together."""

LINK_MBPS = 20.0
"""A home line, upwards."""

WORTH = 0.1
"""Share of the bytes that a stage must save."""

QUICK_CODECS = ("fp32", "int3", "sparse")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Coder:
    """A lossless coder of bytes."""

    name: str
    encode: Callable[[Bytes], bytes]
    decode: Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Streams:
    """A file's payload, ready for a coder; ``order0`` in bits, all together."""

    packed: list[Bytes]
    symbols: list[Bytes]
    order0: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--codecs", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--model", choices=MODELS, default="small", help="0.13M parameters, or 1.5M"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--inner-steps", type=int, default=50)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--keep", metavar="FOLDER", help="leave the last round's files there")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train with each codec, and compress what went over the wire last."""
    if args.quick:
        args.rounds, args.inner_steps, args.repetitions = 2, 5, 1
        args.codecs = [name for name in args.codecs if name in QUICK_CODECS]
    one_thread()
    plain = _spec(args, "fp32")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="distribai-bench-") as folder:
        data = prepared(builtin.documents("stdlib"), plain, Path(folder), 1)
        for name in args.codecs:
            for number, made in enumerate(rounds(_spec(args, name), data, folder), 1):
                if number < args.rounds:
                    continue
                manifest = made.manifest
                up = [open_delta(path, manifest, {}).packed for path in made.deltas]
                down = [open_update(made.update, manifest, {})]
                rows.append(_measured(name, "up", manifest, up, args.repetitions))
                rows.append(_measured(name, "down", manifest, down, args.repetitions))
                _keep(args.keep, name, made)
                common.say(f"{name}: trained and measured")
    _tell(rows)
    return {
        "settings": {
            "nodes": NODES,
            "model": args.model,
            "parameters": parameter_count(plain),
            "rounds": args.rounds,
            "inner_steps": args.inner_steps,
            "repetitions": args.repetitions,
            "piece_bytes": PIECE,
            "link_mbps": LINK_MBPS,
            "quick": args.quick,
        },
        "rows": rows,
        "spread": 0.0,
    }


def _spec(args: argparse.Namespace, codec: str) -> JobSpec:
    values: dict[str, Any] = {
        "name": NAME,
        "steps": args.rounds * args.inner_steps,
        "batch": 4 if args.model == "small" else 1,
        "model": {"architecture_config": to_plain(MODELS[args.model]())},
        "rounds": {"inner_steps": args.inner_steps, "codec_up": codec, "codec_down": codec},
    }
    return recipe_of(values, "the benchmark").to_spec({})


def _keep(folder: str | None, name: str, made: Round) -> None:
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = {f"up{k}": path for k, path in enumerate(made.deltas)} | {"down": made.update}
    for leg, path in files.items():
        shutil.copy(path, Path(folder) / f"{name}.{leg}.safetensors")


# ------------------------------------------------------------------ what there is to compress


def _streams(manifest: ParameterManifest, packed: Packed) -> Streams:
    """Of one file; integer buffers are left out."""
    raw: dict[str, list[Bytes]] = {}
    symbols: dict[str, list[Bytes]] = {}
    order0 = 0.0
    for spec in manifest.travelling:
        if spec.role == "int_buffer":
            continue
        for part in stored_parts(spec, packed.codec.name):
            stored = packed.arrays[spec.name + part.suffix].reshape(-1)
            raw.setdefault(part.suffix, []).append(stored.view(np.uint8))
            for place, stream in enumerate(_symbols(spec, packed, part.suffix, stored)):
                symbols.setdefault(f"{part.suffix} {place}", []).append(stream)
                order0 += _entropy(stream)
    return Streams(_pieces(raw), _pieces(symbols), order0)


def _symbols(
    spec: TensorSpec, packed: Packed, suffix: str, stored: NDArray[Any]
) -> Iterable[Bytes]:
    """A stored array, one symbol a byte."""
    name = packed.codec.name
    suffixes = {part.suffix for part in stored_parts(spec, name)}
    if suffix == LOW:
        return []  # see the other half of the places
    if suffix == HIGH:
        values = packed.reader(spec)(0, spec.size, np.empty(spec.size, np.float32))
        gaps = np.diff(np.flatnonzero(values), prepend=-1) - 1
        return _planes(gaps.astype("<u2"))
    if suffix or stored.dtype != np.uint8:
        return _planes(stored)
    if HIGH in suffixes:
        return [unpack(stored, 0, 4 * stored.size, 2)]
    bits = 8 if STEP in suffixes and name != "int4" else int(name.removeprefix("int"))
    return [unpack(stored, 0, spec.size, bits)]


def _planes(values: NDArray[Any]) -> list[Bytes]:
    """The first bytes of all values, the second ones, and so on."""
    table = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    return [np.ascontiguousarray(column) for column in table.T]


def _entropy(symbols: Bytes) -> float:
    """Bits of all symbols at their own frequencies."""
    counts = np.bincount(symbols, minlength=256)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / symbols.size)).sum())


def _pieces(streams: dict[str, list[Bytes]]) -> list[Bytes]:
    whole = [np.concatenate(parts) for parts in streams.values()]
    return [line[at : at + PIECE] for line in whole for at in range(0, line.size, PIECE)]


# ------------------------------------------------------------------ coders


def _coders() -> list[Coder]:
    found = [
        Coder(f"zlib {level}", lambda b, n=level: zlib.compress(b, n), zlib.decompress)
        for level in (1, 6)
    ]
    found.append(Coder("huffman", _huffman, zlib.decompress))
    if importlib.util.find_spec("zstandard"):
        import zstandard

        for level in (1, 3):
            how = zstandard.ZstdCompressor(level=level)
            found.append(
                Coder(f"zstd {level}", how.compress, zstandard.ZstdDecompressor().decompress)
            )
    return found


def _huffman(data: Bytes) -> bytes:
    """zlib without looking for what came before."""
    how = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    return how.compress(data) + how.flush()


def _measured(
    name: str, leg: str, manifest: ParameterManifest, files: list[Packed], repetitions: int
) -> dict[str, Any]:
    """One row: means over the files of a leg; the coders' figures by form and coder."""
    parameters = sum(t.size for t in manifest.travelling if t.role != "int_buffer")
    streams = [_streams(manifest, packed) for packed in files]
    payload = fmean(sum(line.nbytes for line in s.packed) for s in streams)
    tried = [
        _tried(coder, form, [getattr(s, form) for s in streams], payload, parameters, repetitions)
        for form in ("packed", "symbols")
        for coder in _coders()
    ]
    return {
        "codec": name,
        "leg": leg,
        "bits": 8 * payload / parameters,
        "order0": fmean(s.order0 for s in streams) / parameters,
        "tried": tried,
    }


def _tried(
    coder: Coder,
    form: str,
    files: list[list[Bytes]],
    payload: float,
    parameters: int,
    repetitions: int,
) -> dict[str, Any]:
    """What a coder makes of some files; a piece that does not shrink is left as it is."""
    coded = [coder.encode(line) for lines in files for line in lines]
    lines = [line for lines in files for line in lines]
    sizes = [min(len(c), line.nbytes) for c, line in zip(coded, lines, strict=True)]
    millions = len(files) * parameters / 1e6
    encode = _cpu_seconds(lambda: [coder.encode(line) for line in lines], repetitions) / millions
    decode = _cpu_seconds(lambda: [coder.decode(c) for c in coded], repetitions) / millions
    saved = payload - sum(sizes) / len(files)
    link = 8 * saved / (LINK_MBPS * 1e6) / (parameters / 1e6)
    return {
        "form": form,
        "coder": coder.name,
        "saved": saved / payload,
        "encode_s": encode,
        "decode_s": decode,
        "link_s": link,
        "pays": saved / payload >= WORTH and encode + decode < link,
    }


def _cpu_seconds(work: Callable[[], object], repetitions: int) -> float:
    """The least of some runs: others use the processor's caches too."""
    found = []
    for _ in range(repetitions):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def _tell(rows: list[dict[str, Any]]) -> None:
    """What each codec stores, and what of it the coder that saves most for its time would."""
    lines = []
    for row in rows:
        best = max(row["tried"], key=lambda t: t["link_s"] - t["encode_s"] - t["decode_s"])
        most = max(row["tried"], key=lambda t: t["saved"])
        lines.append(
            [row["codec"], row["leg"], row["bits"], row["order0"], most["saved"]]
            + [best[key] for key in ("form", "coder", "saved", "encode_s", "decode_s", "link_s")]
            + ["yes" if best["pays"] else "no"]
        )
    headers = ["codec", "leg", "bits", "order0", "most saved", "form", "coder", "saved"]
    common.table([*headers, "encode s", "decode s", "link s", "pays"], lines)
