"""Fixtures for tests that need root: machines with their own users, home directories and logs, and a way to run Python
inside them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import Fleet
from tests.support.fleet import fleet as fleets
from tests.support.machine import Machine, machine
from tests.support.pod import PodInstance
from tests.support.pod import pod as pods

Inside = Callable[..., Any]
UNPRIVILEGED = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
"""Prefix of a command that runs as an ordinary user with no other group."""

_PRELUDE = """
import asyncio, json, os, sys
from pathlib import Path
from agent_shim.core.errors import HostError, ShimError
from agent_shim.core.paths import Paths

async def main():
{body}

try:
    print(json.dumps({{"value": asyncio.run(main())}}))
except (ShimError, HostError) as exc:
    print(json.dumps({{"error": str(exc)}}))
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Provide a machine that all of a module's tests share. Changes to users, mounts and logs are discarded with it."""
    with machine(tmp_path_factory.mktemp("machine")) as made:
        yield made


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[PodInstance]:
    """Provide an instance on which tests can start one container after another. Initially, there is no container."""
    async with pods(tmp_path) as made:
        yield made


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Provide a bus and a Director to which tests can add agents. There are no agents at first."""
    async with fleets(tmp_path) as made:
        yield made


@pytest.fixture
def inside(box: Machine) -> Inside:
    """Provide a function that runs the body of a coroutine on the machine: ``inside("return 1 + 1") == 2``.

    If the body raises one of the agent's own exceptions, the function returns the error message.
    """
    root = Path(__file__).parents[2]

    def run(body: str, *prefix: str) -> Any:
        lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
        argv = [*prefix, sys.executable, "-c", _PRELUDE.format(body=lines)]
        done = box.popen(argv, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = done.communicate(timeout=300)
        assert done.returncode == 0, err.decode()
        answer = json.loads(out)
        return answer.get("value", answer.get("error"))

    return run
