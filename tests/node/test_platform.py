from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from distribai.errors import Conflict
from distribai.node.platform import DirectoryLock

HOLD = """
import sys
from pathlib import Path
from distribai.node.platform import DirectoryLock
with DirectoryLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_state_directory_belongs_to_one_daemon(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path / "state"), pytest.raises(Conflict) as caught:
        DirectoryLock(tmp_path / "state").__enter__()
    assert caught.value.code == "node.locked"
    with DirectoryLock(tmp_path / "state"):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Conflict):
            DirectoryLock(tmp_path).__enter__()
        holder.kill()
        holder.wait()
        with DirectoryLock(tmp_path):
            pass


PARENT = """
import subprocess, sys
from distribai import spawn
code = "import os, sys; from distribai.node.platform import die_with_parent; " \
       "die_with_parent(int(os.environ['DISTRIBAI_PARENT_PID']), sys.argv[1]); " \
       "print('up', flush=True); import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], env=spawn.environment(),
                         stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_child_does_not_outlive_a_killed_parent(how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
    ended, _, _ = select.select([child], [], [], 30)
    os.close(child)
    assert ended


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    code = "from distribai.node.platform import die_with_parent; die_with_parent(1, 'kill'); 1/0"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")
