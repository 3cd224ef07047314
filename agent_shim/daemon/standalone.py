"""Deploys the jobs and packages in a directory when the agent starts, without a Director.

``AgentShim.spec`` in agent.json names the directory. It contains ``jobs/NAME`` (rendered templates: ``monit``, ``bin``,
``config`` …), ``packages/NAME`` (compiled packages) and optionally ``instance.json`` with the instance's names. The
directory may come from an image or from a pod's volumes, and may be read-only. Jobs are copied, because their modes and
owners change and links to packages are added. Packages are used in place, except for a package named ``bpm``, which is
copied because the agent's own ``bpm`` is installed in it.

As with a Director, the pre-start scripts run first, then the jobs are started, and the post-start scripts run once all
processes are running. Probes, metrics, restarts and the graceful shutdown work as usual.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from agent_shim.actions import jobs
from agent_shim.actions.agent import Agent
from agent_shim.bulk.modes import DIRECTORY_MODE, set_owners_and_modes
from agent_shim.core import wire
from agent_shim.core.bus_stats import Stats
from agent_shim.core.errors import ActionError, ConfigError, HostError, ShimError, errors_as
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Mbus
from agent_shim.core.spec import AppliedPackage, ApplySpec, Archive, InstanceGroup, Template
from agent_shim.host import files
from agent_shim.services.bundles import BPM, Kind, checked_name

logger = logging.getLogger(__name__)

INSTANCE: Final = "instance.json"
TASK: Final = "deploy"
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0
"""Maximum number of seconds between attempts."""
POLL_S: Final = 0.2
"""Seconds between checks of whether all jobs are running."""


class InstanceNames(msgspec.Struct, frozen=True):
    """The content of ``instance.json``: the names that a Director would give this instance. ``persistent_disk`` is a
    size in MiB, which is passed to drain scripts.
    """

    deployment: str = "standalone"
    name: str = ""
    id: str = ""
    az: str = ""
    index: int = 0
    persistent_disk: int = 0


class Rendered(msgspec.Struct, frozen=True):
    """The content of a spec directory: the paths of the jobs and packages, and the spec that a Director would send for
    them.
    """

    spec: ApplySpec
    jobs: Mapping[str, Path]
    packages: Mapping[str, Path]


# --- the directory ----------------------------------------------------------------------------------------------------


def instance(directory: Path) -> InstanceNames:
    """Read ``instance.json``. If it names no id, the host name becomes the instance's id. Raises ``ConfigError``."""
    path = directory / INSTANCE
    try:
        found = wire.decode(files.read(path), InstanceNames)
    except FileNotFoundError:
        found = InstanceNames()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc
    return msgspec.structs.replace(found, id=found.id or socket.gethostname(), name=found.name or "standalone")


def write_settings(paths: Paths, directory: Path) -> Path:
    """Write settings as a CPI would for an agent without a bus, and return their path. This function blocks. Raises
    ``ConfigError``.
    """
    path = paths.bosh / "standalone.json"
    files.make_dir(path.parent, 0o700)
    document = {"agent_id": instance(directory).id.replace(".", "-")}  # the settings reject an agent id with a dot
    files.write_atomic(path, json.dumps(document).encode(), mode=0o600)
    return path


def read(directory: Path) -> Rendered:
    """Read a spec directory. This function blocks. Raises ``ActionError`` if there are no jobs or a name is invalid,
    and ``ConfigError`` for an invalid ``instance.json``.
    """
    found = {kind: _members(directory, kind) for kind in ("job", "package")}
    if not found["job"]:
        raise ActionError(f"cannot deploy {directory}: no job lies in {directory / 'jobs'}")
    versions = {kind: {name: _version(path) for name, path in paths.items()} for kind, paths in found.items()}
    digest = hashlib.sha256(json.dumps(versions, sort_keys=True).encode()).hexdigest()
    names = instance(directory)
    templates = [Template(name, version) for name, version in versions["job"].items()]
    spec = ApplySpec(
        job=InstanceGroup(name=names.name, template=templates[0].name, version=digest[:16], templates=templates),
        packages={name: AppliedPackage(name=name, version=version) for name, version in versions["package"].items()},
        configuration_hash=digest,
        deployment=names.deployment,
        name=names.name,
        index=names.index,
        id=names.id,
        az=names.az,
        persistent_disk=names.persistent_disk,
        rendered_templates_archive=Archive(),  # otherwise ``bundles_of`` would return no jobs
    )
    return Rendered(spec, found["job"], found["package"])


def _members(directory: Path, kind: str) -> dict[str, Path]:
    """Return the directories below ``jobs`` or ``packages`` by name, except hidden ones, such as the kubelet's
    ``..data``.
    """
    try:
        paths = sorted((directory / f"{kind}s").iterdir())
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise ActionError(f"cannot deploy {directory}: {exc}") from exc
    return {checked_name(kind, path.name): path for path in paths if path.is_dir() and not path.name.startswith(".")}


def _version(tree: Path) -> str:
    """Return a digest of the names, sizes, modes and times of the files below ``tree``."""
    seen = hashlib.sha256()
    for here, directories, names in os.walk(tree):
        # Skip the directories that the kubelet creates in a volume.
        directories[:] = sorted(name for name in directories if not name.startswith(".."))
        for path in (Path(here, name) for name in sorted(names)):
            status = path.stat() if path.exists() else path.lstat()
            facts = path.relative_to(tree), status.st_size, status.st_mode, status.st_mtime_ns
            seen.update(repr(facts).encode())
    return seen.hexdigest()[:16]


def install(paths: Paths, targets: Mapping[Path, tuple[Kind, Path]]) -> None:
    """Install the jobs as copies and the packages as links in the bundle directories. ``targets`` maps the directory of
    each bundle to its kind and its source. This function blocks. Raises ``HostError``.

    The ``bpm`` package is copied too, because the agent installs its own ``bin/bpm`` in it. Files whose names begin
    with ``..`` are left out, because the kubelet creates them in volumes.
    """
    for target, (kind, source) in targets.items():
        files.make_dir(target.parent, DIRECTORY_MODE[kind], paths.shared_owner)
        if kind == "package" and target.parent.name != BPM:
            files.swap_link(source, target)
            continue
        beside = files.sibling(target)
        try:
            shutil.copytree(source, beside, ignore=shutil.ignore_patterns("..*"))
            set_owners_and_modes(kind, beside, paths.shared_owner)
            if kind == "package":
                files.make_dir(beside / "bin", DIRECTORY_MODE[kind], paths.shared_owner)
            beside.rename(target)
        except OSError as exc:
            files.remove_tree(beside)
            raise files.failed(f"copy {source} to {target}", exc) from exc


# --- without a Director -----------------------------------------------------------------------------------------------


class NoBus:
    """A bus for an agent without a Director. Alerts are written to the log."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.mbus = Mbus((), "", "", "")
        self.is_connected = True  # otherwise the agent would never be reported as ready

    async def run(self) -> NoReturn:
        """Wait forever, because a root task must not return."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def drain(self, timeout_s: float) -> None:
        """Return immediately, because there is no connection."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Log alerts and drop heartbeats."""
        if subject.startswith("hm.agent.alert."):
            alert = msgspec.json.decode(data)
            logger.warning("alert: %s: %s", alert["title"], alert["summary"])

    async def rotate(self, mbus: Mbus) -> None:
        """Do nothing, because there is no other bus."""


class Standalone:
    """Deploys the jobs and packages in a spec directory. ``run`` is the root task."""

    def __init__(self, agent: Agent, directory: Path) -> None:
        self.obstacle = "the jobs are being deployed"
        """The reason why the jobs are not deployed, or ""."""
        self.failure = ""
        """The error of the last attempt, or "" after a success and before the first failure."""
        self._agent = agent
        self._directory = directory
        self._is_new = False
        """True from a deployment until the post-start scripts have succeeded."""

    async def run(self) -> NoReturn:
        """Retry until the deployment succeeds, then wait forever."""
        pause = FIRST_PAUSE_S
        while not await self._try_to_deploy():
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def _try_to_deploy(self) -> bool:
        """Deploy the jobs unless they are already deployed. Return True on success, otherwise set ``obstacle`` and
        ``failure``. While the jobs are starting, only ``obstacle`` is set, because a slow start is not a failure.
        """
        try:
            rendered = await asyncio.to_thread(read, self._directory)
            if not self._is_deployed(rendered.spec):
                await self._run_task(lambda: self._deploy(rendered))
                self._is_new = True
            if self._is_new:
                while self._agent.supervisor.job_state() != "running":
                    self.obstacle = f"jobs are {self._agent.supervisor.job_state()}"
                    await asyncio.sleep(POLL_S)
                await self._run_task(lambda: self._run_scripts("post-start"))
                self._is_new = False
        except (ShimError, HostError) as exc:
            if self.obstacle != str(exc):  # log a repeated error only once
                self.obstacle = self.failure = str(exc)
                logger.error("%s", self.obstacle)
            return False
        self.obstacle = self.failure = ""
        return True

    async def _run_task(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work`` as a task in the queue, where only one task runs at a time, and wait until it has finished.
        Raises ``ActionError`` if the task fails.
        """
        task = self._agent.tasks.submit(TASK, work)
        await task.ended.wait()
        if task.state != "done":
            raise ActionError(str(task.outcome))

    def _is_deployed(self, wanted: ApplySpec) -> bool:
        """Return True if the spec ``wanted`` is already deployed. Nothing is left to do then, because job recovery
        starts the jobs unless they were stopped.
        """
        agent = self._agent
        was_started = agent.supervisor.is_wanted or agent.paths.stopped_marker.exists()
        return was_started and agent.spec.current.configuration_hash == wanted.configuration_hash

    async def _deploy(self, rendered: Rendered) -> None:
        """Replace the deployed jobs with those in the spec directory, and start them."""
        agent = self._agent
        if agent.supervisor.count():
            await agent.supervisor.stop(wait=True)
        job_bundles, package_bundles = jobs.bundles_of(rendered.spec)
        sources = {"job": rendered.jobs, "package": rendered.packages}
        missing = agent.bundles.missing([*job_bundles, *package_bundles])
        targets = {agent.bundles.path(bundle): (bundle.kind, sources[bundle.kind][bundle.name]) for bundle in missing}
        await asyncio.to_thread(install, agent.paths, targets)
        await jobs.deploy(agent, rendered.spec)
        await self._run_scripts("pre-start")
        await jobs.start(agent)

    async def _run_scripts(self, name: str) -> None:
        """Run the lifecycle script ``name`` of all jobs. Raises ``ActionError`` if one of them fails."""
        logger.info("%s of all jobs", name)
        with errors_as(name, ActionError):
            await self._agent.scripts.run_all(name, self._agent.spec.current.job_names, {})
