"""Tests the pods from deploy/kubernetes with ``podman kube play``.

podman supports their commands, users, capabilities, read-only root file systems, ConfigMaps, host paths and restarts.
It neither sets the pod's group on volumes nor calls the preStop hook, so the tests do that themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.image.site import ContainerSite, project
from tests.support import pods
from tests.support.environment import AGENT, BLOBS
from tests.support.kubernetes.manifests import DEPLOY, manifests
from tests.support.pods import EXAMPLE, Container, Podman

pytestmark = pytest.mark.image

DOCTOR: Final = ("agent-shim", "doctor", "--json", "-C", "/etc/agent_shim/agent.json")
LAST_WORDS: Final = ("/opt/agent_shim/bin/agent-shim", "drain", "--timeout", "50")


@dataclass(frozen=True)
class Tier:
    """What the tests expect of an overlay's pod. ``user`` is the agent's user, and ``called`` is the name by which
    ``doctor`` refers to the tier.
    """

    user: str
    called: str
    limited: frozenset[str]
    """Topics that ``doctor`` should report as limited."""

    @property
    def expected_verdicts(self) -> tuple[str, dict[str, str]]:
        """Return the tier's name and the verdicts on ``TOPICS`` that ``doctor`` should report."""
        return self.called, {topic: "limited" if topic in self.limited else "good" for topic in TOPICS}


TIERS: Final = {
    "privileged": Tier("0", "privileged", frozenset()),
    "userns": Tier("0", "unprivileged: root of a user namespace that may mount", frozenset()),
    "base": Tier("0", "root with few capabilities", frozenset({"mounts"})),
    "example": Tier("0", "root with few capabilities", frozenset({"mounts"})),
    "restricted": Tier(
        "1000", "restricted: no root", frozenset({"user", "confinement", "mounts", "/etc", "ports below 1024"})
    ),
}
TOPICS: Final = frozenset(
    {"user", "users", "confinement", "mounts", "bpm isolation", "process 1", "/etc", "/tmp", "/run", "ports below 1024"}
)
"""Topics whose verdict depends on the tier, not on the machine that runs the test."""


def reported_verdicts(report: str) -> tuple[str, dict[str, str]]:
    """Return the tier's name and the verdicts on ``TOPICS`` from a JSON report that ``doctor`` wrote."""
    said = json.loads(report)
    return said["tier"], {one["topic"]: one["verdict"] for one in said["findings"] if one["topic"] in TOPICS}


@pytest.fixture(scope="module")
def example(podman: Podman, image: str) -> str:
    return pods.example(podman, image)


def adapted_manifests(name: str, scratch: Path) -> tuple[str, dict[str, Any]]:
    """Return an overlay's manifests, adapted for ``kube play``, and the pod among them.

    Volumes become directories in ``scratch``.
    """
    documents = list(yaml.safe_load_all(manifests(name)))
    owner = next(document for document in documents if document["kind"] in ("StatefulSet", "Pod"))
    template, claims = owner["spec"].get("template", owner), owner["spec"].get("volumeClaimTemplates", [])
    metadata = {**template["metadata"], "name": f"shim-{name}-{os.getpid()}"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    group = pod["spec"].get("securityContext", {}).get("fsGroup", 0)
    kept = [volume for volume in pod["spec"]["volumes"] if "configMap" in volume]
    made = [volume["name"] for volume in pod["spec"]["volumes"] if "configMap" not in volume]
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "blobs", "mountPath": BLOBS, "readOnly": True})
    made.append("blobs")
    for volume in [*made, *(claim["metadata"]["name"] for claim in claims)]:
        path = scratch / volume
        path.mkdir(exist_ok=True)
        os.chown(path, 0, group)
        path.chmod(0o2775)
        kept.append({"name": volume, "hostPath": {"path": str(path), "type": "Directory"}})
    pod["spec"]["volumes"] = kept
    for container in pod["spec"]["containers"]:
        container["image"] = EXAMPLE if container["image"] == EXAMPLE else pods.IMAGE
        # Do not publish the ports on this machine, where other programs may already use them.
        for member in ("startupProbe", "livenessProbe", "readinessProbe", "ports"):
            container.pop(member, None)
    maps = [document for document in documents if document["kind"] == "ConfigMap"]
    return yaml.safe_dump_all([*maps, pod]), pod


def mapped(
    text: str, pod: dict[str, Any], network: pods.ContainerNetwork, scratch: Path
) -> tuple[tuple[str, ...], list[str]]:
    """Return the options and the command that make ``podman run`` simulate a pod with a user namespace.

    ``kube play`` does not support such pods.
    """
    spec = pod["spec"]["containers"][0]
    (scratch / "config").mkdir()
    for document in yaml.safe_load_all(text):
        for file, content in document.get("data", {}).items():
            (scratch / "config" / file).write_text(content)
    paths = {one["name"]: one.get("hostPath", {}).get("path", scratch / "config") for one in pod["spec"]["volumes"]}
    assert spec["securityContext"]["procMount"] == "Unmasked"
    return (
        f"--network={network.name}",
        *("--uidmap=0:200000:65536", "--gidmap=0:200000:65536", "--security-opt=unmask=all", "--cap-drop=all"),
        *(f"--cap-add={name}" for name in spec["securityContext"]["capabilities"]["add"]),
        *(f"--volume={paths[one['name']]}:{one['mountPath']}:U" for one in spec["volumeMounts"]),
    ), spec["command"]


@asynccontextmanager
async def running_overlay(
    podman: Podman, network: pods.ContainerNetwork, name: str, scratch: Path, secret: tuple[str, str] | None = None
) -> AsyncIterator[Container]:
    """Run an overlay's pod and yield its container. ``secret`` is the name and the content of a file in the "settings"
    volume.
    """
    text, pod = adapted_manifests(name, scratch)
    if secret:
        project(scratch / "settings", *secret)
    if not pod["spec"].get("hostUsers", True):
        options, command = mapped(text, pod, network, scratch)
        async with pods.running(podman, EXAMPLE, *command, options=options) as container:
            yield container
        return
    manifest = scratch / "pod.yaml"
    manifest.write_text(text)
    container = Container(podman, f"{pod['metadata']['name']}-{pod['spec']['containers'][0]['name']}")
    await asyncio.to_thread(podman, "kube", "play", "--network", network.name, str(manifest))
    try:
        yield container
    finally:
        print(await asyncio.to_thread(container.logs))  # noqa: T201 - pytest shows it if the test fails
        await asyncio.to_thread(podman.run, "pod", "rm", "--force", "--time", "0", pod["metadata"]["name"])
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                await asyncio.to_thread(podman.run, "volume", "rm", volume["configMap"]["name"])


async def answer(container: Container, port: int, path: str) -> str:
    """Fetch an HTTP page from the pod, retrying until it is available. Return the page's text."""
    url = f"http://{await address(container)}:{port}{path}"

    def ask() -> str:
        with urllib.request.urlopen(url, timeout=5) as got:
            return str(got.read().decode())

    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.to_thread(ask)
            except (urllib.error.URLError, ConnectionError):
                await asyncio.sleep(0.1)


async def address(container: Container) -> str:
    """Return the pod's IP address."""
    return (await container.exec("hostname", "-I")).split()[0]


async def user_of(container: Container, words: str) -> str:
    """Return a space-separated list of the user ids of all processes whose command line matches ``words``."""
    pids = (await container.exec("pgrep", "--full", words)).split()
    users = await container.exec("stat", "--format=%u", *(f"/proc/{pid}" for pid in pids))
    return " ".join(sorted(set(users.split())))


@pytest.mark.parametrize(("name", "tier"), TIERS.items(), ids=TIERS.keys())
async def test_job_answers_in_every_security_tier(
    podman: Podman, example: str, network: pods.ContainerNetwork, tmp_path: Path, name: str, tier: Tier
) -> None:
    async with running_overlay(podman, network, name, tmp_path) as container:
        assert await answer(container, 9190, "/readyz") == "jobs are running\n"
        assert await answer(container, 8080, "/") == "hello from hello\n"
        users = await user_of(container, "http.server"), await user_of(container, "bin/bosh-agent")
        assert users == ("1000", tier.user)
        assert reported_verdicts(await container.exec(*DOCTOR)) == tier.expected_verdicts

        assert await container.exec(*LAST_WORDS) == "all jobs stopped in order\n"
        assert (tmp_path / "store/hello/starts.txt").read_text() == "prepared\ndrained\n"


async def test_cpi_pod_runs_jobs_after_a_secret_change_and_a_container_restart(site: ContainerSite) -> None:
    disk = {"system": "", "persistent": {"disk-1": "/warden-cpi-dev/disk-1"}}
    file = "config.json"
    async with running_overlay(
        site.podman, site.network, "cpi", site.scratch, (file, site.settings(disks=disk))
    ) as container:
        await site.until_pong()
        await site.director.run(AGENT, "mount_disk", "disk-1")
        await site.deploy()
        await container.exec("touch", "/var/vcap/store/kept")
        agent, job = ("pgrep", "--full", "bin/bosh-agent"), ("cat", "/var/vcap/sys/run/sleeper/sleeper.pid")
        before = await container.exec(*agent), await container.exec(*job)
        project(site.scratch / "settings", file, site.settings(disks=disk, bootstrap=False))
        await site.server.add_agent(AGENT, bootstrap=False)
        await site.until_pong()
        assert (await container.exec(*agent), await container.exec(*job)) == before

        await kill_from_outside(site.podman, container)
        await site.until_state("running")
        assert await site.director.run(AGENT, "list_disk") == ["disk-1"]
        await container.exec("test", "-f", "/var/vcap/store/kept")
        assert (site.scratch / "disk-1/kept").exists()
        assert await container.exec(*LAST_WORDS) == "all jobs stopped in order\n"


async def kill_from_outside(podman: Podman, container: Container) -> None:
    """Kill PID 1 from the host, because podman does not restart a container that its own commands have stopped."""
    form = "{{.State.Pid}}"
    first = int(await asyncio.to_thread(podman, "inspect", "--format", form, container.name))
    os.kill(first, 9)
    async with asyncio.timeout(60):
        while await asyncio.to_thread(podman, "inspect", "--format", form, container.name) in (f"{first}\n", "0\n"):
            await asyncio.sleep(0.05)


async def test_restarted_container_starts_its_job_again(
    podman: Podman, example: str, network: pods.ContainerNetwork, tmp_path: Path
) -> None:
    async with running_overlay(podman, network, "base", tmp_path) as container:
        assert await answer(container, 8080, "/starts.txt") == "prepared\n"
        await kill_from_outside(podman, container)
        async with asyncio.timeout(60):
            while await container.status_of("agent-shim", "probe", "ready") != 0:
                await asyncio.sleep(0.1)

        assert await answer(container, 8080, "/") == "hello from hello\n"


def remove_pod(podman: Podman, manifest: Path, pod: str) -> None:
    """Remove a pod, retrying because podman 4.3 fails while conmon is still in the pod's cgroup."""
    for _ in range(30):
        podman.run("kube", "down", str(manifest))
        if podman.run("pod", "exists", pod).returncode:
            return
        time.sleep(0.5)
    pytest.fail(f"podman does not take down {pod}")


async def test_example_pod_keeps_its_disk_when_it_is_started_again(
    podman: Podman, example: str, network: pods.ContainerNetwork, tmp_path: Path
) -> None:
    """The test runs the commands in docs/kubernetes.md."""
    name = f"shim-again-{os.getpid()}"
    volumes = {kind: f"{name}-{kind}" for kind in ("agent", "store")}
    settings, pod = yaml.safe_load_all((DEPLOY / "example/pod.yaml").read_text())
    settings["metadata"]["name"], pod["metadata"]["name"] = volumes["agent"], name
    for volume in pod["spec"]["volumes"]:
        match volume["name"]:
            case "agent":
                volume["configMap"]["name"] = volumes["agent"]
            case "store":
                volume["persistentVolumeClaim"]["claimName"] = volumes["store"]
    for member in ("ports", "readinessProbe"):
        del pod["spec"]["containers"][0][member]
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(yaml.safe_dump_all([settings, pod]))
    container = Container(podman, f"{name}-instance")
    try:
        for times in (1, 2):
            await asyncio.to_thread(podman, "kube", "play", "--network", network.name, str(manifest))
            await container.until(0, "agent-shim", "probe", "ready")
            lines = (await container.exec("cat", "/var/vcap/store/hello/starts.txt")).split()
            assert lines == ["prepared", *["drained", "prepared"] * (times - 1)]
            await container.exec(*LAST_WORDS)
            await asyncio.to_thread(remove_pod, podman, manifest, name)
    finally:
        await asyncio.to_thread(podman.run, "pod", "rm", "--force", "--time", "0", name)
        await asyncio.to_thread(podman.run, "volume", "rm", *volumes.values())


async def test_doctor_proposes_no_further_changes_after_its_patch_is_applied(
    podman: Podman, image: str, network: pods.ContainerNetwork, tmp_path: Path
) -> None:
    name = f"shim-patch-{os.getpid()}"
    context = {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "NET_RAW"]}}
    program = {"name": "instance", "image": pods.IMAGE, "command": ["sleep", "infinity"], "securityContext": context}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [program]}}
    manifest, change = tmp_path / "pod.yaml", tmp_path / "patch.yaml"
    manifest.write_text(yaml.safe_dump(pod))
    container = Container(podman, f"{name}-instance")
    doctor = ("agent-shim", "doctor", "--patch", "pod", "--container", "instance")
    try:
        await asyncio.to_thread(podman, "kube", "play", "--network", network.name, str(manifest))
        change.write_text(await container.exec(*doctor))
        patched = await asyncio.to_thread(applied, manifest, change)
        await asyncio.to_thread(remove_pod, podman, manifest, name)

        manifest.write_text(patched)
        await asyncio.to_thread(podman, "kube", "play", "--network", network.name, str(manifest))
        remaining = await container.exec(*doctor)
        found = json.loads((await asyncio.to_thread(podman.run, "exec", container.name, *DOCTOR[:3])).stdout)
    finally:
        await asyncio.to_thread(podman.run, "pod", "rm", "--force", "--time", "0", name)

    now = yaml.safe_load(patched)["spec"]["containers"][0]
    assert now["securityContext"]["readOnlyRootFilesystem"] is False
    assert {"CHOWN", "KILL", "NET_RAW", "SETUID"} <= {*now["securityContext"]["capabilities"]["add"]}
    assert {mount["mountPath"] for mount in now["volumeMounts"]} >= {"/tmp", "/run"}
    assert yaml.safe_load(remaining) == {}
    assert {one["topic"]: one["verdict"] for one in found["findings"]}["user"] == "good"


def applied(manifest: Path, change: Path) -> str:
    """Apply a patch with kubectl, which needs no cluster for this, and return the new manifest."""
    words = ["kubectl", "patch", "--local", f"--filename={manifest}", f"--patch-file={change}", "--output=yaml"]
    return subprocess.run(words, capture_output=True, check=True, text=True).stdout
