from __future__ import annotations

import pytest

from distribai.core.child import Gate
from distribai.core.states import Intent
from distribai.errors import UsageError
from distribai.node.governor import Governor


def test_a_node_contributes_with_its_share_at_first() -> None:
    governor = Governor(0.5)
    assert governor.intent is Intent.CONTRIBUTE
    assert governor.gate == Gate(0.5)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1])
def test_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(UsageError) as caught:
        Governor(share)
    assert caught.value.code == "config.invalid"


def test_who_pauses_must_be_who_resumes() -> None:
    governor = Governor()
    governor.pause()
    governor.obey("resume")
    assert governor.intent is Intent.PAUSE
    assert governor.gate.pause
    governor.contribute()
    assert governor.intent is Intent.CONTRIBUTE
    governor.obey("pause")
    governor.contribute()
    assert governor.intent is Intent.PAUSE
    governor.obey("resume")
    assert not governor.gate.pause


def test_a_limit_takes_no_tasks_says_why_and_lets_those_in_hand_end() -> None:
    governor = Governor()
    governor.spare("the month is used up")
    assert governor.intent is Intent.PAUSE
    assert governor.reason == "the month is used up"
    assert not governor.gate.pause
    governor.pause()
    assert governor.gate.pause
    assert governor.reason == "", "its owner has paused it, which says enough"
    governor.contribute()
    governor.spare("")
    assert governor.intent is Intent.CONTRIBUTE
    governor.spare("again")
    governor.finish()
    assert (governor.intent, governor.reason) == (Intent.DRAIN, "")


def test_finishing_lets_the_task_end_and_overrides_a_pause() -> None:
    governor = Governor()
    governor.pause()
    governor.obey("drain")
    assert governor.intent is Intent.DRAIN
    assert governor.gate == Gate(1.0, pause=False, finish=False)
    governor.finish(partial=True)
    governor.contribute()
    assert governor.gate == Gate(1.0, pause=False, finish=True)
    governor.finish()
    assert governor.gate.finish


def test_listeners_hear_every_change() -> None:
    governor, heard = Governor(), []
    governor.listen(lambda: heard.append(governor.intent))
    governor.pause()
    governor.contribute()
    governor.finish()
    assert heard == [Intent.PAUSE, Intent.CONTRIBUTE, Intent.DRAIN]


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="explode"):
        Governor().obey("explode")
