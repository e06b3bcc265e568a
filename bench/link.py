"""How much of the time is training over a home's line, dense and as the planner proposes.

Real processes: an orchestrator and two nodes, each behind a shaped line of its own (token bucket,
latency, jitter, upload a quarter of download). First, on free lines, how long a step takes; then
the lines are made so slow that dense fp32 rounds of H steps compute for two fifths of the time. On
them a dense job, the planner's proposal for it (whatever it is), and the dense one again. The
planner knows what the first dense job left on record, nothing else: nobody tells it the rate.

``compute_share`` is the nodes' seconds at inner steps over the time of the rounds, from the grid's
records, without each job's first round, in which data is fetched and models are built. Evaluation,
merging and waiting are no inner steps. ``predicted_share`` is what the plan promised before.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bench import common
from distribai.client import Client
from distribai.core.architectures import family
from distribai.core.forecast import Forecast
from distribai.core.phases import Measured
from distribai.core.plain import to_plain
from distribai.core.plan import parameter_count
from distribai.core.proposal import apply
from distribai.core.spec import DataSpec, JobSpec, ModelSpec, RoundSpec
from distribai.core.traffic import MBPS
from distribai.demo.crew import Crew
from distribai.errors import Unavailable
from distribai.testing.proxy import Proxy
from distribai.testing.shaping import Shape, ShapedLink
from distribai.wire import joinlink

NAME = "link"
HELP = "share of the time that is training over a slow line, dense and as the planner proposes"

T = TypeVar("T")

NODES = 2
AIM = 0.4
"""Share of the time that dense rounds shall compute. At most 0.6 is asked for, and on a machine
that gets busier meanwhile steps take longer."""

DOWN_OVER_UP = 4.0
LATENCY_S, JITTER_S = 0.015, 0.005
CAP_S = 1800.0
TEXT_BYTES = 200_000
"""Text for the jobs: held-out losses are over few batches."""


@dataclass(frozen=True)
class Size:
    """How much is run, in rounds. ``dense_steps``: inner steps of a dense round; ``longest``: of
    the longest round that may be proposed."""

    profile: str
    dense_steps: int
    calibration: int
    dense: int
    proposed: int
    longest: int


FULL = Size("tiny", dense_steps=50, calibration=4, dense=6, proposed=4, longest=6000)
QUICK = Size("tiny", dense_steps=20, calibration=2, dense=2, proposed=2, longest=60)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--profile", default="", help="size of the model")
    parser.add_argument("--longest", type=int, default=0, help="steps of the longest round")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Calibrate, then train dense, as proposed, and dense again."""
    size = QUICK if args.quick else FULL
    size = replace(size, profile=args.profile or size.profile, longest=args.longest or size.longest)
    with _grid({}) as grid:
        calm = grid.train(_spec(grid, size, "calibration"), size.calibration)
    up = _rate(size, calm.measured)
    shapes = {
        "up": Shape(up, latency_s=LATENCY_S, jitter_s=JITTER_S),
        "down": Shape(DOWN_OVER_UP * up, latency_s=LATENCY_S, jitter_s=JITTER_S),
    }
    with _grid(shapes) as grid:
        dense = _spec(grid, size, "dense")
        first = grid.train(dense, size.dense)
        plan = grid.client.plan(dense)
        assert plan.proposal is not None
        assert plan.forecast is not None
        changes = plan.proposal.changes
        common.say(f"proposed: {dict(changes) or 'nothing else'} ({plan.proposal.reason})")
        better = replace(apply(dense, changes), name="proposed")
        proposed = grid.train(better, size.proposed)
        again = grid.train(replace(dense, name="dense again"), size.dense)
    _print(first, plan.forecast, proposed, plan.proposal.forecast, again)
    shares = (first.measured.compute_share, again.measured.compute_share)
    predicted = plan.proposal.forecast.compute_share
    spread = abs(shares[0] - shares[1]) / (sum(shares) / 2)
    return {
        "compute_share": proposed.measured.compute_share,
        "compute_share_fp32": sum(shares) / 2,
        "bytes_up": proposed.bytes_up,
        "bytes_down": proposed.bytes_down,
        "predicted_share": predicted,
        "points_off": 100 * abs(predicted - proposed.measured.compute_share),
        "proposed": dict(changes),
        "settings": {
            "nodes": NODES,
            "size": asdict(size),
            "parameters": parameter_count(dense),
            "up_bytes_per_s": round(up),
            "down_over_up": DOWN_OVER_UP,
            "latency_s": LATENCY_S,
            "jitter_s": JITTER_S,
            "quick": args.quick,
        },
        "samples": {
            name: {**asdict(r.measured), "bytes_up": r.bytes_up, "bytes_down": r.bytes_down}
            for name, r in (
                ("calibration", calm),
                ("dense", first),
                ("proposed", proposed),
                ("dense again", again),
            )
        },
        "spread": spread,
        "noisy": spread > common.NOISY,
        "notes": [
            "bytes of all nodes over each job's rounds, at the lines, data and messages included",
            "spread: the dense job's share before and after the proposed one's",
        ],
    }


@dataclass(frozen=True)
class Run:
    """What became of a job: its phases, and what all lines carried meanwhile."""

    measured: Measured
    bytes_up: int
    bytes_down: int


def _rate(size: Size, calm: Measured) -> float:
    """Bytes a second of upload with which dense rounds compute for :data:`AIM` of the time."""
    compute = calm.compute_s
    overhead = calm.overhead_s or 0.0
    moving = compute / AIM - compute - overhead
    payload = 4.0 * parameter_count(_model(size))
    rate = payload * (1 + 1 / DOWN_OVER_UP) / max(moving, 0.2 * compute)
    common.say(
        f"a dense round computes for {compute:.2f} s, the overhead was {overhead:.2f} s: "
        f"{rate / MBPS:.3g} Mbit/s up"
    )
    return rate


def _model(size: Size) -> JobSpec:
    profile = family("decoder_transformer").PROFILES[size.profile]
    model = ModelSpec("decoder_transformer", to_plain(profile), size.profile)
    rounds = RoundSpec(inner_steps=size.dense_steps, codec_up="fp32", codec_down="fp32")
    # So long that the planner may propose rounds of up to ``longest`` steps; it is ended before.
    return JobSpec("", model, DataSpec(), 20 * size.longest, workers_min=NODES, rounds=rounds)


def _spec(grid: _Grid, size: Size, name: str) -> JobSpec:
    return replace(_model(size), name=name, data=DataSpec("blobs", (grid.text(),)))


def _print(first: Run, forecast: Forecast, proposed: Run, promised: Forecast, again: Run) -> None:
    def row(name: str, run: Run, expected: Forecast | None) -> list[object]:
        m = run.measured
        told = "" if expected is None else f"{expected.compute_share:.1%}"
        return [
            name,
            f"{m.compute_share:.1%}",
            told,
            m.round_s,
            m.compute_s,
            m.download_s,
            m.upload_s,
            m.waiting_s,
            m.rounds,
        ]

    common.table(
        [
            "job",
            "share",
            "forecast",
            "round s",
            "compute",
            "download",
            "upload",
            "waiting",
            "rounds",
        ],
        [
            row("dense fp32", first, forecast),
            row("as proposed", proposed, promised),
            row("dense fp32 again", again, None),
        ],
    )
    common.say(
        "share: seconds at inner steps over the time of the rounds. The dense job's forecast was "
        "made after it, from its own records; the proposed one's before it began."
    )


# ------------------------------------------------------------------ processes


@dataclass
class _Grid:
    """An orchestrator and nodes behind lines."""

    root: Path
    crew: Crew
    client: Client
    links: list[ShapedLink]

    def text(self) -> Any:
        """The jobs' data: this package's own source."""
        path = self.root / "text.txt"
        if not path.is_file():
            files = sorted((common.ROOT / "src" / "distribai").rglob("*.py"))
            path.write_text("\n".join(f.read_text("utf-8") for f in files)[:TEXT_BYTES], "utf-8")
        return self.client.upload(path)

    def train(self, spec: JobSpec, rounds: int) -> Run:
        """Train so many rounds of a job, then cancel it."""
        before = self._moved()
        job = self.client.create_job(spec).id
        self.client.accept(job)
        self._wait(spec.name, lambda: self.client.job(job).version >= rounds)
        moved = self._moved()
        found = self.client.job(job)
        assert found.measured is not None
        self.client.cancel(job, "the benchmark has seen enough")
        self._wait("the nodes are idle", lambda: not any(n.tasks for n in self.client.nodes()))
        share = found.measured.compute_share
        common.say(f"{spec.name}: {rounds} rounds, {share:.1%} of the time at inner steps")
        return Run(found.measured, moved[0] - before[0], moved[1] - before[1])

    def _moved(self) -> tuple[int, int]:
        return sum(x.bytes_up for x in self.links), sum(x.bytes_down for x in self.links)

    def _wait(self, what: str, done: Callable[[], bool]) -> None:
        end = time.monotonic() + CAP_S
        while not done():
            self.crew.check()
            if time.monotonic() > end:
                raise Unavailable("grid.unreachable", f"Waited {CAP_S:.0f} s in vain: {what}.")
            time.sleep(0.2)


@contextmanager
def _grid(shapes: Mapping[str, Shape]) -> Iterator[_Grid]:
    """A grid of real processes whose nodes have lines of these shapes, and have joined."""
    root = Path(tempfile.mkdtemp(prefix="distribai-bench-"))
    crew = Crew(root)
    try:
        ready = crew.start_orchestrator()
        join = joinlink.parse(ready["join_link"])
        with (
            _Lines() as lines,
            Client(ready["url"], ready["operator_token"]) as client,
        ):
            links = [ShapedLink(**shapes) for _ in range(NODES)]
            for index, link in enumerate(links):
                grpc, http = lines.add(join, link)
                through = replace(join, grpc=f"127.0.0.1:{grpc}", http=f"127.0.0.1:{http}")
                crew.start_node(f"node{index}", str(through), 1)
            grid = _Grid(root, crew, client, links)
            grid._wait("the nodes join", lambda: client.health().nodes_online >= NODES)
            yield grid
            crew.stop()
    finally:
        crew.stop()
        shutil.rmtree(root, ignore_errors=True)


class _Lines:
    """Proxies in a thread of their own."""

    def __enter__(self) -> _Lines:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._proxies: list[Proxy] = []
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._proxies:
            self._call(proxy.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def add(self, join: joinlink.JoinLink, link: ShapedLink) -> tuple[int, int]:
        """The ports of one more node: its stream and its blobs share a line."""
        ports = []
        for address in (join.grpc, join.http):
            host, _, port = address.rpartition(":")
            proxy = Proxy(host, int(port), link)
            self._call(proxy.__aenter__())
            self._proxies.append(proxy)
            ports.append(proxy.port)
        return ports[0], ports[1]

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)
