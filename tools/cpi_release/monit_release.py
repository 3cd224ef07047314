"""``./dev monit-release`` builds a BOSH release that replaces monit with the supervisor, for ``bosh upload-release``.

The release's ``agent_shim_monit`` job is an addon without processes. Its pre-start script replaces monit, and removing
the job restores monit (docs/monit.md). The ``bpm`` job is for operators who also want this project's bpm. The package
is built in the same way as the CPI's (``release``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tools.cpi_release.release import command, files_of_job, package_tree, write

NAME: Final = "agent-shim-monit-release"
JOB: Final = "agent_shim_monit"
TEMPLATES: Final = {"pre-start": "bin/pre-start", "run": "bin/run", "http.erb": "config/http"}
PROPERTIES: Final = {
    "agent_shim_monit.http": {
        "description": "Address of metrics and probes, such as 127.0.0.1:9190, or off.",
        "default": "off",
    }
}


def release(version: str, out: Path) -> Path:
    """Build the release tarball in ``out`` and return its path."""
    jobs = {JOB: files_of_job(JOB, TEMPLATES, PROPERTIES), "bpm": files_of_job("bpm", {"bpm": "bin/bpm"}, {}, JOB)}
    return write(out, NAME, version, jobs, lambda content: package_tree(content, JOB, "runtime.lock", "agent_shim"))


def main() -> int:
    return command("monit-release", "Build a BOSH release with the supervisor in monit's place.", release)


if __name__ == "__main__":
    sys.exit(main())
