"""Checks what a request has changed on the agent's machine by inspecting its files and processes from outside."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent_shim.core.paths import Paths
from tests.support.machine import Machine

LOG_TREES: Final = {"job": "var/vcap/data/sys/log", "agent": "var/vcap/bosh/log", "system": "var/log"}


@dataclass(frozen=True)
class Effects:
    """Checks the effects of requests on a machine. ``blobs`` is the agent's local blobstore directory."""

    agent_id: str
    machine: Machine
    blobs: Path

    @property
    def paths(self) -> Paths:
        return Paths(self.machine.vcap)

    def check(self, method: str, arguments: list[Any], value: Any) -> bool:
        """Assert that a request which returned ``value`` has had its effect on the machine.

        Return False, without checking anything, if requests with this method have no visible effect.
        """
        found: Callable[..., None] | None = getattr(self, f"_{method}", None)
        if found is not None:
            found(value, *arguments)
        return found is not None

    def processes(self) -> list[str]:
        """Return the command lines of the jobs' processes."""
        lines = []
        for path in (self.machine.root / "proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes().replace(b"\0", b" ").decode())
            except (FileNotFoundError, ProcessLookupError):
                continue
        return [line for line in lines if re.search(r"/var/vcap/(jobs|packages)/", line)]

    # --- installing and running ---------------------------------------------------------------------------------------

    def _upload_blob(self, _: str, upload: dict[str, str]) -> None:
        kept = (self.paths.sensitive_blobs / upload["blob_id"]).read_bytes()
        assert hashlib.sha1(kept).hexdigest() in upload["checksum"] or (
            hashlib.sha256(kept).hexdigest() in upload["checksum"]
        )

    def _prepare(self, _: str, spec: dict[str, Any]) -> None:
        assert self._names(self.paths.data_packages) >= set(spec["packages"])
        assert self._names(self.paths.data_jobs) >= self._templates(spec)
        archive = spec["rendered_templates_archive"]["blobstore_id"]
        assert not (self.paths.sensitive_blobs / archive).exists()

    def _apply(self, _: str, spec: dict[str, Any]) -> None:
        stored = self._json(self.paths.spec)
        assert stored["configuration_hash"] == spec.get("configuration_hash", "")
        for name in ("id", "az", "name", "deployment"):
            assert (self.paths.instance / name).read_text() == spec.get(name, "")
        if not spec.get("configuration_hash"):
            return
        assert self._in_use(self.paths.jobs) == self._templates(spec)
        assert self._in_use(self.paths.packages) == set(spec["packages"])
        for job in self._templates(spec):
            assert self._names(self._seen(self.paths.jobs / job) / "packages") == set(spec["packages"])
            assert (self._seen(self.paths.jobs / job) / "monit").is_file()

    def _start(self, _: str) -> None:
        spec = self._json(self.paths.spec)
        names = {path.name.partition("_")[2] for path in self.paths.monit_job.iterdir()}
        assert names == {f"{job}.monitrc" for job in self._templates(spec)}
        assert not self.paths.stopped_marker.exists()

    def _stop(self, _: str) -> None:
        assert self.processes() == []
        assert self.paths.stopped_marker.exists()

    # --- scripts ------------------------------------------------------------------------------------------------------

    def _run_script(self, _: Any, name: str, options: dict[str, Any]) -> None:
        if not self._has_script("web", name):
            return
        line = self._hooks()[-1]
        assert f" {name} id=" in line
        assert "user=root" in line
        for variable, text in options.get("env", {}).items():
            assert f" {variable}={text} " in line

    def _drain(self, _: int, kind: str, spec: dict[str, Any]) -> None:
        if not self._has_script("web", "drain"):
            return
        first, then = self._hooks()[-2:]
        changed = self._json(self.paths.spec)["configuration_hash"] != spec.get("configuration_hash")
        expected = f"job_changed hash_{'changed' if changed else 'unchanged'}"
        assert f"drain args={expected if kind == 'update' else 'job_shutdown hash_unchanged'} " in first
        assert "BOSH_JOB_STATE=" in first
        assert "drain args=job_check_status hash_unchanged " in then

    def _run_errand(self, result: dict[str, Any], name: str) -> None:
        variables = dict(line.split("=", 1) for line in result["stdout"].splitlines()[1:])
        assert result["stdout"].startswith("hello from libhello")
        assert result["stderr"] == "to stderr\n"
        assert variables["PATH"] == "/usr/sbin:/usr/bin:/sbin:/bin"
        assert (self.paths.log / name / f"{name}.log").is_file()

    def _compile_package(self, value: dict[str, Any], _id: str, _digest: str, *_: Any) -> None:
        packed = (self.blobs / value["result"]["blobstore_id"]).read_bytes()
        assert hashlib.sha1(packed).hexdigest() == value["result"]["sha1"]
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            names = archive.getnames()
        assert all(name == "." or name.startswith("./") for name in names)
        assert any(name.startswith("./bin/") for name in names)
        assert self._in_use(self.paths.packages) == set()
        assert self._names(self.paths.compile) == set()

    # --- everything else ----------------------------------------------------------------------------------------------

    def _fetch_logs(self, value: dict[str, str], kinds: str, filters: list[str] | None) -> None:
        packed = (self.blobs / value["blobstore_id"]).read_bytes()
        assert hashlib.sha1(packed).hexdigest() == value["sha1"]
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            found = {member.name for member in archive if member.isfile()}
        root = self.machine.root / LOG_TREES[kinds]
        prefix = "./var/log/" if kinds == "system" else "./"
        there = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and not path.is_symlink()}
        wanted = {name for name in there if not filters or name.partition("/")[0] in filters}
        assert found == {prefix + name for name in wanted}
        assert found

    def _ssh(self, _: dict[str, str], command: str, params: dict[str, str]) -> None:
        users = [line.partition(":")[0] for line in (self.machine.root / "etc/passwd").read_text().splitlines()]
        if command == "setup":
            assert params["user"] in users
            keys = self.paths.ssh_home / params["user"] / ".ssh/authorized_keys"
            assert keys.read_text() == params["public_key"]
        else:
            assert not [user for user in users if user.startswith("bosh_") and re.search(params["user_regex"], user)]
            homes = self._names(self.paths.ssh_home)
            assert not [home for home in homes if re.search(params["user_regex"], home)]

    def _sync_dns(self, _: str, _blob: str, _digest: str, version: int) -> None:
        stored = self._json(self.paths.dns_records)
        assert stored["version"] >= version
        hosts = (self.machine.root / "etc/hosts").read_text()
        assert self.agent_id in hosts
        for address, name in stored["records"]:
            assert f"{address} {name}\n" in hosts

    def _update_settings(self, _: str, news: dict[str, Any]) -> None:
        stored = self._json(self.paths.update_settings)
        if "mbus" in news:
            assert stored["mbus"]["cert"] == news["mbus"]["cert"]
        assert stored["trusted_certs"] == news["trusted_certs"]

    # --- disks --------------------------------------------------------------------------------------------------------

    def _add_persistent_disk(self, _: Any, cid: str, hint: dict[str, str]) -> None:
        assert self._json(self.paths.disk_hints)[cid]["Path"] == hint["path"]

    def _remove_persistent_disk(self, _: Any, cid: str) -> None:
        assert cid not in self._json(self.paths.disk_hints)

    def _mount_disk(self, _: Any, cid: str) -> None:
        on_store = self._is_there(self.paths.store, cid)
        assert on_store != self._is_there(self.paths.store_migration_target, cid)
        assert self.paths.managed_disk.read_text() == cid or not on_store

    def _unmount_disk(self, value: dict[str, str], cid: str) -> None:
        assert value["message"].startswith("Unmounted partition of ")
        assert not self._is_there(self.paths.store, cid)

    def _migrate_disk(self, _: Any, old: str, new: str) -> None:
        assert self._is_there(self.paths.store, new)
        assert not self._is_there(self.paths.store_migration_target, old)

    def _is_there(self, place: Path, cid: str) -> bool:
        """Return True if the disk with this ``cid`` is mounted or linked at ``place``.

        A marker file that the agent keeps on each disk contains the disk's cid.
        """
        if place.is_symlink():
            place = self._seen(place)
        marker = place / ".agent_shim/disk.json"
        return marker.exists() and bool(self._json(marker)["cid"] == cid)

    # --- queries ------------------------------------------------------------------------------------------------------

    def _has_script(self, job: str, name: str) -> bool:
        return job in self._names(self.paths.jobs) and (self._seen(self.paths.jobs / job) / "bin" / name).exists()

    def _hooks(self) -> list[str]:
        """Return the lines that the recorded job's hook scripts have logged, one for each run of a script."""
        return (self.paths.log / "web/hooks.log").read_text().splitlines()

    def _seen(self, link: Path) -> Path:
        """Resolve an absolute symlink as a process inside the machine would. Return the target's path as seen from
        outside.
        """
        return self.machine.root / str(link.readlink()).lstrip("/")

    def _in_use(self, links: Path) -> set[str]:
        return self._names(links) - {"bpm"}  # This project's own bpm command is always installed.

    @staticmethod
    def _names(directory: Path) -> set[str]:
        return {path.name for path in directory.iterdir()} if directory.is_dir() else set()

    @staticmethod
    def _templates(spec: dict[str, Any]) -> set[str]:
        return {template["name"] for template in spec["job"].get("templates") or []}

    @staticmethod
    def _json(path: Path) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(path.read_bytes())
        return document
