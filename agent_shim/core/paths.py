"""The file tree of an agent as one value.

``Paths()`` is the tree of a BOSH machine. ``Paths(DIR)`` moves all of it below ``DIR``, which takes the place of
``/var/vcap``; files in ``/etc`` move to ``DIR/etc``, so nothing outside ``DIR`` is written. Names and locations are
those of the Go agent (settings/directories/directories_provider.go).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

VCAP = Path("/var/vcap")


@dataclass(frozen=True, slots=True)
class Paths:
    """Every path of the agent; properties only, no disk access."""

    base: Path = VCAP

    @property
    def is_system(self) -> bool:
        """True for the real tree: only then may the agent change files outside ``base`` (``/etc``)."""
        return self.base == VCAP

    @property
    def etc(self) -> Path:
        return Path("/etc") if self.is_system else self.base / "etc"

    @property
    def logrotate_rule(self) -> Path:
        """The file by which cron and logrotate rotate the logs of jobs under the Go agent."""
        return self.etc / "logrotate.d" / "vcap"

    @property
    def system_log(self) -> Path:
        """The directory that ``bosh logs --system`` packs."""
        return Path("/var/log") if self.is_system else self.base / "var/log"

    @property
    def shared_owner(self) -> str | None:
        """Owner of the directories that jobs may read: ``root:vcap``.

        Below another base None, which leaves them to their creator.
        """
        return "root:vcap" if self.is_system else None

    # --- bosh: the agent's own state -------------------------------------------------------------------------------

    @property
    def bosh(self) -> Path:
        return self.base / "bosh"

    @property
    def bosh_etc(self) -> Path:
        return self.bosh / "etc"

    @property
    def dev_tools_list(self) -> Path:
        """The list of files of compilers, one a line."""
        return self.bosh_etc / "dev_tools_file_list"

    @property
    def static_libraries_list(self) -> Path:
        """The list of libraries that only a compiler needs, one a line."""
        return self.bosh_etc / "static_libraries_list"

    @property
    def bosh_bin(self) -> Path:
        return self.bosh / "bin"

    @property
    def agent_log(self) -> Path:
        """The directory that ``bosh logs --agent`` packs."""
        return self.bosh / "log"

    @property
    def settings_tmpfs(self) -> Path:
        """The directory of files with credentials if ``env.bosh.agent.settings.tmpfs`` is set."""
        return self.bosh / "settings"

    @property
    def with_credentials(self) -> tuple[Path, ...]:
        """Files that are then links to files in ``settings_tmpfs``."""
        return (self.settings_cache, self.update_settings, self.former_mbus, self.disk_hints)

    @property
    def settings_cache(self) -> Path:
        return self.bosh / "settings.json"

    @property
    def update_settings(self) -> Path:
        return self.bosh / "update_settings.json"

    @property
    def former_mbus(self) -> Path:
        """The credentials of the bus before the last rotation."""
        return self.bosh / "former_mbus.json"

    @property
    def spec(self) -> Path:
        return self.bosh / "spec.json"

    @property
    def tasks(self) -> Path:
        return self.bosh / "tasks.json"

    @property
    def disk_hints(self) -> Path:
        return self.bosh / "persistent_disk_hints.json"

    @property
    def stamp(self) -> Path:
        """The id of the instance that owns this root file system, and of the state backup that belongs to it."""
        return self.bosh / "agent_shim.json"

    @property
    def shut_down(self) -> Path:
        """Holds the id of an agent that the Director has shut down."""
        return self.bosh / "shut_down"

    @property
    def managed_disk(self) -> Path:
        return self.bosh / "managed_disk_settings.json"

    # --- data: the ephemeral disk -----------------------------------------------------------------------------------

    @property
    def data(self) -> Path:
        return self.base / "data"

    @property
    def data_jobs(self) -> Path:
        """Installed job bundles: ``data/jobs/<job>/<sha1>``."""
        return self.data / "jobs"

    @property
    def data_packages(self) -> Path:
        """Installed package bundles: ``data/packages/<package>/<sha1>``."""
        return self.data / "packages"

    @property
    def blobs(self) -> Path:
        return self.data / "blobs"

    @property
    def sensitive_blobs(self) -> Path:
        """Blobs that came over the bus by ``upload_blob``."""
        return self.data / "sensitive_blobs"

    @property
    def tmp(self) -> Path:
        return self.data / "tmp"

    @property
    def outcomes(self) -> Path:
        """Results of tasks that are too large to be kept in memory."""
        return self.tmp / "outcomes"

    @property
    def bundled_logs(self) -> Path:
        """Archives of logs, to be fetched by ssh."""
        return self.tmp / "logs"

    @property
    def compile(self) -> Path:
        return self.data / "compile"

    @property
    def dynamic_disks(self) -> Path:
        return self.data / "dynamic_disks"

    @property
    def mirror(self) -> Path:
        """Files that survive a reset of the root file system: the copy of ``bosh``, and the supervisor's state."""
        return self.data / "bosh"

    @property
    def supervisor_state(self) -> Path:
        return self.mirror / "supervisor.json"

    @property
    def data_sys(self) -> Path:
        return self.data / "sys"

    @property
    def log(self) -> Path:
        return self.data_sys / "log"

    @property
    def run(self) -> Path:
        return self.data_sys / "run"

    @property
    def shim_run(self) -> Path:
        """Run-time files of this agent: control socket, supervisor state, captured output."""
        return self.run / "agent_shim"

    @property
    def control_socket(self) -> Path:
        return self.shim_run / "control.sock"

    # --- what jobs see ----------------------------------------------------------------------------------------------

    @property
    def sys(self) -> Path:
        """A link to ``data/sys``."""
        return self.base / "sys"

    @property
    def jobs(self) -> Path:
        return self.base / "jobs"

    @property
    def packages(self) -> Path:
        return self.base / "packages"

    @property
    def store(self) -> Path:
        return self.base / "store"

    @property
    def store_migration_target(self) -> Path:
        return self.base / "store_migration_target"

    @property
    def monit(self) -> Path:
        return self.base / "monit"

    @property
    def monit_job(self) -> Path:
        return self.monit / "job"

    @property
    def stopped_marker(self) -> Path:
        return self.monit / "stopped"

    @property
    def monit_user(self) -> Path:
        return self.monit / "monit.user"

    @property
    def instance(self) -> Path:
        return self.base / "instance"

    @property
    def health(self) -> Path:
        return self.instance / "health.json"

    @property
    def dns_records(self) -> Path:
        return self.instance / "dns" / "records.json"

    @property
    def instance_disks(self) -> Path:
        return self.instance / "disks"

    @property
    def ssh_home(self) -> Path:
        return self.base / "bosh_ssh"
