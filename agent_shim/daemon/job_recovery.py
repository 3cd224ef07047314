"""Starts the jobs again after the container has restarted, without a request from the Director.

The jobs start once their persistent disk is mounted. On a new root file system, their pre-start scripts run first,
because the files that these scripts created outside ``/var/vcap`` are lost. While something prevents the start,
recovery retries with growing pauses, and the instance is reported as failing. The Director takes precedence: a request
that changes the jobs cancels the current attempt, and after a successful ``start`` there are no more attempts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.actions.jobs import missing_files, monit_files
from agent_shim.actions.state import record_health
from agent_shim.core.errors import ActionError, HostError, ShimError, errors_as
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Settings
from agent_shim.host import keeper, proc
from agent_shim.services.disks import hints, markers
from agent_shim.services.volume_lease import VolumeLeases
from agent_shim.supervisor.supervisor import Event, read_saved

logger = logging.getLogger(__name__)

TASK: Final = "recover the jobs"
GO_FIRST: Final = frozenset({"apply", "drain", "migrate_disk", "run_script", "stop", "unmount_disk"})
"""Actions that take precedence over job recovery. If the Director requests one of them, the current attempt to start
the jobs is abandoned.
"""


class RecoveryPace(msgspec.Struct, frozen=True):
    """Timing in seconds: the first and the longest pause between attempts, and how often a running attempt checks
    whether the Director has sent a request.
    """

    first: float = 1.0
    limit: float = 30.0
    look: float = 0.5


class JobRecovery:
    """Starts the jobs again after the container or the agent has restarted. ``begin`` is called as a boot step. If it
    cannot start the jobs yet, the task ``run`` keeps trying. ``alert`` is called with each new obstacle.
    """

    def __init__(self, agent: Agent, alert: Callable[[Event], None], *, pace: RecoveryPace = RecoveryPace()) -> None:
        self.obstacle = ""
        """The reason why the jobs cannot be started, or ""."""
        self._agent = agent
        self._alert = alert
        self._pace = pace
        self._reported = ""
        """The last obstacle that was reported as an alert."""

    async def begin(self) -> str | None:
        """Boot step: adopt running processes and start missing ones. Return the reason if the start has to wait, or
        None.
        """
        agent = self._agent
        obstacle = await self._find_obstacle()
        if obstacle or not agent.state_backup.is_prepared:
            agent.supervisor.hold(obstacle)
        if not await agent.supervisor.recover(root_is_new=agent.state_backup.root_is_new):
            await self._take_over()
        if not agent.supervisor.is_wanted:  # there is nothing to start, so do not report the jobs as failing
            agent.supervisor.end_hold()
        if not agent.supervisor.is_held:
            return None
        self._record_obstacle(obstacle)
        return obstacle or "the pre-start scripts come first"

    async def _take_over(self) -> None:
        """Supervise the jobs in the spec although there is no saved state, and start them unless they were stopped.

        This is needed in three cases: if the agent takes over from monit, whose job files are in ``monit/job``; if the
        state file cannot be read; and if the spec was restored on a new root file system. In all other cases, nothing
        has been deployed, and nothing is done. A running process that is named in a pidfile is supervised and not
        started again.
        """
        agent = self._agent
        monit, state = agent.paths.monit_job, agent.paths.supervisor_state
        is_restored = agent.state_backup.root_is_new
        if not is_restored and not await asyncio.to_thread(lambda: any(monit.glob("*.monitrc")) or state.exists()):
            return
        files = await asyncio.to_thread(monit_files, agent.paths.jobs, agent.spec.current.job_names)
        logger.info("taking over the processes of %d jobs", len(agent.spec.current.job_names))
        await agent.supervisor.configure(files)
        for service in agent.supervisor.services():
            agent.supervisor.trust_pidfile(service.process.name)
        if not await asyncio.to_thread(agent.paths.stopped_marker.exists):
            # Nobody is waiting for the result of this start, so start the jobs even if the start cannot be saved.
            await agent.supervisor.start(is_asked=False)

    async def run(self) -> None:
        """Retry until the jobs are started, by this task or by the Director, then wait forever."""
        agent, pause = self._agent, self._pace.first
        while agent.supervisor.is_held:
            await agent.tasks.submit(TASK, self._attempt).ended.wait()
            if agent.supervisor.is_held:
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._pace.limit)
        self.obstacle = ""
        await asyncio.Event().wait()

    async def _attempt(self) -> None:
        """Try once to start the jobs. This runs as a task in the queue, so that it never runs at the same time as one
        of the Director's tasks. If such a task has stopped or started the jobs in the meantime, only end the hold.
        """
        agent = self._agent
        try:
            if agent.supervisor.is_wanted and agent.supervisor.is_held:
                await agent.disks.recover()
                self._record_obstacle(await self._find_obstacle())
                if self.obstacle or not await self._pre_start():
                    return
                await agent.state_backup.prepared()
            agent.supervisor.end_hold()
            await record_health(agent)
        except (ShimError, HostError) as exc:
            self._record_obstacle(str(exc))

    async def _find_obstacle(self) -> str:
        """Return the reason why the jobs cannot be started, or ""."""
        state = self._agent.state_backup
        if state.root_is_new and state.unwritable:
            return f"the state of this instance may be out of date: {state.unwritable}"
        return missing_files(self._agent) or await self._agent.disks.problem()

    def _record_obstacle(self, obstacle: str) -> None:
        """Hold the jobs back and record the obstacle. ``obstacle`` is "" while the start is merely being prepared. Each
        new obstacle is logged once and reported in one alert.
        """
        self.obstacle = obstacle
        self._agent.supervisor.hold(obstacle)
        if obstacle not in ("", self._reported):
            self._reported = obstacle
            logger.error("the jobs cannot be started: %s", obstacle)
            self._alert(Event("agent", "Execution failed", "alert", f"cannot start the jobs: {obstacle}"))

    async def _pre_start(self) -> bool:
        """Run pre-start scripts if they are due. Return False if a request from the Director takes precedence, in which
        case the scripts are terminated.
        """
        agent = self._agent
        if agent.state_backup.is_prepared:
            return True
        logger.info("pre-start of all jobs: the root file system is a new one")
        names = agent.spec.current.job_names
        running = asyncio.create_task(agent.scripts.run_all("pre-start", names, {}), name="pre-start")
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=self._pace.look)
                is_preempted = not GO_FIRST.isdisjoint(agent.tasks.waiting_methods())
                # The hold ends when the Director starts the jobs.
                if not running.done() and (is_preempted or not agent.supervisor.is_held):
                    return False
            with errors_as("pre-start", ActionError):
                running.result()
            return True
        finally:
            running.cancel()
            await asyncio.wait({running})


def jobs_live(paths: Paths) -> bool:
    """Return True if a process that an agent started or watched for a job is still alive in this container. This
    function blocks.

    In a new container, the result is always False. ``StateBackup.begin`` uses the result to recognize a container in
    which only the agent has restarted.
    """
    saved = read_saved(paths.supervisor_state)
    if saved is not None and saved.incarnation == proc.incarnation() != "":
        for service in saved.services.values():
            record = service.processes
            for identity in (record.known, record.program, *record.others):
                if identity is not None and proc.is_there(identity):
                    return True
    return bool(keeper.living(paths.keepers))


def twin(leases: VolumeLeases, paths: Paths, source: Settings) -> str:
    """Return a message that names one of this agent's disks and another agent that uses it, or "" if there is none.
    Only agents with the same ``agent_id`` are considered, such as this agent's predecessor.

    This function blocks while it reads from the disks. A disk that cannot be read is treated as unused.
    """
    for cid, disk in hints.known(source.disks.persistent, source.env, hints.load(paths.disk_hints)).items():
        if disk.place is None or (marker := markers.read(disk.place)) is None or not marker.role:
            continue
        with suppress(OSError):
            if found := leases.twin(disk.place / markers.DIRECTORY):
                return f"disk {cid} is in use by {found}"
    return ""
