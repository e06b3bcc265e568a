"""The demo from its first process to its last figure."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from distribai.api.answers import JobRecord
from distribai.api.recipe import recipe_of
from distribai.cli import output
from distribai.cli.job_watch import display_of, has_ended
from distribai.client import Client
from distribai.core.states import JobState
from distribai.demo.crew import Crew
from distribai.demo.screen import Result, summary
from distribai.errors import Conflict, DistribAIError, Unavailable

MARKER = ".distribai-demo"
"""A file that says that a directory is an earlier demo's and may be replaced."""

POLL_S = 0.5
NODES_S = 120.0
"""How long the nodes may take to import torch and join on a slow machine."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the demo trains, and where it leaves things."""

    directory: Path
    nodes: int = 3
    steps: int = 1000
    inner_steps: int = 50
    profile: str = "tiny"
    prompt: str = "def "


def run_demo(settings: DemoSettings) -> int:
    """Run it; the exit status: 0 when it trained, and when somebody pressed Ctrl-C.

    Raises:
        DistribAIError: something the demo needs did not work.
    """
    crew: Crew | None = None
    said = "Stopped. Nothing of the demo is left running."
    with _Interrupts() as interrupts:
        try:
            root = _fresh(settings.directory)
            crew = Crew(root)
            said = "\n" + summary(_train(settings, crew, root))
        except KeyboardInterrupt:
            _say("\nStopping ...")
        except Unavailable:
            if crew is not None:
                crew.check()  # whose end it was says more than that nobody answers
            raise
        finally:
            interrupts.armed = False
            if crew is not None:
                crew.stop()
    _say(said)
    return 0


def _train(settings: DemoSettings, crew: Crew, root: Path) -> Result:
    _say(f"Starting an orchestrator and {settings.nodes} nodes (logs: {_shown(root)}) ...")
    ready = crew.start_orchestrator()
    threads = max(1, (os.cpu_count() or 1) // settings.nodes)
    for number in range(1, settings.nodes + 1):
        crew.start_node(f"node-{number}", ready["join_link"], threads)
    with Client(ready["url"], ready["operator_token"]) as client:
        _say("Reading the Python standard library's source text as training data ...")
        recipe = {
            "name": "demo",
            "steps": settings.steps,
            "model": {"profile": settings.profile},
            "rounds": {"inner_steps": settings.inner_steps},
            "workers_min": settings.nodes,
        }
        spec = recipe_of(recipe, "demo").to_spec({})
        job_id = client.create_job(spec).id
        _wait_for_nodes(client, crew, settings.nodes)
        client.accept(job_id)
        started = time.monotonic()
        _say("The nodes have joined; training.")
        job = _follow(client, crew, job_id)
        seconds = time.monotonic() - started
        out = root / "model.safetensors"
        _, blob = client.download_weights(job_id, None, out)
        sample = client.generate(job_id, settings.prompt, max_tokens=200, temperature=0.7)
        return Result(
            job, settings.nodes, seconds, sample.text, settings.prompt, _shown(out), blob.size
        )


def _wait_for_nodes(client: Client, crew: Crew, count: int) -> None:
    end = time.monotonic() + NODES_S
    while client.health().nodes_online < count:
        crew.check()
        if time.monotonic() > end:
            raise Unavailable(
                "grid.unreachable",
                f"Not all of the demo's {count} nodes joined within {NODES_S:.0f} s.",
                f"Their logs are in {crew.root}.",
            )
        time.sleep(POLL_S)


def _follow(client: Client, crew: Crew, job_id: str) -> JobRecord:
    display = display_of(False, time.monotonic)
    try:
        while True:
            job = client.job(job_id)
            display.show(job)
            if has_ended(job):
                break
            crew.check()
            time.sleep(POLL_S)
    finally:
        display.close()
    if job.state != JobState.COMPLETED:
        raise Conflict(
            "job.state",
            f"The demo's job {job.state}: {job.reason}",
            f"The logs are in {crew.root}.",
        )
    return job


def _shown(path: Path) -> str:
    """A path as short as it can be told from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _say(text: str) -> None:
    output.data(text)
    sys.stdout.flush()


def _fresh(directory: Path) -> Path:
    """An empty directory of the demo's own.

    Raises:
        DistribAIError: there is something else in it.
    """
    root = directory.absolute()
    if root.exists() and any(root.iterdir()):
        if not (root / MARKER).exists():
            raise Conflict(
                "io.file",
                f"{root} is not empty, and it is not an earlier demo's.",
                "Choose another place with --dir.",
            )
        shutil.rmtree(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / MARKER).touch()
    except OSError as problem:
        raise DistribAIError(
            "io.file", f"{root} cannot be written: {problem}", "Choose another place with --dir."
        ) from problem
    return root


class _Interrupts:
    """Ctrl-C and a termination both raise ``KeyboardInterrupt``, once, and only while ``armed``:
    a second one must not break off the clearing up."""

    def __init__(self) -> None:
        self.armed = True
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
