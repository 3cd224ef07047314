"""``python -m agent_shim.cli``: the ``agent-shim`` command."""

import sys

from agent_shim.cli.main import main

sys.exit(main())
