"""What a service decides by itself: how long it waits before a restart, whom it takes along."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent_shim.supervisor.ctl_programs import TokenBucket
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.process_finder import Timing
from agent_shim.supervisor.service import Service, ServiceContext
from agent_shim.supervisor.state import State


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
    ("state", "after", "is_start_due"),
    [
        (State.STOPPED, State.STOPPED, False),
        (State.UNMONITORED, State.UNMONITORED, False),
        (State.RUNNING, State.STOPPING, True),
    ],
)
async def test_a_restart_takes_along_only_dependants_that_are_up(
    state: State, after: State, is_start_due: bool
) -> None:
    """One that was stopped stays so."""
    service, dependant = made("web"), made("needs-web")
    service.dependants = [dependant]
    service.record.state, dependant.record.state = State.RUNNING, state

    service.bounce()

    assert (service.state, service.record.is_start_due) == (State.STOPPING, True)
    assert (dependant.state, dependant.record.is_start_due) == (after, is_start_due)


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
