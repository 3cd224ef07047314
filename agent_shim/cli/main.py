"""The entry point ``agent-shim``, with short paths for probes, which run often, and for the daemon.

The image has links to it with the names ``bosh-agent``, ``bpm`` and ``monit``, which are commands of their own.

The other commands are in ``commands``, whose imports alone exceed the budget of a probe and the daemon's memory.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """``agent-shim``: run the command and return the exit code (listed in docs/commands.md)."""
    if argv is None:
        match sys.argv[0].rpartition("/")[2]:
            case "bosh-agent":
                return bosh_agent()
            case "bpm":
                from agent_shim.cli import bpm

                return bpm.main()
            case "monit":
                from agent_shim.cli import monit

                return monit.main()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["probe"]:
        from agent_shim.cli import probe

        if (question := probe.read(words[1:])) is not None:
            return probe.main(question)
    if words[:1] == ["run"]:
        from agent_shim.cli import daemon

        if (flags := daemon.read(words[1:])) is not None:
            return daemon.run("agent-shim", **flags)
    from agent_shim.cli import commands

    return commands.main(words)


def bosh_agent(argv: Sequence[str] | None = None) -> int:
    """``bosh-agent``: run the daemon with the name and flags of CPIs and unit files."""
    from agent_shim.cli import daemon

    words = list(sys.argv[1:] if argv is None else argv)
    if (flags := daemon.read(words)) is not None:
        return daemon.run("bosh-agent", **flags)
    from agent_shim.cli import commands

    return commands.bosh_agent(words)


if __name__ == "__main__":
    sys.exit(main())
