from __future__ import annotations

import os

import pytest

from distribai.core.child import Ready
from distribai.errors import UsageError
from distribai.node.devices import choose, offer, threads

ALL = Ready("2.13", ("cpu", "mps", "cuda"), {"cuda": "H200"}, {"cuda": 141_000})


def test_auto_takes_the_fastest_kind() -> None:
    assert choose("auto", ALL) == "cuda"
    assert choose("auto", Ready("2.13", ("cpu", "mps"))) == "mps"
    assert choose("auto", Ready("2.13", ("cpu",))) == "cpu"


@pytest.mark.parametrize("wanted", ["cuda", "cuda:1", "tpu", ""])
def test_a_device_that_is_not_there_is_refused(wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose(wanted, Ready("2.13", ("cpu",)))
    assert caught.value.code == "config.invalid"


def test_an_accelerator_is_described_by_the_child() -> None:
    (place,) = offer("cuda:1", ALL, 4)
    assert place.torch == "cuda:1"
    assert (place.device.type, place.device.name) == ("cuda", "H200")
    assert (place.device.memory_mb, place.device.threads) == (141_000, 4)


def test_the_cpu_has_the_memory_of_the_machine() -> None:
    (place,) = offer("auto", Ready("2.13", ("cpu",)), 2)
    assert place.torch == "cpu"
    assert place.device.memory_mb > 0
    assert place.device.name


def test_all_cores_of_this_process_are_used_unless_told_otherwise() -> None:
    assert threads(3) == 3
    assert 1 <= threads(0) <= (os.cpu_count() or 1)
