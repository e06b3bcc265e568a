"""A stand-in for the node's daemon: a prepared data set, blobs by hash, the outer step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from distribai.core import child as wire
from distribai.core.architectures import manifest_of
from distribai.core.architectures.decoder_transformer import Config
from distribai.core.plain import canonical_json
from distribai.core.ranges import Ranges, SampleRange
from distribai.core.spec import (
    BlobRef,
    DataSpec,
    JobSpec,
    ModelSpec,
    OptimizerSpec,
    RoundSpec,
    ScheduleSpec,
)
from distribai.core.tasks import Assignment, DatasetRef, Phase, UpdateRef, WeightsRef
from distribai.data.formats import Piece
from distribai.data.shards import prepare
from distribai.data.tokenizers import ByteTokenizer
from distribai.merge.delta import open_delta
from distribai.merge.outer import merge_round, outer_coefficients
from distribai.merge.update import UpdateHeader, write_update
from distribai.merge.version0 import make_version0
from distribai.merge.weights import trainable, weights_hash, write_weights

CONFIG = Config(dim=16, layers=1, heads=2, ffn_dim=24)
H, B = 4, 2


def make_spec(moments: str = "fresh") -> JobSpec:
    """A job of four rounds of 4 steps, two sequences a step."""
    return JobSpec(
        "test",
        ModelSpec("decoder_transformer", asdict(CONFIG)),
        DataSpec(held_out=0.1),
        steps=16,
        batch=B,
        seq_len=8,
        seed=5,
        optimizer=OptimizerSpec(lr=0.01),
        schedule=ScheduleSpec(warmup=2),
        rounds=RoundSpec(inner_steps=H, moments=moments, codec_up="fp32", codec_down="fp32"),  # type: ignore[arg-type]
    )


class Grid:
    """The orchestrator's half of a job, in memory, with blobs as files in ``folder``."""

    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self.folder, self.spec = folder, spec
        self.blobs: dict[str, Path] = {}
        self.manifest = manifest_of(spec.model.family, spec.model.config)
        text = "".join(f"{i} and {i * i % 97} make {i * 7}.\n" for i in range(400))
        dataset, paths = prepare(
            [Piece(text, True)], ByteTokenizer(), spec.seq_len, 0.1, spec.seed, folder
        )
        self.dataset = dataset
        for path in paths:
            self.add(path)
        listing = folder / "dataset.json"
        listing.write_text(canonical_json(dataset))
        self.data = DatasetRef(self.add(listing))
        self.theta = make_version0(self.manifest, spec.seed)
        self.momentum = {n: a * 0 for n, a in make_version0(trainable(self.manifest), 0).items()}
        self.updates: list[UpdateRef] = []
        self.hashes = [self.hash]

    def add(self, path: Path) -> BlobRef:
        """Take a file in as a blob."""
        sha = hashlib.sha256(path.read_bytes()).hexdigest()
        self.blobs[sha] = path
        return BlobRef(sha, path.stat().st_size)

    @property
    def hash(self) -> str:
        """Of the present version."""
        return weights_hash(self.manifest, self.theta)

    def base(self, *, snapshot: bool = False) -> WeightsRef:
        """The present version; with a snapshot of it if wanted."""
        version = len(self.updates)
        ref = None
        if snapshot:
            path = self.folder / f"snapshot{version}.safetensors"
            write_weights(path, self.manifest, self.theta)
            ref = self.add(path)
        return WeightsRef(version, self.hash, ref, version if ref else 0, tuple(self.updates))

    def task(
        self, name: str, phase: Phase = "train", start: int = 0, **knobs: object
    ) -> Assignment:
        """A task at the present version; training takes H steps of samples from ``start``."""
        samples: Ranges = (SampleRange(start, start + H * B),) if phase == "train" else ()
        values: dict[str, object] = {
            "base": self.base(),
            "samples": samples,
            "steps": H if phase == "train" else 0,
            "inner_step_offset": H * len(self.updates),
            **knobs,
        }
        return Assignment(
            "job_a",
            f"task_{name}",
            1,
            len(self.updates),
            phase,
            self.spec,
            data=self.data,
            **values,  # type: ignore[arg-type]
        )

    def merge(self, done: list[wire.Done]) -> None:
        """The outer step over train results: the next version and its update."""
        number = len(self.updates)
        deltas = [
            open_delta(Path(d.delta_path), self.manifest, {"task_id": d.outcome.task_id})
            for d in done
        ]
        update = {t.name: self.theta[t.name] * 0 for t in self.manifest.travelling}
        eta, mu = outer_coefficients(self.spec.outer, number, False)
        merge_round(
            self.manifest,
            self.theta,
            self.momentum if number else None,
            deltas,
            [d.outcome.tokens for d in done],
            eta,
            mu,
            self.theta,
            self.momentum,
            update,
        )
        path = self.folder / f"update{number + 1}.safetensors"
        header = UpdateHeader("job_a", number + 1, self.manifest.hash, self.spec.rounds.codec_down)
        write_update(path, self.manifest, update, header)
        self.updates.append(UpdateRef(number + 1, self.add(path), self.hash))
        self.hashes.append(self.hash)


class Daemon:
    """The daemon's end of a channel: answers ``Need`` from the grid's blobs."""

    def __init__(self, grid: Grid, to_child: BinaryIO, from_child: BinaryIO) -> None:
        self.grid, self._out, self._in = grid, to_child, from_child
        self.needed: list[str] = []
        self.lines: list[wire.Message] = []

    def send(self, message: wire.ToChild) -> None:
        """Write one line."""
        self._out.write(wire.encode(message))
        self._out.flush()

    def read(self) -> wire.Message:
        """The child's next line; fails when the child is gone."""
        line = self._in.readline()
        assert line, "the child closed its end"
        message = wire.decode(line)
        self.lines.append(message)
        return message

    def run(self, task: Assignment, on_need: Callable[[], None] | None = None) -> wire.Done:
        """Have ``task`` done; ``on_need`` is called instead of answering the first ``Need``."""
        self.send(wire.Run(task, str(self.grid.folder), "cpu", 1))
        while not isinstance(message := self.read(), wire.Done):
            if isinstance(message, wire.Need):
                if on_need is not None:
                    on_need()
                    on_need = None
                    continue
                self.needed += [b.sha256 for b in message.blobs]
                paths = {b.sha256: str(self.grid.blobs[b.sha256]) for b in message.blobs}
                self.send(wire.Have(paths))
        return message
