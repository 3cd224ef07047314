"""``python -m agent_shim``: the ``agent-shim`` command."""

import sys

from agent_shim.cli.main import main

sys.exit(main())
