from __future__ import annotations

from dataclasses import replace

from distribai.cli.forecast import MAX_REASONS, forecast_facts, measured_words, proposal_words
from distribai.core.forecast import forecast, overhead_of
from distribai.core.known import Known
from distribai.core.phases import Measured
from distribai.core.proposal import Proposal
from tests.core.test_forecast import NOTHING, hopeless, known
from tests.core.test_plan import make_spec

DENSE = {"rounds__codec_up": "fp32", "rounds__codec_down": "fp32"}
SPEC = make_spec(rounds__inner_steps=100, **DENSE)


def test_a_forecast_is_told_in_a_few_lines_and_names_who_is_slow() -> None:
    machines = [known(SPEC, 0.5, 5.0, node_id=f"node_{i}") for i in range(4)]
    found = forecast(SPEC, [*machines, known(SPEC, 0.5, 100.0, node_id="node_modem")], NOTHING)
    facts = dict(forecast_facts(found))
    assert facts["time"].startswith("1")
    assert facts["a round"].startswith("78.4%")
    assert "50 s inner steps, 5 s download, 5 s upload" in facts["a round"]
    assert facts["slow: node_modem"].startswith("link: a round's bytes take it 3.3 min")
    assert forecast_facts(None) == []


def test_equal_reasons_are_told_once_and_many_are_cut() -> None:
    found = forecast(SPEC, [Known(gflops=1e6, up_mbps=0.1, down_mbps=0.1)] * 3, NOTHING)
    assert "slow: 3 machines" in dict(forecast_facts(found))
    (node, *_) = found.nodes
    many = tuple(replace(node, why_slow=f"reason {i}") for i in range(MAX_REASONS + 2))
    facts = dict(forecast_facts(replace(found, nodes=many)))
    assert facts["slow as well"] == "for 2 more reasons (--json)"


def test_machines_without_a_name_are_told_in_words_and_so_is_what_one_of_them_costs() -> None:
    typical = forecast(replace(SPEC, workers_min=1), [], overhead_of(SPEC, None))
    assert "slow: a typical home" in dict(forecast_facts(typical))
    several = forecast(replace(SPEC, workers_min=3), [], overhead_of(SPEC, None))
    assert "slow: 3 typical homes" in dict(forecast_facts(several))
    mixed = hopeless(make_spec(rounds__inner_steps=10, **DENSE), 300.0)
    found = forecast(make_spec(rounds__inner_steps=10, **DENSE), mixed, NOTHING)
    facts = dict(forecast_facts(found))
    assert facts["time"].endswith("of it for the data at first")
    assert facts["without modem"].endswith(f"instead of {facts['time'].split(',')[0]}")
    others = replace(found, nodes=tuple(replace(n, node_id="") for n in found.nodes))
    assert "without another's machine" in dict(forecast_facts(others))


def test_what_became_of_it_is_told_by_phase() -> None:
    words = measured_words(Measured(7, 20.0, 15.0, 1.0, 3.0, 1.0, 0.75, 1.0))
    assert words == (
        "75.0% at inner steps: 15 s inner steps, 1 s download, 3 s upload, 1 s waiting, in 7 rounds"
    )


def test_a_proposal_is_told_as_lines_of_a_recipe() -> None:
    found = forecast(SPEC, [known(SPEC, 0.5, 5.0)], NOTHING)
    assert proposal_words(Proposal({}, "it is fine", found)) == (
        "Keep the settings of rounds: it is fine."
    )
    words = proposal_words(Proposal({"rounds.inner_steps": 200}, "it is slow", found))
    assert words.endswith("In the recipe:\n\n  rounds:\n    inner_steps: 200")
