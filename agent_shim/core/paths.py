"""Defines the paths of all files that an agent uses, below one base directory.

``Paths()`` is the tree of a BOSH machine. ``Paths(DIR)`` is the same tree below ``DIR``, which replaces ``/var/vcap``.
Files in ``/etc`` correspond to files in ``DIR/etc``. The agent then writes nothing outside ``DIR`` and reads nothing in
the real ``/var/vcap``. Names and locations match the Go agent
(settings/directories/directories_provider.go).
"""

from __future__ import annotations

from pathlib import Path

VCAP = Path("/var/vcap")


class Paths:
    """All paths that the agent uses. An instance can be created without accessing the disk."""

    def __init__(self, base: Path = VCAP) -> None:
        self.base = base
        self.is_system = base == VCAP
        """True if ``base`` is ``/var/vcap``. Only then may the agent change files outside of it, in ``/etc``."""
        self.etc = Path("/etc") if self.is_system else base / "etc"
        self.logrotate_rule = self.etc / "logrotate.d" / "vcap"
        """The configuration with which logrotate, run by cron, rotates job logs under the Go agent."""
        self.system_log = Path("/var/log") if self.is_system else base / "var/log"
        """The directory that ``bosh logs --system`` packs."""
        self.shared_owner = "root:vcap" if self.is_system else None
        """Owner of the directories that jobs are allowed to read: ``root:vcap`` if ``base`` is ``/var/vcap``. Otherwise
        it is None, and owners are not changed.
        """

        # --- bosh: the agent's own state ------------------------------------------------------------------------------
        self.bosh = base / "bosh"
        self.bosh_etc = self.bosh / "etc"
        self.dev_tools_list = self.bosh_etc / "dev_tools_file_list"
        """The list of compiler files, one per line."""
        self.static_libraries_list = self.bosh_etc / "static_libraries_list"
        """The list of libraries that only a compiler needs, one per line."""
        self.bosh_bin = self.bosh / "bin"
        self.agent_log = self.bosh / "log"
        """The directory that ``bosh logs --agent`` packs."""
        self.settings_tmpfs = self.bosh / "settings"
        """The directory for files with credentials if ``env.bosh.agent.settings.tmpfs`` is set."""
        self.settings_cache = self.bosh / "settings.json"
        self.update_settings = self.bosh / "update_settings.json"
        self.former_mbus = self.bosh / "former_mbus.json"
        """The bus credentials from before the last rotation."""
        self.spec = self.bosh / "spec.json"
        self.tasks = self.bosh / "tasks.json"
        self.disk_hints = self.bosh / "persistent_disk_hints.json"
        self.with_credentials = (self.settings_cache, self.update_settings, self.former_mbus, self.disk_hints)
        """Files that contain credentials. If ``settings_tmpfs`` is in use, they are links to files in it."""
        self.stamp = self.bosh / "agent_shim.json"
        """File that says which instance owns this root file system, and which state backup belongs to it."""
        self.agent_lock = self.bosh / "agent_shim.lock"
        self.control_socket = self.bosh / "agent_shim.sock"
        """The control socket. It is not below ``data``, because a listening socket would keep that file system
        mounted.
        """
        self.keepers = self.bosh / "keepers"
        """Directory for the keepers' sockets, which only the agent's user may enter. Like the control socket, it is not
        below ``data``.
        """
        self.shut_down = self.bosh / "shut_down"
        """File that contains the agent's id if the Director has shut the agent down."""
        self.managed_disk = self.bosh / "managed_disk_settings.json"
        self.taken_down = self.bosh / "taken_down_disks.json"
        """List of unmounted disks whose marker does not exist or could not be updated, so that only this file shows
        that they are unmounted.
        """

        # --- data: the ephemeral disk ---------------------------------------------------------------------------------
        self.data = base / "data"
        self.data_jobs = self.data / "jobs"
        """Installed job bundles: ``data/jobs/<job>/<sha1>``."""
        self.data_packages = self.data / "packages"
        """Installed package bundles: ``data/packages/<package>/<sha1>``."""
        self.blobs = self.data / "blobs"
        self.sensitive_blobs = self.data / "sensitive_blobs"
        """Blobs received over the bus with ``upload_blob``."""
        self.tmp = self.data / "tmp"
        self.bundled_logs = self.tmp / "logs"
        """Log archives to be fetched over ssh."""
        self.compile = self.data / "compile"
        self.dynamic_disks = self.data / "dynamic_disks"
        self.mirror = self.data / "bosh"
        """Files that survive a reset of the root file system: a copy of the ``bosh`` directory, and the supervisor's
        state.
        """
        self.supervisor_state = self.mirror / "supervisor.json"
        self.data_sys = self.data / "sys"
        self.log = self.data_sys / "log"
        self.run = self.data_sys / "run"
        self.shim_run = self.run / "agent_shim"
        """This agent's run-time files, such as captured output."""

        # --- job environment ------------------------------------------------------------------------------------------
        self.sys = base / "sys"
        """A link to ``data/sys``."""
        self.jobs = base / "jobs"
        self.packages = base / "packages"
        self.store = base / "store"
        self.store_migration_target = base / "store_migration_target"
        self.monit = base / "monit"
        self.monit_job = self.monit / "job"
        self.empty = base / "empty"
        """Working directory of job scripts and programs. It is directly below the base, because scripts read
        ``../jobs``.
        """
        self.stopped_marker = self.monit / "stopped"
        self.monit_user = self.monit / "monit.user"
        self.instance = base / "instance"
        self.health = self.instance / "health.json"
        self.dns_records = self.instance / "dns" / "records.json"
        self.instance_disks = self.instance / "disks"
        self.ssh_home = base / "bosh_ssh"

    def moved(self, path: Path) -> Path:
        """Return the path in this tree that corresponds to a path below ``/var/vcap``. Any other path is returned
        unchanged.
        """
        return path if self.is_system or not path.is_relative_to(VCAP) else self.base / path.relative_to(VCAP)
