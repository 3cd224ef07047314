"""Runs the daemon process: sets up its signals and sockets, and does everything that has to be done before the settings
are known.

After that, ``runtime`` does the work, and this module forwards requests from operators and monitoring systems.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_shim.actions import dispatch
from agent_shim.core import log, settings, wire
from agent_shim.core.errors import ConfigError
from agent_shim.core.events import until_stopped
from agent_shim.core.paths import Paths
from agent_shim.daemon import boot, job_recovery, status_report
from agent_shim.daemon.endings import SHUT_DOWN
from agent_shim.daemon.runtime import Runtime, is_https
from agent_shim.edges import control_server, metrics
from agent_shim.host import blocking, files, process, reaper, sd_notify, watchdog
from agent_shim.services.settings_store import SettingsStore
from agent_shim.services.state_backup import StateBackup
from agent_shim.services.volume_lease import VolumeLeases, exclusive_agent
from agent_shim.supervisor import bpm_api

logger = logging.getLogger(__name__)

THREADS: Final = 6
"""Number of threads for blocking calls, independent of the number of processors."""
NAME: Final = "bosh-agentmonit"
"""Name of the process, at most 15 characters long. Both `pgrep monit`, which scripts use, and `pgrep bosh-agent` find
it.
"""
RIVAL_POLL_S: Final = 1.0
"""Seconds between checks of whether another agent still uses the same volumes."""


class RunOptions(msgspec.Struct, frozen=True):
    """Options of ``agent-shim run``. If an option is None or "", the value in agent.json is used."""

    config: Path | None
    paths: Paths
    http: str | None = None
    log_format: str = ""
    log_level: str = ""
    job_logs: bool = False


def main(options: RunOptions) -> int:
    """Run until a signal stops the daemon, then return the exit code."""
    unknown: list[str] = []
    config = _read_config(options.config, unknown)
    why_not = _show_as_vcap(options.paths) if config.shim.spec and not options.paths.is_system else ""
    form = options.log_format or config.shim.log_format
    log.setup(level=options.log_level or config.shim.log_level, form=form, file=options.paths.agent_log / "current")
    if why_not:
        logger.warning("jobs do not see the agent's directories at /var/vcap: %s", why_not)
    for key in unknown:
        logger.warning("ignoring an %s of %s", key, options.config)
    if options.job_logs or config.shim.job_logs:
        from agent_shim.services.logs import tail  # imported late, because job logs are rarely copied to stdout

        tail.stream(options.paths.log, as_json=log.is_json(form), out=sys.stdout)
    process.take_name(NAME)
    # Keep asyncio.run from installing its own handler for SIGINT. Otherwise, asyncio would import the inspect module
    # (0.4 MB) when the agent later replaces that handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return asyncio.run(Daemon(options, config).serve())


def _show_as_vcap(paths: Paths) -> str:
    """Make the base directory visible to jobs at ``/var/vcap``. Return the reason if that is impossible, or ""."""
    from agent_shim.host import tree_namespace  # imported late, because it is rarely needed

    try:
        files.make_dir(paths.base, 0o755)
        tree_namespace.show_as_vcap(paths.base)
    except OSError as exc:
        return str(exc)
    return ""


def _read_config(path: Path | None, unknown: list[str]) -> settings.AgentConfig:
    """Read agent.json, or return the defaults if ``path`` is None. Unknown keys are appended to ``unknown``."""
    if path is None:
        return settings.AgentConfig()
    try:
        return settings.parse_config(files.read(path), origin=str(path), unknown=unknown)
    except OSError as exc:
        raise ConfigError(f"cannot read the agent's configuration from {path}: {exc.strerror}") from exc


class Daemon:
    """The daemon of ``agent-shim run``. It waits for the settings and then creates the ``Runtime``."""

    def __init__(self, options: RunOptions, config: settings.AgentConfig) -> None:
        self._options = options
        self._config = config
        self._paths = options.paths
        self._begun_at = time.monotonic()
        self._systemd = sd_notify.from_environment()
        self._stop = asyncio.Event()
        self._stage = "starting"
        self._live: Runtime | None = None
        self._state_backup = StateBackup(self._paths)
        self._leases = VolumeLeases()
        self._metrics = metrics.Metrics(self._readings, dispatch.ACTIONS)

    @property
    def _phase(self) -> str:
        """The agent's current phase in words. It is ``running`` once the agent answers requests."""
        return self._stage if self._live is None else self._live.phase

    async def serve(self) -> int:
        """Boot, answer requests, and exit on SIGTERM or SIGINT, leaving the jobs running.

        As PID 1 in a container, the daemon first stops the jobs in order, because the container stops when PID 1 exits.
        Return the exit code, which is 1 if this stop was not clean.
        """
        process.default_signals()
        process.disable_core_dumps()
        process.raise_file_limit()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(blocking.pool(THREADS))
        for number in (signal.SIGTERM, signal.SIGINT):
            process.on_signal(number, self._signalled)
        for number, steps in ((signal.SIGUSR1, -1), (signal.SIGUSR2, 1)):  # SIGUSR1 logs more, SIGUSR2 less
            loop.add_signal_handler(number, log.turn, steps)
        http = self._options.http or self._config.shim.http
        with exclusive_agent(self._paths, "start"), watchdog.watching(self._systemd.beat, self._systemd.period):
            async with metrics.listening(http, metrics.Routes(self._metrics.render, self._ready, self._metrics.recent)):
                if await until_stopped(self._without_rival(self._rival_on_data), self._stop):
                    await self._serve_alone()
        logger.info("the agent stops")
        stop = self._live.endings.orderly_stop if self._live is not None else None
        return 1 if stop is not None and stop.reasons else 0

    async def _serve_alone(self) -> None:
        """Serve until stopped, now that no other agent uses the data volume. The leases are kept if processes are left
        running, because these processes may still use the volumes.
        """
        # The state backup uses these two values to find out whether this container is new, and whether the backup
        # belongs to this agent.
        jobs_live = partial(job_recovery.jobs_live, self._paths)
        former_holder = self._leases.former.get(self._paths.mirror, "")
        await asyncio.to_thread(self._state_backup.begin, jobs_live, former_holder)
        await boot.boot([boot.tree_step(self._paths)])
        with reaper.reaping():
            async with control_server.listening(self._paths.control_socket, self._answer_operator):
                self._systemd.ready()  # without waiting for the settings, because they may never arrive
                await self._run_until_stopped()
        if self._live is None or not self._live.agent.supervisor.leaves_processes:
            await asyncio.to_thread(self._leases.release_all)

    async def _without_rival(self, find: Callable[[], str]) -> None:
        """Wait until ``find`` returns "", which means that no other agent uses the volumes any more. Until then, write
        nothing and do not answer requests.
        """
        logged = ""
        while rival := await asyncio.to_thread(find):
            self._stage = f"waiting until another agent ends: {rival}"
            if rival != logged:
                logger.error("%s", self._phase)
                logged = rival
            await asyncio.sleep(RIVAL_POLL_S)

    def _rival_on_data(self) -> str:
        """Try once to acquire the lease on the data volume. Return a message about the agent that holds it, or "" on
        success. This function blocks.
        """
        rival = self._leases.hold(self._paths.mirror)  # ``mirror`` is the agent's directory on the data volume
        return rival and f"{self._paths.data} is in use by {rival}"

    def _signalled(self) -> None:
        """Handle SIGTERM or SIGINT. PID 1 stops the jobs in order, and a second signal cuts the scripts short. In all
        other cases, the agent exits and leaves the jobs running.
        """
        live = self._live
        if os.getpid() != 1 or live is None or not live.is_booted:
            self._systemd.stopping()
            self._stop.set()
        elif live.endings.orderly_stop is not None:
            live.endings.orderly_stop.hurry.set()
        else:
            # The container is killed at the end of the grace period. Leave its last second for the agent's exit.
            stopping = live.endings.begin_orderly_stop(max(1.0, self._config.shim.grace - 1))
            stopping.add_done_callback(lambda _: self._stop.set())

    async def _run_until_stopped(self) -> None:
        """Wait for the settings, restore the backup, and wait until no other agent with the same ``agent_id`` uses this
        agent's disks. Then run the agent or, if the Director has shut it down, stay idle.
        """
        store = await asyncio.to_thread(self._settings_store)
        self._stage = "waiting for settings"
        if not await until_stopped(store.wait(), self._stop):
            return
        await asyncio.to_thread(self._leases.introduce, store.current.agent_id)
        await self._state_backup.recover(store.current.agent_id)
        find_twin = partial(job_recovery.twin, self._leases, self._paths, store.current.source)
        if not await until_stopped(self._without_rival(find_twin), self._stop):
            return
        # Read the settings again, because restoring the backup may have changed them.
        if not await until_stopped(store.wait(), self._stop):
            return
        if await asyncio.to_thread(_was_shut_down, self._paths, store.current.agent_id):
            self._stage = SHUT_DOWN
            logger.warning("the Director has shut this agent down: it stays idle until it gets another agent_id")
            await self._stop.wait()
            return
        if is_https(store.current.mbus):
            await asyncio.to_thread(_import_https_bus)
        self._live = Runtime(
            self._paths,
            self._config.shim,
            store,
            state_backup=self._state_backup,
            leases=self._leases,
            metrics=self._metrics,
            stop=self._stop,
        )
        await self._live.serve()

    def _settings_store(self) -> SettingsStore:
        """Return the settings store. Without a Director, first write the settings file that the store reads."""
        if not self._config.shim.spec:
            return SettingsStore(self._paths, self._config.settings_files(self._paths))
        from agent_shim.daemon import standalone  # imported late, because most agents have a Director

        source = standalone.write_settings(self._paths, Path(self._config.shim.spec))
        return SettingsStore(self._paths, [source], needs_bus=False)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _readings(self) -> metrics.Readings:
        """Return the current values of all metrics, or no values while there is no ``Runtime``."""
        return metrics.Readings() if self._live is None else status_report.readings(self._live)

    def _ready(self, level: str) -> tuple[bool, str]:
        """Return whether the agent is ready, and the reason (``status_report.readiness``)."""
        return (False, self._phase) if self._live is None else status_report.readiness(self._live, level)

    async def _answer_operator(self, request: dict[str, Any], line: bytes, peer: control_server.Peer) -> bytes:
        """Answer a request on the control socket: either an action, as the Director would send it, or a command."""
        live, begun_at = self._live, time.monotonic()
        caller = f"operator.uid-{peer.uid}.pid-{peer.pid}"
        if "method" in request and live is not None and live.is_booted:
            action = msgspec.structs.replace(wire.decode_request(line), reply_to=caller)
            return await live.dispatcher.reply(action, line, limit=None)
        answer = await self._run_command(request)
        if (order := _order(request)) is not None:
            # ``_run_command`` and ``monit_api`` report a failure as ``exception``, and ``bpm_api`` as ``error``.
            result = "failed" if answer.startswith((b'{"exception"', b'{"error"')) else "done"
            dispatch.write_audit(order, result, begun_at, caller=caller)
        return answer

    async def _run_command(self, request: dict[str, Any]) -> bytes:
        """Run an operator's command and return the reply, which is an error if the command is not possible yet."""
        live = self._live
        match request:
            case {"command": "status"}:
                uptime = int(time.monotonic() - self._begun_at)
                return msgspec.json.encode(await status_report.status(live, self._phase, uptime))
            case {"command": "probe"}:
                ok, reason = self._ready("jobs")
                return msgspec.json.encode({"ok": ok, "reason": reason})
            case {"command": "drain"} if live is None:
                return msgspec.json.encode({"clean": True, "summary": f"nothing to stop: the agent is {self._phase}"})
            case {"command": "drain", "timeout": grace} if live is not None and live.is_booted:
                # ``hurry`` applies only to a stop that is already in progress.
                if request.get("hurry") and live.endings.orderly_stop is not None:
                    live.endings.orderly_stop.hurry.set()
                await live.endings.begin_orderly_stop(float(grace if grace is not None else self._config.shim.grace))
                stop = live.endings.orderly_stop
                assert stop is not None
                return msgspec.json.encode({"clean": not stop.reasons, "summary": stop.summary})
            case {"command": "bpm"} if live is not None:
                return msgspec.json.encode(await bpm_api.answer(live.agent.supervisor.bpm, request))
            case {"command": "services"} if live is not None:
                return msgspec.json.encode(await live.answer_monit(request))
        return wire.encode_exception(f"cannot answer: the agent is {self._phase}")


def _was_shut_down(paths: Paths, agent_id: str) -> bool:
    """Return True if the Director has sent ``shutdown`` to the agent with this ``agent_id``."""
    try:
        return files.read(paths.shut_down, is_own=True) == agent_id.encode()
    except OSError:
        return False


def _import_https_bus() -> None:
    """Import aiohttp, which takes 0.2 s. Called in a thread, so that the event loop can answer probes during the
    import.
    """
    from agent_shim.edges.bus import https  # noqa: F401


def _order(request: dict[str, Any]) -> str | None:
    """Return an operator's command as text for the audit log, or None for a query, which is not logged."""
    match request:
        case {"command": "drain"}:
            return "drain"
        case {"command": "services", "action": str(action), "names": list(names)} if action != "show":
            return " ".join([action, *map(str, names), *([f"-g {request['group']}"] if request.get("group") else [])])
        case {"command": "bpm", "verb": "start" | "stop" | "run" as verb}:
            return f"bpm {verb} {request.get('job')} {request.get('process')}"
    return None
