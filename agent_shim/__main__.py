"""``python -m agent_shim``: the command ``agent-shim``."""

import sys

from agent_shim.cli.main import main

sys.exit(main())
