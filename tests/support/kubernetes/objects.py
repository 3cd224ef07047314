"""Provides the objects that a test creates in a cluster: a namespace, volumes and pods."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.support.kubernetes import node as nodes
from tests.support.kubernetes.manifests import manifests
from tests.support.kubernetes.node import FirstNode
from tests.support.web import page

LIMIT: Final = 120.0
"""Time limit in seconds for each wait."""
END: Final = "/tmp/end"

Document = dict[str, Any]


def overlay(name: str) -> list[Document]:
    """Return the documents in an overlay from deploy/kubernetes."""
    return list(yaml.safe_load_all(manifests(name)))


def pod_spec(documents: Iterable[Document]) -> Document:
    """Return the only pod spec among the documents so that it can be changed."""
    (spec,) = [_template(document)["spec"] for document in documents if document["kind"] in ("Pod", "StatefulSet")]
    found: Document = spec
    return found


def end_on_request(documents: Iterable[Document]) -> None:
    """Give the container a liveness probe that fails once ``Pod.end`` has created a file."""
    command = ["test", "!", "-e", END]
    pod_spec(documents)["containers"][0]["livenessProbe"] = {"exec": {"command": command}, "failureThreshold": 1}


def _template(document: Document) -> Document:
    found: Document = document if document["kind"] == "Pod" else document["spec"]["template"]
    return found


@dataclass(frozen=True)
class Namespace:
    """A namespace. ``scratch`` contains its volumes."""

    node: FirstNode
    name: str
    scratch: Path

    async def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run a kubectl command in this namespace and return its output. The command must succeed."""
        done = await asyncio.to_thread(self.node.kubectl, f"--namespace={self.name}", *arguments, stdin=stdin)
        if done.returncode != 0:
            pytest.fail(f"kubectl {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    async def create(self) -> None:
        """Create the namespace, and wait for its default service account, without which no pod is admitted."""
        await self.kubectl("create", "namespace", self.name)
        async with asyncio.timeout(LIMIT):
            while await self.kubectl("get", "serviceaccounts", "-o", "name") == "":
                await asyncio.sleep(0.1)

    async def apply(self, documents: Iterable[Document]) -> None:
        """Apply documents, and create a volume for each claim in them."""
        documents = list(documents)
        text = yaml.safe_dump_all([*self._volumes(documents), *documents])
        await self.kubectl("apply", "--filename=-", stdin=text)

    def volume(self, claim: str) -> Path:
        """Return the directory of the volume to which a claim is bound."""
        return self.scratch / "volumes" / claim

    def pod(self, name: str) -> Pod:
        """Return the pod called ``name``, which need not exist yet."""
        return Pod(self, name)

    async def clear(self) -> None:
        """Delete the namespace's remaining objects without a grace period."""
        print(await self.kubectl("get", "events,pods"))
        pods = json.loads(await self.kubectl("get", "pods", "-o", "json"))["items"]
        await self.kubectl("delete", "statefulsets", "--all", "--cascade=orphan")
        for one in pods:
            print(await self.pod(one["metadata"]["name"]).logs())
        await self.kubectl("delete", "pods", "--all", "--force", "--grace-period=0")
        await self.kubectl("delete", "namespace", self.name, "--wait=false")

    def _volumes(self, documents: Iterable[Document]) -> Iterator[Document]:
        for name, spec in _claims(documents):
            path = self.volume(name)
            path.mkdir(parents=True, exist_ok=True)
            here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [nodes.NAME]}
            yield {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": f"{self.name}-{name}"},
                "spec": {
                    "accessModes": spec["accessModes"],
                    "capacity": {"storage": spec["resources"]["requests"]["storage"]},
                    "claimRef": {"namespace": self.name, "name": name},
                    "local": {"path": str(path)},
                    "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
                },
            }


def _claims(documents: Iterable[Document]) -> Iterator[tuple[str, Document]]:
    for document in documents:
        if document["kind"] == "PersistentVolumeClaim":
            yield document["metadata"]["name"], document["spec"]
        elif document["kind"] == "StatefulSet":
            for claim in document["spec"].get("volumeClaimTemplates", []):
                for index in range(document["spec"].get("replicas", 1)):
                    yield f"{claim['metadata']['name']}-{document['metadata']['name']}-{index}", claim["spec"]


@dataclass(frozen=True)
class Pod:
    """A pod with one container."""

    namespace: Namespace
    name: str

    async def look(self) -> Document:
        """Fetch the pod object."""
        found: Document = json.loads(await self.namespace.kubectl("get", "pod", self.name, "-o", "json"))
        return found

    async def container(self) -> Document:
        """Return the status of the pod's container. If the kubelet does not report it as running yet, wait for it."""
        pod = await self.until(_runs, "running")
        found: Document = pod["status"]["containerStatuses"][0]
        return found

    async def until_ready(self, wanted: bool = True) -> None:
        """Wait until the kubelet reports the pod as ready, or as not ready if ``wanted`` is False."""
        await self.until(lambda pod: _is_ready(pod) is wanted, "ready" if wanted else "not ready")

    async def until(self, is_so: Any, what: str) -> Document:
        """Wait until the pod object meets a condition. Return the object."""
        pod: Document = {}
        try:
            async with asyncio.timeout(LIMIT):
                while not (pod and is_so(pod)):
                    await asyncio.sleep(0.2)
                    done = await asyncio.to_thread(
                        self.namespace.node.kubectl, "-n", self.namespace.name, "get", "pod", self.name, "-o", "json"
                    )
                    pod = json.loads(done.stdout) if done.returncode == 0 else {}
        except TimeoutError:
            pytest.fail(f"{self.name} is not {what} within {LIMIT:g} s: {json.dumps(pod.get('status'), indent=1)}")
        return pod

    async def exec(self, *command: str) -> str:
        """Return the output of a command in the pod. The command must succeed."""
        return await self.namespace.kubectl("exec", self.name, "--", *command)

    async def until_exec_works(self) -> None:
        """Wait until the kubelet can run commands in a pod that has replaced another one of the same name.

        The kubelet looks up pods by their names, so it may still find the former pod, whose container has exited.
        """
        async with asyncio.timeout(LIMIT):
            kubectl = self.namespace.node.kubectl
            ask = "-n", self.namespace.name, "exec", self.name, "--", "true"
            while (await asyncio.to_thread(kubectl, *ask)).returncode != 0:
                await asyncio.sleep(0.2)

    async def logs(self) -> str:
        """Return the container's output, or "" if there is none."""
        done = await asyncio.to_thread(self.namespace.node.kubectl, "-n", self.namespace.name, "logs", self.name)
        return done.stdout

    async def get(self, path: str, port: int = 9190) -> tuple[int, str]:
        """Fetch a page from the pod, retrying until the port is open. Return the status and body."""
        url = f"http://{(await self.look())['status']['podIP']}:{port}{path}"
        async with asyncio.timeout(LIMIT):
            while True:
                try:
                    return await asyncio.to_thread(page, url)
                except (urllib.error.URLError, ConnectionError):
                    await asyncio.sleep(0.1)

    async def kill(self) -> None:
        """Kill PID 1, as a crash would, and wait until the kubelet has started a new container."""
        before = await self.container()
        (pid,) = await self._processes(before)
        os.kill(pid, signal.SIGKILL)
        await self.until(lambda pod: _restarts(pod) > before["restartCount"], "restarted")

    async def _processes(self, container: Document) -> list[int]:
        """Return a list with the host pid of the container's PID 1, or an empty list if the container has exited."""
        number = container["containerID"].removeprefix("containerd://")
        tasks = await asyncio.to_thread(self.namespace.node.ctr, "tasks", "list")
        return [
            int(line.split()[1]) for line in tasks.splitlines() if line.startswith(number) and "STOPPED" not in line
        ]

    async def delete_without_grace(self) -> None:
        """Force-delete the pod and wait until its process has exited, because the object is removed before that."""
        container = await self.container()
        await self.namespace.kubectl("delete", "pod", self.name, "--force", "--grace-period=0")
        await self.until_ended(container)

    async def until_ended(self, container: Document) -> None:
        """Wait until a container has no processes left, which may be long after its pod has been deleted."""
        async with asyncio.timeout(LIMIT):
            while await self._processes(container):
                await asyncio.sleep(0.1)

    async def delete(self) -> None:
        """Delete the pod with its grace period, as users do, and wait until it has been removed."""
        await self.namespace.kubectl("delete", "pod", self.name)

    async def end(self) -> tuple[int, str]:
        """Make the liveness probe of ``end_on_request`` fail. Return the container's exit code and termination message.

        The preStop hook, grace period and signals are the same as for a deleted pod. However, a deleted pod may vanish
        before the kubelet has reported how its container exited. Here the container is restarted, so the exited
        container's status remains available.
        """
        before = (await self.container())["restartCount"]
        await self.exec("touch", END)
        pod = await self.until(lambda pod: _restarts(pod) > before, "restarted")
        how = pod["status"]["containerStatuses"][0]["lastState"]["terminated"]
        return how["exitCode"], how.get("message", "")


def _runs(pod: Document) -> bool:
    return any("running" in one["state"] for one in pod["status"].get("containerStatuses", []))


def _is_ready(pod: Document) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))


def _restarts(pod: Document) -> int:
    """Return how many times the pod's container has been restarted, or 0 if the container is not running now."""
    statuses = pod["status"].get("containerStatuses", [])
    return sum(int(one["restartCount"]) for one in statuses if "running" in one["state"])
