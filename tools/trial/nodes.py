"""Kubernetes nodes for the trial: a kind node, or the ``./dev test-kubernetes`` node in its own namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Protocol

from tools.trial.running import FailedError, Runner

NAME: Final = "agent-shim-trial"
CONTAINER: Final = f"{NAME}-control-plane"
"""Name of the container that is the only node of the kind cluster."""
IMAGE: Final = "localhost/agent-shim/trial:latest"
BASE: Final = "ghcr.io/cloudfoundry/ubuntu-{line}-stemcell:latest"
START_S: Final = 3600.0
"""Time limit in seconds for starting the ``./dev test-kubernetes`` node. Its first start also builds Kubernetes."""
STOP_S: Final = 60.0


class Node(Protocol):
    """A node that has the agent's image and publishes the Director pod's ports at the node's address."""

    @property
    def address(self) -> str:
        """Return the node's address, which this machine and the pods can reach."""

    def start(self, line: str) -> None:
        """Start the node unless it is running.

        The node's agent image is based on the Ubuntu release ``line``, such as ``noble``.
        """

    def enter(self) -> None:
        """Prepare the runner for commands that use the node. The node must be running."""

    def digest(self) -> str:
        """Return the digest of the ``localhost/agent-shim`` image on the node."""

    def remove(self) -> None:
        """Remove the node and everything that runs on it. Do nothing if it does not exist."""


def require(*programs: str) -> None:
    """Raise ``FailedError`` with the names of missing programs."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        raise FailedError(f"cannot start without {', '.join(missing)}: docs/try-kubernetes.md says where to get them")


def chosen(runner: Runner, wanted: str | None) -> Node:
    """Return the requested node, or else the one that an earlier run started.

    If there is neither, return a kind node if kind is installed, and otherwise the ``./dev test-kubernetes`` node.
    """
    kind = wanted or ("own" if (runner.state / "own").exists() or shutil.which("kind") is None else "kind")
    return KindNode(runner) if kind == "kind" else Own(runner)


class KindNode:
    """A node that kind creates in a docker or podman container."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._engine = "docker" if shutil.which("docker") else "podman"
        if self._engine == "podman":
            runner.environment["KIND_EXPERIMENTAL_PROVIDER"] = "podman"

    @property
    def address(self) -> str:
        template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self._runner(self._engine, "inspect", "--format", template, CONTAINER).strip()

    def start(self, line: str) -> None:
        require("kind", self._engine)
        if NAME not in self._runner("kind", "get", "clusters").split():
            kubeconfig = f"--kubeconfig={self._runner.kubeconfig}"
            self._runner("kind", "create", "cluster", f"--name={NAME}", kubeconfig, "--wait=5m")
        base = f"BASE_IMAGE={BASE.format(line=line)}"
        self._runner(self._engine, "build", f"--build-arg={base}", f"--tag={IMAGE}", ".")
        archive = f"{self._runner.state}/image.tar"
        self._runner(self._engine, "save", f"--output={archive}", IMAGE)
        self._runner("kind", "load", "image-archive", archive, f"--name={NAME}")
        Path(archive).unlink(missing_ok=True)
        # The image is in no registry. Give it the name by which the stemcell refers to it, so that the kubelet finds it
        # on the node.
        self._images("tag", "--force", IMAGE, f"localhost/agent-shim@{self.digest()}")

    def enter(self) -> None:
        """Do nothing, because the kubeconfig is enough to reach the node."""

    def digest(self) -> str:
        for line in self._images("list").splitlines():
            name, _, digest, *_ = line.split()
            if name == IMAGE:
                return digest
        raise FailedError(f"cannot find {IMAGE} in the node {CONTAINER}")

    def remove(self) -> None:
        if shutil.which("kind"):
            self._runner("kind", "delete", "cluster", f"--name={NAME}")

    def _images(self, *arguments: str) -> str:
        return self._runner(self._engine, "exec", CONTAINER, "ctr", "--namespace=k8s.io", "images", *arguments)


class Own:
    """The ``./dev test-kubernetes`` node, which a background process keeps running. Only root can start it.

    Its agent image is based on Debian instead of Ubuntu, because the node has no access to a registry.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._where = runner.state / "own"

    @property
    def address(self) -> str:
        return str(self._node_info()["address"])

    def start(self, line: str) -> None:  # noqa: ARG002 - the image is based on Debian
        require("podman")
        if os.geteuid() != 0:
            raise FailedError("cannot start a node: this requires root unless kind is installed")
        if not self._is_held():
            shutil.rmtree(self._where, ignore_errors=True)
            self._where.mkdir(parents=True)
            with (self._where / "log").open("wb") as log:
                command = [sys.executable, "-m", "tools.trial.own", str(self._where)]
                holder = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            (self._where / "pid").write_text(str(holder.pid))
            self._until_ready(holder)
        self.enter()
        shutil.copy(self._node_info()["kubeconfig"], self._runner.kubeconfig)

    def enter(self) -> None:
        if not self._is_held():
            raise FailedError("cannot reach the node: it is not running; `./dev try-kubernetes` starts it")
        pid = (self._where / "pid").read_text()
        # The background process has started `unshare`, whose child is PID 1 of the namespaces.
        for _ in range(2):
            (pid,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        namespaces = ("--mount", "--net", "--pid")
        self._runner.inside = ("nsenter", f"--target={pid}", *namespaces, f"--wdns={Path.cwd()}", "--")

    def digest(self) -> str:
        return str(self._node_info()["digest"])

    def remove(self) -> None:
        if not self._is_held():
            return
        (self._where / "stop").touch()
        until = time.monotonic() + STOP_S
        while self._is_held() and time.monotonic() < until:
            time.sleep(0.2)

    def _node_info(self) -> dict[str, str]:
        told: dict[str, str] = json.loads((self._where / "node.json").read_text())
        return told

    def _is_held(self) -> bool:
        try:
            pid = int((self._where / "pid").read_text())
            return b"tools.trial.own" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return False

    def _until_ready(self, holder: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + START_S
        print(f"starting a node; its log is {self._where}/log", flush=True)
        while not (self._where / "node.json").exists():
            if holder.poll() is not None or time.monotonic() > until:
                end = "\n".join((self._where / "log").read_text(errors="replace").splitlines()[-20:])
                raise FailedError(f"cannot start a node: the end of its log:\n{end}")
            time.sleep(0.2)
