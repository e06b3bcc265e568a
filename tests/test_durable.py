from __future__ import annotations

from pathlib import Path

import pytest

from distribai import durable
from distribai.errors import UsageError


def test_a_state_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    durable.state_directory(path)
    durable.state_directory(path)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("path", ["/proc/nothing", "/etc/hostname/below", "/etc/hostname"])
def test_one_that_cannot_be_used_is_named(path: str) -> None:
    with pytest.raises(UsageError) as caught:
        durable.state_directory(Path(path))
    assert caught.value.code == "io.file"
    assert path in caught.value.message
    assert "--state-dir" in caught.value.hint
