"""The ``agent-shim`` entry point, with a fast path for Kubernetes probes, because they run often.

The image has links named ``bosh-agent``, ``bpm`` and ``monit`` to this program, each of which runs a different command.
"""

from __future__ import annotations

import codecs
import io
import sys

PLAIN = {"…": "...", "●": "*"}
"""ASCII replacements for the symbols that the agent's output contains."""


def main(argv: list[str] | None = None) -> int:
    """Run the command that the program's name selects, or ``agent-shim`` if ``argv`` is given. Return its exit code
    (listed in docs/commands.md).
    """
    replace_unencodable()
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


def replace_unencodable() -> None:
    """Make stdout and stderr escape characters that their encoding does not have, instead of raising an error.

    The encoding is that of the locale, such as ISO-8859-1 on an old terminal.
    """
    codecs.register_error("agent_shim", _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the stream is None if the caller closed it
            stream.reconfigure(errors="agent_shim")


def _replaced(exc: UnicodeError) -> tuple[str, int]:
    """Return the replacement for characters that the encoding does not have, and the position at which to continue.
    This is a codec error handler.
    """
    from agent_shim.core import safetext  # imported late, because a probe does not need it

    assert isinstance(exc, UnicodeEncodeError)
    missing = exc.object[exc.start : exc.end]
    return "".join(PLAIN.get(char) or safetext.escape(char) for char in missing), exc.end


if __name__ == "__main__":
    sys.exit(main())
