"""The checked-in wire code is what the proto file makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distribai import wire

WIRE = Path(wire.__file__).parent


def test_the_generated_code_is_what_the_proto_file_makes(tmp_path: Path) -> None:
    out = tmp_path / "v1"
    out.mkdir()
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    made = subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *flags, "distribai.proto"],
        cwd=WIRE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    grpc_file = out / "distribai_pb2_grpc.py"
    grpc_file.write_text(
        grpc_file.read_text().replace(
            "\nimport distribai_pb2", "\nfrom distribai.wire.v1 import distribai_pb2"
        )
    )
    for name in sorted(p.name for p in out.iterdir()):
        if (out / name).read_text() != (WIRE / "v1" / name).read_text():
            pytest.fail(f"{name} is stale: run `make proto`")
