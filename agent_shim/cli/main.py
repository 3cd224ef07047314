"""The doors ``agent-shim`` and ``bosh-agent``; probes, which run every few seconds, go through with little of Python.

Everything else is in ``commands``, whose imports alone cost more than a probe may.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """``agent-shim``: the exit code says who has to act (docs/operations.md lists them)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["probe"]:
        from agent_shim.cli import probe

        if (question := probe.read(words[1:])) is not None:
            return probe.main(question)
    from agent_shim.cli import commands

    return commands.main(words)


def bosh_agent(argv: Sequence[str] | None = None) -> int:
    """``bosh-agent``: the daemon under the name and with the flags that CPIs and unit files use."""
    from agent_shim.cli import commands

    return commands.bosh_agent(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
