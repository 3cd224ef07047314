"""Prepares the container for the Go agent and monit, while every process keeps running.

The files below ``bosh`` already have the Go agent's names and formats. ``hand_back`` removes files that would become
wrong or misleading. The markers on disks and the state backup are removed because the Go agent would not update them.
The monit files of stopped jobs are removed because monit, whose own state is older, would start these jobs.
Afterwards, logrotate rotates the job logs again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Final

from agent_shim.core import settings
from agent_shim.core.errors import HostError, NotThereError, SettingsError
from agent_shim.core.paths import Paths
from agent_shim.host import files, keeper, nftables, proc
from agent_shim.services import state_backup
from agent_shim.services.disks import hints, markers
from agent_shim.services.logs import rotation
from agent_shim.services.volume_lease import exclusive_agent
from agent_shim.supervisor.ownership.process_record import read as read_pidfile
from agent_shim.supervisor.plan import ProcessSpec, plan
from agent_shim.supervisor.supervisor import Saved, read_saved, write_monit_files

READY: Final = "the BOSH agent and monit may be started now"


def hand_back(paths: Paths) -> list[str]:
    """Prepare the container for the Go agent and monit, and return the lines of a report. It is safe to call this
    repeatedly.

    Raises ``AlreadyRunningError`` while an agent is running, ``NotThereError`` if the base does not exist, and
    ``HostError`` after any other failure. If the file that names the jobs or the disks cannot be read, nothing is
    removed. A partial removal would leave markers on unknown disks. The Go agent would not update these markers, so
    they would mislead a later agent.
    """
    if not paths.base.is_dir():
        raise NotThereError(f"cannot hand back: there is no directory {paths.base} (set the base with -b)")
    if not paths.bosh.is_dir():
        return [f"no agent has run below {paths.base}", READY]
    with exclusive_agent(paths, "hand back"):
        saved = read_saved(paths.supervisor_state)
        if saved is None and paths.supervisor_state.exists():
            raise HostError(
                f"cannot hand back: {paths.supervisor_state} cannot be read, so the jobs are not known; start the "
                "agent once and repeat this"
            )
        known = _known_disks(paths)
        report = [*_jobs(paths, saved), *_disks(paths, known), *_firewall(paths)]
        rotation.enable_rule(paths.logrotate_rule)
        files.remove_tree(paths.shut_down)
        files.remove_tree(paths.former_mbus)
        files.remove_tree(paths.shim_run)
        keeper.release_all(paths.keepers)
        state_backup.forget(paths)
    return [*report, READY]


def _jobs(paths: Paths, saved: Saved | None) -> Iterator[str]:
    """Remove the agent's monit files and, unless the jobs are stopped, write new ones for monit. Yield a line for the
    report about each service.
    """
    if saved is None:
        yield "no jobs were supervised"
        return
    files.remove_tree(paths.monit_job)
    files.make_dir(paths.monit_job, 0o755)
    if not saved.is_wanted or paths.stopped_marker.exists():
        yield "the jobs are stopped; monit learns of them when the Director starts them"
        return
    with files.attempting(f"write monit files to {paths.monit_job}"):
        write_monit_files(paths.monit_job, saved.files, is_synced=True)
    for spec in plan(saved.files):
        record = saved.services.get(spec.name.lower())
        yield _job(spec, record.processes.known if record else None)


def _job(spec: ProcessSpec, known: tuple[int, int] | None) -> str:
    """Describe how monit will treat a service's process. ``known`` is the process's pid and start time, or None if it
    was not running.
    """
    found = proc.stat(known[0]) if known else None
    if known is None or found is None or found.identity != known or not found.is_alive:
        return f"{spec.name} does not run: monit will start it"
    pidfile = read_pidfile(spec.pidfile) if spec.pidfile else None
    if spec.pidfile is not None and (pidfile is None or pidfile.pid != found.pid):
        return f"{spec.name} runs with pid {found.pid}, not the one in {spec.pidfile}: monit will start a second one"
    if spec.start_call is not None:  # the agent itself started this bpm process, without runc
        return f"{spec.name} runs with pid {found.pid}, without runc: the release's bpm cannot stop it, so you have to"
    return f"{spec.name} keeps running with pid {found.pid}"


def _known_disks(paths: Paths) -> Mapping[str, hints.DiskSettings]:
    """Return the persistent disks' settings by cid. Raises ``HostError`` if the stored settings cannot be read."""
    try:
        source = settings.parse(files.read(paths.settings_cache, is_own=True), origin=str(paths.settings_cache))
    except FileNotFoundError:
        return {}
    except (OSError, SettingsError) as exc:
        raise HostError(
            f"cannot hand back: the disks are not known: {exc}; start the agent once and repeat this"
        ) from exc
    return hints.known(source.disks.persistent, source.env, hints.load(paths.disk_hints))


def _disks(paths: Paths, known: Mapping[str, hints.DiskSettings]) -> Iterator[str]:
    """Remove the agent's markers from the disks, and yield a line for the report about each of them."""
    for disk in known.values():
        place = disk.place or paths.store  # a disk without a known path may be the one mounted at the store
        if (marker := markers.read(place)) is not None:
            files.remove_tree(place / markers.DIRECTORY)
            is_store = marker.cid in known and marker.role == "store"
            more = f"; {paths.managed_disk} says it is the store" if is_store else ""
            yield f"disk {marker.cid}: our marker is removed{more}"
    if paths.store.is_symlink():
        yield f"{paths.store} is a link to the disk, since this container may not mount: the BOSH agent cannot use that"


def _firewall(paths: Paths) -> Iterator[str]:
    """Remove agent-shim's nftables table, and yield a line for the report if that fails. The Go agent would not update
    the table, because it has its own. If the bus addresses changed later, agent-shim's table would still block jobs
    from the old addresses.
    """
    if paths.is_system and nftables.is_installed():
        try:
            asyncio.run(nftables.remove())
        except HostError as exc:
            yield f"cannot remove packet filter rules, if there are any: {exc}"
