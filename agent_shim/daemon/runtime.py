"""The agent with known settings: the wiring of services and edges, named root tasks, and shutdown.

Root tasks handle the failures of their environment, so the end of one is a bug. It is restarted, and the others are not
affected. If the bus, the lane of tasks or the heartbeat keeps failing, or the supervisor loses a service, the daemon
exits with a traceback, and the init of the container restarts the agent. Jobs keep running in each case.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from agent_shim.actions import access, blobs, compile, disks, dns, jobs, logs, scripts, state  # noqa: A004, F401 - importing registers them
from agent_shim.actions.agent import Agent, EdgeCallbacks
from agent_shim.actions.dispatch import Dispatcher
from agent_shim.actions.tasks import Tasks
from agent_shim.core import settings, wire
from agent_shim.core.errors import ActionError, BusError, HostError
from agent_shim.core.keep_running import run_forever
from agent_shim.core.paths import Paths
from agent_shim.daemon import boot, job_recovery, small_installs
from agent_shim.daemon.orderly_stop import OrderlyStop
from agent_shim.edges import alerts, heartbeat, monit_http
from agent_shim.edges.bus import Bus
from agent_shim.edges.bus.nats import NatsBus
from agent_shim.edges.metrics import Metrics
from agent_shim.host import files, network, proc, process
from agent_shim.services import address_watch, certificate_watch
from agent_shim.services.address_watch import AddressWatch
from agent_shim.services.bundles import Bundles
from agent_shim.services.certificate_watch import CertificateWatch
from agent_shim.services.compiler import Compiler
from agent_shim.services.disks import Disks
from agent_shim.services.dns import Dns
from agent_shim.services.firewall import Firewall
from agent_shim.services.logs import rotation
from agent_shim.services.logs.archives import Logs
from agent_shim.services.logs.rotation import Limits, Rotation
from agent_shim.services.scripts import Scripts
from agent_shim.services.settings_store import SettingsStore
from agent_shim.services.spec_store import SpecStore
from agent_shim.services.sshd import Sshd
from agent_shim.services.state_backup import StateBackup
from agent_shim.services.trusted_cas import TrustedCas
from agent_shim.services.users import Users
from agent_shim.services.vitals import Vitals
from agent_shim.services.volume_lease import VolumeLeases
from agent_shim.supervisor.monit import monit_api
from agent_shim.supervisor.supervisor import STOP_TIMEOUT_S, Event, Supervisor

if TYPE_CHECKING:
    from agent_shim.daemon.standalone import Standalone

logger = logging.getLogger(__name__)

SHUT_DOWN: Final = "shut down by the Director"
STOPPING_IN_ORDER: Final = "the container ends and all jobs are being stopped"
TERMINATION_LOG: Final = Path("/dev/termination-log")
"""The file whose content Kubernetes shows for an ended container (kubectl describe pod)."""
TAKEOVER_STOP_TIMEOUT_S: Final = 10.0
"""Stop timeout in seconds for jobs whose volume another agent has taken."""
MONIT_HTTP: Final = "127.0.0.1:2822"
MONIT_MAIL: Final = "127.0.0.1:2825"
BUS: Final = "AGENT_SHIM_BUS"
"""With the value `off` the agent keeps away from the bus: `sv stop agent` leaves supervision, which is monit's."""
VITAL: Final = frozenset({"bus", "heartbeat", "tasks"})
"""Essential root tasks: the agent restarts if one of them keeps failing."""
LAST_REPLIES_TIMEOUT_S: Final = 1.0
"""Seconds for replies to waiting polls before the agent disconnects from the bus."""


class Runtime:
    """One agent_id with its services and edges; ``serve`` runs it.

    ``phase`` is its progress as text, ``running`` when it answers; ``vitals`` are those of the last heartbeat.
    """

    def __init__(
        self,
        paths: Paths,
        shim: settings.ShimOptions,
        store: SettingsStore,
        *,
        state_backup: StateBackup,
        leases: VolumeLeases,
        metrics: Metrics,
        disown: Callable[[], None],
        stop: asyncio.Event,
    ) -> None:
        """``stop`` ends the agent and leaves the jobs running.

        ``disown`` is called when another agent has taken a volume, and stops all writes of the process to it.
        """
        self.phase = "booting"
        self._begun_at = time.monotonic()
        self.vitals: dict[str, Any] = {}
        self._health: tuple[str, tuple[int, int, int] | None] = "", None
        """State of the jobs, and version of its file, at the last heartbeat."""
        self.dispatcher: Dispatcher | None = None
        self.orderly_stop: OrderlyStop | None = None
        self.standalone: Standalone | None = None
        self.address_watch = AddressWatch(
            lambda: address_watch.expected(self.agent.settings.current, self.agent.spec.current.networks),
            lambda where, text: self._process_event(Event(where, "Connection changed", "alert", text)),
        )
        self.certificate_watch = CertificateWatch(lambda: certificates(self.bus.mbus))
        self._shim = shim
        self._leases = leases
        self._metrics = metrics
        self._disown = disown
        self._stop = stop
        self._ending: asyncio.Task[None] | None = None
        self._leaves_bus = asyncio.Event()
        self.bus = self._make_bus(paths, store)

        def settling() -> float:
            return store.current.source.env.bosh.agent.settings.settling_time

        supervisor = Supervisor(paths, on_event=self._process_event, is_strict=shim.bpm.strict, settling=settling)
        edges = EdgeCallbacks(self._announce_shutdown, self._reconnect, self._begin_shutdown)
        self.agent = assemble(
            paths, store, supervisor, edges, state_backup=state_backup, leases=leases, ssh_port=shim.ssh.port
        )
        self.job_recovery = job_recovery.JobRecovery(self.agent, self._process_event)
        if shim.spec:
            from agent_shim.daemon import standalone

            self.standalone = standalone.Standalone(self.agent, Path(shim.spec))
        obstacle = _firewall_obstacle(paths, is_wanted=shim.firewall)
        self.firewall = Firewall(lambda: self.bus.mbus, lambda: self.bus.is_connected, self._is_bus_heard, obstacle)
        self.heartbeat = heartbeat.Heartbeat(self._measure, self._compose, partial(self._publish, "heartbeat"))
        self.alerts = alerts.Alerts(store.current.agent_id, self.bus.publish)

    def _make_bus(self, paths: Paths, store: SettingsStore) -> Bus:
        """Choose the bus by the first address: HTTPS (bosh CLI) or NATS (Director) (mbus/handler_provider.go)."""
        is_off = os.environ.get(BUS) == "off"
        if is_off or self._shim.spec:
            from agent_shim.daemon.standalone import NoBus

            if is_off:
                logger.warning("the bus is off: this agent supervises the jobs and answers no Director")
            return NoBus()
        agent_id, mbus = store.current.agent_id, store.current.mbus
        if is_https(mbus):
            from agent_shim.edges.bus.https import HttpsBus  # late: aiohttp is 9 MB that an agent on NATS does not need

            return HttpsBus(mbus, partial(self._handle, limit=None), paths.blobs, on_connected=self._connected)
        return NatsBus(agent_id, mbus, self._handle, on_connected=self._connected, reread=store.other_mbus)

    # --- serving ----------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Boot, then answer requests until ``stop`` is set."""
        agent = self.agent
        steps = boot.steps(agent, self.job_recovery, monit_password=self._shim.monit.password)
        async with agent.supervisor:
            if not await until_stopped(boot.boot([step for step in steps if not step.late]), self._stop):
                return
            self.dispatcher = Dispatcher(agent, agent.tasks, on_done=self._metrics.action_done)
            await agent.tasks.resume(self.dispatcher.resumed())
            gc.freeze()  # objects of the boot are permanent: later collections skip them
            self.phase = "running"
            async with self._ports():
                await self._run(self.dispatcher, [step for step in steps if step.late])

    def _rotation(self) -> Rotation:
        wanted, spec = self._shim.logs, self.agent.spec
        limits = Limits(rotation.size(wanted.size), wanted.keep, rotation.size(wanted.total), wanted.period)
        return Rotation(self.agent.paths, limits, lambda: spec.current.properties.logging.max_log_file_size)

    @asynccontextmanager
    async def _ports(self) -> AsyncIterator[None]:
        """Serve the ports of monit and of the Go agent's mail server for monit."""
        paths, monit = self.agent.paths, self._shim.monit
        http = monit.http or (MONIT_HTTP if paths.is_system else "off")
        mail = monit.mail or (MONIT_MAIL if paths.is_system else "off")
        async with monit_http.listening(http, self.answer_monit, paths.monit_user), monit_http.refusing_mail(mail):
            yield

    async def _run(self, dispatcher: Dispatcher, late: list[boot.Step]) -> None:
        agent = self.agent
        booted = asyncio.Event()

        async def boot_late() -> None:
            await boot.boot(late)
            booted.set()

        async def come_back() -> None:
            await booted.wait()  # jobs need the trusted authorities as soon as they start
            await self.job_recovery.run()

        async def keep_names() -> None:
            await booted.wait()  # it sets the host name
            await agent.dns.keep_names(lambda: agent.settings.current.agent_id)

        roots: dict[str, Callable[[], Awaitable[None]]] = {
            "bus": self.bus.run,
            "heartbeat": self.heartbeat.run,
            "alerts": self.alerts.run,
            "tasks": lambda: agent.tasks.run(dispatcher.failure),
            "settings": lambda: agent.settings.watch(self._settings_changed),
            "coming back": come_back,
            "copy of the state": agent.state_backup.watch,
            "leases": lambda: self._leases.keep(self._begin_takeover_stop),
            "addresses": self.address_watch.watch,
            "own names": keep_names,
            "firewall": self.firewall.watch,
            "certificates": self.certificate_watch.watch,
            "loop lag": self._metrics.watch_lag,
        }
        if self._shim.logs.rotate:
            roots["logs of jobs"] = self._rotation().run
        else:
            await asyncio.to_thread(rotation.leave_to_logrotate, agent.paths.logrotate_rule)
        if self.standalone is not None:
            roots["standalone"] = self.standalone.run
        try:
            async with asyncio.TaskGroup() as group:
                running: list[asyncio.Task[Any]] = [group.create_task(agent.supervisor.run(), name="supervisor")]
                running.append(group.create_task(boot_late(), name="boot beside the connection"))
                running += [
                    group.create_task(run_forever(name, run, is_vital=name in VITAL), name=name)
                    for name, run in roots.items()
                ]
                await until_stopped(self._leaves_bus.wait(), self._stop)
                agent.tasks.release_polls()
                await self.bus.drain(LAST_REPLIES_TIMEOUT_S)
                for task in running:
                    task.cancel()
                await self._stop.wait()
        except BaseExceptionGroup as broken:
            raise broken.exceptions[0] from None

    # --- endings ----------------------------------------------------------------------------------------------------
    #
    # orderly stop: the container ends; jobs stop in order, and the Director is still answered
    # shutdown: the Director deletes the instance; jobs stop, then the agent leaves the bus, also after a restart
    # takeover stop: another agent has taken a volume; the agent leaves the bus at once, and jobs stop

    def begin_orderly_stop(self, grace: float) -> asyncio.Task[None]:
        """Stop all jobs in order, once; refuse all later changes of the machine."""
        if self.orderly_stop is None or self._ending is None:
            assert self.dispatcher is not None
            self.phase = self.dispatcher.refusing = STOPPING_IN_ORDER
            self.orderly_stop = OrderlyStop(grace)
            self._ending = asyncio.create_task(self._stop_in_order(self.orderly_stop), name="orderly stop")
        return self._ending

    async def _stop_in_order(self, stop: OrderlyStop) -> None:
        await stop.run(self.agent)
        self.phase = f"the container ends: {stop.summary}"
        if self.agent.paths.is_system:
            await asyncio.to_thread(write_termination_log, f"agent-shim: {stop.summary}\n")

    def _begin_shutdown(self) -> None:
        # Not awaited: the Director deletes the container without waiting for the reply.
        self._ending = asyncio.create_task(self._shut_down(), name="shutdown")

    async def _shut_down(self) -> None:
        agent = self.agent
        self.phase = SHUT_DOWN
        agent_id = agent.settings.current.agent_id.encode()
        try:
            await asyncio.to_thread(files.write_atomic, agent.paths.shut_down, agent_id, mode=0o600)
            await agent.state_backup.update()
        except HostError as exc:
            logger.error("the agent would come back after a restart: %s", exc)
        try:
            await self._stop_jobs()
        finally:
            self._leaves_bus.set()

    def _begin_takeover_stop(self, why: str) -> None:
        if self._ending is None:
            logger.critical("%s; the jobs are ended, and nothing more is done here", why)
            self.phase = f"fenced off: {why}"
            # At once: the Director would get two replies, and all root tasks write to the volume.
            if self.dispatcher is not None:
                self.dispatcher.refusing = self.phase
            self._leaves_bus.set()
            self._disown()
            self.agent.supervisor.disown()
            self._ending = asyncio.create_task(self._stop_jobs(TAKEOVER_STOP_TIMEOUT_S), name="takeover stop")

    async def _stop_jobs(self, timeout: float = STOP_TIMEOUT_S) -> None:
        try:
            await self.agent.supervisor.stop(wait=True, timeout=timeout)
        except (HostError, ActionError) as exc:
            logger.error("cannot stop all jobs: %s", exc)

    # --- requests of the edges --------------------------------------------------------------------------------------

    async def _handle(self, data: bytes, limit: int | None = wire.MAX_REPLY_BYTES) -> tuple[str, bytes] | None:
        assert self.dispatcher is not None
        return await self.dispatcher.handle(data, limit=limit)

    async def _is_bus_heard(self, timeout_s: float) -> bool:
        return isinstance(self.bus, NatsBus) and await self.bus.is_heard(timeout_s)

    def _connected(self) -> None:
        self.heartbeat.beat_now()
        self.firewall.due.set()
        self.alerts.flush()

    async def _measure(self) -> dict[str, Any]:
        await self._keep_health()
        self.vitals = await self.agent.vitals.sample()
        return self.vitals

    async def _keep_health(self) -> None:
        """Write the health for bosh-dns again if it, or its file, has changed."""
        path, job_state = self.agent.paths.health, self.agent.supervisor.job_state()
        if (version := files.version(path)) is None or (job_state, version) != self._health:
            await state.record_health(self.agent)
            self._health = job_state, files.version(path)

    def _compose(self, vitals: dict[str, Any] | None) -> bytes:
        spec = self.agent.spec.current
        message = heartbeat.Message(
            deployment=spec.deployment,
            job=spec.job.name,
            index=spec.index,
            job_state=self.agent.supervisor.job_state(),
            vitals=vitals or {},
            node_id=spec.id,
            number_of_processes=self.agent.supervisor.count(),
        )
        return msgspec.json.encode(message)

    async def answer_monit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the command ``monit`` and clients of its API (see ``supervisor.monit.monit_api``)."""
        obstacle = "" if self.phase == "running" else self.phase
        found = await monit_api.answer(self.agent.supervisor, request, obstacle=obstacle)
        return found | {"pid": os.getpid(), "uptime_secs": int(time.monotonic() - self._begun_at)}

    async def _publish(self, kind: str, message: bytes) -> None:
        await self.bus.publish(f"hm.agent.{kind}.{self.agent.settings.current.agent_id}", message)

    async def _announce_shutdown(self) -> None:
        """Send the shutdown notice; best effort, it only silences the Health Monitor (concrete_notifier.go)."""
        try:
            await self._publish("shutdown", b"null")
        except BusError as exc:
            logger.warning("cannot notify the Health Monitor of the shutdown: %s", exc)

    async def _reconnect(self, wanted: settings.Mbus) -> None:
        if is_https(wanted) != is_https(self.bus.mbus):
            raise ActionError(f"cannot go over to a bus of the kind {wanted.scheme}: that takes a restart of the agent")
        await self.agent.settings.keep_former(self.bus.mbus)
        await self.bus.rotate(wanted)

    async def _settings_changed(self, found: settings.Effective) -> None:
        """Apply new settings of the CPI; invalid credentials do not end the current link."""
        if found.mbus == self.bus.mbus or os.environ.get(BUS) == "off":
            return
        try:
            await self._reconnect(found.mbus)
        except ActionError as exc:
            logger.error("the settings have changed, and %s", exc)

    def _process_event(self, event: Event) -> None:
        of_settings = self.agent.settings.current.source.networks.values()
        # Addresses that apply filled in for dynamic networks are absent from the settings.
        stored = [each for each in self.agent.spec.current.networks.values() if isinstance(each, dict)]
        found = chain(
            (each.ip for each in of_settings if each.ip), (str(each["ip"]) for each in stored if each.get("ip"))
        )
        ips = set(islice(found, address_watch.MAX_ADDRESSES))
        self.alerts.raise_alert(event.service, event.event, event.action, event.description, ips)


def assemble(
    paths: Paths,
    store: SettingsStore,
    supervisor: Supervisor,
    edges: EdgeCallbacks,
    *,
    state_backup: StateBackup,
    leases: VolumeLeases,
    ssh_port: int = 22,
) -> Agent:
    """Create and wire the services of an agent."""
    spec = SpecStore(paths)
    of_jobs = partial(_processes_of_jobs, supervisor)
    environ = {**process.script_environment(os.environ), "TMPDIR": str(paths.tmp)}
    users = Users(paths)
    persistent = Disks(
        paths, lambda: store.current, lambda: spec.current.id, of_jobs, hold=leases.hold, release=leases.release
    )
    return Agent(
        paths=paths,
        settings=store,
        spec=spec,
        tasks=Tasks(paths.tasks, paths.outcomes),
        supervisor=supervisor,
        bundles=Bundles(paths, partial(small_installs.work, paths)),
        compiler=Compiler(paths, environ),
        scripts=Scripts(paths, environ, supervisor.run_script),
        logs=Logs(paths),
        vitals=Vitals(paths, persistent.is_mounted),
        dns=Dns(paths),
        users=users,
        sshd=Sshd(paths, ssh_port, lambda: bool(users.made() or store.current.source.env.bosh.authorized_keys)),
        certificates=TrustedCas(paths),
        disks=persistent,
        state_backup=state_backup,
        edges=edges,
    )


def certificates(mbus: settings.Mbus) -> dict[str, str]:
    """The agent's certificate and its authority as PEM texts, by their names in metrics and warnings."""
    if is_https(mbus):
        return {certificate_watch.DOOR: mbus.certificate}
    return {"client": mbus.certificate, "CA": mbus.ca}


def is_https(mbus: settings.Mbus) -> bool:
    """True if the bosh CLI connects over HTTPS, instead of a Director over NATS."""
    return mbus.scheme == "https"


def _firewall_obstacle(paths: Paths, *, is_wanted: bool) -> str:
    """The reason the agent manages no packet filter rules here; "" if it does."""
    if not is_wanted:
        return "it is switched off in agent.json"
    if not boot.owns_system(paths):
        return boot.NOT_ROOT
    return "the network is that of the machine, with others on it" if network.is_of_machine() else ""


async def until_stopped(work: Awaitable[Any], stop: asyncio.Event) -> bool:
    """Wait for ``work`` or ``stop``; return False for the latter."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        working.cancel()
        stopping.cancel()


def _processes_of_jobs(supervisor: Supervisor) -> set[int]:
    """The processes of all jobs and their descendants."""
    leaders = [service.pid for service in supervisor.services() if service.pid]
    return proc.descent(proc.children(proc.table()), leaders)


def write_termination_log(text: str, path: Path = TERMINATION_LOG) -> None:
    """Write the outcome for Kubernetes; the file is its mount and is never created."""
    try:
        with path.open("r+") as opened:
            opened.write(text)
            opened.truncate()
    except OSError as exc:
        logger.debug("no termination log: %s", exc)
