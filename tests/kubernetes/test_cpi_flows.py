"""Tests deployments on a real cluster, with a scripted Director and real agents. Each flow runs once for each way in
which the CPI can attach disks.

A flow begins and ends with an instance that has a disk with a file on it, and the next flow uses the same instance. At
the end of each flow, ``Site.check`` checks that the file still exists and that the Director has a record of every
object in the cluster. After a failed flow, everything is deleted and deployed again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agent_shim.core.paths import Paths
from tests.support import jobs
from tests.support.kubernetes import cpi_site
from tests.support.kubernetes.calls import CpiCallError
from tests.support.kubernetes.cpi_site import LABEL, WAYS, Site, Way
from tests.support.kubernetes.deployments import DeployedInstance
from tests.support.kubernetes.node import FirstNode
from tests.support.kubernetes.objects import Document

pytestmark = [pytest.mark.kubernetes, pytest.mark.asyncio(loop_scope="module")]

ATTACHING = pytest.mark.parametrize("site", [way for way in WAYS if way.attach != "never"], ids=str, indirect=True)
"""Runs a test once for each way of attaching disks that works with an existing VM."""

LIVE = pytest.mark.parametrize("site", [way for way in WAYS if way.attach in ("live", "auto")], ids=str, indirect=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS, ids=str)
async def site(
    request: pytest.FixtureRequest, node: FirstNode, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    way: Way = request.param
    async with cpi_site.site(node, way, tmp_path_factory.mktemp("site")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def db(site: Site) -> DeployedInstance:
    """Return an instance with a disk: the one that the previous flow has left, or a new one."""
    instance, site.spare = site.spare, None
    if instance is None:
        await site.empty()
        can_attach = site.way.attach != "never" or site.way.reserved
        instance = await site.deployments.first_deploy() if can_attach else await _deploy_in_two_steps(site)
        await site.write(instance)
    return instance


async def _deploy_in_two_steps(site: Site) -> DeployedInstance:
    """Deploy an instance on a cluster where disks can be attached only when a VM is created.

    The first deploy must fail in attach_disk with an error that explains why. The instance is then stopped and started
    again, so that it gets a new VM with the disk.
    """
    director = site.deployments
    instance = DeployedInstance("db")
    await director.create_vm(instance)
    await director.connect(instance)
    instance.disk = await director.create_disk(instance)
    with pytest.raises(CpiCallError, match="never"):
        await site.cpi.call("attach_disk", instance.vm, instance.disk)
    await director.delete_vm(instance)
    await director.new_vm(instance)
    return instance


async def test_first_deploy_with_the_cpi_succeeds(site: Site, db: DeployedInstance) -> None:
    await site.check(db)


async def test_recreate_with_the_cpi_keeps_the_disk(site: Site, db: DeployedInstance) -> None:
    before = db.vm
    await site.deployments.recreate(db)

    assert db.vm != before
    pod = await site.namespace.pod(db.vm).look()
    assert db.networks["default"]["ip"] == pod["status"]["podIP"], "links and DNS lead to the former VM"
    await site.check(db)


async def test_changed_vm_type_replaces_the_vm_and_keeps_the_disk(site: Site, db: DeployedInstance) -> None:
    with site.vm_type(memory=300, cpu=0.1):
        await site.deployments.recreate(db)

    pod = await site.namespace.pod(db.vm).look()
    assert pod["spec"]["containers"][0]["resources"]["requests"]["memory"] == "300Mi"
    await site.check(db)


@ATTACHING
async def test_disk_moves_to_the_new_vm_in_a_create_swap_delete_update(site: Site, db: DeployedInstance) -> None:
    await site.deployments.create_swap_delete(db)
    await site.check(db)


@ATTACHING
async def test_disk_data_survives_migration_to_a_larger_disk(site: Site, db: DeployedInstance) -> None:
    old = await site.deployments.grow_by_migration(db, 128)
    await site.check(db)
    await site.deployments.delete_disk(old)
    await site.check(db)


async def test_disk_can_be_enlarged_in_place_but_not_shrunk(site: Site, db: DeployedInstance) -> None:
    with pytest.raises(CpiCallError) as told:
        await site.cpi.call("resize_disk", db.disk, 32)
    assert told.value.kind in ("NotSupported", "NotImplemented")
    await site.deployments.grow_by_resize(db, 128)

    claim = await site.namespace.kubectl("get", "pvc", db.disk, "-o", "jsonpath={.spec.resources.requests.storage}")
    assert claim == "128Mi"
    await site.check(db)


async def test_stop_hard_and_start_keep_the_disk(site: Site, db: DeployedInstance) -> None:
    await site.deployments.stop_hard(db)
    await site.check(db)
    assert await site.cpi.call("has_disk", db.disk)
    await site.deployments.new_vm(db)
    await site.check(db)


async def test_pod_deleted_without_the_director_is_resurrected(site: Site, db: DeployedInstance) -> None:
    await site.namespace.pod(db.vm).delete()
    assert await site.cpi.call("has_vm", db.vm) is False
    assert await site.cpi.call("has_disk", db.disk) is True
    await site.deployments.resurrect(db)
    await site.check(db)


async def test_vm_with_an_unresponsive_agent_is_resurrected(site: Site, db: DeployedInstance) -> None:
    await site.exec(db, "pkill", "-STOP", "--full", "bin/bosh-agent")
    assert await site.deployments.is_unresponsive(db)
    assert await site.cpi.call("has_vm", db.vm) is True
    await site.deployments.resurrect(db)
    await site.check(db)


async def test_reboot_vm_keeps_disks_and_data_or_is_rejected_as_unsupported(site: Site, db: DeployedInstance) -> None:
    """After "Reboot VM" in `bosh cloud-check`, the Director does not mount disks again, so the agent must mount
    them.
    """
    if site.way.attach == "never":
        with pytest.raises(CpiCallError, match="recreate the VM instead"):
            await site.cpi.call("reboot_vm", db.vm)
        await site.check(db)
        return
    await site.exec(db, "touch", "/var/vcap/data/kept", "/etc/of-this-life")
    await site.cpi.call("reboot_vm", db.vm)
    await site.deployments.until_ready(db)
    found = await site.exec(db, "sh", "-c", "ls /var/vcap/data/kept /etc/of-this-life 2>/dev/null || true")
    assert found == "/var/vcap/data/kept\n"
    await site.check(db)


@LIVE
async def test_detaching_a_disk_in_use_fails_and_leaves_it_attached(site: Site, db: DeployedInstance) -> None:
    director = site.deployments
    second = await director.create_disk(db)
    await director.attach(db, second)
    await director.mount(db, second)
    await site.exec(db, "touch", "/var/vcap/store_migration_target/of-the-second")
    with pytest.raises(CpiCallError, match="uses it"):
        await site.cpi.call("detach_disk", db.vm, second)
    assert second in await site.cpi.call("get_disks", db.vm)
    assert second in (await site.cpi.call("attach_disk", db.vm, second))["path"]
    await site.exec(db, "test", "-e", "/var/vcap/store_migration_target/of-the-second")
    await director.detach(db, second)
    await director.delete_disk(second)
    await site.check(db)


async def _dynamic_disk(site: Site, db: DeployedInstance) -> tuple[str, str]:
    """Attach a dynamic disk to a VM while jobs run there, and write a file to it. Return the disk's cid and the path of
    the disk's link in the VM.
    """
    disk = await site.deployments.provide_dynamic_disk(db, "of-a-driver")
    link = f"/var/vcap/data/dynamic_disks/{disk}"
    await site.exec(db, "sh", "-c", f"echo kept >{link}/file; sync")
    return disk, link


async def _delete_dynamic(site: Site, db: DeployedInstance, disk: str) -> None:
    await site.deployments.detach_dynamic_disk(db, disk)
    await site.deployments.delete_dynamic_disk(disk)


@LIVE
async def test_dynamic_disk_is_attached_and_detached_while_jobs_run(site: Site, db: DeployedInstance) -> None:
    before = await site.namespace.pod(db.vm).container()
    disk, link = await _dynamic_disk(site, db)
    await site.deployments.provide_dynamic_disk(db, "of-a-driver")
    await site.deployments.detach_dynamic_disk(db, disk)
    assert await site.exec(db, "sh", "-c", f"ls {link} 2>/dev/null || true") == ""
    await site.deployments.provide_dynamic_disk(db, "of-a-driver")

    assert await site.exec(db, "cat", f"{link}/file") == "kept\n"
    assert (await site.namespace.pod(db.vm).container())["containerID"] == before["containerID"]
    claim = await site.namespace.kubectl("get", "pvc", disk, "-o", "jsonpath={.metadata.annotations}")
    assert "a volume driver" in claim
    await _delete_dynamic(site, db, disk)
    await site.check(db)


def _driver(disk: str) -> dict[str, str]:
    """Return a job that mounts a dynamic disk at a second path, as docs/disks.md recommends for volume drivers."""
    start = f"""
disk=/var/vcap/data/dynamic_disks/{disk} place=/var/vcap/data/volume
if [ -b $disk ]; then mkdir -p $place; mount $disk $place
elif mkdir -p $place && mount --bind $disk/ $place; then :
else rmdir $place; ln -s $disk $place
fi
echo kept >>$place/file
echo $$ >$pidfile
cd $place
exec sleep 1000"""
    stop = """
kill $(cat $pidfile); while [ -e /proc/$(cat $pidfile) ]; do sleep 0.1; done; rm $pidfile
place=/var/vcap/data/volume
[ -L $place ] && rm $place || { umount $place && rmdir $place; }"""
    return jobs.process(Paths(), "db", start, stop)


@LIVE
async def test_job_can_mount_a_dynamic_disk_and_gets_it_back_after_a_recreate(site: Site, db: DeployedInstance) -> None:
    director = site.deployments
    disk = await director.provide_dynamic_disk(db, "of-a-driver")
    director.files = _driver(disk)
    try:
        await director.stop(db)
        await director.start(db)
        await director.ask(db, "remove_dynamic_disk", disk)
        with pytest.raises(CpiCallError, match="uses it"):
            await site.cpi.call("detach_disk", db.vm, disk)
        await director.provide_dynamic_disk(db, "of-a-driver")
        await director.world.agents.value(db.agent, "get_state", "full")  # This makes the agent measure the disks.
        _, metrics = await site.namespace.pod(db.vm).get("/metrics")
        assert f'agent_shim_disk_size_bytes{{disk="{disk}"}}' in metrics
        await director.stop_hard(db)
        director.files = {}
        await director.new_vm(db)
        await director.provide_dynamic_disk(db, "of-a-driver")
        director.files = _driver(disk)
        await director.stop(db)
        await director.start(db)
        assert await site.exec(db, "cat", "/var/vcap/data/volume/file") == "kept\nkept\n"
        await director.stop(db)
    finally:
        director.files = {}
    await _delete_dynamic(site, db, disk)
    await director.start(db)
    await site.check(db)


@LIVE
async def test_live_disks_are_attached_again_after_pid_1_is_killed(site: Site, db: DeployedInstance) -> None:
    disk, link = await _dynamic_disk(site, db)

    await site.namespace.pod(db.vm).kill()

    await site.deployments.until_ready(db)
    assert await site.exec(db, "cat", f"{link}/file") == "kept\n"
    await _delete_dynamic(site, db, disk)
    await site.check(db)


@LIVE
async def test_restarted_attachment_pod_does_not_mount_the_disk_twice(site: Site, db: DeployedInstance) -> None:
    disk, link = await _dynamic_disk(site, db)
    (attachment,) = [one for one in await site.objects() if _attaches(one, disk)]

    await site.namespace.pod(attachment["metadata"]["name"]).kill()

    mounts = await site.exec(db, "cat", "/proc/self/mountinfo")
    assert [line.split()[4] for line in mounts.splitlines()].count(f"/var/vcap/disks/{disk}") == 1
    assert await site.exec(db, "cat", f"{link}/file") == "kept\n"
    await _delete_dynamic(site, db, disk)
    await site.check(db)


def _attaches(one: Document, disk: str) -> bool:
    labels: dict[str, str] = one["metadata"].get("labels", {})
    return (one["kind"], labels.get(f"{LABEL}/kind"), labels.get(f"{LABEL}/disk")) == ("Pod", "attachment", disk)


async def test_reattaching_an_attached_disk_succeeds(site: Site, db: DeployedInstance) -> None:
    """With "Reattach disk to instance", `bosh cloud-check` makes the Director attach a disk that may already be
    attached.
    """
    await site.deployments.attach(db, db.disk)
    await site.deployments.mount(db, db.disk)
    await site.check(db)


async def test_orphaned_disk_can_be_attached_again(site: Site, db: DeployedInstance) -> None:
    await site.deployments.delete(db)
    await site.check(db)
    again = DeployedInstance("other", disk=db.disk, kept=db.kept)
    await site.deployments.new_vm(again)
    await site.check(again)


async def test_errand_runs_on_its_own_vm(site: Site, db: DeployedInstance) -> None:
    with site.vm_type(persistent_disk=None):
        assert await site.deployments.errand() == "the errand has run\n"
    await site.check(db)


async def test_compilation_vm_compiles_a_package(site: Site, db: DeployedInstance) -> None:
    with site.vm_type(persistent_disk=None):
        assert (await site.deployments.compile("p"))["blobstore_id"]
    await site.check(db)


async def test_deleted_deployment_leaves_no_objects_and_can_be_deleted_again(site: Site, db: DeployedInstance) -> None:
    vm, disk = db.vm, db.disk
    await site.deployments.delete(db)
    await site.deployments.delete_disk(disk)
    assert await site.cpi.call("has_vm", vm) is False
    assert await site.cpi.call("has_disk", disk) is False
    for method, cid in (("delete_vm", vm), ("delete_disk", disk)):
        try:
            await site.cpi.call(method, cid)
        except CpiCallError as exc:
            assert exc.kind in ("VMNotFound", "DiskNotFound"), exc
    await site.check()
    assert await site.objects() == []
