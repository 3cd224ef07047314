"""Boots the agent in named, idempotent steps. Each step is timed, and its outcome, or the reason for skipping it, is
logged.

The order of the steps and the file modes follow the Go agent (agent/bootstrap.go, platform/linux_platform.go). Steps
that configure a machine (interfaces, partitions, mounts over system directories) are omitted in a container.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_shim.actions.agent import Agent
from agent_shim.actions.jobs import bundles_of
from agent_shim.core.errors import ActionError, BootError, HostError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import BoshEnv
from agent_shim.daemon.job_recovery import JobRecovery
from agent_shim.host import cgroups, files, mounts
from agent_shim.host.descriptors import closing
from agent_shim.services import bosh_env, resolver
from agent_shim.services.bundles import install_bpm_wrapper
from agent_shim.services.users import NO_PASSWORD

logger = logging.getLogger(__name__)

LEFT_TO_THE_CONTAINER: Final = (
    "network interfaces",
    "system disk",
    "ephemeral disk",
    "shared memory",
    "log, opt and home directories",
)
"""The Go agent's boot steps that are omitted here, because the container runtime has already done them."""

GO_AGENT_PASSWORD: Final = "random-password"  # noqa: S105 - this password is public
"""The password that the Go agent always writes to monit.user."""

RUN: Final = Path("/run")
"""The system daemons' run-time directory. It is an emptyDir if the root file system is read-only."""

MIN_FREE_BYTES: Final = 1 << 20
"""Free space on the data volume below which the boot logs a warning."""

NOT_ROOT: Final = "needs root and the base directory /var/vcap"


Run = Callable[[], Awaitable[str | None]]
"""A function that executes a step and returns why the step was skipped, or None."""


class Step(msgspec.Struct, frozen=True):
    """One idempotent boot action. If a ``vital`` step fails, the boot fails; failures of other steps are only logged.

    A ``late`` step runs while the bus is connecting, because neither the bus nor any request depends on it.
    """

    name: str
    run: Run
    vital: bool = False
    late: bool = False


async def boot(steps: list[Step]) -> None:
    """Run the steps in order and log each outcome. Raises ``BootError`` if a vital step fails. If any other
    step fails, it is logged as skipped, with its error as the reason.
    """
    for step in steps:
        begun_at = time.monotonic()
        try:
            skipped = await step.run()
        except (OSError, ActionError) as exc:
            if step.vital:
                raise BootError(f"cannot boot: step {step.name}: {exc}") from exc
            skipped = str(exc)
        milliseconds = (time.monotonic() - begun_at) * 1000
        outcome = f"skipped: {skipped}" if skipped else "done"
        logger.info("boot step %s: %s (%.1f ms)", step.name, outcome, milliseconds)


def directories(paths: Paths) -> list[tuple[Path, int, str | None]]:
    """Return the directories to create, with the modes and owners that the Go agent gives them during its bootstrap. If
    the owner is None, it is not changed.
    """
    own = "root:root" if paths.is_system else None
    shared = paths.shared_owner
    return [
        (paths.bosh, 0o700, own),
        (paths.bosh_etc, 0o755, own),
        (paths.agent_log, 0o750, own),
        (paths.data, 0o755, None),
        (paths.mirror, 0o700, own),
        (paths.data_sys, 0o750, shared),
        (paths.log, 0o750, shared),
        (paths.run, 0o1777, shared),
        (paths.shim_run, 0o700, own),
        (paths.keepers, 0o700, own),
        (paths.data_jobs, 0o750, shared),
        (paths.data_packages, 0o755, shared),
        (paths.sensitive_blobs, 0o700, shared),
        (paths.sensitive_blobs / "tmp", 0o750, shared),
        (paths.blobs, 0o700, shared),
        (paths.blobs / "tmp", 0o750, shared),
        (paths.dynamic_disks, 0o700, shared),
        (paths.tmp, 0o755, own),
        (paths.jobs, 0o750, shared),
        (paths.packages, 0o755, shared),
        (paths.instance, 0o755, own),
        (paths.monit, 0o755, own),
        (paths.monit_job, 0o755, own),
        (paths.empty, 0o755, own),
    ]


def make_tree(paths: Paths) -> None:
    """Create the directories and the ``sys`` link.

    The kubelet makes every emptyDir world-writable. This permission is removed, because a job could otherwise replace
    directories that contain programs run by root. All users are allowed to enter volumes, because some provisioners
    create them with mode 0750.
    """
    if os.geteuid() == 0:
        for path in filter(Path.is_dir, (paths.base, paths.data)):
            try:
                files.close_to_others(path, "root:root" if paths.is_system else None, more=0o755)
            except HostError as exc:
                logger.warning("%s: jobs may replace programs that root runs", exc)
    for path, mode, owner in directories(paths):
        if path == paths.data and path.is_dir():  # a volume keeps its mode, except for the changes above
            continue
        # The agent's run directory is in sys/run, where all users may create entries, so a job may have created it.
        make = files.make_own_dir if path == paths.shim_run else files.make_dir
        make(path, mode, owner)
    if not paths.sys.is_symlink() or paths.sys.readlink() != paths.data_sys:
        files.swap_link(paths.data_sys, paths.sys)
    try:
        files.remove_tree(paths.tmp / "outcomes")  # earlier versions stored task results there
    except HostError as exc:
        logger.warning("%s", exc)


def steps(agent: Agent, recovery: JobRecovery, *, monit_password: str = "") -> list[Step]:
    """Return the boot steps that follow once the settings are known."""
    paths, settings = agent.paths, agent.settings.current
    bosh = settings.source.env.bosh

    async def omitted() -> str:
        return "it belongs to the container runtime"

    async def refused() -> str | None:
        return bosh_env.refused(bosh)

    async def names() -> str | None:
        return None if await agent.dns.restore(settings.agent_id) else "no records yet"

    async def leftovers() -> None:
        await agent.bundles.sweep()
        await agent.compiler.clean()
        await agent.logs.tidy()

    async def disks() -> str | None:
        await agent.disks.recover()
        return await agent.disks.problem() or None

    def as_root(run: Callable[..., Awaitable[str | None]], *arguments: Any, **options: Any) -> Run:
        """Return a step function that calls ``run`` with ``arguments`` and ``options`` if ``owns_system`` is True, and
        does nothing otherwise.
        """

        async def checked() -> str | None:
            return await run(*arguments, **options) if owns_system(paths) else NOT_ROOT

        return checked

    password = bosh.password or NO_PASSWORD
    tools = partial(bosh_env.remove_listed, paths.dev_tools_list, is_wanted=bosh.remove_dev_tools)
    libraries = partial(bosh_env.remove_listed, paths.static_libraries_list, is_wanted=bosh.remove_static_libraries)
    # Try only once, because job recovery waits for this step.
    authorities = partial(agent.certificates.install, settings.update.trusted_certs, tries=1)
    return [
        *(Step(name, omitted) for name in LEFT_TO_THE_CONTAINER),
        Step("own names", partial(agent.dns.name_self, settings.agent_id)),
        Step("authorized keys", as_root(_authorize_keys, agent, bosh.authorized_keys), late=True),
        Step("passwords", as_root(agent.users.set_passwords, password, keep_root=bosh.keep_root_password), late=True),
        Step("ssh server", as_root(agent.sshd.settle), late=True),
        Step("unsupported keys in env.bosh", refused),
        Step("settings in memory", as_root(bosh_env.settings_in_memory, paths, bosh)),
        Step("development tools", as_root(tools)),
        Step("static libraries", as_root(libraries)),
        Step("directories in memory", as_root(_put_in_memory, paths, bosh)),
        Step("name servers", as_root(resolver.write_servers, settings.name_servers)),
        Step("time servers", partial(_write_time_servers, paths, settings.ntp)),
        Step("temporary files", as_root(asyncio.to_thread, _make_temporary_files, paths)),
        Step("out-of-memory kills", partial(asyncio.to_thread, _kill_one_process, paths)),
        Step("trusted certificates", authorities, late=True),
        Step("names of other instances", names),
        Step("leftovers from interrupted work", leftovers),
        # Install bpm at boot, because scripts and operators may call it before the first ``apply``.
        Step("bpm command", partial(asyncio.to_thread, install_bpm_wrapper, paths)),
        Step("monit user", partial(_write_monit_user, paths, monit_password)),
        Step("instance links and files", partial(_restore_instance, agent), vital=True),
        Step("job directories", partial(_make_job_directories, agent), vital=True),
        Step("persistent disk", disks),
        Step("jobs that ran before", recovery.begin, vital=True),
    ]


async def _authorize_keys(agent: Agent, keys: list[str]) -> str | None:
    """Boot step: allow SSH logins as vcap with any of the ``keys``."""
    if not keys:
        return "no keys in the settings"
    await agent.users.authorize_vcap(keys)
    return None


async def _put_in_memory(paths: Paths, bosh: BoshEnv) -> str | None:
    """Boot step: mount a tmpfs on each directory for which ``env.bosh`` requests one. These can be the directories for
    rendered jobs, blobs with secrets, and run files. Return the reason if nothing is mounted, or None.
    """
    wanted = {}
    if bosh.job_dir.tmpfs:
        wanted = dict.fromkeys((paths.data_jobs, paths.sensitive_blobs), bosh.job_dir.size("100m"))
    if bosh.run_dir.tmpfs or bosh.run_dir.tmpfs_size:
        wanted[paths.run] = bosh.run_dir.size("16m")
    if not wanted:
        return "none are requested"
    for path, size in wanted.items():
        await asyncio.to_thread(_mount_tmpfs, path, size, paths.shim_run)
    await asyncio.to_thread(make_tree, paths)  # the new mounts hide the directories created before
    return None


def _mount_tmpfs(path: Path, size: str, shim_run: Path) -> None:
    """Mount a tmpfs of ``size`` (such as ``16m``) on a directory unless it is already a mount point. The agent's own
    run files stay visible.
    """
    if mounts.is_mount_point(path):
        return
    # Keep ``shim_run`` open, because the tmpfs may cover it.
    with closing(os.open(shim_run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as covered:
        mounts.mount_tmpfs(path, f"size={size},mode=0750")
        if shim_run.is_relative_to(path):
            files.make_dir(shim_run, 0o700)
            mounts.bind(Path(f"/proc/self/fd/{covered}"), shim_run)


async def _write_time_servers(paths: Paths, servers: list[str]) -> str | None:
    """Boot step: write the names of the time servers to the file in which the Go agent stores them."""
    if not servers:
        return "no servers in the settings"
    await asyncio.to_thread(files.write_atomic, paths.bosh_etc / "ntpserver", " ".join(servers).encode())
    return None


def _kill_one_process(paths: Paths) -> str | None:
    """Boot step: when memory runs out, let the kernel kill only one process in this container instead of the agent and
    all jobs. Return the reason if nothing was changed, or None.

    This works only if the container's cgroup is writable, as in privileged pods. An agent that is not root can also do
    this if the runtime delegates the cgroup to it (runc with ``cgroup_writable``), because ``memory.oom.group`` is one
    of the delegated files (/sys/kernel/cgroup/delegate).
    """
    if not paths.is_system:
        return "needs the base directory /var/vcap"
    try:
        if not cgroups.end_oom_group(cgroups.find()):
            return "already limited to one process"
    except OSError as exc:
        return f"an out-of-memory kill ends all jobs, unless the kubelet has singleProcessOOMKill set: {exc.strerror}"
    return None


def _make_temporary_files(paths: Paths) -> None:
    """Boot step: create the directories for temporary and run-time files, or correct their modes and owners."""
    for path in (Path("/tmp"), Path("/var/tmp")):  # noqa: S108 - the function creates these directories
        files.make_dir(path, 0o1777, paths.shared_owner)
    files.make_dir(RUN, 0o755, "root:root")


async def _write_monit_user(paths: Paths, password: str) -> str | None:
    """Boot step: write monit's user and password. If ``password`` is "", an existing password is kept, because running
    jobs read it when they started. However, the Go agent's password is replaced by a random one, because it is publicly
    known. Return the reason if nothing was written, or None.
    """
    try:
        found = (await asyncio.to_thread(files.read, paths.monit_user, is_own=True)).decode()
    except (OSError, ValueError):
        found = ""
    has_own_password = found.startswith("vcap:") and found.removeprefix("vcap:").strip() not in ("", GO_AGENT_PASSWORD)
    if has_own_password and not password:
        return "it exists"
    line = f"vcap:{password or secrets.token_hex(16)}\n"
    await asyncio.to_thread(files.write_atomic, paths.monit_user, line.encode(), mode=0o600)
    return None


async def _restore_instance(agent: Agent) -> str | None:
    """Load the spec. On a new root file system, restore its links and instance files. Return None if they were
    restored, otherwise the reason why not.
    """
    spec = await agent.spec.load()
    if not agent.state_backup.root_is_new:
        return "the root file system is not new"
    jobs, packages = bundles_of(spec)
    gone = agent.bundles.missing([*jobs, *packages])
    present_jobs = [job for job in jobs if job not in gone]
    present_packages = [package for package in packages if package not in gone]
    await agent.bundles.link(present_jobs, present_packages)
    await asyncio.to_thread(agent.spec.write_instance_files)
    return None


async def _make_job_directories(agent: Agent) -> str | None:
    """Boot step: create the deployed jobs' log, run and data directories. Return the reason if there are no jobs, or
    None.
    """
    if not agent.spec.current.jobs:
        return "nothing is deployed yet"
    await agent.bundles.make_job_dirs(agent.spec.current.job_names)
    return None


def owns_system(paths: Paths) -> bool:
    """Return True if the agent is root and its base is /var/vcap. Only then may it change users and /tmp."""
    return paths.is_system and os.geteuid() == 0


def tree_step(paths: Paths) -> Step:
    """Return the boot step that creates the directories. It runs before the settings are known."""

    async def tree() -> str | None:
        await asyncio.to_thread(make_tree, paths)
        # Remove temporary files before the agent writes any. The existing ones were left behind by a killed agent.
        await asyncio.to_thread(files.sweep, [paths.bosh, paths.mirror, paths.monit, paths.instance])
        free = shutil.disk_usage(paths.data).free
        if free < MIN_FREE_BYTES:
            logger.warning("%s has %d bytes free", paths.data, free)
        return None

    return Step("directories", tree, vital=True)
