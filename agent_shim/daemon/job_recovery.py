"""Jobs that ran before the container was restarted run again, before anybody asks.

Nothing of them is started before their disk is on the store and, where the root file system is a new one, before their
pre-start scripts have run: what those had made outside ``/var/vcap`` is gone. What is in the way is tried again, with
growing pauses; meanwhile the instance is failing. The Director goes first: a request of it that changes the jobs ends
the attempt, and a ``start`` ends the waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from agent_shim.actions.agent import Agent
from agent_shim.actions.jobs import missing_files, monit_files
from agent_shim.actions.state import record_health
from agent_shim.core.errors import ActionError, HostError, ShimError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Settings
from agent_shim.services.disks import hints, markers
from agent_shim.services.volume_lease import VolumeLeases
from agent_shim.supervisor.supervisor import Event

logger = logging.getLogger(__name__)

TASK: Final = "bring the jobs back"
GO_FIRST: Final = frozenset({"apply", "drain", "migrate_disk", "run_script", "stop", "unmount_disk"})
"""What the Director may ask that ends an attempt."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds before the second attempt, and between attempts at most; between looks whether the Director waits."""

    first: float = 1.0
    limit: float = 30.0
    look: float = 0.5


class JobRecovery:
    """``begin`` is the boot step for the jobs, ``run`` the root task that does what takes longer.

    ``tell`` is called when something new is in the way.
    """

    def __init__(self, agent: Agent, tell: Callable[[Event], None], *, pace: Pace = Pace()) -> None:
        self.obstacle = ""
        """Why the jobs cannot be started."""
        self._agent = agent
        self._tell = tell
        self._pace = pace
        self._told = ""

    async def begin(self) -> str | None:
        """Adopt what runs and start what shall run, unless that has to wait; why it has to, or None."""
        agent = self._agent
        obstacle = await self._find_obstacle()
        if obstacle or not agent.mirror.is_prepared:
            agent.supervisor.hold(obstacle)
        if not await agent.supervisor.recover(root_is_new=agent.mirror.root_is_new):
            await self._take_over()
        if not agent.supervisor.is_wanted:
            agent.supervisor.resume()
        if not agent.supervisor.is_held:
            return None
        self._found(obstacle)
        return obstacle or "the pre-start scripts come first"

    async def _take_over(self) -> None:
        """Go on where monit ended, or start what the spec names where our own memory of it is lost.

        Processes that run are adopted: they carry monit's mark (platform of the Go agent: ``monit/job``).
        """
        agent = self._agent
        was_monit = await asyncio.to_thread(lambda: any(agent.paths.monit_job.glob("*.monitrc")))
        if not (was_monit or agent.paths.supervisor_state.exists()):
            return
        files = await asyncio.to_thread(monit_files, agent.paths.jobs, agent.spec.current.job_names)
        logger.info("taking over the processes of %d jobs", len(agent.spec.current.job_names))
        await agent.supervisor.configure(files)
        if not agent.paths.stopped_marker.exists():
            await agent.supervisor.start()

    async def run(self) -> None:
        """Attempt until the jobs are started, by us or by the Director; then there is nothing more to do, for ever."""
        agent, pause = self._agent, self._pace.first
        while agent.supervisor.is_held:
            await agent.tasks.submit(TASK, self._attempt).ended.wait()
            if agent.supervisor.is_held:
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._pace.limit)
        self.obstacle = ""
        await asyncio.Event().wait()

    async def _attempt(self) -> None:
        """The work of a task, so that it does not run beside one of the Director's."""
        agent = self._agent
        try:
            if agent.supervisor.is_wanted and agent.supervisor.is_held:
                await agent.disks.recover()
                self._found(await self._find_obstacle())
                if self.obstacle or not await self._pre_start():
                    return
                await agent.mirror.prepared()
            agent.supervisor.resume()
            await record_health(agent)
        except (ShimError, HostError) as exc:
            self._found(str(exc))

    async def _find_obstacle(self) -> str:
        return missing_files(self._agent) or await self._agent.disks.problem()

    def _found(self, obstacle: str) -> None:
        """Wait, and say what is in the way, once."""
        self.obstacle = obstacle
        self._agent.supervisor.hold(obstacle)
        if obstacle not in ("", self._told):
            self._told = obstacle
            logger.error("the jobs cannot be started: %s", obstacle)
            self._tell(Event("agent", "Execution failed", "alert", f"cannot start the jobs: {obstacle}"))

    async def _pre_start(self) -> bool:
        """Run the scripts where they are due; False when the Director has something else in mind."""
        agent = self._agent
        if agent.mirror.is_prepared:
            return True
        logger.info("pre-start of all jobs: the root file system is a new one")
        names = agent.spec.current.job_names
        running = asyncio.create_task(agent.scripts.run_all("pre-start", names, {}), name="pre-start")
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=self._pace.look)
                if not running.done() and not self._may_go_on():
                    return False
            try:
                running.result()
            except ActionError as exc:
                raise ActionError(f"pre-start: {exc}") from exc
            return True
        finally:
            running.cancel()
            await asyncio.wait({running})

    def _may_go_on(self) -> bool:
        return self._agent.supervisor.is_held and GO_FIRST.isdisjoint(self._agent.tasks.waiting_methods())


def twin(fence: VolumeLeases, paths: Paths, source: Settings) -> str:
    """Which of our disks is in use by an agent with our own id, the one before us perhaps, and where it is.

    Blocks on the disks. What cannot be looked at is in use by nobody.
    """
    known = hints.known(source.disks.persistent, source.env, hints.load(paths.disk_hints))
    for cid, disk in known.items():
        marker = markers.read(disk.place) if disk.place is not None else None
        if disk.place is None or marker is None or not marker.role:
            continue
        with suppress(OSError):
            if found := fence.twin(disk.place / markers.DIRECTORY):
                return f"disk {cid} is in use by {found}"
    return ""
