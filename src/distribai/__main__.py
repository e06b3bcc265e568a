"""``python -m distribai``: the command, where no ``distribai`` is on the path."""

import sys

from distribai.cli.main import main

sys.exit(main())
