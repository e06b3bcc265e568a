from __future__ import annotations

import subprocess
import sys


def test_the_pretended_child_loads_no_torch() -> None:
    code = "import distribai.testing.child, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
