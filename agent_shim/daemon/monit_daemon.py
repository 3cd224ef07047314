"""Runs only the supervisor, as a replacement for monit under another agent: ``agent-shim monit -c MONITRC``.

The daemon reads monit's control file and job files, serves monit's HTTP interface, and emails alerts. Like monit, it
leaves the jobs running when it exits, and the next daemon adopts them. Monit's own state file (state.c) is updated too,
so that monit knows which services are monitored if it takes over again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from agent_shim import __version__
from agent_shim.core import keep_running, log, wire
from agent_shim.core.errors import ConfigError, HostError
from agent_shim.core.events import is_set_within, until_stopped
from agent_shim.core.keep_running import run_forever
from agent_shim.core.paths import Paths
from agent_shim.edges import alerts, control_server, mail, monit_http
from agent_shim.host import blocking, clock, files, process, reaper, sd_notify, watchdog
from agent_shim.services.vitals import Vitals
from agent_shim.services.volume_lease import exclusive_agent
from agent_shim.supervisor import bpm_api, monit_api
from agent_shim.supervisor.monit import control_file
from agent_shim.supervisor.state import MONITORED
from agent_shim.supervisor.supervisor import Event, Saved, Supervisor, Timing

logger = logging.getLogger(__name__)

NAME: Final = "monit"
"""Process name, which makes ``pgrep monit`` find this process."""
THREADS: Final = 4
ANY: Final = "0.0.0.0"  # noqa: S104 - monit's default if the control file names no address
_COUNT: Final = struct.Struct("i")
"""The header of monit 5.2.5's state file, which contains the number of entries."""
_STATE: Final = struct.Struct("256s4iQ")
"""An entry of monit 5.2.5's state file (``State_T``): name (at most 255 bytes and a NUL), mode, starts, cycles,
monitored (0 if not), error.
"""
RETRY_S: Final = 0.5
QUEUE: Final = "agent_shim.json"
"""Name of the file with unsent emails in the directory named by ``set eventqueue``."""


class MonitDaemonOptions(msgspec.Struct, frozen=True):
    """Options of ``agent-shim monit``."""

    control_file: Path
    paths: Paths
    http: str = "off"
    """Address on which metrics and probes are served, or ``off``."""
    log_level: str = "info"
    has_bpm: bool = False
    """True if agent_shim runs the processes in bpm.yml files itself. Otherwise the release's own bpm runs them, and is
    itself run like any other program.
    """


def main(options: MonitDaemonOptions) -> int:
    """Run until a signal stops the daemon, then return the exit code. Raises ``ConfigError`` for an invalid control
    file.
    """
    control = control_file.read(options.control_file)
    log.setup(level=options.log_level, form="text", file=control.logfile)
    process.take_name(NAME)
    return asyncio.run(MonitDaemon(options, control).serve())


class MonitDaemon:
    """The daemon of ``agent-shim monit``."""

    def __init__(self, options: MonitDaemonOptions, control: control_file.Control) -> None:
        self._options, self._paths = options, options.paths
        # Do not store the state on a persistent disk, because this machine's agent unmounts disks.
        self._paths.supervisor_state = self._paths.bosh / "monit.json"
        self._control = control
        self._begun_at = time.monotonic()
        self._stop, self._reload = asyncio.Event(), asyncio.Event()
        self._is_loaded = False
        self._about = monit_http.About()
        self._supervisor = Supervisor(
            self._paths,
            notify=self._notify,
            timing=Timing(cycle=float(control.poll)),
            has_bpm=options.has_bpm,
            acted_on=control_file.ACTED_ON,
            on_saved=self._write_state_of_monit,
        )
        self._alerts = alerts.Alerts(
            "",  # no agent id is needed, because it occurs only in a bus subject, and these alerts are emails
            lambda _, message: mail.deliver(self._control, message),
            encode=lambda *event: mail.compose(self._control, *event),
        )
        with suppress(OSError, ValueError):
            if control.queue is not None:
                kept = files.read(control.queue / QUEUE, is_own=True)
                self._alerts.waiting.extend(msgspec.json.decode(kept, type=list[bytes]))
        self._vitals = Vitals(self._paths, self._paths.store.is_mount)

    async def serve(self) -> int:
        """Supervise the services until SIGTERM or SIGINT, but leave the jobs running. On SIGHUP, reread the files."""
        process.default_signals()
        process.raise_file_limit()
        asyncio.get_running_loop().set_default_executor(blocking.pool(THREADS))
        for number in (signal.SIGTERM, signal.SIGINT):
            process.on_signal(number, self._stop.set)
        process.on_signal(signal.SIGHUP, self._reload.set)
        # `monit` without an action sends SIGUSR1 to trigger a check. Ignore the signal, because checks run every cycle
        # anyway.
        process.on_signal(signal.SIGUSR1, lambda: None)
        systemd, control = sd_notify.from_environment(), self._control
        await asyncio.to_thread(files.make_own_dir, self._paths.shim_run, 0o700)
        async with AsyncExitStack() as stack:
            stack.enter_context(exclusive_agent(self._paths, "start"))
            stack.enter_context(watchdog.watching(systemd.beat, systemd.period))
            if self._options.http != "off":
                await stack.enter_async_context(self._serving_metrics())
            stack.enter_context(reaper.reaping())
            files.write_atomic(control.pidfile, b"%d\n" % os.getpid(), is_synced=False)
            stack.callback(control.pidfile.unlink, missing_ok=True)
            await stack.enter_async_context(self._supervisor)
            await stack.enter_async_context(control_server.listening(self._paths.control_socket, self._answer_operator))
            systemd.ready()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._supervisor.run(), name="supervisor")]
                for name, run in {"mails": self._alerts.run, "mails that wait": self._retry_mails}.items():
                    tasks.append(group.create_task(run_forever(name, run), name=name))
                await self._serve_control_file()
                for task in tasks:
                    task.cancel()
        return 0

    async def _serve_control_file(self) -> None:
        """Serve the HTTP interface that the control file configures, and supervise the jobs in its files. After each
        reload request, read all these files again.
        """
        self._supervisor.hold()  # ``_take_files`` ends the hold
        known = {} if await self._supervisor.recover() else await asyncio.to_thread(self._monitored_by_monit)
        await is_set_within(self._control.start_delay, self._stop)
        action = "start"
        while not self._stop.is_set():
            if action:
                self._reload.clear()
                await self._take_files(known)
                name = f"system_{socket.gethostname()}"
                self._notify(Event(name, "Monit instance changed", action, f"Monit {action}ed"))
            # Unless a reload is requested, the next iteration only retries the port. Monit's state is used only once.
            action, known, control = "", {}, self._control
            address = f"{control.address or ANY}:{control.port}" if control.port else "off"
            async with monit_http.listening(address, self.answer, control.credentials, lambda: self._about) as where:
                # Try again later if the port is in use, because a predecessor that was just killed may still hold it.
                pause = self._reload.wait() if where or not control.port else asyncio.sleep(RETRY_S)
                await until_stopped(pause, self._stop)
            if self._reload.is_set():
                action = "reload"
                try:
                    self._control = await asyncio.to_thread(control_file.read, self._options.control_file)
                except ConfigError as exc:
                    logger.error("the previous files stay in use: %s", exc)

    async def _take_files(self, monitored: Mapping[str, bool]) -> None:
        """Supervise the services in the files. New services are started, except those in manual mode and those that,
        according to ``monitored``, monit did not monitor.
        """
        before = {service.process.name.lower() for service in self._supervisor.services()}
        await self._supervisor.configure(self._control.job_files, are_written=False)
        for service in self._supervisor.services():
            name = service.process.name.lower()
            if name not in before and service.mode != "manual" and monitored.get(name, True):
                if name in monitored:  # monit started the process, so it is not a descendant of a keeper
                    self._supervisor.trust_pidfile(name)
                await self._supervisor.monitor_one(name)
        self._about = await asyncio.to_thread(self._describe)
        self._supervisor.end_hold()
        self._is_loaded = True

    def _describe(self) -> monit_http.About:
        """Describe the daemon for the status document.

        ``incarnation`` is different after each reload, even if several reloads happen within the same second.
        """
        control, path = self._control, self._paths.bosh / "monit.incarnation"
        try:
            before = int(files.read(path, is_own=True))
        except (OSError, ValueError):
            before = 0
        incarnation = max(int(clock.wall_time()), before + 1)
        files.write_atomic(path, b"%d" % incarnation, mode=0o600, is_synced=False)
        try:
            identity = files.read(control.idfile).decode().strip()
        except (OSError, UnicodeDecodeError):
            identity = secrets.token_hex(16)
            files.write_atomic(control.idfile, f"{identity}\n".encode())
        where = control.address or ANY
        return monit_http.About(str(control.path), control.poll, where, control.port, identity, incarnation)

    # --- monit's state ------------------------------------------------------------------------------------------------

    def _monitored_by_monit(self) -> dict[str, bool]:
        """Read the state file that monit left. The result maps each service's name to True if monit monitored the
        service. If the file cannot be read, the result is empty, so that all services are started.
        """
        with suppress(OSError, struct.error):
            monitored = {}
            entries = files.read(self._control.statefile)[_COUNT.size :]
            for name, _, _, _, is_monitored, _ in _STATE.iter_unpack(entries):
                monitored[name.partition(b"\0")[0].decode("latin-1").lower()] = is_monitored != 0
            return monitored
        return {}

    def _write_state_of_monit(self, saved: bytes) -> None:
        """Write monit's state file, so that monit can take over. Called after each save of the supervisor's state, with
        a ``Saved`` as JSON. Monit ignores a state file that was written in the same second in which monit starts.
        """
        rows = [
            _STATE.pack(name.encode("utf-8", "surrogateescape")[:255], 0, 0, 0, record.state in MONITORED, 0)
            for name, record in msgspec.json.decode(saved, type=Saved).services.items()
        ]
        content = _COUNT.pack(len(rows)) + b"".join(rows)
        files.write_atomic(self._control.statefile, content, mode=0o600, is_synced=False)

    # --- mail ---------------------------------------------------------------------------------------------------------

    def _notify(self, event: Event) -> None:
        """Queue an email about an event."""
        self._alerts.raise_alert(event.service, event.event, event.action, event.description, ips=())

    async def _retry_mails(self) -> NoReturn:
        """Try to send the unsent emails once per cycle. Emails that still cannot be sent are stored in a file for the
        next daemon.
        """
        kept: list[bytes] | None = None
        while True:
            # With 0 slots, which means no limit, the slice contains all messages.
            queue, waiting = self._control.queue, list(self._alerts.waiting)[-self._control.slots :]
            if queue is not None and kept != waiting:
                kept = waiting
                with suppress(HostError):
                    await asyncio.to_thread(files.make_dir, queue, 0o700)
                    content = msgspec.json.encode(waiting)
                    await asyncio.to_thread(files.write_atomic, queue / QUEUE, content, mode=0o600)
            await asyncio.sleep(clock.until_beat(float(self._control.poll)))
            self._alerts.flush()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request from the ``monit`` command or from a client of monit's HTTP interface. Unlike in
        ``Runtime.answer_monit``, ``reload`` and ``quit`` act on the daemon itself.
        """
        if asked := {"reload": self._reload, "quit": self._stop}.get(str(request.get("action"))):
            asked.set()
            found: dict[str, Any] = {"services": []}
        else:
            obstacle = "" if self._is_loaded else "monit is starting"
            found = await monit_api.answer(self._supervisor, request, obstacle=obstacle)
        return found | {"pid": os.getpid(), "uptime_secs": int(time.monotonic() - self._begun_at)}

    async def _answer_operator(self, request: dict[str, Any], _line: bytes, _peer: control_server.Peer) -> bytes:
        """Answer a request on the control socket."""
        match request:
            case {"command": "status"}:
                return msgspec.json.encode(await self._status())
            case {"command": "probe"}:
                ok, reason = self._ready("jobs")
                return msgspec.json.encode({"ok": ok, "reason": reason})
            case {"command": "bpm"} if self._options.has_bpm:
                return msgspec.json.encode(await bpm_api.answer(self._supervisor.bpm, request))
            case {"command": "services"}:
                return msgspec.json.encode(await self.answer(request))
        return wire.encode_exception("cannot answer: this process only replaces monit, not the BOSH agent")

    async def _status(self) -> dict[str, Any]:
        """Return the answer to ``agent-shim status``."""
        return {
            "version": __version__,
            "phase": "running" if self._is_loaded else "starting",
            "control_file": str(self._control.path),
            "uptime_secs": int(time.monotonic() - self._begun_at),
            "job_state": self._supervisor.job_state(),
            "mails_waiting": len(self._alerts.waiting),
            "warnings": [],
            "vitals": await self._vitals.sample(),
            "processes": monit_api.with_events(self._supervisor),
        }

    def _ready(self, _level: str) -> tuple[bool, str]:
        """Return whether the daemon is ready, and the reason. All probe levels are treated alike."""
        state = self._supervisor.job_state() if self._is_loaded else "starting"
        return state in ("running", "stopped"), f"jobs are {state}"

    def _serving_metrics(self) -> AbstractAsyncContextManager[object]:
        """Serve metrics and probes for the duration of the block."""
        # Imported late, because the metrics libraries use 4 MB and would take a third of the start time.
        from agent_shim.edges import metrics

        def read() -> metrics.Readings:
            mails = self._alerts
            return metrics.Readings(
                bus=metrics.BusReading(connected=None),
                alerts={"sent": mails.sent, "dropped": mails.dropped, "collapsed": mails.collapsed},
                figures=self._vitals.figures(),
                is_ready=self._ready("jobs")[0],
                job_state=self._supervisor.job_state(),
                processes=self._supervisor.services(),
                failures=dict(keep_running.failures),
            )

        exported = metrics.Metrics(read)
        return metrics.listening(self._options.http, metrics.Routes(exported.render, self._ready, exported.recent))
