"""Queues long actions as tasks and runs them one at a time. Each task has an id, under which its outcome is stored.

Ids, states and messages match the Go agent (agent/task, agent/action/get_task.go, cancel_task.go). There are four
differences: the queue never blocks the bus; the number, size and age of stored results are limited; the reply to
``get_task`` may be delayed until the task has finished; a queued task that is cancelled fails immediately.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_shim.core import events, wire
from agent_shim.core.errors import ActionError, TaskNotFoundError
from agent_shim.core.keep_running import is_asked_to_end
from agent_shim.host import files

logger = logging.getLogger(__name__)

POLL_HOLD_S: Final = 3.0
"""Maximum number of seconds for which the reply to a poll is delayed while the task is running. The Director polls
immediately, then once a second.
"""

MAX_HELD: Final = 100
"""Maximum number of polls whose replies are delayed at the same time. Further polls are answered immediately, because
each delayed reply uses 6 KB and the bus accepts thousands of requests.
"""

MAX_OUTCOME_BYTES: Final = 16 * 1024 * 1024
"""Maximum total size of stored outcomes as JSON. The newest outcome is always kept. An errand's outcome can take up
to 1 MiB.
"""
MAX_WAITING: Final = 10_000
"""Maximum number of queued tasks. Further requests are rejected."""
MAX_JOURNAL_BYTES: Final = files.MAX_FILE_BYTES // 2
"""Maximum total size of the requests in the journal. A larger journal could not be read back. Half of the file limit is
used, because base64 makes each request a third longer, and each entry also has an id and a method.
"""

TaskWork = Callable[[], Awaitable[Any]]


class Task(msgspec.Struct):
    """A long action. ``state`` is running (including while the task is queued), done or failed. Replies to the Director
    contain the state until the task has finished, and the outcome after that.

    Arguments are not kept, because some are large or secret.
    """

    id: str
    method: str
    cancelled: asyncio.Event | None
    is_resumed: bool = False
    """True if an earlier agent process accepted the task. That process may already have started the task."""
    state: str = "running"
    progress: str = ""
    """Current step, for operators."""
    outcome: Any = None
    """The value of a finished task, or the error message of a failed one."""
    outcome_bytes: int = 0
    """Size of the outcome as JSON."""
    begun_at: float = 0.0
    ended_at: float = 0.0
    ended: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


class TaskLimits(msgspec.Struct, frozen=True):
    """Limits on stored outcomes: their number, their total size in bytes, and their age in seconds. Outcomes are stored
    because the Director and the CLI poll again if a reply was lost.
    """

    number: int = 1000
    size: int = MAX_OUTCOME_BYTES
    age: float = 24 * 3600.0


class Tasks:
    """The agent's tasks. The Director, job recovery and the standalone mode submit them. ``run`` executes them, and
    must run in a root task of the daemon (``daemon/runtime.py``).

    Persistent tasks are stored in the file ``journal``. ``hold`` is the maximum delay of a poll in seconds.
    """

    def __init__(self, journal: Path, *, bounds: TaskLimits = TaskLimits(), hold: float = POLL_HOLD_S) -> None:
        self._journal = journal
        self._bounds = bounds
        self._hold = hold
        self._tasks: dict[str, Task] = {}
        self._queue: asyncio.Queue[tuple[Task, TaskWork]] = asyncio.Queue()
        self._stored: dict[str, dict[str, str]] = {}
        """The journal's entries for unfinished persistent tasks, by task id."""
        self._saving = asyncio.Lock()
        self._released = asyncio.Event()
        """Set once polls are no longer delayed."""
        self._held = 0
        """Number of polls whose replies are being delayed."""
        self.running: Task | None = None

    @property
    def waiting(self) -> int:
        """Number of queued tasks, not counting the running one. Cancelled tasks count until ``run`` discards them."""
        return self._queue.qsize()

    def waiting_methods(self) -> set[str]:
        """Return the methods of the queued tasks. Job recovery abandons its attempt if certain methods are queued."""
        return {task.method for task in self._tasks.values() if task.state == "running" and task is not self.running}

    def submit(self, method: str, work: TaskWork, *, cancelled: asyncio.Event | None = None, task_id: str = "") -> Task:
        """Queue ``work`` and return its task. If ``cancelled`` is given, cancelling the task sets it."""
        task = Task(task_id or str(uuid.uuid4()), method, cancelled)
        self._tasks[task.id] = task
        self._queue.put_nowait((task, work))
        return task

    def require_room(self, method: str) -> None:
        """Raise ``ActionError`` if a request must be rejected because the queue is full."""
        if (waiting := self._queue.qsize()) >= MAX_WAITING:
            raise ActionError(f"cannot queue {method}: {waiting} tasks are already queued; try again later")

    async def submit_persistent(self, method: str, work: TaskWork, request: bytes) -> Task:
        """Queue a task and store its request in ``tasks.json``, so that it survives an agent restart under the same id.

        Raises ``ActionError`` if the queue or the journal is full.
        """
        self.require_room(method)
        if sum(len(entry["Payload"]) for entry in self._stored.values()) + len(request) > MAX_JOURNAL_BYTES:
            raise ActionError(f"cannot queue {method}: {len(self._stored)} stored tasks are already queued")
        task_id = str(uuid.uuid4())
        self._stored[task_id] = {"TaskID": task_id, "Method": method, "Payload": base64.b64encode(request).decode()}
        await self._save()
        return self.submit(method, work, task_id=task_id)

    async def resume(self, resumed: Mapping[str, Callable[[bytes], TaskWork]]) -> None:
        """Queue an earlier agent process's persistent tasks under their old ids. Tasks with an unknown method or an
        unreadable request are dropped.

        If a task has been resumed before without finishing, it fails, because the request may be what crashed the
        agent.
        """
        for task_id, method, request, is_begun in await asyncio.to_thread(_read_journal, self._journal):
            if method not in resumed:
                logger.warning("cannot resume a stored task: unknown method %s", method)
                continue
            try:
                work = resumed[method](request)
            except ValueError as exc:
                logger.warning("cannot resume a stored task of %s: %s", method, exc)
                continue
            self._stored[task_id] = {"TaskID": task_id, "Method": method, "Payload": base64.b64encode(request).decode()}
            if is_begun:
                work = _give_up
                self._stored[task_id]["Begun"] = "again"
            self.submit(method, work, task_id=task_id).is_resumed = True
            logger.info("resuming task %s (%s) after a restart", task_id, method)

    async def poll(self, task_id: str) -> Task:
        """Return the task. If it is still running, first wait for it to finish, but at most ``hold`` seconds.

        Returns immediately if too many polls are already waiting, or after ``release_polls``.
        """
        task = self.find(task_id)
        if task.state == "running" and not self._released.is_set() and self._held < MAX_HELD:
            self._held += 1
            ended = asyncio.ensure_future(task.ended.wait())
            try:
                await events.ended_before(self._released, ended, self._hold)
            finally:
                self._held -= 1
                ended.cancel()
        return task

    def release_polls(self) -> None:
        """Answer all delayed polls and delay no further ones, because the agent is about to exit."""
        self._released.set()

    def find(self, task_id: str) -> Task:
        """Return a task. Raises ``TaskNotFoundError`` if the id is unknown or the task's outcome has been forgotten."""
        try:
            return self._tasks[task_id]
        except KeyError:
            raise TaskNotFoundError(f"Task with id {task_id} could not be found") from None

    def cancel(self, task_id: str) -> None:
        """Cancel a task. A queued task fails immediately, and a finished task is not changed. Raises ``ActionError`` if
        tasks of this kind cannot be cancelled.
        """
        task = self.find(task_id)
        if task.state != "running":
            return
        if task.cancelled is None:
            raise ActionError("not supported")
        task.cancelled.set()
        if task is not self.running:
            self._finish(task, "failed", "cancelled before it began")

    def report(self, progress: str) -> None:
        """Set the current step of the running task."""
        if self.running is not None:
            self.running.progress = progress

    async def run(self, failure: Callable[[str, BaseException], str]) -> None:
        """Run tasks one at a time, in order of arrival, until cancelled. ``failure`` returns the error message for an
        exception.
        """
        try:
            while True:
                await self._run_next(failure)
        except Exception:
            if self.running is not None:  # finish the task, because its pollers would otherwise wait forever
                self._finish(self.running, "failed", "an internal error of the agent (its log has the traceback)")
                self.running = None
            raise

    async def _run_next(self, failure: Callable[[str, BaseException], str]) -> None:
        """Wait for the next task, run it, and store its outcome."""
        task, work = await self._queue.get()
        if task.state != "running":  # the task was cancelled while it was in the queue
            return
        self.running = task
        task.begun_at = time.monotonic()
        if task.is_resumed:  # if this task crashes the agent again, the next agent must not retry it
            self._stored[task.id]["Begun"] = "again"
            await self._save()
        try:
            state, outcome = "done", await work()
            # Only the size is used, but if the outcome cannot be encoded, the task must fail here.
            content = msgspec.json.encode(outcome)
        except asyncio.CancelledError as exc:
            if is_asked_to_end():  # the agent is exiting; otherwise only the work was cancelled
                raise
            state, outcome, content = "failed", failure(task.method, exc), b""
        except Exception as exc:  # noqa: BLE001 - the queue survives any failure of a task
            # A lone surrogate (from undecodable script output) cannot be encoded as UTF-8.
            state, outcome = "failed", failure(task.method, exc).encode("utf-8", "replace").decode()
            content = msgspec.json.encode(outcome)
        if self._stored.pop(task.id, None) is not None:
            await self._save()
        task.outcome_bytes = len(content)
        self._finish(task, state, outcome)
        self.running = None
        self._forget_old_outcomes()

    def _forget_old_outcomes(self) -> None:
        """Forget the oldest finished tasks until the limits on stored outcomes are met. The newest outcome alone may
        exceed the size limit.
        """
        ended = [task for task in self._tasks.values() if task.state != "running"]
        ended.sort(key=lambda task: task.ended_at, reverse=True)
        total_sizes = accumulate(task.outcome_bytes for task in ended)
        horizon = time.monotonic() - self._bounds.age
        for newer, (task, total_size) in enumerate(zip(ended, total_sizes, strict=True)):
            is_excess = newer >= self._bounds.number or (newer > 0 and total_size > self._bounds.size)
            if is_excess or task.ended_at < horizon:
                del self._tasks[task.id]

    def _finish(self, task: Task, state: str, outcome: Any) -> None:
        task.state, task.outcome = state, outcome
        task.ended_at = time.monotonic()
        task.ended.set()
        task.cancelled = None  # a finished task cannot be cancelled

    async def _save(self) -> None:
        """Write the journal, or remove it if there are no persistent tasks. A failure is only logged."""
        async with self._saving:  # one writer at a time, so that the newest content is written last
            try:
                if self._stored:
                    raw = msgspec.json.encode(self._stored)
                    await asyncio.to_thread(files.write_atomic, self._journal, raw, mode=0o600)
                else:
                    await asyncio.to_thread(self._journal.unlink, missing_ok=True)
            except OSError as exc:
                logger.error("cannot write %s: %s; tasks would not survive a restart of the agent", self._journal, exc)


async def _give_up() -> None:
    """Raise ``ActionError``. Runs instead of the work of a task that has already been resumed once."""
    raise ActionError("two agents have exited while running it, so it is not tried again")


def _read_journal(journal: Path) -> list[tuple[str, str, bytes, bool]]:
    """Return the id, method and request of each stored task, and whether it has already been resumed once. An
    unreadable file is treated as empty (agent/task/concrete_manager.go).
    """
    try:
        document = wire.decode(files.read(journal, is_own=True), dict[str, dict[str, str]])
        return [
            (entry["TaskID"], entry["Method"], base64.b64decode(entry["Payload"]), "Begun" in entry)
            for entry in document.values()
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError) as exc:
        logger.warning("cannot read %s: %s; dropping stored tasks", journal, exc)
        return []
