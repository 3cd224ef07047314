"""Long random walks: after any requests and events, the state of a service is that of a simple model.

The service is the real one; its process and programs are played, and time jumps from timer to timer. The model has no
transitions: it derives the state from the last request and the living processes.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from agent_shim.core.errors import HostError
from agent_shim.supervisor import ctl_programs as programs_module
from agent_shim.supervisor import service as service_module
from agent_shim.supervisor.ctl_programs import TokenBucket
from agent_shim.supervisor.launch_queue import LaunchQueue
from agent_shim.supervisor.ownership import Left
from agent_shim.supervisor.plan import ProcessSpec, Program
from agent_shim.supervisor.process_finder import LateError, Timing
from agent_shim.supervisor.process_record import ProcessRecord
from agent_shim.supervisor.service import Event, Record, Service, ServiceContext
from agent_shim.supervisor.state import ENDING, WORK, State, Work

TIMING: Final = Timing()
SPEC: Final = ProcessSpec(
    name="web",
    job="web",
    pidfile="/web.pid",
    start=Program(("/start",), timeout=30.0),
    stop=Program(("/stop",), timeout=30.0),
)
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
START_TAKES: Final = {"well": 0.0, "slowly": 2.2, "not": 0.4, "late": 45.0}
STOP_TAKES: Final = {"well": 0.0, "slowly": 3.3, "not": 1.1}


class Jumping(selectors.SelectSelector):
    """Time jumps to the next timer. A wait without a timer has hung."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits for somebody else"
        self.now += max(0.0, timeout)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class Played:
    """A process or program; ``over`` is set when it has ended."""

    is_caged = True

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.identity = (pid, pid)
        self.over = asyncio.Event()
        self.on_end: Callable[[], None] | None = None

    def end(self) -> None:
        self.over.set()
        if self.on_end is not None:
            self.on_end()

    @property
    def is_alive(self) -> bool:
        return not self.over.is_set()

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    def send(self, sig: int) -> bool:
        raise AssertionError(f"signal {sig}: the stop program is there for that")

    async def wait(self) -> int | None:
        await self.over.wait()
        return 1

    async def terminate(self, _grace: float) -> int | None:
        self.end()
        return 1


@dataclass
class Machine:
    """The true state of the machine, apart from the agent's view; asserts the invariants."""

    process: Played | None = None
    starter: Played | None = None
    stopper: Played | None = None
    starts: int = 0
    how_starts: str = "well"
    how_stops: str = "well"
    pids: int = 0

    @property
    def is_there(self) -> bool:
        return self.process is not None and self.process.is_alive

    @property
    def is_starting(self) -> bool:
        return self.starter is not None and self.starter.is_alive

    @property
    def is_stopping(self) -> bool:
        return self.stopper is not None and self.stopper.is_alive

    def new(self) -> Played:
        self.pids += 1
        return Played(self.pids)

    def appear(self) -> None:
        self.process = self.new()

    def run(self, program: Program) -> Played:
        if program == SPEC.start:
            assert not self.is_starting, "two start programs at a time"
            assert not self.is_there, "started, though it is there"
            assert not self.is_stopping, "a start program beside the stop program"
            self.starts += 1
            self.starter = self.new()
            asyncio.get_running_loop().call_later(START_TAKES[self.how_starts], self._started, self.starter)
            return self.starter
        self.stopper = self.new()
        asyncio.get_running_loop().call_later(STOP_TAKES[self.how_stops], self._stopped, self.stopper)
        return self.stopper

    def _started(self, starter: Played) -> None:
        if starter.is_alive:
            starter.end()
            if self.how_starts != "not" and not self.is_there:
                self.appear()

    def _stopped(self, stopper: Played) -> None:
        if stopper.is_alive:
            stopper.end()
            if self.how_stops != "not" and self.process is not None:
                self.process.end()

    def kill_all(self) -> None:
        for each in (self.process, self.starter, self.stopper):
            if each is not None:
                each.end()


class PlayedPresence:
    """Stands for ``Presence``."""

    machine: Machine

    def __init__(self, *_: Any) -> None:
        self.process: Played | None = None
        self.program: Played | None = None
        self.doubted: Played | None = None
        self.up_at = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    refused = ""

    async def look(self, *_: Any) -> bool:
        return self._take_up()

    def _take_up(self) -> bool:
        if self.process is None or not self.process.is_alive:
            self.process = self.machine.process if self.machine.is_there else None
            self.up_at = asyncio.get_running_loop().time()
        return self.process is not None

    async def gone(self, _: ProcessSpec) -> str:
        if self.process is not None:
            await self.process.wait()
        return "exit 1"

    async def arrival(self, spec: ProcessSpec, _: ProcessRecord) -> None:
        assert self.program is not None
        assert spec.start is not None
        try:
            async with asyncio.timeout(spec.start.timeout):
                await self.program.wait()
        except TimeoutError:
            await self.program.terminate(0)
            raise LateError("no process after 30 seconds") from None
        if not self._take_up():
            raise HostError("the start program exited: exit 1")

    def resume(self, *_: Any) -> None:
        self.program = self.machine.starter if self.machine.is_starting else None
        self._take_up()

    def release_program(self) -> None:
        self.program = None

    def release(self) -> None:
        self.process = self.program = None


class PlayedPrograms:
    """Stands for ``Programs``."""

    ownership = SimpleNamespace(label_of=lambda _: "")

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def run(self, _name: str, program: Program, _event: str, **_: Any) -> Played:
        return self._machine.run(program)

    async def members(self, *_: Any) -> list[tuple[int, int]]:
        return []

    async def clear(self, *_: Any) -> None:
        pass

    async def dismiss(self, *_: Any) -> None:
        pass

    async def sweep(self, *_: Any) -> list[Left]:
        machine = self._machine
        left = machine.process
        if left is not None and left.is_alive and machine.how_stops == "not":
            return [Left(*left.identity, "web")]
        machine.kill_all()
        return []

    async def refused_limit(self, _: str) -> str:
        return ""

    async def printed(self, _: str) -> list[str]:
        return []


@dataclass
class Model:
    """The last request and whether the process is trusted; the rest are facts of the machine."""

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
        """No process survived; wanted services start again, and are trusted."""
        self.wanted = "left alone" if self.wanted == "stuck" else self.wanted
        self.watched, self.is_trusted = None, True
        if self.is_ending:
            self.is_ending, self.wanted = False, "up" if self.again else "down"
            self.again = False

    def look(self, state: State, now: float) -> None:
        """Take up the facts; ``state`` tells only that a stop is through, and how, and the exact moment of trust."""
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
    bugs: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = Model(self.machine)
        self.spec = SPEC
        may_start = asyncio.Event()
        may_start.set()
        self._shared = ServiceContext(
            base=Path("/"),
            programs=cast("Any", PlayedPrograms(self.machine)),
            bpm=cast("Any", None),
            restarts=TokenBucket(1e9, 1e9),
            timing=TIMING,
            notify=self.events.append,
            changed=lambda: None,
            was_oom=lambda: False,
            may_start=may_start,
            launches=LaunchQueue(),
            failed=lambda _, bug: self.bugs.append(bug),
        )
        self.service = Service(SPEC, self._shared)
        self.service.begin()

    async def end(self) -> None:
        if life := self.service.retire():
            await asyncio.wait([life])
        if self.bugs:
            raise self.bugs[0]

    async def next_agent(self, *, same_world: bool) -> None:
        """The agent has died, perhaps with all processes; its successor reads the saved record."""
        saved = msgspec.json.encode(self.service.record)
        await self.end()
        self.service.release()
        if not same_world:
            self.machine.kill_all()
        # The stop program is unknown if the file broke meanwhile; an unfinished stop is repeated.
        self.machine.stopper = None
        self.service = Service(self.spec, self._shared)
        self.service.resume(msgspec.json.decode(saved, type=Record), same_world=same_world)
        self.service.begin()

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
            asked = {"start": service.start, "stop": service.stop, "unmonitor": service.unmonitor}
            asked.get(step, service.bounce)()
            self.model.ask(step)
        else:
            await self.happen(step)
        await self.check()

    async def happen(self, step: Step) -> None:
        model, machine = self.model, self.machine
        if step == "die" and machine.process is not None:
            machine.process.end()
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
        assert not self.bugs
        assert service._life is not None or WORK[service.state] in (Work.REST, Work.WATCH), "it does no work"
        self.model.look(service.state, asyncio.get_running_loop().time())
        assert service.state is self.model.state(), f"{service.state} for {self.model}"
        assert service.reported != "running" or (self.machine.is_there and self.model.is_trusted)

    async def never_gives_up(self) -> None:
        """A wanted service that cannot run is retried without end."""
        starts = self.machine.starts
        await self.pass_by(PAUSES["age"] + START_TAKES["late"])
        if self.model.wanted == "up":
            assert self.machine.is_there or self.machine.starts > starts


async def walk(steps: list[Step]) -> None:
    one = Walk()
    PlayedPresence.machine = one.machine
    try:
        for step in steps:
            await one.step(step)
        await one.never_gives_up()
    finally:
        await one.end()


@pytest.fixture(autouse=True, scope="module")
def _played() -> Iterator[None]:
    """Presence is played, and the clock is that of the loop."""
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_module, "ProcessFinder", PlayedPresence)
        patch.setattr(service_module, "time", clock)
        patch.setattr(programs_module, "time", clock)
        yield


def steps(at_least: int) -> st.SearchStrategy[list[Step]]:
    return st.lists(st.sampled_from(Step.__args__), min_size=at_least, max_size=EVENTS)  # type: ignore[attr-defined]


def go(taken: list[Step]) -> None:
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(walk(taken))


@given(steps(1))
@settings(derandomize=True)
def test_state_is_what_the_model_says(taken: list[Step]) -> None:
    """A few thousand events."""
    go(taken)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_state_is_what_the_model_says_for_long(number: int) -> None:
    """A hundred thousand events in all: twenty times fifty walks of a hundred each."""

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
        go(taken)

    long()
