"""Runs the agent once its settings are known: connects services and edges, runs the named root tasks, and shuts down.

Root tasks handle failures in their environment and never return, so a root task ends only because of a bug. If that
happens, the task is restarted without affecting the other tasks. If the bus, the task queue or the heartbeat keeps
failing, or the supervisor loses a service, the daemon exits with a traceback, and the container's init restarts the
agent. Jobs keep running in all these cases.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from agent_shim.actions import access, blobs, compile, disks, dns, jobs, logs, scripts, state  # noqa: A004, F401 - importing registers them
from agent_shim.actions.agent import Agent, EdgeCallbacks
from agent_shim.actions.dispatch import Dispatcher
from agent_shim.actions.tasks import Tasks
from agent_shim.bulk import workers
from agent_shim.bulk.protocol import Execute
from agent_shim.core import settings
from agent_shim.core.errors import ActionError, BusError
from agent_shim.core.events import until_stopped
from agent_shim.core.keep_running import run_forever
from agent_shim.core.paths import Paths
from agent_shim.daemon import boot, job_recovery
from agent_shim.daemon.endings import Endings
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
from agent_shim.services.logs.rotation import Rotation, RotationLimits
from agent_shim.services.scripts import Scripts
from agent_shim.services.settings_store import SettingsStore
from agent_shim.services.spec_store import SpecStore
from agent_shim.services.sshd import Sshd
from agent_shim.services.state_backup import StateBackup
from agent_shim.services.trusted_cas import TrustedCas
from agent_shim.services.users import Users
from agent_shim.services.vitals import Vitals
from agent_shim.services.volume_lease import VolumeLeases
from agent_shim.supervisor import monit_api
from agent_shim.supervisor.supervisor import Event, Supervisor

if TYPE_CHECKING:
    from agent_shim.daemon.standalone import Standalone

logger = logging.getLogger(__name__)

MONIT_HTTP: Final = "127.0.0.1:2822"
MONIT_MAIL: Final = "127.0.0.1:2825"
BUS: Final = "AGENT_SHIM_BUS"
"""Environment variable that keeps the agent off the bus if its value is `off`. On a stemcell, `sv stop agent` does not
stop the agent but restarts it with this value. The jobs therefore stay supervised, just as monit keeps supervising them
when the Go agent is stopped.
"""
VITAL: Final = frozenset({"bus", "heartbeat", "tasks"})
"""The essential root tasks. If one of them keeps failing, the agent restarts."""
LAST_REPLIES_TIMEOUT_S: Final = 1.0
"""How long the agent may take to reply to delayed polls before it disconnects from the bus."""


class Runtime:
    """An agent with its services and edges. ``serve`` runs it. ``vitals`` are the figures that were sent in the last
    heartbeat.
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
        stop: asyncio.Event,
    ) -> None:
        """Create the agent, its services and its edges. When ``stop`` is set, the agent exits and leaves the jobs
        running.
        """
        self.is_booted = False
        """True as soon as requests are answered."""
        self.vitals: dict[str, Any] = {}
        self._begun_at = time.monotonic()
        self._health: tuple[str, tuple[int, int, int] | None] = "", None
        """Job state, and version of the health file, at the last heartbeat."""
        self._shim = shim
        self._leases = leases
        self._metrics = metrics
        self._stop = stop

        def settling() -> float:
            """Return the settling time in the current settings, in seconds."""
            return store.current.source.env.bosh.agent.settings.settling_time

        supervisor = Supervisor(paths, notify=self._notify, is_strict=shim.bpm.strict, settling=settling)
        edges = EdgeCallbacks(self._announce_shutdown, self._reconnect, lambda: self.endings.begin_shutdown())  # noqa: PLW0108 - self.endings is created later
        self._workers = workers.Workers()
        self.agent = assemble(
            paths,
            store,
            supervisor,
            edges,
            state_backup=state_backup,
            leases=leases,
            execute=self._workers.execute,
            ssh_port=shim.ssh.port,
        )
        self.dispatcher = Dispatcher(self.agent, self.agent.tasks, on_done=metrics.action_done)
        self.endings = Endings(self.agent, self.dispatcher)
        self.bus = self._make_bus(paths, store)
        self.alerts = alerts.Alerts(store.current.agent_id, self.bus.publish)
        self.heartbeat = heartbeat.Heartbeat(self._measure, self._compose, partial(self._publish, "heartbeat"))
        self.job_recovery = job_recovery.JobRecovery(self.agent, self._notify)
        self.address_watch = AddressWatch(
            lambda: address_watch.expected(store.current, self.agent.spec.current.networks),
            lambda where, text: self._notify(Event(where, "Connection changed", "alert", text)),
        )
        self.certificate_watch = CertificateWatch(lambda: certificates(self.bus.mbus))
        obstacle = firewall_obstacle(paths, is_wanted=shim.firewall)
        self.firewall = Firewall(lambda: self.bus.mbus, lambda: self.bus.is_connected, self._is_bus_heard, obstacle)
        self.standalone: Standalone | None = None
        if shim.spec:
            from agent_shim.daemon import standalone

            self.standalone = standalone.Standalone(self.agent, Path(shim.spec))

    def _make_bus(self, paths: Paths, store: SettingsStore) -> Bus:
        """Create the bus that the scheme of the first address requires: HTTPS (bosh CLI) or NATS (Director).

        The Go agent chooses in the same way (mbus/handler_provider.go).
        """
        is_off = os.environ.get(BUS) == "off"
        if is_off or self._shim.spec:
            from agent_shim.daemon.standalone import NoBus

            if is_off:
                logger.warning("the bus is off: this agent supervises the jobs and answers no Director")
            return NoBus()
        agent_id, mbus, handle = store.current.agent_id, store.current.mbus, self.dispatcher.handle
        if is_https(mbus):
            # Imported late, because an agent that uses NATS does not need aiohttp, which uses 9 MB.
            from agent_shim.edges.bus.https import HttpsBus

            return HttpsBus(mbus, partial(handle, limit=None), paths.blobs, on_connected=self._connected)
        return NatsBus(agent_id, mbus, handle, on_connected=self._connected, reread=store.other_mbus)

    @property
    def phase(self) -> str:
        """The agent's current phase in words. It is ``running`` while the agent answers requests."""
        return self.endings.phase or ("running" if self.is_booted else "booting")

    # --- serving ------------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Boot, then answer requests until ``stop`` is set. Late boot steps run while requests are answered."""
        agent, paths, monit = self.agent, self.agent.paths, self._shim.monit
        steps = boot.steps(agent, self.job_recovery, monit_password=monit.password)
        http = monit.http or (MONIT_HTTP if paths.is_system else "off")
        mail = monit.mail or (MONIT_MAIL if paths.is_system else "off")
        async with self._workers, agent.supervisor:
            if not await until_stopped(boot.boot([step for step in steps if not step.late]), self._stop):
                return
            await agent.tasks.resume(self.dispatcher.resumed())
            gc.freeze()  # exclude the permanent objects created by the boot from garbage collection
            self.is_booted = True
            users = monit_http.user_in(paths.monit_user)
            async with monit_http.listening(http, self.answer_monit, users), monit_http.refusing_mail(mail):
                await self._run([step for step in steps if step.late])

    async def _run(self, late: list[boot.Step]) -> None:
        """Run the root tasks until ``stop`` is set or the agent has to leave the bus. Then answer the polls
        whose replies are delayed, cancel all root tasks, and wait for ``stop``.
        """
        agent = self.agent
        booted = asyncio.Event()

        async def boot_late() -> None:
            await boot.boot(late)
            booted.set()

        async def recover_jobs() -> None:
            # A late step installs the trusted certificates, which jobs need as soon as they start.
            await booted.wait()
            await self.job_recovery.run()

        roots: dict[str, Callable[[], Awaitable[None]]] = {
            "bus": self.bus.run,
            "heartbeat": self.heartbeat.run,
            "alerts": self.alerts.run,
            "tasks": lambda: agent.tasks.run(self.dispatcher.failure),
            "settings": lambda: agent.settings.watch(self._settings_changed),
            "coming back": recover_jobs,
            "copy of the state": agent.state_backup.watch,
            "leases": lambda: self._leases.keep(self.endings.begin_takeover_stop),
            "addresses": self.address_watch.watch,
            "own names": lambda: agent.dns.keep_names(lambda: agent.settings.current.agent_id),
            "firewall": self.firewall.watch,
            "certificates": self.certificate_watch.watch,
            "loop lag": self._metrics.watch_lag,
        }
        wanted, spec = self._shim.logs, agent.spec
        if wanted.rotate:
            limits = RotationLimits(rotation.size(wanted.size), wanted.keep, rotation.size(wanted.total), wanted.period)
            roots["logs of jobs"] = Rotation(
                agent.paths, limits, lambda: spec.current.properties.logging.max_log_file_size
            ).run
        else:
            await asyncio.to_thread(rotation.leave_to_logrotate, agent.paths.logrotate_rule)
        if self.standalone is not None:
            roots["standalone"] = self.standalone.run
        try:
            async with asyncio.TaskGroup() as group:
                running: list[asyncio.Task[Any]] = [group.create_task(agent.supervisor.run(), name="supervisor")]
                running.append(group.create_task(boot_late(), name="late boot steps"))
                running += [
                    group.create_task(run_forever(name, run, is_vital=name in VITAL), name=name)
                    for name, run in roots.items()
                ]
                await until_stopped(self.endings.leaves_bus.wait(), self._stop)
                agent.tasks.release_polls()
                await self.bus.drain(LAST_REPLIES_TIMEOUT_S)
                for task in running:
                    task.cancel()
                await self._stop.wait()
        except BaseExceptionGroup as broken:  # the first error has ended the task group
            raise broken.exceptions[0] from None

    # --- requests from the edges --------------------------------------------------------------------------------------

    async def _is_bus_heard(self, timeout_s: float) -> bool:
        """Return True if the bus is NATS and a server sends anything within ``timeout_s`` seconds. The firewall uses
        this to verify that its rules do not block the agent itself.
        """
        return isinstance(self.bus, NatsBus) and await self.bus.is_heard(timeout_s)

    def _connected(self) -> None:
        """Send a heartbeat and the queued alerts, and have the firewall rules updated. Called whenever the bus has
        connected.
        """
        self.heartbeat.beat_now()
        self.firewall.due.set()
        self.alerts.flush()

    async def _measure(self) -> dict[str, Any]:
        """Measure the vitals. Also write the health file, which bosh-dns reads, if the job state or the file itself has
        changed.
        """
        path, job_state = self.agent.paths.health, self.agent.supervisor.job_state()
        if (version := files.version(path)) is None or (job_state, version) != self._health:
            await state.record_health(self.agent)
            self._health = job_state, files.version(path)
        self.vitals = await self.agent.vitals.sample()
        return self.vitals

    def _compose(self, vitals: dict[str, Any] | None) -> bytes:
        """Return a heartbeat message. ``vitals`` is None before the first measurement."""
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
        """Answer a request from the ``monit`` command or from a client of monit's HTTP interface."""
        obstacle = "" if self.phase == "running" else self.phase
        found = await monit_api.answer(self.agent.supervisor, request, obstacle=obstacle)
        return found | {"pid": os.getpid(), "uptime_secs": int(time.monotonic() - self._begun_at)}

    async def _publish(self, kind: str, message: bytes) -> None:
        """Send a ``heartbeat`` or ``shutdown`` message to the Health Monitor. Raises ``BusError``."""
        await self.bus.publish(f"hm.agent.{kind}.{self.agent.settings.current.agent_id}", message)

    async def _announce_shutdown(self) -> None:
        """Send the shutdown notice. Failures are ignored, because the notice only silences the Health Monitor
        (concrete_notifier.go).
        """
        try:
            await self._publish("shutdown", b"null")
        except BusError as exc:
            logger.warning("cannot notify the Health Monitor of the shutdown: %s", exc)

    async def _reconnect(self, wanted: settings.Mbus) -> None:
        """Connect to the bus with new addresses or credentials. Raises ``ActionError`` if that fails."""
        if is_https(wanted) != is_https(self.bus.mbus):
            raise ActionError(f"cannot go over to a bus of the kind {wanted.scheme}: that takes a restart of the agent")
        # An agent that restarts during the rotation may need the current credentials again.
        await self.agent.settings.keep_former(self.bus.mbus)
        await self.bus.rotate(wanted)

    async def _settings_changed(self, found: settings.Effective) -> None:
        """Reconnect to the bus if its addresses or credentials in the settings files have changed. If that fails, the
        current connection stays open.
        """
        if found.mbus == self.bus.mbus or os.environ.get(BUS) == "off":
            return
        try:
            await self._reconnect(found.mbus)
        except ActionError as exc:
            logger.error("the settings have changed, and %s", exc)

    def _notify(self, event: Event) -> None:
        """Queue an alert for the Health Monitor, with the addresses of this instance."""
        configured = self.agent.settings.current.source.networks.values()
        # The settings do not contain the addresses of dynamic networks. Take these addresses from the stored spec, into
        # which ``apply`` wrote them.
        stored = [members for members in self.agent.spec.current.networks.values() if isinstance(members, dict)]
        ips = {net.ip for net in configured if net.ip}
        ips |= {str(members["ip"]) for members in stored if members.get("ip")}
        self.alerts.raise_alert(event.service, event.event, event.action, event.description, ips)


def assemble(
    paths: Paths,
    store: SettingsStore,
    supervisor: Supervisor,
    edges: EdgeCallbacks,
    *,
    state_backup: StateBackup,
    leases: VolumeLeases,
    execute: Execute = workers.execute,
    ssh_port: int = 22,
) -> Agent:
    """Create an agent's services and connect them to each other."""
    spec = SpecStore(paths)

    def job_pids() -> set[int]:
        """Return the pids of all job processes and their descendants, which the agent is allowed to terminate in order
        to release a disk.
        """
        leaders = [service.pid for service in supervisor.services() if service.pid]
        return proc.descent(proc.children(proc.table()), leaders)

    environ = {**process.script_environment(os.environ), "TMPDIR": str(paths.tmp)}
    users = Users(paths)
    persistent = Disks(paths, lambda: store.current, lambda: spec.current.id, job_pids, leases)
    return Agent(
        paths=paths,
        settings=store,
        spec=spec,
        tasks=Tasks(paths.tasks),
        supervisor=supervisor,
        bundles=Bundles(paths, execute),
        compiler=Compiler(paths, environ, supervisor.keepers, execute),
        scripts=Scripts(paths, environ, supervisor.spawn_script),
        logs=Logs(paths, execute),
        vitals=Vitals(paths, lambda: persistent.is_mounted, persistent.dynamic_places),
        dns=Dns(paths),
        users=users,
        sshd=Sshd(paths, ssh_port, lambda: bool(users.made() or store.current.source.env.bosh.authorized_keys)),
        certificates=TrustedCas(paths),
        disks=persistent,
        state_backup=state_backup,
        edges=edges,
    )


def certificates(mbus: settings.Mbus) -> dict[str, str]:
    """Return the agent's certificate and its CA in PEM format, keyed by the names that metrics and warnings use."""
    if is_https(mbus):
        return {certificate_watch.HTTPS: mbus.certificate}
    return {"client": mbus.certificate, "CA": mbus.ca}


def is_https(mbus: settings.Mbus) -> bool:
    """Return True if the bus is HTTPS for the bosh CLI, rather than NATS for a Director."""
    return mbus.scheme == "https"


def firewall_obstacle(paths: Paths, *, is_wanted: bool) -> str:
    """Return the reason why the agent does not manage packet filter rules, or "" if it manages them."""
    if not is_wanted:
        return "it is switched off in agent.json"
    if not boot.owns_system(paths):
        return boot.NOT_ROOT
    return "the container shares the host's network with other programs" if network.is_of_machine() else ""
