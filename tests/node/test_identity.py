from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from distribai.core.ids import node_id
from distribai.errors import NotAllowed
from distribai.node.identity import KEY_FILE, load_or_create

POSIX = pytest.mark.skipif(os.name != "posix", reason="file modes")


def test_a_key_is_made_once_and_kept(tmp_path: Path) -> None:
    made = load_or_create(tmp_path / "new")
    again = load_or_create(tmp_path / "new")
    assert made.public_key == again.public_key
    assert made.node_id == node_id(made.public_key)
    assert load_or_create(tmp_path / "other").node_id != made.node_id
    assert [p.name for p in (tmp_path / "new").iterdir()] == [KEY_FILE]


@POSIX
def test_only_the_owner_may_read_the_key(tmp_path: Path) -> None:
    load_or_create(tmp_path)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    (tmp_path / KEY_FILE).chmod(0o644)
    load_or_create(tmp_path)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600


def test_a_half_written_key_of_a_killed_daemon_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "node.new").write_bytes(b"half")
    load_or_create(tmp_path)


def test_a_file_that_is_no_key_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).write_bytes(b"nonsense")
    with pytest.raises(NotAllowed) as caught:
        load_or_create(tmp_path)
    assert caught.value.code == "node.key"
    assert (tmp_path / KEY_FILE).read_bytes() == b"nonsense"


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    key = generate_private_key(65537, 1024)
    (tmp_path / KEY_FILE).write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    with pytest.raises(NotAllowed):
        load_or_create(tmp_path)
