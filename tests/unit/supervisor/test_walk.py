"""Tests a service against a model with random requests and events.

After any sequence of requests and events, the real service must be in the state that a simple model predicts. Processes
and programs are simulated, and the clock jumps from timer to timer. The model has no transitions: it derives the state
from the last request and the running processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.service import Event, Service, ServiceRecord
from agent_shim.supervisor.state import ENDING, State
from tests.support.played import SPEC, START_TAKES, TIMING, SimulatedMachine, SimulatedProcess, played, service_on

BROKEN: Final = ProcessSpec(name="web", job="web", error="line 1")
EVENTS: Final = 100
"""Maximum number of steps in a walk."""

Step: TypeAlias = Literal[
    "start", "stop", "unmonitor", "restart", "die", "appear", "moment", "while", "age",
    "starts well", "starts slowly", "starts not", "starts late",
    "stops well", "stops slowly", "stops not",
    "agent dies", "machine boots", "file breaks", "file is mended",
]  # fmt: skip
MOMENT: Final = 0.199
NOTICED: Final = TIMING.look + 0.2
PAUSES: Final[Mapping[str, float]] = {"moment": 0.3, "while": 4.1, "age": TIMING.backoff_limit + TIMING.cycle + 3.7}


@dataclass
class Model:
    """The expected state of a service.

    It depends on the last request, on the machine, and on whether the process is trusted to keep running.
    """

    machine: SimulatedMachine
    wanted: Literal["up", "down", "left alone", "stuck", "nothing usable"] = "down"
    is_trusted: bool = True
    is_ending: bool = False
    """Whether a stop was requested and has not finished."""
    again: bool = False
    since: float = 0.0
    """Simulated time at which the watched process was first seen. The process is trusted once it has run for the
    settling time.
    """
    watched: SimulatedProcess | None = None

    def state(self) -> State:
        machine = self.machine
        match self.wanted:
            case "nothing usable":
                return State.BROKEN
            case "left alone":
                return State.UNMONITORED
            case "stuck":
                return State.STUCK
            case "down":
                return (State.BOUNCING if self.again else State.STOPPING) if self.is_ending else State.STOPPED
        if machine.is_stopping:
            return State.STARTING if self.is_trusted else State.RESTARTING
        if machine.is_starting and not (self.watched is not None and self.watched.is_alive):
            return State.STARTING if self.is_trusted else State.RESTARTING
        if machine.is_there:
            return State.RUNNING if self.is_trusted else State.SETTLING
        return State.DOWN

    def ask(self, what: str) -> None:
        if self.wanted == "nothing usable":
            return
        if what == "start":
            if self.is_ending:
                self.again = True
            elif self.wanted != "up":
                self.wanted, self.is_trusted = "up", True
        elif what == "unmonitor":
            self.again = False
            if self.wanted == "up":
                self.wanted = "left alone"
        else:
            self.again = what == "restart"
            self.wanted, self.is_ending = "down", True

    def boot(self) -> None:
        """Simulate a boot, after which no process is left. If the service should run, it is started again and trusted
        immediately.
        """
        self.wanted = "left alone" if self.wanted == "stuck" else self.wanted
        self.watched, self.is_trusted = None, True
        if self.is_ending:
            self.is_ending, self.wanted = False, "up" if self.again else "down"
            self.again = False

    def look(self, state: State, now: float) -> None:
        """Update the model from the machine's state.

        Only two facts are derived from the service's ``state``: whether and how a stop has finished, and when a process
        became trusted.
        """
        machine = self.machine
        if self.is_ending and state not in ENDING:
            self.is_ending, self.watched = False, None
            if state is State.STUCK:
                assert machine.is_there, "called stuck, though nothing is left"
                self.wanted, self.again = "stuck", False
            else:
                assert self.again or not (machine.is_there or machine.is_starting), "called stopped, and it lives"
                if self.again:
                    self.wanted, self.is_trusted, self.again = "up", True, False
        if self.wanted != "up" or machine.is_stopping:
            self.watched = None
            return
        if self.watched is not None and not self.watched.is_alive:
            self.is_trusted, self.watched = False, None
        if not (machine.is_there or machine.is_starting):
            self.is_trusted = False
        elif machine.is_there and not machine.is_starting:
            if self.watched is not machine.process:
                self.watched, self.since = machine.process, now
            lived = now - self.since
            # The model looks for the process every MOMENT seconds, whereas the service looks only once per second for a
            # process that it did not start. They may therefore notice the process at different times.
            if lived > TIMING.settle - MOMENT and (state is State.RUNNING or lived > TIMING.settle + NOTICED):
                self.is_trusted = True


@dataclass
class Walk:
    """A service on a simulated machine, together with the model with which it is compared."""

    machine: SimulatedMachine = field(default_factory=SimulatedMachine)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = Model(self.machine)
        self.spec = SPEC
        self.service = self.made()
        self.running = asyncio.create_task(self.service.run())

    def made(self) -> Service:
        return service_on(self.machine, self.spec, notify=self.events.append)

    async def end(self) -> None:
        self.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.running

    async def next_agent(self, *, is_same_container: bool) -> None:
        """Simulate that the agent dies and its successor resumes from the saved record.

        Unless ``is_same_container`` is set, all processes die with the agent.
        """
        saved = msgspec.json.encode(self.service.record)
        await self.end()
        self.service.release()
        if not is_same_container:
            self.machine.kill_all()
        # The next agent does not wait for a running stop program, but carries out an unfinished stop again. If the
        # monit file has become invalid, the agent does not even know the stop program.
        self.machine.stopper = None
        self.service = self.made()
        self.service.resume(msgspec.json.decode(saved, type=ServiceRecord), is_same_container=is_same_container)
        self.running = asyncio.create_task(self.service.run())

    async def step(self, step: Step) -> None:
        """Perform one step of the walk, such as a request or an exit, then compare the service with the model."""
        what, _, how = step.partition(" ")
        if step in PAUSES:
            await self.let_time_pass(PAUSES[step])
        elif what == "starts":
            self.machine.how_starts = how
        elif what == "stops":
            self.machine.how_stops = how
        elif step in ("start", "stop", "unmonitor", "restart"):
            service = self.service
            asked: dict[str, Callable[[], None]] = {"start": service.start, "stop": service.stop}
            asked |= {"unmonitor": service.unmonitor, "restart": service.bounce}
            asked[step]()
            self.model.ask(step)
        else:
            await self.happen(step)
        await self.check()

    async def happen(self, step: Step) -> None:
        model, machine = self.model, self.machine
        if step == "die" and machine.process is not None:
            machine.end()
        elif step == "appear" and not (machine.is_there or machine.is_starting):
            machine.appear()
            model.look(self.service.state, asyncio.get_running_loop().time())
            # Wait until the service, which polls for processes that it did not start, has noticed this one.
            await asyncio.sleep(NOTICED)
        elif step == "agent dies":
            await self.next_agent(is_same_container=True)
            model.since = asyncio.get_running_loop().time()
        elif step == "machine boots":
            await self.next_agent(is_same_container=False)
            model.boot()
        elif step == "file breaks":
            self.take(BROKEN)
            model.wanted, model.is_ending, model.again = "nothing usable", False, False
        elif step == "file is mended":
            self.take(SPEC)
            if model.wanted == "nothing usable":
                model.wanted = "down"

    def take(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.service.take_spec(spec)

    async def let_time_pass(self, seconds: float) -> None:
        """Let simulated time pass, and compare the service with the model whenever something may have happened."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until:
            await asyncio.sleep(min(MOMENT, until - loop.time()))
            await self.check()

    async def check(self) -> None:
        """Assert that the service and the model agree once the service has handled all pending events."""
        await asyncio.sleep(1e-6)
        service = self.service
        assert not self.running.done()
        now = asyncio.get_running_loop().time()
        self.model.look(service.state, now)
        if service.state is State.DOWN and self.model.wanted == "up" and self.machine.is_starting:
            # A start program that exceeds its timeout keeps running, and the service is down until its process appears.
            assert self.spec.start is not None
            assert now - self.machine.starts[-1] >= self.spec.start.timeout, "down before the timeout of its start"
            self.model.is_trusted = False
            return
        # The service looks once per second for a process that appears without a start or after the start timeout.
        if service.state is State.DOWN and self.machine.is_there and now - self.model.since <= NOTICED:
            return
        assert service.state is self.model.state(), f"{service.state} for {self.model}"
        assert service.reported != "running" or (self.machine.is_there and self.model.is_trusted)

    async def never_gives_up(self) -> None:
        """Assert that starts are retried forever if the service should run but cannot."""
        starts = len(self.machine.starts)
        await self.let_time_pass(PAUSES["age"] + START_TAKES["late"])
        if self.model.wanted == "up":
            assert self.machine.is_there or len(self.machine.starts) > starts


@played
async def walk(steps: list[Step]) -> None:
    one = Walk()
    try:
        for step in steps:
            await one.step(step)
        await one.never_gives_up()
    finally:
        await one.end()


def steps(at_least: int) -> st.SearchStrategy[list[Step]]:
    return st.lists(st.sampled_from(Step.__args__), min_size=at_least, max_size=EVENTS)  # type: ignore[attr-defined]


@given(steps(1))
@settings(derandomize=True)
def test_service_state_matches_the_model_after_random_events(taken: list[Step]) -> None:
    walk(taken)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_service_state_matches_the_model_after_many_random_events(number: int) -> None:
    @seed(number)
    @given(steps(EVENTS))
    @settings(
        max_examples=50,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def long(taken: list[Step]) -> None:
        walk(taken)

    long()
