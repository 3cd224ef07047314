"""Runs a real ``Service`` with simulated processes and programs, on a simulated clock that jumps to the next timer."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, ParamSpec

import pytest

from agent_shim.core.errors import HostError
from agent_shim.supervisor import ctl_programs as programs_module
from agent_shim.supervisor import launcher as launcher_module
from agent_shim.supervisor import service as service_module
from agent_shim.supervisor.ctl_programs import TokenBucket
from agent_shim.supervisor.monit.ast import MonitProgram
from agent_shim.supervisor.ownership.ending import Code, Ending
from agent_shim.supervisor.ownership.keepers import Left
from agent_shim.supervisor.ownership.process_finder import LateError, Named, Timing
from agent_shim.supervisor.ownership.process_record import ProcessRecord
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.service import Service, ServiceContext

Taken = ParamSpec("Taken")
TIMING: Final = Timing()
SPEC: Final = ProcessSpec(
    name="web",
    job="web",
    pidfile="/web.pid",
    start=MonitProgram(("/start",)),
    stop=MonitProgram(("/stop",)),
)
START_TAKES: Final = {"well": 0.0, "slowly": 2.2, "not": 0.4, "late": 45.0}
STOP_TAKES: Final = {"well": 0.0, "slowly": 3.3, "not": 1.1, "hangs": 1000.0}
MAX_PID: Final = 2**22
"""The kernel's limit for pids. Simulated pids are higher, so ``/proc`` never contains a real process for them."""


class Jumping(selectors.SelectSelector):
    """Selector for an event loop whose clock jumps to the next timer.

    If the loop waits without a timer, the test fails instead of hanging.
    """

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


class SimulatedProcess:
    """A simulated process or program. ``over`` is set once it has exited."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.identity = (pid, pid)
        self.over = asyncio.Event()

    def end(self) -> None:
        self.over.set()

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
class SimulatedMachine:
    """The true state of the simulated machine, regardless of what the agent believes. Asserts the invariants."""

    process: SimulatedProcess | None = None
    starter: SimulatedProcess | None = None
    stopper: SimulatedProcess | None = None
    how_starts: str = "well"
    how_stops: str = "well"
    how_ends: Ending = field(default_factory=lambda: Code(1))
    refuses: str = ""
    """The event (such as ``Started``) whose program cannot be executed, or "" if every program can be."""
    orphans: list[Left] = field(default_factory=list)
    """Processes that may have been descendants of a killed keeper."""
    pids: int = MAX_PID
    ran: list[tuple[float, str]] = field(default_factory=list)
    """Each run of a program, as its time and the event that caused it."""
    graces: list[float] = field(default_factory=list)
    """Grace periods in seconds, one for each call that kills leftover processes."""

    @property
    def is_there(self) -> bool:
        return self.process is not None and self.process.is_alive

    @property
    def is_starting(self) -> bool:
        return self.starter is not None and self.starter.is_alive

    @property
    def is_stopping(self) -> bool:
        return self.stopper is not None and self.stopper.is_alive

    @property
    def starts(self) -> list[float]:
        """Times at which the start program was run."""
        return [at for at, event in self.ran if event == "Started"]

    def new(self) -> SimulatedProcess:
        self.pids += 1
        return SimulatedProcess(self.pids)

    def appear(self) -> None:
        self.process = self.new()

    def end(self) -> None:
        """Let the simulated process exit."""
        assert self.process is not None
        self.process.end()

    def run(self, event: str) -> SimulatedProcess:
        if event == self.refuses:
            raise HostError(f"cannot run {event}")
        loop, program = asyncio.get_running_loop(), self.new()
        self.ran.append((loop.time(), event))
        if event == "Started":
            assert not self.is_starting, "two start programs at a time"
            assert not self.is_there, "started, though it is there"
            assert not self.is_stopping, "a start program beside the stop program"
            self.starter = program
            loop.call_later(START_TAKES[self.how_starts], self._started, program)
        elif event == "Stopped":
            self.stopper = program
            loop.call_later(STOP_TAKES[self.how_stops], self._stopped, program)
        return program

    def _started(self, starter: SimulatedProcess) -> None:
        if starter.is_alive:
            starter.end()
            if self.how_starts != "not" and not self.is_there:
                self.appear()

    def _stopped(self, stopper: SimulatedProcess) -> None:
        if stopper.is_alive:
            stopper.end()
            if self.how_stops != "not" and self.process is not None:
                self.process.end()

    def kill_all(self) -> None:
        for each in (self.process, self.starter, self.stopper):
            if each is not None:
                each.end()


class PlayedFinder:
    """Replaces ``ProcessFinder`` and finds the process of a ``SimulatedMachine``."""

    refused = ""
    is_refused_process_alive = False

    def __init__(self, keepers: Any, *_: Any) -> None:
        self.machine: SimulatedMachine = keepers.machine
        self.process: SimulatedProcess | None = None
        self.program: SimulatedProcess | None = None
        self.doubted: SimulatedProcess | None = None
        self.up_at = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def is_starting(self) -> bool:
        return self.program is not None and self.program.is_alive

    async def look(self, *_: Any) -> bool:
        return self._adopt()

    look_at_path = look

    def _adopt(self) -> bool:
        if self.process is None or not self.process.is_alive:
            self.process = None
            if self.machine.is_there:
                self.process, self.up_at = self.machine.process, asyncio.get_running_loop().time()
        return self.process is not None

    def compare_with_pidfile(self, _: ProcessSpec) -> Named:
        return Named.WATCHED if self.process is None else Named.NONE

    async def gone(self, _: ProcessSpec) -> Ending:
        if self.process is not None:
            await self.process.wait()
        return self.machine.how_ends

    async def arrival(self, spec: ProcessSpec, _: ProcessRecord) -> None:
        assert self.program is not None
        assert spec.start is not None
        try:
            async with asyncio.timeout(spec.start.timeout):
                await self.program.wait()
        except TimeoutError:
            raise LateError("no process after 30 seconds") from None
        if not self._adopt():
            raise HostError("the start program exited: exit 1")

    def resume(self, *_: Any) -> None:
        self.program = self.machine.starter if self.machine.is_starting else None
        self._adopt()

    def release_program(self) -> None:
        self.program = None

    def release(self) -> None:
        self.process = self.program = None


class PlayedKeepers:
    """Replaces ``Keepers`` and terminates the processes of a ``SimulatedMachine``."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self.machine = machine

    def of(self, _: Sequence[str]) -> list[object]:
        return []

    async def orphans(self, _: Sequence[str]) -> list[Left]:
        return self.machine.orphans

    async def clear(self, *_: Any) -> None:
        pass

    async def trees(self, _labels: Sequence[str], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return others

    async def end(self, _labels: Sequence[str], _others: object, grace: float) -> list[Left]:
        machine = self.machine
        machine.graces.append(grace)
        left = machine.process
        if left is not None and left.is_alive and machine.how_stops == "not":
            return [Left(*left.identity, "web")]
        machine.kill_all()
        return machine.orphans


class PlayedPrograms:
    """Replaces ``Programs`` and runs programs on a ``SimulatedMachine``."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self.keepers = PlayedKeepers(machine)

    async def spawn(self, _name: str, _program: MonitProgram, event: str, **_: Any) -> SimulatedProcess:
        return self._machine.run(event)

    async def refused_limit(self, _: str) -> str:
        return ""

    async def printed(self, _: str) -> list[str]:
        return ["disk full"]


def service_on(machine: SimulatedMachine, spec: ProcessSpec = SPEC, **members: Any) -> Service:
    """Create a service on a simulated machine. ``members`` replace members of the service's context."""
    may_start = asyncio.Event()
    may_start.set()
    usual: dict[str, Any] = {
        "programs": PlayedPrograms(machine),
        "bpm": None,
        "restarts": TokenBucket(1e9, 1e9),
        "timing": TIMING,
        "notify": lambda _: None,
        "changed": lambda: None,
        "was_oom": lambda: False,
        "may_start": may_start,
    }
    return Service(spec, ServiceContext(**usual | members))


def played(test: Callable[Taken, Coroutine[Any, Any, None]]) -> Callable[Taken, None]:
    """Decorate a test to run on the jumping clock, with ``PlayedFinder`` instead of ``ProcessFinder``."""

    @functools.wraps(test)
    def run(*arguments: Taken.args, **named: Taken.kwargs) -> None:
        clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service_module, "ProcessFinder", PlayedFinder)
            patch.setattr(service_module, "time", clock)
            patch.setattr(launcher_module, "time", clock)
            patch.setattr(programs_module, "time", clock)
            with asyncio.Runner(loop_factory=Loop) as runner:
                runner.run(test(*arguments, **named))

    return run
