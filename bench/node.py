"""What a node costs: tokens per second inside its training child against a bare PyTorch loop.

The child is the real one, in its own process, driven over its pipes. Its time is the daemon's:
from sending a warm task to its answer, with the gate, progress, canonical copy, delta and hashes in
it. The bare loop trains the same model with the same optimizer on batches that lie ready in memory.
Both use one thread and take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import common
from distribai import spawn
from distribai.core import child as wire
from distribai.core.architectures import family
from distribai.core.plain import canonical_json, to_plain
from distribai.core.ranges import SampleRange
from distribai.core.spec import BlobRef, DataSpec, JobSpec, ModelSpec
from distribai.core.tasks import Assignment, DatasetRef, WeightsRef
from distribai.data import builtin, formats
from distribai.data.reader import SampleReader
from distribai.data.shards import DatasetManifest, prepare
from distribai.data.tokenizers import ByteTokenizer
from distribai.merge.version0 import make_version0
from distribai.merge.weights import weights_hash

NAME = "node"
HELP = "tokens per second inside a node over those of a bare PyTorch loop"

QUICK_STEPS = 15
"""Inner steps of a turn, instead of a whole round's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--text", metavar="FILE", help="train on this file, not on stdlib")
    parser.add_argument("--turns", type=int, default=8, help="turns of each side")
    parser.add_argument("--profile", default="tiny")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Let both sides take turns over one round's inner steps each."""
    config = to_plain(family("decoder_transformer").PROFILES[args.profile])
    model = ModelSpec("decoder_transformer", config, args.profile)
    spec = JobSpec(NAME, model, DataSpec(), steps=10_000)
    if args.quick:
        spec = replace(spec, rounds=replace(spec.rounds, inner_steps=QUICK_STEPS))
    turns = 3 if args.quick else args.turns
    tokens = spec.rounds.inner_steps * spec.batch * spec.seq_len
    with tempfile.TemporaryDirectory(prefix="distribai-bench-") as folder:
        setting = _Setting(spec, args.text, Path(folder))
        bare = _Bare(setting)
        with _ChildProcess(setting) as node:
            samples = common.alternate(
                {"bare": lambda: tokens / bare.train(), "node": lambda: tokens / node.train()},
                "bare",
                turns,
            )
    ratio = samples.ratio("node")
    common.table(
        ["side", "tokens/s", "of bare"],
        [
            ["bare loop", median(samples.figures["bare"]), 1.0],
            ["in a node", median(samples.figures["node"]), ratio],
        ],
    )
    return {
        "throughput_ratio": ratio,
        "audit_overhead": None,
        "settings": {
            "spec": to_plain(spec),
            "turns": turns,
            "text": args.text or "stdlib",
            "quick": args.quick,
        },
        "samples": samples.rounded(),
        "spread": samples.spread,
        "noisy": samples.noisy,
        "notes": ["audit_overhead is null: there are no audits yet"],
    }


class _Setting:
    """What both sides train: the prepared data, and a task's samples."""

    def __init__(self, spec: JobSpec, text: str | None, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        source = formats.read_files([Path(text)], "text") if text else builtin.documents("stdlib")
        self.manifest: DatasetManifest
        self.manifest, paths = prepare(
            source, ByteTokenizer(), spec.seq_len, spec.data.held_out, spec.seed, folder
        )
        shards = self.manifest.shards
        self.shards = {s.blob.sha256: p for s, p in zip(shards, paths, strict=True)}
        listing = folder / "dataset.json"
        listing.write_text(canonical_json(self.manifest))
        digest = hashlib.sha256(listing.read_bytes()).hexdigest()
        self.data = DatasetRef(BlobRef(digest, listing.stat().st_size))
        self.blobs = {**self.shards, digest: listing}
        self.steps = spec.rounds.inner_steps

    def samples(self, turn: int) -> SampleRange:
        """The samples of a turn."""
        size = self.steps * self.spec.batch
        return SampleRange(turn * size, (turn + 1) * size)


class _ChildProcess:
    """A training child, and its daemon's end of the pipes."""

    def __init__(self, setting: _Setting) -> None:
        self._setting, self._turn = setting, 0
        manifest = family(setting.spec.model.family).manifest(
            family(setting.spec.model.family).PROFILES[setting.spec.model.profile]
        )
        first = make_version0(manifest, setting.spec.seed)
        self._base = WeightsRef(0, weights_hash(manifest, first))

    def __enter__(self) -> _ChildProcess:
        self._process = subprocess.Popen(
            spawn.command("training-child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=spawn.environment(),
        )
        self._read()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def train(self) -> float:
        """Seconds from sending the next task to its answer."""
        setting, turn = self._setting, self._turn
        self._turn += 1
        task = Assignment(
            "job_bench",
            f"task_{turn}",
            1,
            0,
            "train",
            setting.spec,
            self._base,
            setting.data,
            samples=(setting.samples(turn),),
            steps=setting.steps,
            inner_step_offset=turn * setting.steps,
        )
        start = time.perf_counter()
        self._send(wire.Run(task, str(setting.folder), "cpu", 1))
        while not isinstance(message := self._read(), wire.Done):
            if isinstance(message, wire.Need):
                wanted = {b.sha256: str(setting.blobs[b.sha256]) for b in message.blobs}
                self._send(wire.Have(wanted))
        if message.outcome.status != "done":
            raise RuntimeError(message.outcome.reason)
        return time.perf_counter() - start

    def _send(self, message: wire.ToChild) -> None:
        assert self._process.stdin
        self._process.stdin.write(wire.encode(message))
        self._process.stdin.flush()

    def _read(self) -> wire.Message:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the training child has ended")
        return wire.decode(line)


class _Bare:
    """The loop that everybody writes, in this process."""

    def __init__(self, setting: _Setting) -> None:
        import torch

        from distribai.training import models
        from distribai.training.optimizers import Muon, muon_names

        torch.set_num_threads(1)
        self._setting, self._turn = setting, 0
        spec = setting.spec
        live = models.build(spec.model.family, spec.model.config)
        live.load(make_version0(live.manifest, spec.seed))
        self._model, inner = live.module, spec.optimizer
        taken = muon_names(spec.model.family, spec.model.config)
        named = list(self._model.named_parameters())
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [p for n, p in named if n not in taken],
                lr=inner.lr,
                betas=(inner.betas[0], inner.betas[1]),
                weight_decay=inner.weight_decay,
                fused=True,
            ),
            Muon(
                [p for n, p in named if n in taken],
                lr=inner.muon_lr,
                momentum=inner.muon_momentum,
                weight_decay=inner.weight_decay,
            ),
        ]
        self._reader = SampleReader(setting.manifest, setting.shards, spec.seed)

    def train(self) -> float:
        """Seconds of the next turn's steps over batches that lie ready."""
        import torch
        from torch.nn import functional

        setting = self._setting
        samples = setting.samples(self._turn)
        self._turn += 1
        batches = [
            torch.from_numpy(np.array(rows))
            for rows in self._reader.batches((samples,), setting.spec.batch)
        ]
        start = time.perf_counter()
        for rows in batches:
            logits = self._model(rows[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), setting.spec.optimizer.clip)
            for optimizer in self._optimizers:
                optimizer.step()
        return time.perf_counter() - start
