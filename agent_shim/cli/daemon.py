"""``agent-shim run`` and ``bosh-agent``: the command of a process that lives as long as its container.

The flags that CPIs, unit files and the image use are read without ``argparse``, which would take 0.5 MB of the daemon
until its end; other forms are left to the full parser.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from agent_shim.core import lean_imports

with lean_imports.without(late={"ipaddress": {}}):  # 0.2 MB: for addresses in the brackets of a URL
    from pathlib import Path

from agent_shim.core import safetext
from agent_shim.core.errors import BootError, HostError, ShimError
from agent_shim.core.paths import VCAP, Paths

FLAGS: Final = {"-C": "config", "-b": "base", "-P": "platform", "-M": "supervisor"}
"""Both commands have these, each with a value; -P and -M are accepted for compatibility."""


def read(words: list[str]) -> dict[str, Any] | None:
    """Values by name; None for any other form."""
    pairs = list(zip(words[::2], words[1::2], strict=False))
    if len(words) % 2 or any(flag not in FLAGS or value.startswith("-") for flag, value in pairs):
        return None
    return {FLAGS[flag]: value for flag, value in pairs}


def run(
    program: str,
    *,
    config: Path | str | None = None,
    base: Path | str = VCAP,
    http: str | None = None,
    log_format: str = "",
    log_level: str = "",
    job_logs: bool = False,
    **_ignored: object,
) -> int:
    """Run the daemon; print its error and return the exit code (listed in docs/commands.md)."""
    try:
        from agent_shim.daemon import main as daemon

        file, paths = None if config is None else Path(config), Paths(Path(base).absolute())
        return daemon.main(daemon.Options(file, paths, http, log_format, log_level, job_logs))
    except (ShimError, HostError) as exc:
        print(safetext.lines(f"{program}: {exc}"), file=sys.stderr)  # noqa: T201 - a command
        return exc.exit_code if isinstance(exc, ShimError) else BootError.exit_code
