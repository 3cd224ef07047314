"""Removes cgroups that tests and benchmarks leave on the machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

from agent_shim.host import job_cgroups


def remove_cgroups(base: Path) -> None:
    """Remove the empty job cgroups of agents below ``base``, because a killed agent does not remove them."""
    with contextlib.suppress(OSError):
        escaped = str(base).replace("/", "%2f")
        for _, hierarchy in job_cgroups.hierarchies():
            for directory in (job_cgroups.parent_of_job_cgroups(hierarchy) / "agent_shim").glob(f"*@{escaped}*"):
                with contextlib.suppress(OSError):
                    directory.rmdir()
