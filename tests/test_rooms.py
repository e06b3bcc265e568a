"""What a process of each kind loads: torch belongs to the training child alone."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    ["orchestrator.main", "orchestrator.http.app", "node.main", "client", "demo.run", "cli.main"],
)
def test_a_process_without_training_loads_no_torch(module: str) -> None:
    code = (
        f"import sys, distribai.{module}; "
        "sys.exit(','.join(m for m in ('torch', 'tokenizers') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
