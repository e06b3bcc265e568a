"""The bytes of every message, for each protocol version. DISTRIBAI_REGENERATE_GOLDEN=1 writes those
of the present version anew; those of earlier versions are never touched again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distribai.wire.v1 import distribai_pb2 as pb
from distribai.wire.versions import PROTOCOL, PROTOCOL_MIN
from tests.wire.samples import every_message

ALL = Path(__file__).parent / "golden"
GOLDEN = ALL / f"v{PROTOCOL}"
MESSAGES = every_message()
EARLIER = sorted(
    path
    for version in range(PROTOCOL_MIN, PROTOCOL)
    for path in (ALL / f"v{version}").glob("*.bin")
)


@pytest.fixture(scope="module", autouse=True)
def regenerate() -> None:
    if os.environ.get("DISTRIBAI_REGENERATE_GOLDEN") == "1":
        GOLDEN.mkdir(parents=True, exist_ok=True)
        for old in GOLDEN.glob("*.bin"):
            old.unlink()
        for name, message in MESSAGES.items():
            (GOLDEN / f"{name}.bin").write_bytes(message.SerializeToString(deterministic=True))


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_still_has_its_released_bytes(name: str) -> None:
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    assert MESSAGES[name].SerializeToString(deterministic=True) == golden


@pytest.mark.parametrize("name", MESSAGES)
def test_released_bytes_still_read_as_the_same_message(name: str) -> None:
    golden = (GOLDEN / f"{name}.bin").read_bytes()
    read = getattr(pb, name.split(".")[0]).FromString(golden)
    assert read == MESSAGES[name]


def test_there_is_a_golden_file_for_every_message_and_for_nothing_else() -> None:
    assert {p.stem for p in GOLDEN.glob("*.bin")} == set(MESSAGES)


@pytest.mark.parametrize("path", EARLIER, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_an_earlier_version_s_message_is_read_whole_and_without_additions(path: Path) -> None:
    golden = path.read_bytes()
    read = getattr(pb, path.stem.split(".")[0]).FromString(golden)
    assert read.SerializeToString(deterministic=True) == golden
    # What is not understood would be written again as well: every field must be one of today's.
    copy = type(read)()
    copy.CopyFrom(read)
    copy.DiscardUnknownFields()
    assert copy.SerializeToString(deterministic=True) == golden


def test_every_version_that_is_still_spoken_has_its_bytes() -> None:
    assert {p.parent.name for p in EARLIER} == {f"v{v}" for v in range(PROTOCOL_MIN, PROTOCOL)}
