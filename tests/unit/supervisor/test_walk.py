"""Long random walks: after any requests and events, the state of a service is the state of a simple model.

The service is the real one. Its process and programs are played, and time jumps from timer to timer. The model has no
transitions: it derives the state from the last request and the living processes.
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
from agent_shim.supervisor.service import Event, Record, Service
from agent_shim.supervisor.state import ENDING, State
from tests.support.played import SPEC, START_TAKES, TIMING, Machine, Played, played, service_on

BROKEN: Final = ProcessSpec(name="web", job="web", error="line 1")
EVENTS: Final = 100
"""Settings of one walk."""

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
    """The last request and whether the process is trusted. The rest are facts of the machine."""

    machine: Machine
    wanted: Literal["up", "down", "left alone", "stuck", "nothing usable"] = "down"
    is_trusted: bool = True
    is_ending: bool = False
    """A stop has been asked for and has not been through."""
    again: bool = False
    since: float = 0.0
    """The trial of an untrusted one began."""
    watched: Played | None = None

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
        """No process survived. Wanted services start again, and are trusted."""
        self.wanted = "left alone" if self.wanted == "stuck" else self.wanted
        self.watched, self.is_trusted = None, True
        if self.is_ending:
            self.is_ending, self.wanted = False, "up" if self.again else "down"
            self.again = False

    def look(self, state: State, now: float) -> None:
        """Take up the facts. ``state`` tells only that a stop is through, and how, and the exact moment of trust."""
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
            # We look from moment to moment, the service for one that comes by itself from second to second.
            if lived > TIMING.settle - MOMENT and (state is State.RUNNING or lived > TIMING.settle + NOTICED):
                self.is_trusted = True


@dataclass
class Walk:
    """One service on one machine, and the model beside it."""

    machine: Machine = field(default_factory=Machine)
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

    async def next_agent(self, *, same_world: bool) -> None:
        """The agent has died, perhaps with all processes. Its successor reads the saved record."""
        saved = msgspec.json.encode(self.service.record)
        await self.end()
        self.service.release()
        if not same_world:
            self.machine.kill_all()
        # The stop program is unknown if the file broke meanwhile. An unfinished stop is repeated.
        self.machine.stopper = None
        self.service = self.made()
        self.service.resume(msgspec.json.decode(saved, type=Record), same_world=same_world)
        self.running = asyncio.create_task(self.service.run())

    async def step(self, step: Step) -> None:
        """Play a request or an event, then compare service and model."""
        what, _, how = step.partition(" ")
        if step in PAUSES:
            await self.pass_by(PAUSES[step])
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
            # The wait for it polls.
            await asyncio.sleep(NOTICED)
        elif step == "agent dies":
            await self.next_agent(same_world=True)
            model.since = asyncio.get_running_loop().time()
        elif step == "machine boots":
            await self.next_agent(same_world=False)
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

    async def pass_by(self, seconds: float) -> None:
        """Let time pass, and look at every moment at which something can have happened."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until:
            await asyncio.sleep(min(MOMENT, until - loop.time()))
            await self.check()

    async def check(self) -> None:
        """Service and model agree as soon as no work is due."""
        await asyncio.sleep(1e-6)
        service = self.service
        assert not self.running.done()
        now = asyncio.get_running_loop().time()
        self.model.look(service.state, now)
        if service.state is State.DOWN and self.model.wanted == "up" and self.machine.is_starting:
            # A start program slower than its timeout runs on, and the service is down until its process appears.
            assert self.spec.start is not None
            assert now - self.machine.starts[-1] >= self.spec.start.timeout, "down before the timeout of its start"
            self.model.is_trusted = False
            return
        # It looks from second to second for a process that comes without a start or after its timeout.
        if service.state is State.DOWN and self.machine.is_there and now - self.model.since <= NOTICED:
            return
        assert service.state is self.model.state(), f"{service.state} for {self.model}"
        assert service.reported != "running" or (self.machine.is_there and self.model.is_trusted)

    async def never_gives_up(self) -> None:
        """A wanted service that cannot run is retried forever."""
        starts = len(self.machine.starts)
        await self.pass_by(PAUSES["age"] + START_TAKES["late"])
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
def test_random_events_keep_supervisor_and_model_equal(taken: list[Step]) -> None:
    """A few thousand events are tried."""
    walk(taken)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_many_random_events_keep_supervisor_and_model_equal(number: int) -> None:
    """A hundred thousand events are tried: twenty times fifty walks of a hundred each."""

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
