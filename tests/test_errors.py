"""The tree of exceptions."""

from __future__ import annotations

import pytest

from distribai import errors


def all_classes(root: type) -> set[type]:
    found = {root}
    for child in root.__subclasses__():
        found |= all_classes(child)
    return found


def test_every_error_has_an_exit_and_an_http_status() -> None:
    for cls in all_classes(errors.DistribAIError):
        assert 400 <= cls.http_status < 600
        assert 0 < cls.exit_status < 128


def test_an_unregistered_code_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="unregistered"):
        errors.NotFound("job.vanished", "The job is gone.")


def test_an_error_prints_its_message_and_its_code() -> None:
    problem = errors.NotFound("job.unknown", "No job x.", "List them.", field="id")
    assert str(problem) == "No job x. [job.unknown]"
    assert (problem.hint, problem.field) == ("List them.", "id")


def test_a_code_keeps_its_one_sentence() -> None:
    with pytest.raises(ValueError, match="twice"):
        errors.register(job__unknown="Something else.")
    assert all(sentence.endswith(".") for sentence in errors.CODES.values())
