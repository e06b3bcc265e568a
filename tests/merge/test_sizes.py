"""What a plan says of a file's size is its size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distribai.core.architectures import manifest_of
from distribai.core.architectures.decoder_transformer import PROFILES
from distribai.core.codecs import PARTS, CodecStage, packed_layout
from distribai.core.framing import file_bytes
from distribai.core.plain import to_plain
from distribai.core.plan import parameter_count, plan
from distribai.core.spec import DataSpec, JobSpec, ModelSpec, RoundSpec
from distribai.merge.codecs import codecs
from distribai.merge.delta import KIND, write_delta
from distribai.merge.headers import to_metadata
from distribai.merge.tensorfile import NUMPY_DTYPES
from distribai.merge.update import UpdateHeader, write_update
from distribai.merge.version0 import make_version0
from tests.merge.support import ODD, header, trained


def test_every_codec_has_its_stored_arrays_and_every_dtype_its_bytes() -> None:
    from distribai.core.framing import ITEM_BYTES

    assert codecs().keys() == PARTS.keys()
    assert {name: dtype.itemsize for name, dtype in NUMPY_DTYPES.items()} == dict(ITEM_BYTES)


@pytest.mark.parametrize("name", PARTS)
def test_a_file_has_exactly_the_bytes_that_its_layout_says(name: str, tmp_path: Path) -> None:
    base = make_version0(ODD, 1)
    told = header(ODD, codec=name)
    blob = write_delta(tmp_path / "d", ODD, base, trained(ODD, base, 2), told)
    assert (tmp_path / "d").stat().st_size == blob.size
    assert file_bytes(packed_layout(ODD, name), to_metadata(KIND, told)) == blob.size


@pytest.mark.parametrize("name", PARTS)
def test_a_plan_counts_real_files_headers_included(name: str, tmp_path: Path) -> None:
    tiny = to_plain(PROFILES["tiny"])
    manifest = manifest_of("decoder_transformer", tiny)
    base = make_version0(manifest, 1)
    told = header(manifest, codec=name, job_id="job_" + 16 * "a", task_id="task_" + 16 * "a")
    up = write_delta(tmp_path / "d", manifest, base, trained(manifest, base, 2), told)
    claim = UpdateHeader("job_" + 16 * "a", 3, manifest.hash, name)
    down = write_update(tmp_path / "u", manifest, trained(manifest, base, 3), claim)
    spec = JobSpec(
        "job",
        ModelSpec("decoder_transformer", tiny),
        DataSpec(),
        steps=100,
        rounds=RoundSpec(inner_steps=10, codec_up=name, codec_down=name),
    )
    found = plan(spec, parameter_count(spec), 4)
    assert abs(found.bytes_up - 10 * up.size) <= 10 * 64
    assert abs(found.bytes_down - 10 * down.size) <= 10 * 64
    assert found.bytes_total == 4 * (found.bytes_up + found.bytes_down)


def test_a_plan_follows_a_schedule() -> None:
    tiny = to_plain(PROFILES["tiny"])
    spec = JobSpec("job", ModelSpec("decoder_transformer", tiny), DataSpec(), steps=95)

    def up(*stages: CodecStage) -> int:
        rounds = RoundSpec(inner_steps=10, codec_up=stages)
        return plan(replace(spec, rounds=rounds), parameter_count(spec), 4).bytes_up

    int4, sparse = up(CodecStage(0, "int4")), up(CodecStage(0, "sparse"))
    assert up(CodecStage(0, "int4"), CodecStage(4, "sparse")) * 10 == 4 * int4 + 6 * sparse
    assert up(CodecStage(0, "int4"), CodecStage(10, "sparse")) == int4
