"""A scripted Director that manages deployments on a cluster, calling the CPI and the agents in the same order as a real
one.

The order comes from src/bosh-director/lib/bosh/director: deployment_plan/steps, instance_updater, disk_manager.rb,
vm_creator.rb, problem_handlers, jobs/vm_state.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agent_shim.core.paths import Paths
from agent_shim.demo.director import Director, RpcTimeoutError
from agent_shim.demo.pki import Authority
from agent_shim.demo.release import archive
from tests.support import jobs
from tests.support.broker import NatsServer
from tests.support.http import BlobServer, http_server
from tests.support.kubernetes.calls import Cpi, CpiCallError
from tests.support.proxy import Proxy

NETWORKS: Final = {
    "default": {"type": "dynamic", "cloud_properties": {}, "prefix": "32", "default": ["dns", "gateway"]}
}
"""A dynamic network as the Director sends it (deployment_plan/network_settings.rb)."""
READY_S: Final = 90.0
"""Time limit in seconds for an agent to answer. The Director waits 600 s."""
KEPT: Final = "written-at-the-beginning"
"""Name of a file on the disk that must still exist after every flow."""


@dataclass
class CpiEnvironment:
    """The services around a CPI: a bus that revokes bootstrap credentials, and a blobstore. Pods can reach both."""

    address: str
    server: NatsServer
    bus: Proxy
    blobs: BlobServer
    blobs_port: int
    agents: Director

    @property
    def mbus(self) -> str:
        """Value of the CPI job's ``agent.mbus`` property."""
        return f"nats://{self.address}:{self.bus.port}"

    def blobstores(self) -> list[dict[str, Any]]:
        """Value of ``env.bosh.blobstores`` in the form that bosh-deployment uses."""
        return [{"provider": "dav", "options": {"endpoint": f"http://{self.address}:{self.blobs_port}"}}]

    def credentials(self, agent: str, *, bootstrap: bool) -> dict[str, str]:
        """Create a new ``mbus.cert`` for an agent."""
        made = self.server.mbus(agent, bootstrap=bootstrap)
        return {"ca": made.ca, "certificate": made.certificate, "private_key": made.private_key}

    def blob(self, content: bytes) -> dict[str, str]:
        """Store content in the blobstore. Return its id and digest as they appear in a spec."""
        name = f"blob-{hashlib.sha1(content).hexdigest()[:12]}"
        self.blobs.blobs[f"/{hashlib.sha1(name.encode()).hexdigest()[:2]}/{name}"] = content
        return {"blobstore_id": name, "sha1": hashlib.sha1(content).hexdigest()}


@asynccontextmanager
async def world(address: str, scratch: Path) -> AsyncIterator[CpiEnvironment]:
    """Run a bus and a blobstore for a CPI's VMs. ``address`` is an address of this machine that pods can reach."""
    authority = Authority()
    async with (
        NatsServer(scratch / "bus", authority, pair=authority.server(hosts=("127.0.0.1", address))) as server,
        http_server() as blobs,
        Proxy(server.port, address) as bus,
        Proxy(blobs.port, address) as ahead,
        Director(poll=0.1).on(server.peer()) as agents,
    ):
        yield CpiEnvironment(address, server, bus, blobs, ahead.port, agents)


@dataclass
class DeployedInstance:
    """An instance in the Director's database. While it has no VM, ``vm`` and ``agent`` are ""."""

    group: str
    index: int = 0
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    vm: str = ""
    agent: str = ""
    disk: str = ""
    kept: str = ""
    networks: dict[str, Any] = field(default_factory=lambda: NETWORKS)
    """The networks that the agent of the last VM reported.

    The Director sends them to the next VM (network_settings.rb).
    """


@dataclass
class DynamicDisk:
    """A row in the Director's ``dynamic_disks`` table. While the disk is not attached, ``vm`` is ""."""

    name: str
    cid: str
    vm: str = ""
    hint: Any = None


class Deployments:
    """Instances on a cluster. ``vms`` and ``disks`` contain all cids in this Director's database."""

    def __init__(self, cpi: Cpi, world: CpiEnvironment, stemcell: str, vm_type: dict[str, Any]) -> None:
        self.cpi = cpi
        self.world = world
        self.stemcell = stemcell
        self.vm_type = vm_type
        self.disk_type: dict[str, Any] = {}
        self.disk_size_mib = 64
        self.files: dict[str, str] = {}
        """Additional job files. They replace a job's usual files of the same name."""
        self.dynamic_disks: dict[str, DynamicDisk] = {}
        self.vms: set[str] = set()
        self.disks: set[str] = set()
        self.secrets: list[str] = []
        """Private keys and passwords that were in requests. Tests check that they do not leak."""

    # --- VMs ----------------------------------------------------------------------------------------------------------

    async def create_vm(self, instance: DeployedInstance, disks: Sequence[str] = ()) -> None:
        """Create a VM whose agent gets permanent credentials (vm_creator.rb,
        steps/update_instance_settings_step.rb).
        """
        agent = str(uuid.uuid4())
        world = self.world
        bootstrap = world.credentials(agent, bootstrap=True)
        password = f"$6$salt${secrets.token_hex(16)}"
        self.secrets += [bootstrap["private_key"].splitlines()[2], password]
        env = {
            "bosh": {
                "mbus": {"cert": bootstrap},
                "blobstores": world.blobstores(),
                "group": f"director-dep-{instance.group}",
                "groups": ["director", "dep", instance.group, "director-dep", f"dep-{instance.group}"],
                "tags": {"owner": "tests"},
                "password": password,
            }
        }
        arguments = [agent, self.stemcell, self.vm_type, instance.networks, list(disks), env]
        vm, *_ = await self.cpi.call("create_vm", *arguments)
        # At this point, a Director creates the VM's database row, which nats-sync reads to add the agent's user
        # (steps/create_vm_step.rb).
        await world.server.add_agent(agent)
        instance.vm, instance.agent = vm, agent
        self.vms.add(vm)
        metadata = {"director": "director", "deployment": "dep", "id": instance.id, "index": str(instance.index)}
        metadata |= {"job": instance.group, "instance_group": instance.group, "owner": "tests"}
        metadata |= {"name": f"{instance.group}/{instance.id}", "created_at": "2026-01-01T00:00:00Z"}
        await self.cpi.call("set_vm_metadata", vm, metadata)
        await self.until_ready(instance)
        permanent = world.credentials(agent, bootstrap=False)
        self.secrets.append(permanent["private_key"].splitlines()[2])
        await self.ask(instance, "update_settings", {"mbus": {"urls": [world.mbus], "cert": permanent}})
        await world.server.add_agent(agent, bootstrap=False)

    async def delete_vm(self, instance: DeployedInstance) -> None:
        """Delete the VM and its agent's user on the bus."""
        with contextlib.suppress(CpiCallError):
            await self._delete_vm(instance)
        instance.vm = instance.agent = ""

    async def _delete_vm(self, instance: DeployedInstance) -> None:
        try:
            await self.cpi.call("delete_vm", instance.vm)
        except CpiCallError as exc:
            if exc.kind != "VMNotFound":
                raise AssertionError(f"delete_vm of {instance.vm}: {exc}") from exc
        self.vms.discard(instance.vm)
        with contextlib.suppress(KeyError):
            await self.world.server.remove_agent(instance.agent)

    async def until_ready(self, instance: DeployedInstance) -> None:
        """Ping the agent once a second, as the Director does, but give up sooner."""
        await self.world.agents.wait_until_ready(instance.agent, timeout=READY_S)

    async def ask(self, instance: DeployedInstance, method: str, *arguments: Any) -> Any:
        """Run an action, wait until it has finished, and return its value."""
        return await self.world.agents.run(instance.agent, method, *arguments)

    # --- disks --------------------------------------------------------------------------------------------------------

    async def create_disk(self, instance: DeployedInstance, size_mib: int = 0) -> str:
        """Create a disk for an instance's VM."""
        disk: str = await self.cpi.call("create_disk", size_mib or self.disk_size_mib, self.disk_type, instance.vm)
        self.disks.add(disk)
        return disk

    async def attach(self, instance: DeployedInstance, disk: str) -> None:
        """Attach a disk as steps/attach_disk_step.rb does, then set the disk's metadata."""
        hint = await self.cpi.call("attach_disk", instance.vm, disk)
        assert hint not in (None, "", {}), "AttachDiskResponseError"
        await self.until_ready(instance)
        await self.ask(instance, "add_persistent_disk", disk, hint)
        await self.cpi.call("set_disk_metadata", disk, {"director": "director", "deployment": "dep"})

    async def mount(self, instance: DeployedInstance, disk: str) -> None:
        await self.ask(instance, "mount_disk", disk)

    async def detach(self, instance: DeployedInstance, disk: str) -> None:
        """Unmount and detach a disk, as steps/unmount_disk_step.rb and detach_disk_step.rb do."""
        if disk in await self.ask(instance, "list_disk"):
            await self.ask(instance, "unmount_disk", disk)
        await self.ask(instance, "remove_persistent_disk", disk)
        await self.cpi.call("detach_disk", instance.vm, disk)

    async def delete_disk(self, disk: str) -> None:
        await self.cpi.call("delete_disk", disk)
        self.disks.discard(disk)

    # --- dynamic disks ------------------------------------------------------------------------------------------------

    async def provide_dynamic_disk(self, instance: DeployedInstance, name: str) -> str:
        """Create a dynamic disk if it does not exist, and attach it if it is not attached. Return its cid.

        The Director does this for ``POST /dynamic_disks/provide`` (jobs/dynamic_disks).
        """
        disk = next((one for one in self.dynamic_disks.values() if one.name == name), None)
        if disk is None:
            properties = self.disk_type | {"name": name}
            disk = DynamicDisk(name, await self.cpi.call("create_disk", self.disk_size_mib, properties, instance.vm))
            self.dynamic_disks[disk.cid] = disk
            self.disks.add(disk.cid)
        if not disk.vm:
            disk.hint = await self.cpi.call("attach_disk", instance.vm, disk.cid)
            assert len(json.dumps(disk.hint)) <= 255, "the column of the Director's table"
            disk.vm = instance.vm
            metadata = {"director": "director", "deployment": "dep", "owner": "a volume driver"}
            await self.cpi.call("set_disk_metadata", disk.cid, metadata)
        assert disk.vm == instance.vm, "disk is attached to a different vm"
        await self.ask(instance, "add_dynamic_disk", disk.cid, disk.hint)
        return disk.cid

    async def detach_dynamic_disk(self, instance: DeployedInstance, cid: str) -> None:
        """Detach a dynamic disk, as the Director does for ``POST /dynamic_disks/NAME/detach``
        (steps/detach_dynamic_disk_step.rb).
        """
        await self.ask(instance, "remove_dynamic_disk", cid)
        await self.cpi.call("detach_disk", instance.vm, cid)
        self.dynamic_disks[cid].vm = ""

    async def delete_dynamic_disk(self, cid: str) -> None:
        """Delete a dynamic disk as the Director does for ``DELETE /dynamic_disks/NAME``.

        The Director does the same after ``bosh delete-deployment`` (disk_deleter.rb).
        """
        if await self.cpi.call("has_disk", cid):
            await self.delete_disk(cid)
        del self.dynamic_disks[cid]

    async def _detach_all_dynamic_disks(self, instance: DeployedInstance) -> None:
        """Detach the VM's dynamic disks, as the Director does before it deletes a VM with a responsive agent
        (steps/detach_instance_disks_step.rb).
        """
        for disk in self.dynamic_disks.values():
            if disk.vm == instance.vm:
                await self.detach_dynamic_disk(instance, disk.cid)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def spec(self, instance: DeployedInstance) -> dict[str, Any]:
        """Return the ``apply`` spec for an instance with one job."""
        name = instance.group
        files = {f"{name}/{path}": text for path, text in self.job(name).items()}
        return {
            "deployment": "dep",
            "job": {"name": name, "template": name, "version": "1", "templates": [{"name": name, "version": "1"}]},
            "index": instance.index,
            "name": name,
            "id": instance.id,
            "networks": instance.networks,
            "packages": {},
            "configuration_hash": "hash",
            "persistent_disk": 0,
            "rendered_templates_archive": self.world.blob(archive(files)),
        }

    def job(self, name: str) -> dict[str, str]:
        """Return the files of the instance's job, which is also an errand."""
        drain = "#!/bin/sh\n[ ! -d /var/vcap/store ] || echo drained >>/var/vcap/store/drained\necho 0\n"
        errand = "#!/bin/sh\necho the errand has run\n"
        return jobs.sleeper(Paths(), name) | {"bin/run": errand, "bin/drain": drain} | self.files

    async def start(self, instance: DeployedInstance) -> None:
        """Apply the spec, start the jobs, and wait until they are running (instance_updater/starter.rb)."""
        await self.ask(instance, "apply", self.spec(instance))
        await self.ask(instance, "run_script", "pre-start", {})
        await self.ask(instance, "start")
        await self.until_running(instance)
        await self.ask(instance, "run_script", "post-start", {})

    async def until_running(self, instance: DeployedInstance) -> None:
        async with asyncio.timeout(READY_S):
            while (await self.world.agents.value(instance.agent, "get_state"))["job_state"] != "running":
                await asyncio.sleep(0.1)

    async def stop(self, instance: DeployedInstance) -> None:
        """Stop the jobs as instance_updater/stopper does: pre-stop, drain, stop, post-stop."""
        await self.ask(instance, "run_script", "pre-stop", {})
        await self.ask(instance, "drain", "shutdown", {})
        await self.ask(instance, "stop")
        await self.ask(instance, "run_script", "post-stop", {})

    async def connect(self, instance: DeployedInstance) -> None:
        """Contact the agent on a new VM for the first time (steps/apply_vm_spec_step.rb)."""
        bare = {"deployment": "dep", "job": {"name": instance.group}, "index": instance.index, "id": instance.id}
        await self.ask(instance, "apply", {**bare, "name": instance.group, "networks": instance.networks})
        instance.networks = (await self.ask(instance, "get_state"))["networks"]
        await self.ask(instance, "prepare", self.spec(instance))

    # --- flows --------------------------------------------------------------------------------------------------------

    async def first_deploy(self, group: str = "db", *, with_disk: bool = True) -> DeployedInstance:
        """Deploy a new instance, by default with a persistent disk, as ``bosh deploy`` does."""
        instance = DeployedInstance(group)
        await self.create_vm(instance)
        await self.connect(instance)
        if with_disk:
            instance.disk = await self.create_disk(instance)
            await self.attach(instance, instance.disk)
            await self.mount(instance, instance.disk)
        await self.start(instance)
        return instance

    async def new_vm(self, instance: DeployedInstance) -> None:
        """Create a VM for an instance with an existing disk, and start its jobs."""
        disks = [instance.disk] if instance.disk else []
        await self.create_vm(instance, disks)
        await self.connect(instance)
        for disk in disks:
            await self.attach(instance, disk)
            await self.mount(instance, disk)
        await self.start(instance)

    async def stop_hard(self, instance: DeployedInstance) -> None:
        """Stop an instance and delete its VM, as ``bosh stop --hard`` does."""
        await self.stop(instance)
        if instance.disk:
            await self.detach(instance, instance.disk)
        await self._detach_all_dynamic_disks(instance)
        await self.delete_vm(instance)

    async def recreate(self, instance: DeployedInstance) -> None:
        """Stop an instance and recreate its VM, as the Director does for ``bosh recreate`` or a changed VM type."""
        await self.stop_hard(instance)
        await self.new_vm(instance)

    async def resurrect(self, instance: DeployedInstance) -> None:
        """Recreate a VM without sending requests to its agent, as the Health Monitor's scan-and-fix and cck's "Recreate
        VM" do.
        """
        await self.delete_vm(instance)
        await self.new_vm(instance)

    async def create_swap_delete(self, instance: DeployedInstance) -> None:
        """Update an instance with create-swap-delete: create the second VM while the first still has the disk.

        The first VM is orphaned and deleted at the end.
        """
        old = DeployedInstance(instance.group, instance.index, instance.id, instance.vm, instance.agent, instance.disk)
        await self.create_vm(instance, [instance.disk])
        await self.connect(instance)
        await self.stop(old)
        await self.detach(old, old.disk)
        # After the shutdown the old VM is idle, and its pod never becomes ready again.
        await self.world.agents.value(old.agent, "shutdown")
        await self.attach(instance, instance.disk)
        await self.mount(instance, instance.disk)
        await self.start(instance)
        await self.delete_vm(old)

    async def grow_by_migration(self, instance: DeployedInstance, size_mib: int) -> str:
        """Replace the disk with a new disk of another size. The agent copies the files to it.

        Return the cid of the old disk, which is orphaned.
        """
        old = instance.disk
        await self.stop(instance)
        new = await self.create_disk(instance, size_mib)
        await self.attach(instance, new)
        await self.mount(instance, new)
        await self.ask(instance, "migrate_disk", old, new)
        await self.detach(instance, old)
        instance.disk = new
        await self.start(instance)
        return old

    async def grow_by_resize(self, instance: DeployedInstance, size_mib: int) -> None:
        """Detach the disk, enlarge it with ``resize_disk``, and attach it again
        (``director.enable_cpi_resize_disk``).
        """
        await self.stop(instance)
        await self.detach(instance, instance.disk)
        await self.cpi.call("resize_disk", instance.disk, size_mib)
        await self.attach(instance, instance.disk)
        await self.mount(instance, instance.disk)
        await self.start(instance)

    async def delete(self, instance: DeployedInstance) -> None:
        """Delete an instance as ``bosh delete-deployment`` does. Its disk is orphaned and remains."""
        await self.stop(instance)
        if instance.disk:
            await self.detach(instance, instance.disk)
        await self._detach_all_dynamic_disks(instance)
        await self.delete_vm(instance)

    async def errand(self, group: str = "errand") -> str:
        """Run an errand on a new VM and delete the VM, as ``bosh run-errand`` does. Return the errand's output."""
        instance = DeployedInstance(group)
        await self.new_vm_without_start(instance)
        result = await self.ask(instance, "run_errand", group)
        await self.stop(instance)
        await self.delete_vm(instance)
        return str(result["stdout"])

    async def new_vm_without_start(self, instance: DeployedInstance) -> None:
        await self.create_vm(instance)
        await self.connect(instance)
        await self.ask(instance, "apply", self.spec(instance))

    async def compile(self, name: str) -> dict[str, Any]:
        """Compile a package on a new compilation VM. Return the agent's result."""
        instance = DeployedInstance(f"compilation-{uuid.uuid4()}")
        await self.create_vm(instance)
        await self.cpi.call("set_vm_metadata", instance.vm, {"compiling": name, "deployment": "dep"})
        script = "#!/bin/sh\nset -e\necho compiled >$BOSH_INSTALL_TARGET/result\n"
        source = self.world.blob(archive({"packaging": script}))
        answer = await self.ask(instance, "compile_package", source["blobstore_id"], source["sha1"], name, "1", {})
        await self.delete_vm(instance)
        found: dict[str, Any] = answer["result"]
        return found

    async def is_unresponsive(self, instance: DeployedInstance) -> bool:
        """Return True if a ping fails. The Health Monitor and cck use the same criterion."""
        try:
            await self.world.agents.value(instance.agent, "ping", timeout=2.0)
        except RpcTimeoutError:
            return True
        return False
