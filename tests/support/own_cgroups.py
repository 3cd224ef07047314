"""Creates cgroups for a single test run.

Two agents in one cgroup would count and kill each other's job processes if the jobs had the same name.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent_shim.host import cgroups

_LIFETIME_S: Final = 24 * 3600
"""Longest time in seconds for which a test run uses a cgroup."""
_END_TIMEOUT_S: Final = 10
"""Seconds that killed processes may take to leave a cgroup."""


def hierarchies() -> list[cgroups.Hierarchy]:
    """Return the hierarchies that contain this process and can limit its resources."""
    found = cgroups.find()
    each = dict.fromkeys(filter(None, (found.memory, found.pids, found.cpu, found.cpuacct)))
    return [one for one in each if cgroups.contains_this_process(one)]


@contextlib.contextmanager
def own_cgroups(kind: str) -> Iterator[list[tuple[Path, Path]]]:
    """Create a cgroup in each hierarchy that can limit processes.

    Yield a list with a pair for each cgroup: the cgroup's directory, and the top directory of the hierarchy. First,
    remove cgroups of the same ``kind`` that killed test runs have left behind. At the end of the block, remove the new
    cgroups.

    A cgroup's name contains the time at which it was created. A pid would not show whether the cgroup is still in use,
    because the test run may be in another pid namespace.
    """
    made = []
    now = int(time.time())
    name = f"{kind}-{now}-{uuid.uuid4()}"
    for hierarchy in hierarchies():
        here = hierarchy.levels[0]
        for former in here.glob(f"{kind}-*"):
            created = former.name.split("-")[1]
            if created.isdigit() and now - int(created) > _LIFETIME_S:
                _remove(former, timeout=0)
        with contextlib.suppress(OSError):
            (here / name).mkdir()
            made.append((here / name, hierarchy.levels[-1]))
    try:
        yield made
    finally:
        for ours, _ in made:
            _remove(ours, timeout=_END_TIMEOUT_S)


def joining(directories: list[tuple[Path, Path]], argv: list[str]) -> list[str]:
    """Return a command that joins the cgroups ``directories`` and then executes ``argv``.

    The command fails if it cannot join one of them.
    """
    join = "".join(f"echo 0 >{ours}/cgroup.procs && " for ours, _ in directories)
    return ["sh", "-c", f'{join} exec "$@"', "sh", *argv]


def _remove(cgroup: Path, *, timeout: float) -> None:
    """Remove a cgroup and its children, waiting up to ``timeout`` seconds for their killed processes to exit."""
    give_up_at = time.monotonic() + timeout
    while cgroup.exists():
        with contextlib.suppress(FileNotFoundError):  # another test run may have removed it
            for below in sorted(cgroup.rglob("*/"), reverse=True):
                with contextlib.suppress(OSError):
                    below.rmdir()
        with contextlib.suppress(OSError):
            cgroup.rmdir()
            return
        if time.monotonic() > give_up_at:
            return
        time.sleep(0.05)
