"""The daemon: one loop, the services wired together, named root tasks, and what signals mean.

A root task that ends, for whatever reason, ends the daemon with a traceback: everything that can go wrong outside is
handled inside them, so its end is a bug, and the supervisor of the container starts the agent anew. Jobs go on.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from agent_shim import __version__, alerts, boot, comeback, control, heartbeat, log, metrics, orderly, settings, wire
from agent_shim.actions import (  # noqa: F401 - importing registers them
    access,
    blobs,
    compile,  # noqa: A004
    core,
    disks,
    dns,
    jobs,
    logs,
    scripts,
)
from agent_shim.agent import Agent, Edges
from agent_shim.bundles import Bundles
from agent_shim.bus import Bus
from agent_shim.bus.nats import NatsBus
from agent_shim.certificates import Certificates
from agent_shim.compiler import Compiler
from agent_shim.disks import Disks
from agent_shim.dispatch import ACTIONS, Dispatcher
from agent_shim.dns import Dns
from agent_shim.drift import Drift, expected
from agent_shim.errors import ActionError, BusError, ConfigError, HostError
from agent_shim.fencing import Fence, only_one
from agent_shim.host import files, notify, proc, reaper
from agent_shim.logs import Logs
from agent_shim.mirror import Mirror
from agent_shim.paths import Paths
from agent_shim.scripts import Scripts
from agent_shim.settings_store import SettingsStore
from agent_shim.spec_store import SpecStore
from agent_shim.sshd import Sshd
from agent_shim.supervisor import bpm_answers, monit_answers
from agent_shim.supervisor.supervisor import Event, ServiceInfo, Supervisor
from agent_shim.tasks import Tasks, is_asked_to_end
from agent_shim.users import Users
from agent_shim.vitals import Vitals

if TYPE_CHECKING:
    from agent_shim.standalone import Standalone

logger = logging.getLogger(__name__)

GIVEN_UP: Final = "shut down by the Director"
STOPPING: Final = "the container ends and all jobs are being stopped"
RIVAL_LOOK: Final = 1.0
"""Seconds between looks whether an agent that uses our volumes has ended."""
FENCED_GRACE: Final = 10.0
"""Seconds for jobs whose volume another agent has taken."""
LAST_WORDS: Final = 1.0
"""Seconds in which the replies to held polls may leave before the bus is left."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of ``agent-shim run``; what is None or empty comes from agent.json."""

    config: Path | None
    paths: Paths
    http: str | None = None
    log_format: str = ""
    log_level: str = ""


def main(options: Options) -> int:
    """Run until told to stop; returns the exit code."""
    config = _read_config(options.config)
    log.setup(
        level=options.log_level or config.shim.log_level,
        form=options.log_format or config.shim.log_format,
        file=options.paths.agent_log / "current",
    )
    return asyncio.run(Daemon(options, config).serve())


def _read_config(path: Path | None) -> settings.AgentConfig:
    if path is None:
        return settings.AgentConfig()
    try:
        return settings.parse_config(path.read_bytes(), origin=str(path))
    except OSError as exc:
        raise ConfigError(f"cannot read the agent's configuration from {path}: {exc.strerror}") from exc


class Daemon:
    """Everything that lives as long as the process."""

    def __init__(self, options: Options, config: settings.AgentConfig) -> None:
        self._options = options
        self._config = config
        self._paths = options.paths
        self._begun_at = time.monotonic()
        self._systemd = notify.from_environment()
        self._stop = asyncio.Event()
        self._phase = "starting"
        self._agent: Agent | None = None
        self._dispatcher: Dispatcher | None = None
        self._bus: Bus | None = None
        self._vitals: dict[str, Any] = {}
        self._ending: asyncio.Task[None] | None = None
        self._given_up = asyncio.Event()
        self._orderly: orderly.OrderlyStop | None = None
        self._standalone: Standalone | None = None
        self._mirror = Mirror(self._paths)
        self._fence = Fence()
        self._drift = Drift(self._expected_addresses, self._address_missing)
        self._metrics = metrics.Metrics(self._readings, ACTIONS)

    async def serve(self) -> int:
        """Boot, answer, and on SIGTERM or SIGINT go, leaving the jobs as they are.

        As process 1 of a container the same signals are its end: then the jobs are stopped in order first.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        with only_one(self._paths, "start"):
            async with self._systemd.beating(), self._http():
                if await self._or_stop(self._without_rival(self._rival_on_data)):
                    await self._serve_alone()
        logger.info("the agent stops")
        return 1 if self._orderly is not None and self._orderly.reasons else 0

    async def _serve_alone(self) -> None:
        await asyncio.to_thread(self._mirror.begin)
        await boot.boot([boot.tree_step(self._paths)])
        with reaper.reaping():
            async with control.listening(self._paths.control_socket, self._answer_operator):
                self._systemd.ready()
                await self._until_stopped()
        if self._agent is None or not any(service.pid for service in self._agent.supervisor.services()):
            await asyncio.to_thread(self._fence.let_all_go)

    async def _without_rival(self, find: Callable[[], str]) -> None:
        """Wait until no other agent uses our volumes; nothing is touched, and nobody answered, until then."""
        said = ""
        while rival := await asyncio.to_thread(find):
            self._phase = f"waiting until another agent ends: {rival}"
            if rival != said:
                logger.error("%s", self._phase)
                said = rival
            await asyncio.sleep(RIVAL_LOOK)

    def _rival_on_data(self) -> str:
        rival = self._fence.hold(self._paths.mirror)
        return rival and f"{self._paths.data} is in use by {rival}"

    def _signalled(self) -> None:
        if os.getpid() != 1 or self._dispatcher is None:
            self._systemd.stopping()
            self._stop.set()
        elif self._orderly is not None:
            self._orderly.hurry.set()
        else:
            # The container is killed when the grace is over: a second of it is for our own end.
            self._begin_orderly_stop(max(1.0, self._config.shim.grace - 1)).add_done_callback(
                lambda _: self._stop.set()
            )

    def _begin_orderly_stop(self, grace: float) -> asyncio.Task[None]:
        """Stop all jobs in order, once; from now on nothing that changes the machine is done."""
        if self._orderly is None or self._ending is None:
            assert self._dispatcher is not None
            self._phase = STOPPING
            self._dispatcher.refusing = STOPPING
            self._orderly = orderly.OrderlyStop(grace)
            self._ending = asyncio.create_task(self._stop_in_order(self._orderly), name="orderly stop")
        return self._ending

    async def _stop_in_order(self, stop: orderly.OrderlyStop) -> None:
        await stop.run(self._running)
        if self._paths.is_system:
            await asyncio.to_thread(_write_termination_log, f"agent-shim: {stop.summary}\n")

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[None]:
        address = self._options.http or self._config.shim.http
        async with metrics.listening(address, metrics.Routes(self._metrics.render, self._ready)):
            yield

    async def _until_stopped(self) -> None:
        store = await asyncio.to_thread(self._settings_store)
        self._phase = "waiting for settings"
        if not await self._or_stop(store.wait()):
            return
        await asyncio.to_thread(self._fence.introduce, store.current.agent_id)
        await self._mirror.recover(store.current.agent_id)
        find_twin = partial(comeback.twin, self._fence, self._paths, store.current.source)
        if not await self._or_stop(self._without_rival(find_twin)) or not await self._or_stop(store.wait()):
            return
        if await asyncio.to_thread(_was_given_up, self._paths, store.current.agent_id):
            self._phase = GIVEN_UP
            logger.warning("the Director has shut this agent down: it stays idle until it gets another agent_id")
            await self._stop.wait()
            return
        self._phase = "booting"
        agent, bus = self._assemble(store)
        async with agent.supervisor:
            if not await self._or_stop(boot.boot(boot.steps(agent, self._comeback))):
                return
            self._dispatcher = dispatcher = Dispatcher(agent, agent.tasks, on_done=self._metrics.action_done)
            await agent.tasks.resume(dispatcher.resumed())
            gc.freeze()  # what boot has made stays: no later collection looks at it again
            self._phase = "running"
            await self._run(agent, dispatcher, bus)

    def _settings_store(self) -> SettingsStore:
        if not self._config.shim.spec:
            return SettingsStore(self._paths, self._config.settings_files)
        from agent_shim import standalone  # late: most agents have a Director

        source = standalone.write_settings(self._paths, Path(self._config.shim.spec))
        return SettingsStore(self._paths, [source], needs_bus=False)

    async def _or_stop(self, work: Awaitable[Any]) -> bool:
        """Wait for ``work`` or the stop signal; False for the latter."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return working.done()
        finally:
            working.cancel()
            stopping.cancel()

    def _assemble(self, store: SettingsStore) -> tuple[Agent, Bus]:
        agent_id = store.current.agent_id
        bus = self._make_bus(store)
        agent = assemble(
            self._paths,
            store,
            Supervisor(self._paths, on_event=self._process_event, is_strict=self._config.shim.bpm.strict),
            Edges(self._announce_shutdown, self._reconnect, self._shut_down),
            mirror=self._mirror,
            fence=self._fence,
            ssh_port=self._config.shim.ssh.port,
        )
        self._comeback = comeback.Comeback(agent, self._process_event)
        if self._config.shim.spec:
            from agent_shim import standalone

            self._standalone = standalone.Standalone(agent, Path(self._config.shim.spec))
        self._alerts = alerts.Alerts(agent_id, bus.publish)
        self._heartbeat = heartbeat.Heartbeat(self._measure, self._compose, self._send_heartbeat)
        self._agent, self._bus = agent, bus
        return agent, bus

    def _make_bus(self, store: SettingsStore) -> Bus:
        """The first address chooses: the bosh CLI calls over HTTPS, a Director over NATS (mbus/handler_provider.go)."""
        if self._config.shim.spec:
            from agent_shim.standalone import NoBus

            return NoBus()
        if _is_https(store.current.mbus):
            from agent_shim.bus.https import HttpsBus  # late: aiohttp is 9 MB that an agent on NATS does not need

            return HttpsBus(
                store.current.mbus,
                partial(self._handle, limit=None),
                self._paths.blobs,
                on_connected=self._connected,
            )
        return NatsBus(
            store.current.agent_id,
            store.current.mbus,
            self._handle,
            on_connected=self._connected,
            reread=lambda refused: store.current.other_mbus(refused),  # noqa: PLW0108 - the settings change
        )

    async def _run(self, agent: Agent, dispatcher: Dispatcher, bus: Bus) -> None:
        roots: dict[str, Callable[[], Awaitable[None]]] = {
            "bus": bus.run,
            "heartbeat": self._heartbeat.run,
            "alerts": self._alerts.run,
            "supervisor": agent.supervisor.run,
            "tasks": lambda: agent.tasks.run(dispatcher.failure),
            "settings": lambda: agent.settings.watch(self._settings_changed),
            "coming back": self._comeback.run,
            "copy of the state": agent.mirror.watch,
            "leases": lambda: self._fence.keep(self._fenced_off),
            "addresses": self._drift.watch,
            "loop lag": self._metrics.watch_lag,
        }
        if self._standalone is not None:
            roots["standalone"] = self._standalone.run
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(_for_ever(name, run), name=name) for name, run in roots.items()]
                await self._or_stop(self._given_up.wait())
                agent.tasks.release_polls()
                await bus.settle(LAST_WORDS)
                for task in running:
                    task.cancel()
                await self._stop.wait()
        except BaseExceptionGroup as broken:
            raise broken.exceptions[0] from None

    # --- what the edges ask -----------------------------------------------------------------------------------------

    async def _handle(self, data: bytes, limit: int | None = wire.MAX_REPLY) -> tuple[str, bytes] | None:
        assert self._dispatcher is not None
        return await self._dispatcher.handle(data, limit=limit)

    def _connected(self) -> None:
        self._heartbeat.beat_now()
        self._alerts.flush()

    async def _measure(self) -> dict[str, Any]:
        agent = self._running
        await core.record_health(agent)
        self._vitals = await agent.vitals.sample()
        return self._vitals

    def _compose(self, vitals: dict[str, Any] | None) -> bytes:
        agent = self._running
        spec = agent.spec.current
        return heartbeat.build(
            deployment=spec.deployment,
            job=spec.job.name,
            index=spec.index,
            job_state=agent.supervisor.job_state(),
            vitals=vitals or {},
            node_id=spec.id,
            number_of_processes=agent.supervisor.count(),
        )

    async def _send_heartbeat(self, message: bytes) -> None:
        await self._tell("heartbeat", message)

    async def _tell(self, kind: str, message: bytes) -> None:
        assert self._bus is not None
        await self._bus.publish(f"hm.agent.{kind}.{self._running.settings.current.agent_id}", message)

    @property
    def _running(self) -> Agent:
        assert self._agent is not None, "asked before there are settings"
        return self._agent

    async def _announce_shutdown(self) -> None:
        """Best effort, as the notice only silences the Health Monitor (notification/concrete_notifier.go)."""
        try:
            await self._tell("shutdown", b"null")
        except BusError as exc:
            logger.warning("cannot tell the Health Monitor of the shutdown: %s", exc)

    async def _reconnect(self, wanted: settings.Mbus) -> None:
        assert self._bus is not None
        if _is_https(wanted) != _is_https(self._bus.mbus):
            raise ActionError(f"cannot go over to a bus of the kind {wanted.scheme}: that takes a restart of the agent")
        await self._bus.rotate(wanted)

    async def _settings_changed(self, found: settings.Effective) -> None:
        """New settings of the CPI; credentials that cannot be used are no reason to lose the link there is."""
        assert self._bus is not None
        if found.mbus == self._bus.mbus:
            return
        try:
            await self._reconnect(found.mbus)
        except ActionError as exc:
            logger.error("the settings have changed, and %s", exc)

    def _shut_down(self) -> None:
        # Not awaited: the Director does not wait for the answer either, and deletes the container next.
        self._ending = asyncio.create_task(self._give_up(), name="shutdown")

    async def _give_up(self) -> None:
        """Stop all jobs, leave the bus, and stay idle, after a restart too."""
        agent = self._running
        self._phase = GIVEN_UP
        try:
            await files.save(self._paths.given_up, agent.settings.current.agent_id.encode(), mode=0o600)
            await agent.mirror.update()
        except HostError as exc:
            logger.error("the agent would come back after a restart: %s", exc)
        try:
            await agent.supervisor.stop(wait=True)
        except (HostError, ActionError) as exc:
            logger.error("cannot stop all jobs: %s", exc)
        finally:
            self._given_up.set()

    def _fenced_off(self, why: str) -> None:
        """Another agent has taken a volume: it took us for dead. Whatever goes on here does harm."""
        if self._ending is None:
            logger.critical("%s; the jobs are ended, and nothing more is done here", why)
            self._phase = f"fenced off: {why}"
            self._ending = asyncio.create_task(self._step_aside(), name="step aside")

    async def _step_aside(self) -> None:
        agent = self._running
        agent.supervisor.disown()
        try:
            await agent.supervisor.stop(wait=True, timeout=FENCED_GRACE)
        except ActionError as exc:
            logger.error("%s", exc)
        self._given_up.set()

    def _expected_addresses(self) -> dict[str, str]:
        agent = self._running
        return expected(agent.settings.current, agent.spec.current.networks)

    def _address_missing(self, network: str, text: str) -> None:
        self._process_event(Event(network, "Connection changed", "alert", text))

    def _process_event(self, event: Event) -> None:
        agent = self._running
        ips = {network.ip for network in agent.settings.current.networks.values() if network.ip}
        # What apply filled in for dynamic networks, of which the settings know no address.
        stored = [network for network in agent.spec.current.networks.values() if isinstance(network, dict)]
        ips |= {str(network["ip"]) for network in stored if network.get("ip")}
        self._alerts.raise_alert(event.service, event.event, event.action, event.description, ips)

    def _readings(self) -> metrics.Readings:
        agent, bus = self._agent, self._bus
        if agent is None or bus is None:
            return metrics.Readings()
        sent_at = None if _is_https(bus.mbus) else self._heartbeat.sent_at
        return metrics.Readings(
            bus=metrics.BusReading(
                connected=bus.is_connected,
                reconnects=bus.stats.reconnects,
                received=bus.stats.received,
                received_bytes=bus.stats.received_bytes,
                sent=bus.stats.sent,
                sent_bytes=bus.stats.sent_bytes,
                rejected=bus.stats.rejected,
                heartbeat_age=None if sent_at is None else time.monotonic() - sent_at,
            ),
            machine=metrics.machine_reading(self._vitals),
            processes=[_process_reading(service) for service in agent.supervisor.services()],
            tasks_running=int(agent.tasks.running is not None),
            tasks_waiting=agent.tasks.waiting,
            addresses_missing=len(self._drift.missing),
            migration=None
            if (progress := agent.disks.progress()) is None
            else progress.size / max(1, progress.size_total),
        )

    def _ready(self, level: str) -> tuple[bool, str]:
        if self._phase != "running" or self._agent is None or self._bus is None:
            return False, self._phase
        if not self._bus.is_connected:
            return False, "not connected to the message bus"
        if level == "agent":
            return True, "connected"
        if self._standalone is not None and self._standalone.obstacle:
            return False, self._standalone.obstacle
        state = self._agent.supervisor.job_state()
        return state in ("running", "stopped"), f"jobs are {state}"

    async def _answer_operator(self, request: dict[str, Any], line: bytes) -> bytes:
        match request:
            case {"command": "status"}:
                return msgspec.json.encode(await self._status())
            case {"command": "probe", "kind": kind}:
                ok, reason = (True, "alive") if kind == "live" else self._ready("")
                return msgspec.json.encode({"ok": ok, "reason": reason})
            case {"command": "drain"} if self._agent is None:
                return msgspec.json.encode({"clean": True, "summary": f"nothing to stop: the agent is {self._phase}"})
            case {"command": "drain", "timeout": grace} if self._dispatcher is not None:
                await self._begin_orderly_stop(float(grace if grace is not None else self._config.shim.grace))
                assert self._orderly is not None
                return msgspec.json.encode({"clean": not self._orderly.reasons, "summary": self._orderly.summary})
            case {"command": "bpm"} if self._agent is not None:
                return msgspec.json.encode(await bpm_answers.answer(self._agent.supervisor.bpm, request))
            case {"command": "services"} if self._agent is not None:
                obstacle = "" if self._phase == "running" else self._phase
                found = await monit_answers.answer(self._agent.supervisor, request, obstacle=obstacle)
                uptime = int(time.monotonic() - self._begun_at)
                return msgspec.json.encode(found | {"pid": os.getpid(), "uptime_secs": uptime})
            case {"method": _} if self._dispatcher is not None:
                return await self._dispatcher.reply(wire.decode_request(line), line, limit=None)
        return wire.encode_exception(f"cannot answer: the agent is {self._phase}")

    async def _status(self) -> dict[str, Any]:
        agent, bus = self._agent, self._bus
        status: dict[str, Any] = {
            "version": __version__,
            "phase": self._phase,
            "uptime_secs": int(time.monotonic() - self._begun_at),
            "agent_id": "",
            "bus": {"connected": False, "error": self._phase},
            "deployment": "",
            "instance": "",
            "job_state": "unknown",
            "task": "",
            "task_progress": "",
            "task_secs": 0,
            "disk": "",
            "warnings": [],
            "tasks_waiting": 0,
            "processes": [],
        }
        if agent is None or bus is None:
            return status
        spec, task = agent.spec.current, agent.tasks.running
        return status | {
            "agent_id": agent.settings.current.agent_id,
            "bus": {"connected": bus.is_connected, "error": bus.stats.last_error},
            "deployment": spec.deployment,
            "instance": f"{spec.name}/{spec.id}" if spec.name else "",
            "job_state": agent.supervisor.job_state(),
            "task": task.method if task else "",
            "task_progress": task.progress if task else "",
            "task_secs": int(time.monotonic() - task.begun_at) if task else 0,
            "disk": await _disk_status(agent),
            "warnings": self._warnings(),
            "tasks_waiting": agent.tasks.waiting,
            "bpm": {"level": agent.supervisor.bpm.level},
            "processes": [monit_answers.describe(service) for service in agent.supervisor.services()],
        }

    def _warnings(self) -> list[str]:
        missing = [f"no interface has the address {ip} ({where})" for ip, where in self._drift.missing.items()]
        obstacle = self._comeback.obstacle
        return [f"the jobs cannot be started: {obstacle}", *missing] if obstacle else missing


def assemble(
    paths: Paths,
    store: SettingsStore,
    supervisor: Supervisor,
    edges: Edges,
    *,
    mirror: Mirror,
    fence: Fence,
    ssh_port: int = 22,
) -> Agent:
    """The services of an agent, wired."""
    spec = SpecStore(paths)
    of_jobs = partial(_processes_of_jobs, supervisor)
    environ = {**os.environ, "TMPDIR": str(paths.tmp)}
    users = Users(paths)
    persistent = Disks(
        paths, lambda: store.current, lambda: spec.current.id, of_jobs, hold=fence.hold, let_go=fence.let_go
    )
    return Agent(
        paths=paths,
        settings=store,
        spec=spec,
        tasks=Tasks(paths.tasks, paths.outcomes),
        supervisor=supervisor,
        bundles=Bundles(paths),
        compiler=Compiler(paths, environ),
        scripts=Scripts(paths, environ),
        logs=Logs(paths),
        vitals=Vitals(paths, persistent.is_mounted),
        dns=Dns(paths),
        users=users,
        sshd=Sshd(paths, ssh_port, lambda: bool(users.ephemeral() or store.current.source.env.bosh.authorized_keys)),
        certificates=Certificates(paths),
        disks=persistent,
        mirror=mirror,
        edges=edges,
    )


def _is_https(mbus: settings.Mbus) -> bool:
    return mbus.scheme == "https"


def _processes_of_jobs(supervisor: Supervisor) -> set[int]:
    """The processes of all jobs with all that they have started."""
    leaders = [service.pid for service in supervisor.services() if service.pid]
    return proc.descent(proc.children(proc.table()), leaders)


async def _disk_status(agent: Agent) -> str:
    """The persistent disk in a line: how far a migration is, what is wrong, or whether there is one."""
    if (progress := agent.disks.progress()) is not None:
        files_done = f"{progress.files}/{progress.files_total} files"
        return f"migration, {progress.phase}: {files_done}, {progress.size}/{progress.size_total} bytes"
    return await agent.disks.problem() or ("mounted" if agent.disks.is_mounted() else "none")


def _process_reading(service: ServiceInfo) -> metrics.ProcessReading:
    process = service.process
    return metrics.ProcessReading(
        name=process.name,
        state=process.state,
        is_up=service.pid != 0,
        uptime=process.uptime_secs,
        restarts=service.restarts,
        memory=process.mem_kb * 1024,
        cpu=process.cpu_total / 100 * (os.cpu_count() or 1),
    )


def _write_termination_log(text: str) -> None:
    """Tell Kubernetes how it ended, where there is one; the file is its mount and is never made."""
    try:
        with open("/dev/termination-log", "r+") as opened:
            opened.write(text)
    except OSError as exc:
        logger.debug("no termination log: %s", exc)


def _was_given_up(paths: Paths, agent_id: str) -> bool:
    """Whether the Director has sent ``shutdown`` to this very agent before."""
    try:
        return paths.given_up.read_text() == agent_id
    except OSError:
        return False


async def _for_ever(name: str, run: Callable[[], Awaitable[None]]) -> None:
    try:
        await run()
    except asyncio.CancelledError:
        if is_asked_to_end():
            raise
    raise RuntimeError(f"root task {name} has ended, which it must not")
