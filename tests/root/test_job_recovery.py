"""Tests what happens to jobs and disks when a container exits and a new one starts with the same volumes.

The containers have real mounts and pids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.paths import Paths
from agent_shim.demo.pki import Authority
from agent_shim.host import files
from tests.support import jobs
from tests.support.pod import AGENT, PodInstance
from tests.support.waiting import until

pytestmark = pytest.mark.root

WITHOUT_MOUNTS = ("setpriv", "--bounding-set=-sys_admin", "--")


def writer(name: str) -> dict[str, str | bytes]:
    """Return a job that writes a line to the persistent disk in its pre-start and each time it is started.

    The pre-start also creates a file in /etc, which does not exist in a new container.
    """
    files = jobs.sleeper(Paths(), name)
    ctl = files["bin/ctl"].replace("start)", f"start) echo {name} >>/var/vcap/store/events;")
    pre_start = f"#!/bin/sh\necho pre-start {name} >>/var/vcap/store/events\ntouch /etc/made-by-{name}\n"
    return {"monit": files["monit"], "bin/ctl": ctl, "bin/pre-start": pre_start}


async def deploy(pod: PodInstance, *names: str) -> dict[str, Any]:
    """Deploy the jobs ``names`` as the Director does, but without running pre-start. Return the spec."""
    return await pod.deploy({name: writer(name) for name in names}, {"tool": {"bin/tool": "#!/bin/sh"}})


def events(pod: PodInstance, cid: str = "disk-1") -> list[str]:
    """Return the lines that the jobs have written to the disk since the last call, and delete them."""
    path = pod.volume(cid) / "events"
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("")
    return lines


async def test_first_ping_is_answered_before_boot_steps_that_the_bus_does_not_need(pod: PodInstance) -> None:
    """In a new container, the agent installs CA certificates with a command that takes most of a second. In this test
    the command never exits.
    """
    pod.start_container()
    pod.machine.write("/mnt/for-ever", "", mode=0o755)
    (pod.machine.root / "mnt/for-ever").write_text("#!/bin/sh\nexec sleep 1000\n")
    pod.machine.run("mount --bind /mnt/for-ever /usr/sbin/update-ca-certificates")
    pod.machine.run("mount -t tmpfs tmpfs /usr/local/share/ca-certificates")
    pod.machine.write("/var/vcap/bosh/update_settings.json", {"trusted_certs": Authority("extra").ca})

    await pod.start_agent()

    assert await pod.director.value(AGENT, "ping", timeout=30) == "pong"
    assert "boot step trusted certificates" not in pod.log
    assert "boot step jobs that ran before" in pod.log


async def with_a_disk(pod: PodInstance) -> None:
    """Start the first container and mount a disk on the store."""
    pod.attach("disk-1")
    await pod.start()
    await pod.run("mount_disk", "disk-1")


@pytest.mark.parametrize("prefix", [(), WITHOUT_MOUNTS], ids=["by mount", "by link"])
async def test_container_restart_restores_disk_and_jobs(pod: PodInstance, prefix: tuple[str, ...]) -> None:
    """The boot must mount the disk, run pre-start and start the jobs, in that order. It must also restore users and
    host names, and remove stale files from the run directory.
    """
    pod.prefix = prefix
    await with_a_disk(pod)
    await deploy(pod, "web", "worker")
    assert sorted(events(pod)) == ["web", "worker"]
    records = json.dumps({"version": 3, "records": [["10.9.8.7", "neighbour.bosh"]]}).encode()
    blob = jobs.blob(pod.scratch / "blobs", records)
    await pod.run("sync_dns", blob["blobstore_id"], blob["sha1"], 3)
    before = await pod.until("running")

    await pod.restart()

    after = await pod.until("running")
    seen = events(pod)
    assert sorted(seen[:2]) == ["pre-start web", "pre-start worker"]
    assert sorted(seen[2:]) == ["web", "worker"]
    assert (pod.machine.root / "etc/made-by-web").exists()
    assert await pod.run("list_disk") == ["disk-1"]
    assert "10.9.8.7 neighbour.bosh" in (pod.machine.root / "etc/hosts").read_text()
    dns = pod.vcap / "instance/dns/records.json"
    assert (dns.read_bytes(), oct(dns.stat().st_mode & 0o777), dns.stat().st_gid) == (records, "0o640", 1000)
    for volatile in ("processes", "vitals"):
        before.pop(volatile, None)
        after.pop(volatile, None)
    assert after == before
    assert pod.vcap.joinpath("jobs/web").readlink().is_relative_to("/var/vcap/data/jobs/web")


async def test_reboot_with_the_same_root_file_system_starts_jobs_without_pre_start(pod: PodInstance) -> None:
    """pre-start must not run, because its changes to the root file system still exist."""
    pod.keeps_root = True
    await with_a_disk(pod)
    await deploy(pod, "web")
    assert events(pod) == ["web"]
    (pod.vcap / "data/sys/run/web/stale").touch()

    await pod.restart()

    await pod.until("running")
    assert events(pod) == ["web"]
    assert not (pod.vcap / "data/sys/run/web/stale").exists()
    assert await pod.run("list_disk") == ["disk-1"]


async def test_recreated_vm_mounts_its_disk_but_starts_no_job_until_an_apply(pod: PodInstance) -> None:
    """The Docker and Kubernetes CPIs attach the disk before the Director sends any request, so the agent mounts it at
    boot.
    """
    await with_a_disk(pod)
    spec = await deploy(pod, "web")
    events(pod)
    pod.kill()
    pod.lose_data()
    await pod.start()

    assert (pod.vcap / "store/events").exists()
    assert await pod.run("list_disk") == ["disk-1"]
    assert (await pod.until("running"))["deployment"] == ""
    assert events(pod) == []
    await pod.run("apply", spec)
    await pod.run("start")
    await pod.until("running")
    assert events(pod) == ["web"]


async def test_jobs_wait_for_a_disk_that_appears_late(pod: PodInstance) -> None:
    await with_a_disk(pod)
    await deploy(pod, "web")
    events(pod)
    pod.kill()
    pod.disks.clear()
    pod.start_container()
    settings = json.loads((pod.vcap / "bosh/warden-cpi-agent-env.json").read_text())
    settings["disks"]["persistent"]["disk-1"] = "/var/vcap/bosh/disks/disk-1"
    pod.machine.write("/var/vcap/bosh/warden-cpi-agent-env.json", settings)
    pod.exec_agent()
    await pod.director.wait_until_ready(AGENT, timeout=30)
    await pod.until("failing")
    assert events(pod) == []

    # Some CPIs attach a disk by running mount inside the running container. Let the disk appear in the same way.
    pod.machine.run("mkdir -p /var/vcap/bosh/disks/disk-1 /mnt/late")
    pod.volume("disk-1").joinpath(".agent_shim/lease.json").unlink()
    for path in sorted(pod.volume("disk-1").rglob("*")):
        target = pod.scratch / "container-2/late" / path.relative_to(pod.volume("disk-1"))
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    pod.machine.run("mount --bind /mnt/late /var/vcap/bosh/disks/disk-1")

    await pod.until("running")
    assert (pod.scratch / "container-2/late/events").read_text().splitlines() == ["pre-start web", "web"]


async def test_second_container_does_not_mount_a_disk_that_the_first_still_uses(
    pod: PodInstance, tmp_path: Path
) -> None:
    """A pod can be recreated on another node while its predecessor is still running."""
    await with_a_disk(pod)
    await deploy(pod, "web")
    events(pod)
    (tmp_path / "twin").mkdir()
    twin = PodInstance(tmp_path / "twin", pod.server, pod.director)
    files.swap_link(pod.scratch / "disks", twin.scratch / "disks")
    twin.disks = pod.disks
    try:
        twin.start_container()
        twin.exec_agent()
        await until(lambda: "waiting until another agent ends" in twin.log)
        assert f"disk disk-1 is in use by agent {AGENT} on " in twin.log
        assert not (twin.vcap / "store").exists()
        assert await pod.run("list_disk") == ["disk-1"]
    finally:
        twin.kill()


async def test_job_files_lost_with_a_tmpfs_are_reported_as_missing(pod: PodInstance) -> None:
    """With ``env.bosh.job_dir.tmpfs``, the jobs' files are lost when the container is restarted, so the Director must
    apply the spec again. If only the agent is restarted, the files and processes must remain.
    """
    pod.env = {"job_dir": {"tmpfs": True, "tmpfs_size": "20m"}, "run_dir": {"tmpfs": True}}
    await with_a_disk(pod)
    spec = await deploy(pod, "web")
    mounts, pid = mounts_in_data(pod), pod.machine.run("cat /var/vcap/sys/run/web/web.pid")
    assert {line for line in mounts if line.endswith("tmpfs")} == {
        "/var/vcap/data/jobs tmpfs",
        "/var/vcap/data/sensitive_blobs tmpfs",
        "/var/vcap/data/sys/run tmpfs",
    }

    pod.end_agent()
    await pod.start_agent()
    await pod.until("running")
    assert mounts_in_data(pod) == mounts
    assert pod.machine.run("cat /var/vcap/sys/run/web/web.pid") == pid
    assert events(pod) == ["web"]

    await pod.restart()
    await pod.until("failing")
    text = "the files of job web are gone, the Director has to apply its spec again"
    assert text in pod.log
    assert events(pod) == []
    await pod.run("apply", spec)
    await pod.run("start")
    await pod.until("running")


def mounts_in_data(pod: PodInstance) -> list[str]:
    """Return each mount below ``data`` with its file system type. If mounts are stacked, the path appears several
    times.
    """
    return sorted(pod.machine.run("findmnt -rno TARGET,FSTYPE | grep ^/var/vcap/data/").splitlines())


SECRET = "not-to-be-found-on-a-disk"


async def test_settings_kept_in_memory_are_not_written_to_disk(pod: PodInstance) -> None:
    pod.env = {"agent": {"settings": {"tmpfs": True}}}
    await with_a_disk(pod)
    stores = [{"provider": "dav", "options": {"user": SECRET}}]
    await pod.run("update_settings", {"trusted_certs": "", "disk_associations": [], "blobstores": stores})
    held = json.loads(pod.machine.run("cat /var/vcap/bosh/settings/update_settings.json"))
    assert held["blobstores"][0]["options"]["user"] == SECRET

    pod.end_agent()
    await pod.start_agent()

    assert await pod.run("list_disk") == ["disk-1"]
    assert "boot step settings in memory: done" in pod.log
    assert pod.machine.run("findmnt -rno FSTYPE,OPTIONS /var/vcap/bosh/settings").startswith(
        "tmpfs rw,relatime,size=16384k,mode=700"
    )
    assert pod.machine.run("cat /var/vcap/bosh/update_settings.json").startswith("{")
    assert pod.machine.run(f"find /var/vcap/bosh /var/vcap/data -xdev -type f | xargs grep -l {SECRET} || true") == ""


IN_MEMORY = {"job_dir": {"tmpfs": True}, "run_dir": {"tmpfs": True}}


@pytest.mark.parametrize("why", ["the container may not mount", "the manifest mounts them"])
async def test_job_files_survive_a_restart_if_the_agent_mounts_no_tmpfs(pod: PodInstance, why: str) -> None:
    """If the container is not allowed to mount file systems, the agent must log at boot that it skipped the
    ``job_dir.tmpfs`` and ``run_dir.tmpfs`` mounts. If a manifest mounts these directories, the agent must use them as
    they are.
    """
    pod.env = IN_MEMORY
    is_refused = why == "the container may not mount"
    if is_refused:
        pod.prefix = WITHOUT_MOUNTS
    else:
        for name in ("jobs", "sensitive_blobs"):
            (pod.scratch / name).mkdir()
            pod.seen[f"/var/vcap/data/{name}"] = pod.scratch / name
    await with_a_disk(pod)
    assert ("boot step directories in memory: skipped: cannot mount a tmpfs" in pod.log) is is_refused
    await deploy(pod, "web")
    if not is_refused:
        assert list((pod.scratch / "jobs").iterdir()) == [pod.scratch / "jobs/web"]
    events(pod)

    await pod.restart()

    await pod.until("running")
    assert events(pod) == ["pre-start web", "web"]
