"""Decisions of a service alone: the wait before a restart, the dependants that restart with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from agent_shim.supervisor.ctl_programs import TokenBucket
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.process_finder import Timing
from agent_shim.supervisor.service import Service, ServiceContext
from agent_shim.supervisor.state import State
from agent_shim.supervisor.supervisor import SCHEMA, read_saved


@pytest.mark.parametrize(
    ("failures", "delay_s"), [(1, 0.0), (2, 0.5), (3, 1.0), (4, 2.0), (7, 16.0), (8, 30.0), (99999, 30.0)]
)
async def test_the_first_restart_comes_at_once_and_each_next_after_twice_the_time(
    failures: int, delay_s: float
) -> None:
    """Half a second before the second, thirty at most."""
    service = made("web")
    service.record.failures = failures

    assert service._delay() == delay_s


@pytest.mark.parametrize(
    ("state", "after"),
    [
        (State.STOPPED, State.STOPPED),
        (State.UNMONITORED, State.UNMONITORED),
        (State.RUNNING, State.BOUNCING),
    ],
)
async def test_a_restart_takes_along_only_dependants_that_are_up(state: State, after: State) -> None:
    """One that was stopped stays so."""
    service, dependant = made("web"), made("needs-web")
    service.dependants = [dependant]
    service.record.state, dependant.record.state = State.RUNNING, state

    service.bounce()

    assert (service.state, dependant.state) == (State.BOUNCING, after)


def test_a_restart_saved_by_the_first_release_goes_on(tmp_path: Path) -> None:
    """Version 0.2.0 saved it as a stop with a mark."""
    services = {
        "bounced": {"state": "stopping", "is_start_due": True},
        "stopped": {"state": "stopping", "is_start_due": False},
    }
    document = {"schema": SCHEMA, "incarnation": "", "is_wanted": True, "files": [], "services": services}
    (tmp_path / "supervisor.json").write_bytes(msgspec.json.encode(document))

    saved = read_saved(tmp_path / "supervisor.json")

    assert saved is not None
    bounced = saved.services["bounced"]
    assert (bounced.state, saved.services["stopped"].state) == (State.BOUNCING, State.STOPPING)
    assert b'"is_start_due":false' in msgspec.json.encode(bounced)


def made(name: str) -> Service:
    shared = ServiceContext(
        base=Path("/"),
        programs=cast("Any", SimpleNamespace(ownership=None)),
        bpm=cast("Any", None),
        restarts=TokenBucket(1, 1),
        timing=Timing(),
        notify=lambda _: None,
        changed=lambda: None,
        was_oom=lambda: False,
        may_start=asyncio.Event(),
    )
    return Service(ProcessSpec(name=name, job=name), shared)
