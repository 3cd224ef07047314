"""Tests pods from deploy/kubernetes on a real kubelet: probes, hooks, grace periods, restarts, Secrets and volumes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import pytest

from agent_shim.core.paths import Paths
from tests.image.test_kubernetes import DOCTOR, TIERS, reported_verdicts
from tests.support import jobs
from tests.support.environment import AGENT, BLOBS, Environment
from tests.support.kubernetes.objects import Document, Namespace, Pod, end_on_request, overlay, pod_spec

pytestmark = pytest.mark.kubernetes

DISK: Final = "disk-1"
DISKS: Final = {"system": "", "persistent": {DISK: f"/warden-cpi-dev/{DISK}"}}
IN_ORDER: Final = (0, "agent-shim: all jobs stopped in order\n")
AGENT_PID: Final = ("pgrep", "--full", "bin/bosh-agent")
HUNG_S: Final = 90
"""How long the agent is suspended, in seconds."""
JOB_PID: Final = ("cat", "/var/vcap/sys/run/sleeper/sleeper.pid")
HELLO_PID: Final = ("pgrep", "--full", "http.server")


def pod_of_cpi(bosh: Environment, settings: str, *, disk: bool = True) -> list[Document]:
    """Return the manifests for a pod like those that a CPI creates. ``settings`` is the content of its settings file.

    The pod gets the test's blobstore and, unless ``disk`` is False, a disk.
    """
    bosh.blobs.mkdir(exist_ok=True)
    documents = [one for one in overlay("cpi") if disk or one["kind"] != "PersistentVolumeClaim"]
    spec = pod_spec(documents)
    container = spec["containers"][0]
    if not disk:
        spec["volumes"] = [one for one in spec["volumes"] if one["name"] != DISK]
        container["volumeMounts"] = [one for one in container["volumeMounts"] if one["name"] != DISK]
    spec["volumes"].append({"name": "blobs", "hostPath": {"path": str(bosh.blobs)}})
    container["volumeMounts"].append({"name": "blobs", "mountPath": BLOBS, "readOnly": True})
    (secret,) = (one for one in documents if one["kind"] == "Secret")
    del secret["data"]
    secret["stringData"] = {"config.json": settings}
    return documents


def set_grace(documents: list[Document], seconds: int) -> None:
    """Set the pod's grace period to ``seconds``, and the preStop hook's timeout to one second less."""
    spec = pod_spec(documents)
    spec["terminationGracePeriodSeconds"] = seconds
    spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] = str(seconds - 1)


@pytest.mark.parametrize("name", ["example", "base", "privileged", "restricted"])
async def test_job_in_a_pod_runs_without_a_director(namespace: Namespace, name: str) -> None:
    await namespace.apply(overlay(name))
    pod = namespace.pod("hello" if name == "example" else "hello-0")
    await pod.until_ready()

    assert await pod.get("/", 8080) == (200, "hello from hello\n")
    assert await pod.get("/readyz") == (200, "jobs are running\n")
    assert "agent_shim_build_info" in (await pod.get("/metrics"))[1]
    tier, judgements = TIERS[name].expected_verdicts
    if namespace.node.minor >= 24:
        # With containerd 2, every user in a pod can bind ports below 1024.
        judgements = judgements | {"ports below 1024": "good"}
    assert reported_verdicts(await pod.exec(*DOCTOR)) == (tier, judgements)
    await namespace.kubectl("delete", "statefulsets", "--all", "--cascade=orphan")
    await pod.delete()
    store = namespace.volume("hello-store" if name == "example" else "store-hello-0")
    assert (store / "hello/starts.txt").read_text() == "prepared\ndrained\n"


async def test_pod_readiness_follows_the_job(namespace: Namespace) -> None:
    await namespace.apply(overlay("base"))
    pod = namespace.pod("hello-0")
    await pod.until_ready()
    await pod.exec("agent-shim", "stop", "hello", "--wait")
    await pod.until_ready(False)
    await pod.exec("agent-shim", "start", "hello", "--wait")
    await pod.until_ready()

    assert (await pod.container())["restartCount"] == 0


async def test_cpi_pod_becomes_ready_without_the_bus(namespace: Namespace, bosh: Environment) -> None:
    await bosh.server.remove_agent(AGENT)
    await namespace.apply(pod_of_cpi(bosh, bosh.settings(), disk=False))
    pod = namespace.pod("vm-1")
    await pod.until(lambda one: one["status"].get("podIP") and "containerStatuses" in one["status"], "started")

    await pod.until_ready()
    assert await pod.get("/readyz?level=boot") == (200, "booted\n")
    assert (await pod.get("/readyz?level=agent"))[0] == 503
    await bosh.server.add_agent(AGENT)
    await bosh.until_pong()
    assert (await pod.get("/readyz?level=agent"))[0] == 200


async def test_restarting_the_agent_in_a_pod_keeps_the_jobs_running(namespace: Namespace) -> None:
    await namespace.apply(overlay("base"))
    pod = namespace.pod("hello-0")
    await pod.until_ready()
    agent, job = await pod.exec(*AGENT_PID), await pod.exec(*HELLO_PID)
    await pod.exec("sv", "restart", "agent")
    while await pod.exec("sh", "-c", f"{' '.join(AGENT_PID)} || true") in (agent, ""):
        await asyncio.sleep(0.1)
    await pod.until_ready()

    assert await pod.exec(*HELLO_PID) == job
    assert (await pod.container())["restartCount"] == 0


async def test_unresponsive_agent_in_a_pod_does_not_stop_jobs(namespace: Namespace) -> None:
    """On a busy node, the agent may be slow to answer. The liveness probe must not restart the container, because that
    would restart all jobs.
    """
    await namespace.apply(overlay("base"))
    pod = namespace.pod("hello-0")
    await pod.until_ready()
    job = await pod.exec(*HELLO_PID)
    await pod.exec("pkill", "-STOP", "--full", "bin/bosh-agent")
    await pod.until(lambda one: not one["status"]["containerStatuses"][0]["ready"], "not ready")
    await asyncio.sleep(HUNG_S)
    await pod.exec("pkill", "-CONT", "--full", "bin/bosh-agent")
    await pod.until_ready()

    assert await pod.exec(*HELLO_PID) == job
    assert (await pod.container())["restartCount"] == 0


async def test_agent_mounts_the_disk_and_starts_jobs_after_a_container_restart(
    namespace: Namespace, bosh: Environment
) -> None:
    await namespace.apply(pod_of_cpi(bosh, bosh.settings(disks=DISKS)))
    pod = namespace.pod("vm-1")
    await pod.until_ready()
    await bosh.until_pong()
    await bosh.director.run(AGENT, "mount_disk", DISK)
    await bosh.deploy()
    await pod.exec("touch", "/etc/of-this-life", "/var/vcap/store/kept")
    await pod.kill()
    await bosh.until_state("running")
    state = await bosh.director.value(AGENT, "get_state")

    assert [job["name"] for job in state["job"]["templates"]] == ["sleeper"]
    assert (await pod.exec(*JOB_PID)).strip() != ""
    assert await bosh.director.run(AGENT, "list_disk") == [DISK]
    assert await pod.exec("sh", "-c", "ls /etc/of-this-life /var/vcap/store/kept 2>/dev/null || true") == (
        "/var/vcap/store/kept\n"
    )
    assert (namespace.volume(DISK) / "kept").exists()
    await pod.until_ready()


async def test_pod_recreated_with_a_disk_can_mount_it(namespace: Namespace, bosh: Environment) -> None:
    """A CPI attaches a disk by deleting the pod without a grace period and creating a pod with the volume."""
    await namespace.apply(pod_of_cpi(bosh, bosh.settings(), disk=False))
    await bosh.deploy()
    await bosh.director.run(AGENT, "stop")
    await namespace.pod("vm-1").delete_without_grace()
    await namespace.apply(pod_of_cpi(bosh, bosh.settings(disks=DISKS)))
    await bosh.until_pong()
    await bosh.director.run(AGENT, "add_persistent_disk", DISK, f"/warden-cpi-dev/{DISK}")
    await bosh.director.run(AGENT, "mount_disk", DISK)
    await bosh.deploy()
    pod = namespace.pod("vm-1")
    await pod.exec("touch", "/var/vcap/store/kept")

    assert await bosh.director.run(AGENT, "list_disk") == [DISK]
    assert (namespace.volume(DISK) / "kept").exists()


async def test_agent_reads_new_bus_credentials_from_a_changed_secret(namespace: Namespace, bosh: Environment) -> None:
    await namespace.apply(pod_of_cpi(bosh, bosh.settings(), disk=False))
    await bosh.deploy()
    pod = namespace.pod("vm-1")
    before = await pod.exec(*AGENT_PID), await pod.exec(*JOB_PID)
    documents = pod_of_cpi(bosh, bosh.settings(bootstrap=False), disk=False)
    await namespace.apply(one for one in documents if one["kind"] == "Secret")
    await bosh.server.add_agent(AGENT, bootstrap=False)
    await bosh.until_pong()

    assert (await pod.exec(*AGENT_PID), await pod.exec(*JOB_PID)) == before
    assert (await pod.container())["restartCount"] == 0


def draining(name: str, others: tuple[str, ...]) -> dict[str, str]:
    """Return a job whose drain script takes eight seconds and then records which of the other jobs are still
    running.
    """
    trace = "/var/vcap/store/trace"
    run = Paths().run
    drain = f"""#!/bin/sh
echo {name} begins >>{trace}
sleep 8
for other in {" ".join(others)}; do kill -0 $(cat {run}/$other/$other.pid) && echo {name} sees $other >>{trace}; done
echo {name} ends >>{trace}
echo 0
"""
    return jobs.sleeper(Paths(), name) | {"bin/drain": drain}


async def deploy_draining(namespace: Namespace, bosh: Environment, grace: int) -> tuple[Pod, Path]:
    """Create a pod with three jobs from ``draining``. Return the pod and the file to which the jobs write."""
    names = ("one", "two", "three")
    documents = pod_of_cpi(bosh, bosh.settings(disks=DISKS))
    set_grace(documents, grace)
    end_on_request(documents)
    await namespace.apply(documents)
    await bosh.until_pong()
    await bosh.director.run(AGENT, "mount_disk", DISK)
    await bosh.deploy({name: draining(name, names) for name in names})
    return namespace.pod("vm-1"), namespace.volume(DISK) / "trace"


async def test_pod_deletion_waits_for_drains_within_the_grace_period(namespace: Namespace, bosh: Environment) -> None:
    pod, trace = await deploy_draining(namespace, bosh, 30)

    assert await pod.end() == IN_ORDER
    lines = trace.read_text().splitlines()
    assert len([line for line in lines if " sees " in line]) == 9
    assert len([line for line in lines if line.endswith(" ends")]) == 3


async def test_pod_deletion_cuts_off_drains_beyond_the_grace_period(namespace: Namespace, bosh: Environment) -> None:
    pod, trace = await deploy_draining(namespace, bosh, 5)

    assert await pod.end() == (1, "agent-shim: not clean: drain scripts were cut short\n")
    lines = trace.read_text().splitlines()
    assert sorted(lines) == ["one begins", "three begins", "two begins"]


def slow_to_drain(trace: str) -> dict[str, str]:
    """Return a job whose drain script takes eight seconds, and whose process records when it gets SIGTERM."""
    start = f'echo $$ >$pidfile; trap "echo stopped >>{trace}; exit 0" TERM; while :; do sleep 0.1; done'
    drain = f"#!/bin/sh\necho drain begins >>{trace}\nsleep 8\necho drain ends >>{trace}\necho 0\n"
    return jobs.process(Paths(), "slow", start) | {"bin/drain": drain}


async def test_evicted_pod_cuts_drains_short_and_stops_its_jobs(namespace: Namespace, bosh: Environment) -> None:
    """When the kubelet evicts a pod, it allows one second for the preStop hook and two more for the container.

    The pod's own grace period is ignored.
    """
    if namespace.node.minor < 36:
        pytest.skip("older kubelets give other times")
    documents = pod_of_cpi(bosh, bosh.settings(disks=DISKS))
    (data,) = (one for one in pod_spec(documents)["volumes"] if "emptyDir" in one)
    data["emptyDir"] = {"sizeLimit": "16Mi"}
    await namespace.apply(documents)
    await bosh.until_pong()
    await bosh.director.run(AGENT, "mount_disk", DISK)
    await bosh.deploy({"slow": slow_to_drain("/var/vcap/store/trace")})
    pod = namespace.pod("vm-1")
    await pod.exec("sh", "-c", "head -c 32M /dev/zero >/var/vcap/data/fill")

    ended = await pod.until(lambda one: one["status"]["phase"] == "Failed", "evicted")
    assert ended["status"]["reason"] == "Evicted"
    assert (namespace.volume(DISK) / "trace").read_text() == "drain begins\nstopped\n"
