"""``distribai demo``: a grid on this machine that trains a small model, start to finish."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def demo(
    *,
    quick: Annotated[bool, Parameter(show_default=False, help="A few short rounds only.")] = False,
    nodes: Annotated[int, Parameter(help="Node processes to start.")] = 3,
    steps: Annotated[int | None, Parameter(help="Inner steps per node.")] = None,
    directory: Annotated[
        Path, Parameter(name="--dir", help="Where weights, logs and state are left.")
    ] = Path("distribai-demo"),
) -> int:
    """Train a small model on this machine with an orchestrator and three nodes; about two
    minutes. Ctrl-C ends everything."""
    from distribai.demo.run import DemoSettings, run_demo

    settings = DemoSettings(directory, nodes=nodes, steps=1000 if steps is None else steps)
    if quick:
        settings = DemoSettings(directory, nodes=nodes, steps=steps or 80, inner_steps=20)
    return run_demo(settings)
