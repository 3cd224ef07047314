"""Two clients for LXD: one makes the same calls as bosh-lxd-cpi-release, the other runs the real CPI."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

SETTINGS: Final = "/var/vcap/bosh/warden-cpi-agent-env.json"
STARTUP: Final = str(Path("/root", "startup.sh"))
POOL: Final = "default"
BRIDGE: Final = "lxdbr0"


IS_INCUS: Final = os.environ.get("LXD") == "incus"
DAEMON, CLIENT = ("incusd", "incus") if IS_INCUS else ("lxd", "lxc")
PATH: Final = f"{os.environ['PATH']}:/usr/sbin:/sbin:/usr/libexec/incus:/opt/incus/bin"
"""Directories in which to look for programs. Incus packages install the daemon outside the usual directories."""


@dataclass(frozen=True)
class Lxc:
    """Runs ``lxc`` or ``incus`` against the daemon that the tests start."""

    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the daemon and its clients."""
        prefix = "INCUS" if IS_INCUS else "LXD"
        places = {f"{prefix}_DIR": str(self.directory), f"{prefix}_CONF": str(self.directory / "client")}
        return {**os.environ, **places, "PATH": PATH}

    def __call__(self, *arguments: str, stdin: str | None = None) -> str:
        """Run a command and return its output.

        Raises ``RuntimeError`` with the error message if the command fails.
        """
        # Without a terminal, `lxc` reads standard input until it ends, so provide an empty standard input by default.
        done = subprocess.run(
            [CLIENT, *arguments], env=self.environment, input=stdin or "", text=True, capture_output=True, check=False
        )
        if done.returncode != 0:
            said = done.stderr + done.stdout
            if arguments[0] == "start":
                said += (self.directory / "logs" / arguments[-1] / "lxc.log").read_text()
            raise RuntimeError(f"{CLIENT} {' '.join(arguments)} ended with {done.returncode}: {said}")
        return done.stdout


class LxdCpi:
    """Makes the same calls to LXD as bosh-lxd-cpi-release.

    Each method corresponds to the method with the same name in ``src/lxd-bosh-cpi`` at e28a247.
    """

    def __init__(self, lxc: Lxc) -> None:
        self._lxc = lxc

    def create_stemcell(self, image: Path, properties: dict[str, Any]) -> str:
        """Import the root file system. Return the stemcell's cid.

        LXD rejects a creation date of 0, so the modification time of ``image`` is used.
        """
        metadata = {
            "architecture": properties["architecture"],
            "creation_date": int(image.stat().st_mtime),
            "properties": {"description": f"{properties['name']}-{properties['version']}"},
        }
        alias = f"img-{uuid.uuid4()}"
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "metadata.yaml").write_text(yaml.safe_dump(metadata))
            packed = Path(scratch) / "metadata.tar"
            subprocess.run(["tar", "-C", scratch, "-cf", str(packed), "metadata.yaml"], check=True)
            self._lxc("image", "import", str(packed), str(image), f"--alias={alias}")
        return alias

    def create_vm(
        self, agent_id: str, stemcell: str, properties: dict[str, Any], networks: dict[str, Any], env: dict[str, Any]
    ) -> str:
        """Create the container, push its files, and start it."""
        vm = f"c-{uuid.uuid4()}"
        config = [f"--config={key}={value}" for key, value in properties.get("config", {}).items()]
        self._lxc("init", stemcell, vm, f"--type={properties['instance_type']}", *config)
        for number, network in enumerate(networks.values()):
            device = [
                "nic",
                f"name=eth{number}",
                "nictype=bridged",
                f"parent={BRIDGE}",
                f"ipv4.address={network['ip']}",
            ]
            self._lxc("config", "device", "add", vm, f"eth{number}", *device)
            content = (
                f"# Using LXD DHCP to statically assign our IP address\nauto eth{number}\niface eth{number} inet dhcp\n"
            )
            self._push(vm, f"/etc/network/interfaces.d/eth{number}", content)
        for name, device in properties.get("devices", {}).items():
            self._lxc("config", "device", "add", vm, name, device["type"], *_fields(device))
        self._push(vm, STARTUP, "#!/bin/bash\ntouch /var/vcap/started\n", mode="0755")
        first, *others = self._lxc("file", "pull", f"{vm}/etc/rc.local", "-").split("\n")
        self._push(vm, "/etc/rc.local", "\n".join([first, "", STARTUP, "", *others]), mode="0755")
        ephemeral = f"vol-e-{uuid.uuid4()}"
        self._create_volume(ephemeral, properties["ephemeral_disk"])
        self._add_volume(vm, ephemeral, "/var/vcap/data")
        settings = {
            "agent_id": agent_id,
            "vm": {"name": vm, "id": vm},
            "mbus": "",
            "ntp": [],
            "blobstore": {},
            "networks": {name: {**network, "preconfigured": True} for name, network in networks.items()},
            "disks": {"system": "", "ephemeral": {"path": "/var/vcap/data"}, "persistent": {}},
            "env": env,
        }
        self._push(vm, SETTINGS, json.dumps(settings), mode="0644")
        self._lxc("start", vm)
        return vm

    def create_disk(self, megabytes: int) -> str:
        disk = f"vol-p-{uuid.uuid4()}"
        self._create_volume(disk, megabytes)
        return disk

    def attach_disk(self, vm: str, disk: str) -> Any:
        """Force-stop the container, add the volume and the disk hint, and start the container again."""
        self._lxc("stop", "--force", vm)
        self._add_volume(vm, disk, f"/warden-cpi-dev/{disk}")
        hint = {"path": f"/warden-cpi-dev/{disk}"}
        settings = json.loads(self._lxc("file", "pull", f"{vm}{SETTINGS}", "-"))
        settings["disks"]["persistent"][disk] = hint
        self._push(vm, SETTINGS, json.dumps(settings), mode="0644")
        self._lxc("start", vm)
        return hint

    def detach_disk(self, vm: str, disk: str) -> None:
        """Force-stop the container, remove the volume and the disk hint, and start the container again."""
        self._lxc("stop", "--force", vm)
        self._lxc("config", "device", "remove", vm, disk)
        settings = json.loads(self._lxc("file", "pull", f"{vm}{SETTINGS}", "-"))
        del settings["disks"]["persistent"][disk]
        self._push(vm, SETTINGS, json.dumps(settings), mode="0644")
        self._lxc("start", vm)

    def reboot_vm(self, vm: str) -> None:
        self._lxc("restart", "--force", vm)

    def delete_vm(self, vm: str) -> None:
        """Force-stop the container, and delete it together with its ephemeral disks."""
        self._lxc("stop", "--force", vm)
        devices = yaml.safe_load(self._lxc("config", "show", vm))["devices"]
        self._lxc("delete", vm)
        for name in devices:
            if name.startswith("vol-e-"):
                self._lxc("storage", "volume", "delete", POOL, name)

    def _create_volume(self, name: str, megabytes: int) -> None:
        self._lxc("storage", "volume", "create", POOL, name, f"size={megabytes}MB")

    def _add_volume(self, vm: str, name: str, path: str) -> None:
        self._lxc("config", "device", "add", vm, name, "disk", f"pool={POOL}", f"source={name}", f"path={path}")

    def _push(self, vm: str, path: str, content: str, *, mode: str = "0644") -> None:
        self._lxc("file", "push", "-", f"{vm}{path}", "--uid=0", "--gid=0", f"--mode={mode}", stdin=content)


def _fields(device: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in device.items() if key != "type"]


class RealCpi(LxdCpi):
    """Sends the Director's requests to the CPI's own binary."""

    def __init__(self, lxc: Lxc, binary: str, scratch: Path) -> None:
        super().__init__(lxc)
        self._binary, self._config = binary, scratch / "cpi.json"
        server = {"Socket": str(lxc.directory / "unix.socket"), "Network": BRIDGE, "StoragePool": POOL}
        agent = {"Mbus": "", "NTP": [], "Blobstore": {"Provider": "dummy", "Options": {}}}
        self._config.write_text(json.dumps({"Server": server, "Agent": agent}))

    def _call(self, method: str, *arguments: Any) -> Any:
        request = {"method": method, "arguments": arguments, "context": {"director_uuid": "d"}, "api_version": 2}
        command = [self._binary, f"-configPath={self._config}"]
        done = subprocess.run(command, input=json.dumps(request), text=True, capture_output=True, check=True)
        answer = json.loads(done.stdout)
        if answer["error"]:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def create_stemcell(self, image: Path, properties: dict[str, Any]) -> str:
        return str(self._call("create_stemcell", str(image), properties))

    def create_vm(
        self, agent_id: str, stemcell: str, properties: dict[str, Any], networks: dict[str, Any], env: dict[str, Any]
    ) -> str:
        return str(self._call("create_vm", agent_id, stemcell, properties, networks, [], env)[0])

    def create_disk(self, megabytes: int) -> str:
        return str(self._call("create_disk", megabytes, {}, None))

    def attach_disk(self, vm: str, disk: str) -> Any:
        return self._call("attach_disk", vm, disk)

    def detach_disk(self, vm: str, disk: str) -> None:
        self._call("detach_disk", vm, disk)

    def reboot_vm(self, vm: str) -> None:
        self._call("reboot_vm", vm)

    def delete_vm(self, vm: str) -> None:
        self._call("delete_vm", vm)
