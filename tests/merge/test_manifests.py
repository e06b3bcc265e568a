"""Manifests: to JSON and back, and replayed bit for bit."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from distribai.core.plain import canonical_json, from_plain, to_plain
from distribai.core.ranges import SampleRange
from distribai.core.spec import BlobRef
from distribai.merge.delta import Delta
from distribai.merge.manifests import (
    AcceptedSubmission,
    RoundManifest,
    VersionManifest,
    replay_round,
)
from distribai.merge.outer import UpdateHeader, merge_files, momentum_hash, write_momentum
from distribai.merge.version0 import make_version0
from distribai.merge.weights import tensor_hashes, weights_hash, write_weights
from tests.merge.support import ODD, blank, stored_delta, trained

TOKENS = [100, 250, 0, 100]


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[RoundManifest, list[Delta]]:
    base = make_version0(ODD, 1)
    _, momentum, _ = blank(ODD)
    write_weights(tmp_path / "w", ODD, base)
    write_momentum(tmp_path / "m", ODD, momentum)
    deltas = [
        stored_delta(tmp_path, ODD, base, trained(ODD, base, k), f"t{k}", tokens=n)
        for k, n in enumerate(TOKENS)
    ]
    made = merge_files(
        ODD,
        tmp_path / "w",
        tmp_path / "m",
        deltas,
        TOKENS,
        float(np.float32(0.8)),
        float(np.float32(0.3)),
        out_theta=tmp_path / "w1",
        out_momentum=tmp_path / "m1",
        out_update=tmp_path / "u1",
        header=UpdateHeader("j", 1, ODD.hash, "fp32"),
    )
    submissions = tuple(
        AcceptedSubmission(
            f"t{k}", 1, f"n{k}", BlobRef("00", 1), n, 5, (SampleRange(k * 10, k * 10 + 10),)
        )
        for k, n in enumerate(TOKENS)
    )
    record = RoundManifest(
        job_id="j",
        round=0,
        manifest_hash=ODD.hash,
        base_version=0,
        base_hash=weights_hash(ODD, base),
        base_momentum_hash=momentum_hash(ODD, momentum),
        submissions=submissions,
        choices=made.choices,
        weights_hash=made.weights_hash,
        momentum_hash=made.momentum_hash,
    )
    return record, deltas


def replay(folder: Path, record: RoundManifest, deltas: list[Delta]):
    return replay_round(ODD, record, folder / "w", folder / "m", deltas)


def test_a_round_replays_to_the_same_bits_from_its_json(recorded, tmp_path: Path):
    record, deltas = recorded
    again = from_plain(RoundManifest, json.loads(canonical_json(record)))
    assert again == record
    verdict = replay(tmp_path, again, deltas[::-1])
    assert verdict.ok
    assert verdict.weights_hash == record.weights_hash


def test_a_version_manifest_survives_json():
    weights = make_version0(ODD, 1)
    version = VersionManifest(
        "j",
        3,
        ODD.hash,
        tensor_hashes(ODD, weights),
        weights_hash(ODD, weights),
        snapshot=BlobRef("ab", 5),
    )
    assert from_plain(VersionManifest, json.loads(canonical_json(version))) == version
    assert to_plain(version)["update"] is None


def test_another_result_is_found(recorded, tmp_path: Path):
    record, deltas = recorded
    for field in ("weights_hash", "momentum_hash", "base_hash", "base_momentum_hash"):
        verdict = replay(tmp_path, dataclasses.replace(record, **{field: "0" * 64}), deltas)
        assert not verdict.ok


def test_another_delta_is_found(recorded, tmp_path: Path):
    record, deltas = recorded
    base = make_version0(ODD, 1)
    deltas[1] = stored_delta(tmp_path, ODD, base, trained(ODD, base, 77), "t1", tokens=250)
    assert not replay(tmp_path, record, deltas).ok


def test_choices_that_favour_a_row_are_found(recorded, tmp_path: Path):
    record, deltas = recorded
    told = record.choices
    wrong = [
        dataclasses.replace(told, weights=tuple(reversed(told.weights[:2])) + told.weights[2:]),
        dataclasses.replace(told, weights=told.weights[:2]),
        dataclasses.replace(told, order=told.order[::-1]),
        dataclasses.replace(told, dropped=()),
        dataclasses.replace(told, equal=True),
        dataclasses.replace(told, rule="median"),
    ]
    for choices in wrong:
        verdict = replay(tmp_path, dataclasses.replace(record, choices=choices), deltas)
        assert not verdict.ok
        assert verdict.weights_hash == ""


def test_stored_weights_within_rounding_are_used_as_they_are(recorded, tmp_path: Path):
    record, deltas = recorded
    weights = list(record.choices.weights)
    weights[0] = float(np.nextafter(np.float32(float.fromhex(weights[0])), np.float32(1))).hex()
    choices = dataclasses.replace(record.choices, weights=tuple(weights))
    verdict = replay(tmp_path, dataclasses.replace(record, choices=choices), deltas)
    assert verdict.weights_hash
    assert verdict.weights_hash != record.weights_hash
    assert len(verdict.problems) == 2


def test_tokens_that_the_delta_does_not_claim_are_found(recorded, tmp_path: Path):
    record, deltas = recorded
    submissions = (dataclasses.replace(record.submissions[0], tokens=101), *record.submissions[1:])
    verdict = replay(tmp_path, dataclasses.replace(record, submissions=submissions), deltas)
    assert any("101" in problem for problem in verdict.problems)


def test_a_replay_needs_every_delta(recorded, tmp_path: Path):
    record, deltas = recorded
    with pytest.raises(ValueError, match="exactly"):
        replay(tmp_path, record, deltas[:-1])


def test_late_work_counts_less_and_replays(tmp_path: Path):
    """Weights by ``tokens (1 + staleness)^-0.5``, exactly; a staleness that the delta's header does
    not bear out is found."""
    base = make_version0(ODD, 1)
    write_weights(tmp_path / "w", ODD, base)
    deltas = [
        stored_delta(tmp_path, ODD, base, trained(ODD, base, k), f"t{k}", tokens=64, base_version=v)
        for k, v in enumerate((2, 1, 2))
    ]
    staleness = (0, 1, 0)
    made = merge_files(
        ODD,
        tmp_path / "w",
        None,
        deltas,
        [64] * 3,
        1.0,
        0.0,
        out_theta=tmp_path / "w1",
        out_momentum=tmp_path / "m1",
        out_update=tmp_path / "u1",
        header=UpdateHeader("j", 3, ODD.hash, "fp32"),
        staleness=staleness,
    )
    share = 1 / (2 + 1 / np.sqrt(2))
    expected = [np.float32(share), np.float32(share / np.sqrt(2)), np.float32(share)]
    assert [float.fromhex(w) for w in made.choices.weights] == pytest.approx(expected, rel=1e-7)
    assert not made.choices.equal
    record = RoundManifest(
        job_id="j",
        round=2,
        manifest_hash=ODD.hash,
        base_version=2,
        base_hash=weights_hash(ODD, base),
        base_momentum_hash="",
        submissions=tuple(
            AcceptedSubmission(
                f"t{k}", 1, "n", BlobRef("00", 1), 64, 5, (SampleRange(k, k + 1),), staleness=late
            )
            for k, late in enumerate(staleness)
        ),
        choices=made.choices,
        weights_hash=made.weights_hash,
        momentum_hash=made.momentum_hash,
    )
    assert replay_round(ODD, record, tmp_path / "w", None, deltas).ok
    for k, late in ((0, 1), (1, 0)):
        lied = list(record.submissions)
        lied[k] = dataclasses.replace(lied[k], staleness=late)
        found = replay_round(
            ODD, dataclasses.replace(record, submissions=tuple(lied)), tmp_path / "w", None, deltas
        )
        assert any("starts from version" in problem for problem in found.problems)


def test_a_manifest_from_before_late_work_reads_as_it_was_meant(recorded):
    record, _ = recorded
    old = to_plain(record)
    for submission in old["submissions"]:
        del submission["staleness"]
    assert from_plain(RoundManifest, old) == record
