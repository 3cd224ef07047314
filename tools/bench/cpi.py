"""Measures the Kubernetes CPI on its own node, and compares it with a minimal client of the API server.

The benchmark calls the CPI's methods in the same order as a Director. It needs root and the packages that ``./dev
test-kubernetes`` needs. The first run builds the node. ``on_node`` runs in the node's namespaces.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kubernetes_cpi import names
from tests.support.kubernetes import cpi_site, node
from tests.support.kubernetes.calls import PATH, Cpi
from tests.support.kubernetes.cpi_site import Site, Way
from tests.support.kubernetes.deployments import NETWORKS, DeployedInstance
from tools.bench.measuring import Figure, Figures, figure

ROUNDS: Final = 15
PODS: Final = 5
PARALLEL_CALLS: Final = 32
"""Number of concurrent CPI calls. A Director with ``max_threads: 32`` makes this many."""
INSTANCES: Final = 3
WAY: Final = Way("live", "live", "base", "privileged")
POD_TIMEOUT_S: Final = 60.0
STEPS: Final = ("to the pod", "to its volume and node", "to its container", "to its agent")
"""Names of the periods into which the times of ``Bare.steps_of_next`` divide a create_vm call."""
STEPS_OF_ATTACHMENT: Final = ("to the pod", "to its mount")
"""Names of the periods of an attach_disk call to a running VM. There are only two, because the container has a
postStart hook that waits for the mount, and the kubelet reports the end of the hook together with the container's
start.
"""
START: Final = "import json, msgspec"
START_OF_A_CLIENT: Final = "import http.client, json, msgspec, ssl"


async def measure(command: str, scale: float, figures: Figures) -> None:
    """Start a node and run the measurements there."""
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch, "figures.json")
        argv = [sys.executable, "-m", "tools.bench.cpi", str(found), str(scale)]
        # Redirect the node's messages to stderr, where all progress goes.
        run = "import sys; from tests.support.kubernetes.run import run_as_node; sys.exit(run_as_node(sys.argv[1:]))"
        done = await asyncio.create_subprocess_exec(sys.executable, "-c", run, *argv, stdout=sys.stderr)
        code = await done.wait()
        if found.exists():
            figures |= json.loads(found.read_text())
        if code:
            raise RuntimeError(f"the node ended with {code}")


# --- the API server without a CPI -------------------------------------------------------------------------------------


@dataclass
class Bare:
    """A minimal API server client, to which the CPI is compared. It does not retry requests or convert objects to
    types.
    """

    namespace: str
    token: str
    authority: Path

    def connection(self) -> http.client.HTTPSConnection:
        address = node.API.removeprefix("https://")
        context = ssl.create_default_context(cafile=str(self.authority))
        return http.client.HTTPSConnection(address, context=context, timeout=POD_TIMEOUT_S)

    def ask(self, link: http.client.HTTPSConnection, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the decoded response. Raises ``RuntimeError`` for an error status."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        content = None if body is None else json.dumps(body)
        link.request(method, f"/api/v1/namespaces/{self.namespace}/{path}", content, headers)
        response = link.getresponse()
        said = response.read()
        if response.status >= http.client.BAD_REQUEST:
            raise RuntimeError(f"{method} {path}: {response.status}: {said.decode()}")
        return json.loads(said)

    def until_ready(self, pod: str) -> None:
        """Wait until the kubelet reports a pod as ready."""
        link = self.connection()
        headers = {"Authorization": f"Bearer {self.token}"}
        link.request(
            "GET", f"/api/v1/namespaces/{self.namespace}/pods?watch=1&fieldSelector=metadata.name={pod}", None, headers
        )
        status: Any = None
        try:
            for line in link.getresponse():
                status = json.loads(line)["object"]["status"]
                conditions = status.get("conditions") or []
                if any(one["type"] == "Ready" and one["status"] == "True" for one in conditions):
                    break
        except TimeoutError:
            raise RuntimeError(f"{pod} is not ready after {POD_TIMEOUT_S:g} s: {json.dumps(status)}") from None
        finally:
            link.close()

    def steps_of_next(self, watch: http.client.HTTPSConnection) -> dict[str, float]:
        """Return the times at which the API server reports that the next pod was created, assigned to a node, and
        started.

        ``watch`` is a connection from the ``watch`` method.
        """
        told: dict[str, float] = {}
        for line in watch.getresponse():
            event = json.loads(line)
            if not told and event["type"] != "ADDED":
                continue
            status = event["object"]["status"]
            conditions = {one["type"] for one in status.get("conditions") or [] if one["status"] == "True"}
            containers = status.get("containerStatuses") or []
            seen = {
                "pod": True,
                "node": "PodScheduled" in conditions,
                "container": any("running" in one["state"] for one in containers),
            }
            for step, is_done in seen.items():
                if is_done:
                    told.setdefault(step, time.monotonic())
            if len(told) == len(seen):
                break
        watch.close()
        return told

    def watch(self, kind: str) -> http.client.HTTPSConnection:
        """Start watching pods labelled with ``kind``. Return the connection on which the server reports new pods."""
        link = self.connection()
        version = self.ask(link, "GET", "pods?limit=1")["metadata"]["resourceVersion"]
        query = f"watch=1&labelSelector={names.KIND}={kind}&resourceVersion={version}"
        headers = {"Authorization": f"Bearer {self.token}"}
        link.request("GET", f"/api/v1/namespaces/{self.namespace}/pods?{query}", None, headers)
        return link

    def make(self, secret: Any, pod: Any, claims: Sequence[Any] = ()) -> float:
        """Create a pod's objects. Return the seconds from the first request until the pod is ready."""
        began = time.monotonic()
        link = self.connection()
        if secret is not None:
            self.ask(link, "POST", "secrets", secret)
        for claim in claims:
            self.ask(link, "POST", "persistentvolumeclaims", claim)
        self.ask(link, "POST", "pods", pod)
        self.until_ready(pod["metadata"]["name"])
        return time.monotonic() - began

    def until_gone(self, pod: str) -> None:
        """Wait until the pod no longer exists in the API server."""
        link = self.connection()
        give_up_at = time.monotonic() + POD_TIMEOUT_S
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < give_up_at:
                self.ask(link, "GET", f"pods/{pod}")
                time.sleep(0.1)

    def remove(self, pod: str) -> None:
        """Remove the Secret and the claim that were created with a pod.

        Do nothing if they do not exist. Attachment pods have neither.
        """
        link = self.connection()
        for other in (f"secrets/{pod}", f"persistentvolumeclaims/{names.data_claim(pod)}"):
            with contextlib.suppress(RuntimeError):
                self.ask(link, "DELETE", other)


def copied(document: Any, before: str, after: str) -> Any:
    """Return a copy of an API object, renamed from ``before`` to ``after`` and without the fields that the cluster
    added.
    """
    text = json.dumps({key: one for key, one in document.items() if key != "status"}).replace(before, after)
    made = json.loads(text)
    for key in ("uid", "resourceVersion", "creationTimestamp", "managedFields", "selfLink"):
        made["metadata"].pop(key, None)
    made.get("spec", {}).pop("nodeName", None)
    return made


def claim_by_hand(claim: Any, before: str, after: str) -> Any:
    """Return a copy of a claim, renamed from ``before`` to ``after`` and not bound to a volume."""
    made = copied(claim, before, after)
    made["metadata"].pop("annotations", None)
    made["spec"].pop("volumeName", None)
    return made


# --- processes --------------------------------------------------------------------------------------------------------


def seconds_of(argv: Sequence[str], request: bytes = b"") -> float:
    """Run a process and return the seconds from its exec to its exit."""
    began = time.monotonic()
    subprocess.run(argv, input=request, capture_output=True, check=True, env={"PATH": PATH})
    return time.monotonic() - began


def largest_of(argv: Sequence[str], requests: Sequence[bytes], home: Path) -> tuple[float, list[float], list[Any]]:
    """Run one process for each request, all at the same time.

    Return the seconds until all have exited, the peak memory of each in MB, and their responses.
    """
    began = time.monotonic()
    running = []
    for number, request in enumerate(requests):
        given, said = home / f"request-{number}", home / f"response-{number}"
        given.write_bytes(request)
        with given.open("rb") as stdin, said.open("wb") as stdout:
            environment = {"PATH": PATH, "TMPDIR": str(home), "HOME": str(home)}
            running.append(
                subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, env=environment, cwd=home)
            )
    memory = {process.pid: 0.0 for process in running}
    # Read the peak while the process is running. After its exit, the kernel reports a value that includes this
    # program's memory before the exec.
    while left := [process for process in running if process.poll() is None]:
        for process in left:
            memory[process.pid] = max(memory[process.pid], high_water(process.pid))
        time.sleep(0.02)
    seconds = time.monotonic() - began
    return (
        seconds,
        list(memory.values()),
        [json.loads((home / f"response-{number}").read_bytes()) for number in range(len(requests))],
    )


def high_water(pid: int) -> float:
    """Return the peak memory of a process in MB, or 0 if it has exited."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def request(cpi: Cpi, method: str, *arguments: Any) -> bytes:
    context = {"director_uuid": cpi.director, "request_id": "cpi-1", "vm": {"stemcell": {"api_version": 3}}}
    return msgspec.json.encode({"method": method, "arguments": arguments, "context": context, "api_version": 3})


# --- on the node ------------------------------------------------------------------------------------------------------


async def on_node(figures: Figures, scale: float, scratch: Path) -> None:
    """Start the node and measure everything on it."""
    here = node.FirstNode(node.here())
    here.start()
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(cpi_site.site(here, WAY, scratch))
        config = json.loads((scratch / "cpi.json").read_text())
        bare = Bare(site.namespace.name, config["cluster"]["token"], here.authority)
        count = max(1, round(ROUNDS * scale))
        await asyncio.to_thread(_calls, site, figures, count)
        await _vms(site, bare, figures, max(1, round(PODS * scale)))
        await _at_once(site, figures, max(2, round(PARALLEL_CALLS * scale)))
        await _deploys(site, bare, figures)


def _calls(site: Site, figures: Figures, count: int) -> None:
    argv, ask = list(site.cpi.command), request(site.cpi, "info")
    floor = [seconds_of([sys.executable, "-I", "-c", START]) for _ in range(count)]
    made = [seconds_of(argv, ask) for _ in range(count)]
    figures["cpi info"] = _seconds(made, floor, "an interpreter that imports json and msgspec")


def _seconds(made: Sequence[float], floor: Sequence[float], what: str) -> Figure:
    return figure([one * 1000 for one in made], "ms", floor=[one * 1000 for one in floor], floor_is=what)


def _figures_by_step(what: str, steps: Sequence[str], times: Sequence[Sequence[float]]) -> Figures:
    """Return a figure in ms for each step. ``times`` contains the recorded times of each call. A step is the interval
    between two consecutive times.
    """
    return {
        f"{what}, {step}": figure([(one[number + 1] - one[number]) * 1000 for one in times], "ms")
        for number, step in enumerate(steps)
    }


async def _vms(site: Site, bare: Bare, figures: Figures, count: int) -> None:
    director = site.deployments
    instance = await director.first_deploy()
    # Use a thread, because this process also forwards messages between the agents and the bus.
    await asyncio.to_thread(_small_calls, site, bare, figures, instance, count * 3)
    link = bare.connection()
    pod = bare.ask(link, "GET", f"pods/{instance.vm}")
    secret = bare.ask(link, "GET", f"secrets/{instance.vm}")
    data = bare.ask(link, "GET", f"persistentvolumeclaims/{names.data_claim(instance.vm)}")
    name = names.attachment(instance.vm, instance.disk)
    attachment = bare.ask(link, "GET", f"pods/{name}")
    by_hand, by_cpi, steps = [], [], []
    for _ in range(count):
        other = f"vm-by-hand-{uuid.uuid4().hex[:16]}"
        arguments = _arguments(site, str(uuid.uuid4()))
        made = settings_by_hand(secret, instance.vm, other, arguments), copied(pod, instance.vm, other)
        claims = [claim_by_hand(data, instance.vm, other)]
        by_hand.append(await asyncio.to_thread(bare.make, *made, claims))
        await _remove(site, bare, other)
        fresh = DeployedInstance("one")
        telling = asyncio.create_task(asyncio.to_thread(bare.steps_of_next, bare.watch(names.KIND_VM)))
        began = time.monotonic()
        await _create_vm(site, fresh)
        by_cpi.append(time.monotonic() - began)
        steps.append([began, *(await telling).values(), began + by_cpi[-1]])
        await site.cpi.call("delete_vm", fresh.vm)
    figures["cpi create_vm"] = _seconds(by_cpi, by_hand, "the same objects made by hand, until ready")
    figures |= _figures_by_step("cpi create_vm", STEPS, steps)
    by_hand, by_cpi, steps = [], [], []
    for _ in range(count):
        disk = await director.create_disk(instance)
        # Attach and detach the disk once before the measurement, because the first attachment has to wait until the
        # claim is bound to a volume.
        await site.cpi.call("attach_disk", instance.vm, disk)
        await site.cpi.call("detach_disk", instance.vm, disk)
        # The next pod has the same name as the previous one. Wait until the previous pod is gone, so that this wait is
        # not part of the measurement.
        await asyncio.to_thread(bare.until_gone, names.attachment(instance.vm, disk))
        telling = asyncio.create_task(asyncio.to_thread(bare.steps_of_next, bare.watch(names.KIND_ATTACHMENT)))
        began = time.monotonic()
        await site.cpi.call("attach_disk", instance.vm, disk)
        by_cpi.append(time.monotonic() - began)
        steps.append([began, (await telling)["pod"], began + by_cpi[-1]])
        await site.cpi.call("detach_disk", instance.vm, disk)
        other = f"by-hand-{uuid.uuid4().hex[:16]}"
        made_by_hand = copied(json.loads(json.dumps(attachment).replace(instance.disk, disk)), name, other)
        by_hand.append(await asyncio.to_thread(bare.make, None, made_by_hand))
        await _remove(site, bare, other)
    figures["cpi attach_disk, live"] = _seconds(by_cpi, by_hand, "the same attachment pod made by hand, until ready")
    figures |= _figures_by_step("cpi attach_disk, live", STEPS_OF_ATTACHMENT, steps)
    await _vm_lifecycle(site, figures, instance, count)


async def _vm_lifecycle(site: Site, figures: Figures, instance: DeployedInstance, count: int) -> None:
    """Measure CPI calls together with the requests that a Director sends to the agent."""
    director = site.deployments
    pong: dict[str, list[float]] = {"claim": [], "empty_dir": []}
    recreated = []
    for _ in range(count):
        for kind, seconds in pong.items():
            with site.vm_type(ephemeral_disk={"size": 256, "type": kind}):
                fresh, began = DeployedInstance("one"), time.monotonic()
                await director.create_vm(fresh)
                seconds.append((time.monotonic() - began) * 1000)
                await director.delete_vm(fresh)
        began = time.monotonic()
        await director.recreate(instance)
        recreated.append((time.monotonic() - began) * 1000)
    figures["cpi create_vm to pong"] = figure(pong["claim"], "ms")
    figures["cpi create_vm to pong, data in an emptyDir"] = figure(pong["empty_dir"], "ms")
    figures["cpi stop --hard and start, with a disk"] = figure(recreated, "ms")


async def _remove(site: Site, bare: Bare, pod: str) -> None:
    """Delete a pod that ``Bare`` created, together with its Secret and claim, as ``delete_vm`` does.

    The Secret and the claim are deleted once the kubelet has terminated the pod.
    """
    await site.namespace.pod(pod).delete()
    await asyncio.to_thread(bare.remove, pod)


def _small_calls(site: Site, bare: Bare, figures: Figures, instance: DeployedInstance, count: int) -> None:
    def three_requests() -> float:
        began = time.monotonic()
        link = bare.connection()
        for _ in range(3):
            bare.ask(link, "GET", f"pods/{instance.vm}")
        link.close()
        return time.monotonic() - began

    calls = {
        "cpi has_vm": request(site.cpi, "has_vm", instance.vm),
        "cpi attach_disk, nothing to do": request(site.cpi, "attach_disk", instance.vm, instance.disk),
    }
    floor: list[float] = []
    made: dict[str, list[float]] = {name: [] for name in calls}
    # Alternate between the measurements, so that other work on the machine affects all of them equally.
    for _ in range(count):
        floor.append(seconds_of([sys.executable, "-I", "-c", START_OF_A_CLIENT]) + three_requests())
        for name, ask in calls.items():
            made[name].append(seconds_of(list(site.cpi.command), ask))
    what = "the start of an interpreter with http.client, ssl and msgspec, and three bare requests"
    for name, seconds in made.items():
        figures[name] = _seconds(seconds, floor, what)


async def _create_vm(site: Site, instance: DeployedInstance) -> None:
    """Create a VM, but send its agent no requests.

    The agent cannot connect to the bus, because the agent's credentials are not in the bus's configuration.
    """
    instance.agent = str(uuid.uuid4())
    instance.vm, *_ = await site.cpi.call("create_vm", *_arguments(site, instance.agent))


def _arguments(site: Site, agent: str) -> list[Any]:
    world = site.deployments.world
    env = {"bosh": {"mbus": {"cert": world.credentials(agent, bootstrap=True)}, "blobstores": world.blobstores()}}
    return [agent, site.deployments.stemcell, site.deployments.vm_type, NETWORKS, [], env]


async def _at_once(site: Site, figures: Figures, count: int) -> None:
    requests = [request(site.cpi, "create_vm", *_arguments(site, str(uuid.uuid4()))) for _ in range(count)]
    site.cpi.home.mkdir(exist_ok=True)
    argv = list(site.cpi.command)
    seconds, memory, responses = await asyncio.to_thread(largest_of, argv, requests, site.cpi.home)
    failed = [one["error"]["message"] for one in responses if one["error"]]
    if failed:
        raise RuntimeError(f"{len(failed)} of {count} create_vm at once failed: {failed[0]}")
    figures[f"cpi {count} create_vm at once"] = figure([seconds * 1000], "ms")
    figures["cpi memory of a create_vm"] = figure(memory, "MB")
    deletes = [request(site.cpi, "delete_vm", one["result"][0]) for one in responses]
    await asyncio.to_thread(largest_of, argv, deletes, site.cpi.home)


@dataclass
class ByHand(Cpi):
    """A replacement for the CPI that creates pods and disks from prepared manifests. The benchmark calls it in the same
    way as the CPI.
    """

    answer: Callable[[str, Sequence[Any]], Any] = lambda *_: None

    async def call(self, method: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self.answer, method, arguments)


async def _deploys(site: Site, bare: Bare, figures: Figures) -> None:
    """Measure the first deploy of several instances with disks, once with the CPI and once with prepared manifests."""
    director, real = site.deployments, site.cpi
    seconds: dict[str, tuple[float, float]] = {}
    for kind in ("empty_dir", "claim"):
        with site.vm_type(ephemeral_disk={"size": 256, "type": kind}):
            began = time.monotonic()
            await director.compile("package")
            compiled = time.monotonic()
            deploys = (director.first_deploy(f"{kind}{number}") for number in range(INSTANCES))
            deployed = await asyncio.gather(*deploys)
            seconds[kind] = compiled - began, time.monotonic() - compiled
    link = bare.connection()
    vm, disk = deployed[0].vm, deployed[0].disk
    pod, secret = bare.ask(link, "GET", f"pods/{vm}"), bare.ask(link, "GET", f"secrets/{vm}")
    claim = bare.ask(link, "GET", f"persistentvolumeclaims/{disk}")
    data = bare.ask(link, "GET", f"persistentvolumeclaims/{names.data_claim(vm)}")
    disks: dict[str, str] = {}

    def answer(method: str, arguments: Sequence[Any]) -> Any:
        if method == "create_vm":
            return [_made_by_hand(bare, (secret, pod, data, claim), vm, arguments, disks), {}]
        if method == "create_disk":
            return disks[arguments[2]]
        return f"/disks/{arguments[1]}" if method == "attach_disk" else None

    director.cpi = ByHand([], real.home, answer=answer)
    began = time.monotonic()
    await asyncio.gather(*(director.first_deploy(f"by{number}") for number in range(INSTANCES)))
    by_hand = time.monotonic() - began
    director.cpi = real
    what = "the same with manifests made by hand, disks from the beginning"
    deploy = f"cpi first deploy of {INSTANCES} instances with disks"
    figures[deploy] = _seconds([seconds["claim"][1]], [by_hand], what)
    figures["cpi compilation on a VM of its own"] = figure([seconds["claim"][0] * 1000], "ms")
    figures[f"{deploy} and a compilation, data in emptyDirs"] = figure([sum(seconds["empty_dir"]) * 1000], "ms")


def _made_by_hand(
    bare: Bare, objects: tuple[Any, Any, Any, Any], vm: str, arguments: Sequence[Any], disks: dict[str, str]
) -> str:
    secret, pod, data, claim = objects
    name = f"vm-by-hand-{uuid.uuid4().hex[:16]}"
    disk = disks[name] = f"disk-by-hand-{uuid.uuid4().hex[:16]}"
    claims = [claim_by_hand(data, vm, name), claim_by_hand(claim, claim["metadata"]["name"], disk)]
    settings = settings_by_hand(secret, vm, name, arguments)
    other = copied(pod, vm, name)
    other["spec"]["volumes"].append({"name": disk, "persistentVolumeClaim": {"claimName": disk}})
    other["spec"]["containers"][0]["volumeMounts"].append({"name": disk, "mountPath": f"/disks/{disk}"})
    bare.make(settings, other, claims)
    return name


def settings_by_hand(secret: Any, vm: str, name: str, arguments: Sequence[Any]) -> Any:
    """Return a VM's Secret with the settings that create_vm would write if it were called with ``arguments``."""
    made = copied(secret, vm, name)
    agent, env = arguments[0], arguments[5]
    made["data"] = {key: _settings_of(one, agent, env) for key, one in made["data"].items()}
    return made


def _settings_of(encoded: str, agent: str, env: Any) -> str:
    """Return encoded settings with the agent ID ``agent`` and with ``env`` merged into the environment.

    Documents other than settings are returned unchanged.
    """
    document = json.loads(base64.b64decode(encoded))
    if "agent_id" not in document:
        return encoded
    document["agent_id"] = agent
    document["env"]["bosh"] |= env["bosh"] | {
        "mbus": {**document["env"]["bosh"].get("mbus", {}), **env["bosh"]["mbus"]}
    }
    return base64.b64encode(json.dumps(document).encode()).decode()


def main() -> int:
    target, scale = Path(sys.argv[1]), float(sys.argv[2])
    # Raise KeyboardInterrupt, so that the measurements are written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    figures: Figures = {}
    scratch = Path(tempfile.mkdtemp())
    try:
        asyncio.run(on_node(figures, scale, scratch))
    finally:
        target.write_text(json.dumps(figures))
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
