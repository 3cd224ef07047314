"""Answers the requests that the ``bpm`` command sends to the agent. The error messages match those of bpm
(``src/bpm/commands``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agent_shim.core.errors import ConfigError, HostError
from agent_shim.host import proc
from agent_shim.supervisor.bpm.calls import BpmCall
from agent_shim.supervisor.bpm_runner import Bpm, UnknownProcessError

if TYPE_CHECKING:
    from agent_shim.supervisor.bpm import config


async def answer(runner: Bpm, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request with ``{"value": …}`` or ``{"error": …}``. ``request`` contains a verb and, except for ``list``,
    a job and a process.
    """
    verb = str(request.get("verb"))
    if verb == "list":
        rows, complaints = await asyncio.to_thread(runner.rows)
        return {"value": [[row.name, row.pid, row.status] for row in rows], "complaints": complaints}
    job, name = str(request.get("job")), str(request.get("process"))
    if any(not word or "/" in word or word.startswith(".") for word in (job, name)):
        return {"error": f"failed to get job: {job!r} {name!r} cannot be the names of a job and a process"}
    try:
        return {"value": await _do(runner, verb, job, name, request)}
    except (ConfigError, OSError) as exc:
        return {"error": str(exc)}


async def _do(runner: Bpm, verb: str, job: str, name: str, request: Mapping[str, Any]) -> Any:
    """Execute a request about one process and return the value of the answer. This is a pid for ``start`` and ``pid``,
    an exit code for ``run``, a list of pids for ``tree``, a command and the spec that it needs for ``shell``, and None
    for all other requests.
    """
    call = BpmCall("start", job, name)  # the runner ignores the verb in a call
    match verb:
        case "start":
            await _defined(runner, job, name)
            with _failing("start"):
                return (await runner.start(call)).pid
        case "stop":
            return await runner.stop(call)
        case "run":
            await _defined(runner, job, name)
            volumes = [_volume(text) for text in _texts(request, "volumes")]
            await asyncio.to_thread(runner.check_volumes, job, volumes)
            env = dict(_pair(text) for text in _texts(request, "env"))
            with _failing("run"):
                return await runner.run(call, volumes, env)
        case "end run":
            return await runner.end_run(call)
        case "pid":
            identity = await asyncio.to_thread(runner.find, job, name)
            return identity[0] if identity else 0
        case "tree":
            identity = await asyncio.to_thread(runner.find, job, name)
            return await asyncio.to_thread(_tree, identity[0]) if identity else []
        case "shell":
            from agent_shim.host import sandbox

            order = await runner.shell_order(job, await _defined(runner, job, name))
            return {"launcher": sandbox.launcher(), "order": order}
    raise HostError(f"unknown command {verb!r}")


def _tree(pid: int) -> list[int]:
    """Return the pids of a process and all its descendants, starting with the process itself."""
    return [pid, *sorted(proc.descent(proc.children(proc.table()), [pid]) - {pid})]


async def _defined(runner: Bpm, job: str, name: str) -> config.ProcessConfig:
    """Return the process's definition in bpm.yml. Raises ``ConfigError`` with bpm's message.

    Call this outside ``_failing``, because bpm reports errors in bpm.yml with a different message.
    """
    try:
        return await asyncio.to_thread(runner.definition, job, name)
    except UnknownProcessError:
        raise
    except (ConfigError, OSError) as exc:
        raise ConfigError(f"failed to parse job configuration: {exc}") from exc


@contextlib.contextmanager
def _failing(verb: str) -> Iterator[None]:
    """Convert errors in the block to a ``HostError`` with bpm's message."""
    try:
        yield
    except (ConfigError, OSError) as exc:
        raise HostError(f"failed to {verb} job-process: {exc}") from exc


def _texts(request: Mapping[str, Any], name: str) -> list[str]:
    """Return an optional list of strings from the request. Raises ``ConfigError`` if the value is anything else."""
    texts = request.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"cannot read the request: {name} must be a list of strings")
    return texts


def _volume(text: str) -> config.Volume:
    """Parse a volume that is given as ``PATH[:OPTION,…]``. Raises ``ConfigError``."""
    from agent_shim.supervisor.bpm import config

    path, colon, options = text.partition(":")
    if ":" in options:
        raise ConfigError(f"invalid volume definition (format: <path>[:<options>]): {text}")
    flags = options.split(",") if colon else []
    for option in flags:
        if option not in ("writable", "mount_only", "allow_executions", "shared"):
            raise ConfigError(f"invalid volume option: {option}")
    return config.Volume(path, **dict.fromkeys(flags, True))


def _pair(text: str) -> tuple[str, str]:
    """Split an environment variable that is given as ``NAME=VALUE``. Raises ``ConfigError``."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f'invalid environment variable definition (format should be KEY=value): "{text}"')
    return name, value
