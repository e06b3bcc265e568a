"""When a node is set apart."""

from __future__ import annotations

from distribai.core.standing import QUARANTINE_JOBS, verdict
from distribai.core.states import STANDING, Standing


def test_only_jobs_in_which_others_could_work_count() -> None:
    failed = {f"job_{i}": f"cause {i} [node.child]" for i in range(QUARANTINE_JOBS)}
    guilty, why = verdict(failed, set(failed))
    assert guilty
    assert "cause 0 [node.child]; cause 1" in why
    assert verdict(failed, set(failed) - {"job_0"})[0] is False
    guilty, why = verdict(failed, ())
    assert (guilty, why) == (False, "it failed 0 of 3 jobs in which others did not fail")


def test_a_ban_leads_to_a_pardon_only_and_everything_else_to_a_ban() -> None:
    assert STANDING[Standing.BANNED] == {Standing.PROBATION}
    for standing in set(Standing) - {Standing.BANNED}:
        assert STANDING[standing] == set(Standing) - {standing}
