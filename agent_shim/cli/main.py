"""The entry point ``agent-shim``, with a short path for probes, which run often.

The image has links to it with the names ``bosh-agent``, ``bpm`` and ``monit``, which are commands of their own.
"""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command of this name, by default ``agent-shim``. Return its exit code (listed in docs/commands.md)."""
    name = sys.argv[0].rpartition("/")[2] if argv is None else ""
    words = sys.argv[1:] if argv is None else argv
    if name == "bpm":
        from agent_shim.cli import bpm

        return bpm.main(words)
    if name == "monit":
        from agent_shim.cli import monit

        return monit.main(words)
    if name != "bosh-agent" and words[:1] == ["probe"]:
        from agent_shim.cli import probe

        if (question := probe.read(words[1:])) is not None:
            return probe.main(question)
    from agent_shim.cli import commands

    return commands.bosh_agent(words) if name == "bosh-agent" else commands.main(words)


if __name__ == "__main__":
    sys.exit(main())
