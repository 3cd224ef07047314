"""Dispatches requests to actions and builds the replies.

Error messages, argument binding and the choice between an immediate answer and a task id match the Go agent
(agent/action_dispatcher.go, agent/action/runner.go). A broad exception handler ensures that no request can crash the
agent.
"""

from __future__ import annotations

import asyncio
import logging
import time
import types
import typing
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import Any, Final, NewType

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.actions.tasks import Tasks, TaskWork
from agent_shim.core import safetext, wire
from agent_shim.core.errors import ActionError, BadArgumentsError, HostError, ShimError, UnknownActionError

logger = logging.getLogger(__name__)
audit = logging.getLogger("agent_shim.audit")
"""Audit log: one line per request and one per finished task, with caller, outcome and duration.

It omits arguments and values, since some are secret.
"""

ProtocolVersion = NewType("ProtocolVersion", int)
"""Parameter type that receives the ``protocol`` of the request."""

Done = Callable[[str, str, float], None]
"""Called after each action with its method, its outcome (``done`` or ``failed``) and its duration in seconds."""


FROM_PAYLOAD: Final = "Extracting method arguments from payload"


class Mode(Enum):
    """How an action is answered: with its result as soon as it has run, or immediately with the id of a task that runs
    it.
    """

    NOW = "now"
    TASK = "task"


class RegisteredAction(msgspec.Struct, frozen=True):
    """A registered protocol action, with the types of its arguments."""

    method: str
    mode: Mode
    run: Callable[..., Awaitable[Any]]
    parameters: tuple[tuple[str, Any], ...]
    required: int
    injected: dict[str, Any]
    task_from_protocol: int
    persistent: bool

    def bind(self, arguments: Any) -> dict[str, Any]:
        """Convert positional JSON arguments to named ones of the declared types.

        Surplus arguments are ignored, as in Go. If the last parameter is optional, which corresponds to a variadic
        parameter in Go, surplus arguments must have that parameter's type.
        """
        if arguments is None:
            arguments = []
        if not isinstance(arguments, list):
            raise BadArgumentsError(
                "Extracting json arguments: Unmarshalling payload arguments to interface{} types: "
                f"cannot use {type(arguments).__name__} as list"
            )
        if len(arguments) < self.required:
            text = f"Not enough arguments, expected {self.required}, got {len(arguments)}"
            raise BadArgumentsError(f"{FROM_PAYLOAD}: {text}")
        try:
            if len(self.parameters) > self.required:
                for surplus in arguments[len(self.parameters) :]:
                    wire.convert(surplus, self.parameters[-1][1])
            pairs = zip(arguments, self.parameters, strict=False)
            return {name: wire.convert(value, wanted) for value, (name, wanted) in pairs}
        except msgspec.ValidationError as exc:
            raise BadArgumentsError(f"{FROM_PAYLOAD}: Unmarshalling action argument: {exc}") from exc


ACTIONS: Final[dict[str, RegisteredAction]] = {}

_INJECTED: Final = (Agent, ProtocolVersion, asyncio.Event)


def action(
    method: str, mode: Mode, *, task_from_protocol: int = 0, persistent: bool = False
) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Awaitable[Any]]]:
    """Register a coroutine function as the action ``method``. Requests with a protocol version below
    ``task_from_protocol`` are answered immediately, whatever the ``mode``. A ``persistent`` task is resumed after the
    agent restarts, and cannot be cancelled.

    The function's first parameter is the ``Agent``. Parameters of type ``ProtocolVersion`` and ``asyncio.Event`` (set
    when the task is cancelled) are injected. All others are the arguments of the request, in order.
    """

    def register(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        hints = typing.get_type_hints(function, include_extras=True)
        del hints["return"]
        parameters, injected = [], {}
        for name, hint in hints.items():
            if hint in _INJECTED:
                injected[name] = hint
            else:
                parameters.append((name, _without_none(hint)))
        required = len(parameters) - len(function.__defaults__ or ())
        ACTIONS[method] = RegisteredAction(
            method, mode, function, tuple(parameters), required, injected, task_from_protocol, persistent
        )
        return function

    return register


def _without_none(hint: Any) -> Any:
    """Return T if ``hint`` is ``T | None``, otherwise ``hint``. The None can be ignored, because a JSON null means the
    zero value even for an optional argument.
    """
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    return members[0] if len(members) == 1 else hint


class Dispatcher:
    """Answers requests by running the registered actions."""

    def __init__(self, agent: Agent, tasks: Tasks, *, on_done: Done) -> None:
        self._agent = agent
        self._tasks = tasks
        self._on_done = on_done
        self.refusing = ""
        """Why actions that change the instance are rejected, or "" while they are accepted."""

    async def handle(self, data: bytes, *, limit: int | None = wire.MAX_REPLY_BYTES) -> tuple[str, bytes] | None:
        """Answer a request. Return the reply subject and the reply, or None for an unreadable request. ``limit`` is the
        maximum size of the reply in bytes, or None for no limit.
        """
        try:
            request = wire.decode_request(data)
        except wire.RequestError as exc:
            write_audit("", "dropped", time.monotonic(), error=exc)
            return None
        return request.reply_to, await self.reply(request, data, limit=limit)

    async def reply(self, request: wire.Request, data: bytes, *, limit: int | None = wire.MAX_REPLY_BYTES) -> bytes:
        """Answer a decoded request. ``data`` is the request as received, which is stored with a persistent task.
        ``limit`` is the maximum size of the reply in bytes, or None for no limit.
        """
        begun_at, task_id = time.monotonic(), ""
        try:
            registered = ACTIONS.get(request.method)
            if registered is None:
                raise UnknownActionError(f"unknown message {request.method}")
            if self.refusing and registered.method not in HARMLESS:
                raise ActionError(f"cannot run {registered.method}: {self.refusing}")
            if registered.mode is Mode.NOW or request.protocol < registered.task_from_protocol:
                value = await self._run(registered, request, is_task=False)
            else:
                cancelled = asyncio.Event() if asyncio.Event in registered.injected.values() else None
                work = partial(self._run, registered, request, cancelled)
                if registered.persistent:  # the task must be stored before the reply reveals its id
                    task = await self._tasks.submit_persistent(registered.method, work, data)
                    await self._agent.state_backup.update()
                else:
                    self._tasks.require_room(registered.method)
                    task = self._tasks.submit(registered.method, work, cancelled=cancelled)
                task_id = task.id
                value = {"agent_task_id": task_id, "state": "running"}
            reply = wire.encode_value(value, limit=limit)
        except Exception as exc:  # noqa: BLE001 - no request can end the process
            write_audit(request.method, "failed", begun_at, caller=request.reply_to, error=exc)
            return wire.encode_exception(self._reply_text(request.method, exc), limit=limit)
        write_audit(request.method, "accepted" if task_id else "done", begun_at, caller=request.reply_to, task=task_id)
        return reply

    def resumed(self) -> dict[str, Callable[[bytes], TaskWork]]:
        """Return a function for each action with persistent tasks. The function turns a stored request into work that
        can be run again after a restart.
        """
        return {
            method: lambda data, entry=entry: partial(self._run, entry, wire.decode_request(data))  # type: ignore[misc]
            for method, entry in ACTIONS.items()
            if entry.persistent
        }

    async def _run(
        self,
        registered: RegisteredAction,
        request: wire.Request,
        cancelled: asyncio.Event | None = None,
        *,
        is_task: bool = True,
    ) -> Any:
        """Run an action. If it runs as a task, also write an audit line when it ends. For other actions, ``reply``
        writes the only audit line.
        """
        begun_at, task, outcome = time.monotonic(), self._tasks.running, "failed"
        error: BaseException | None = None
        try:
            arguments = registered.bind(request.arguments)
            available = {ProtocolVersion: request.protocol, asyncio.Event: cancelled, Agent: self._agent}
            injected = {name: available[kind] for name, kind in registered.injected.items()}
            value = await registered.run(**arguments, **injected)
            outcome = "done"
            return value
        except BaseException as exc:
            error = exc
            raise
        finally:
            self._on_done(registered.method, outcome, time.monotonic() - begun_at)
            if is_task:
                task_id = task.id if task else ""
                write_audit(registered.method, outcome, begun_at, caller=request.reply_to, task=task_id, error=error)
            if registered.method not in HARMLESS:  # the backup must be complete before the reply is sent
                await self._agent.state_backup.update()

    def failure(self, method: str, exc: BaseException) -> str:
        """Return the error message for the Director.

        For an expected error, the message includes the reason. Any other error must be a bug, so the message names only
        the type of the exception.
        """
        if isinstance(exc, ShimError | HostError):
            return safetext.lines(str(exc))
        logger.error("internal error in %s", method, exc_info=exc)
        return f"internal error in {method}: {type(exc).__name__} (the agent's log has the traceback)"

    def _reply_text(self, method: str, exc: BaseException) -> str:
        """Return the error message for a reply. As in the Go agent, the message names the action unless the action is
        unknown.
        """
        text = self.failure(method, exc)
        return text if isinstance(exc, UnknownActionError) else f"Action Failed {method}: {text}"


def write_audit(
    method: str, result: str, begun_at: float, *, caller: str = "", task: str = "", error: BaseException | None = None
) -> None:
    """Write an audit line for an action that began at ``begun_at`` (monotonic). ``result`` is done, failed, accepted
    (as a task) or dropped (unreadable).

    Strings are truncated, because callers control their length.
    """
    seconds = round(time.monotonic() - begun_at, 6)
    members: dict[str, Any] = {"method": method[:100], "result": result, "seconds": seconds}
    if caller:
        members["reply_to"] = caller[:200]
    if task:
        members["task"] = task
    if error is not None:
        foreseen = isinstance(error, ShimError | HostError | wire.RequestError)
        members["error"] = str(error)[:300] if foreseen else type(error).__name__
    audit.info("request", extra={"members": members})


HARMLESS: Final = frozenset(
    {"ping", "info", "get_task", "cancel_task", "get_state", "list_disk", "fetch_logs", "fetch_logs_with_signed_url"}
)
"""Actions that change no stored state. They stay available while the container shuts down, and the state backup is not
updated after them.
"""
