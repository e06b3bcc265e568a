"""The description against the program: whatever it allows, and what it forbids, is answered as it
says, and never with a defect.

``SCHEMATHESIS_EXAMPLES=200`` tries more of each operation than the few that there is time for.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import hypothesis
import schemathesis
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks as openapi

from tests.http.real import RealGrid, served

__all__ = ["served"]

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "2"))


def no_defect(context: object, response: Any, case: Any) -> None:
    """No 5xx, but for a sample that no node has made in time: there is no node."""
    if response.status_code >= 500:
        assert response.json()["code"] == "task.timeout", response.text


CHECKS: list[Any] = [
    no_defect,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_schema_conformance,
]


def test_every_operation_answers_as_it_is_described(served: RealGrid) -> None:
    schema = schemathesis.openapi.from_dict(served.app.openapi())
    found = [operation.ok() for operation in schema.get_all_operations()]
    assert len(found) > 30
    for operation in found:
        _try(served, operation, GenerationMode.POSITIVE)
        with suppress(Unsatisfiable):  # nothing can be wrong where nothing is taken
            _try(served, operation, GenerationMode.NEGATIVE)


def _try(served: RealGrid, operation: Any, mode: GenerationMode) -> None:
    @hypothesis.settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
    def call(case: Any, known: bool) -> None:
        if known:  # what is made up names nothing: half of the time something that is there
            for name, value in served.known.items():
                if name in (case.path_parameters or {}):
                    case.path_parameters[name] = value
        _do_not_wait(case.query)
        _do_not_wait(case.body, default=operation.path.endswith("/generate"))
        case.call_and_validate(
            base_url=served.url,
            headers={"Authorization": f"Bearer {served.token}"},
            checks=CHECKS,
            timeout=30,
        )

    call()


def _do_not_wait(given: object, default: bool = False) -> None:
    """Whatever may be waited for does not come: there is no node."""
    if isinstance(given, dict):
        if default:
            given.setdefault("timeout", 120.0)
        for name, longest in {"wait": 60.0, "timeout": 600.0}.items():
            value = given.get(name)
            if isinstance(value, (int, float)) and 0 < value <= longest:
                given[name] = 0.01
