"""A single-node cluster in the namespaces that ``run_as_node`` created. When PID 1 of the PID namespace exits, the
kernel kills the whole cluster.

A test may add a second node, which has its own network, mounts and container runtime.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support import pods

NODE: Final = "SHIM_TEST_NODE"
"""Environment variable with the path of the node's directory, in which ``run_as_node`` puts the files named below."""
PROGRAMS: Final = "programs"
IMAGES: Final = "images.tar"

PAUSE: Final = "localhost/agent-shim/pause:latest"
CGROUPS: Final = Path("/sys/fs/cgroup")
ADDRESS: Final = "192.0.2.2"
"""The node's address, at which pods can reach servers."""
PODS: Final = "192.0.2.128/25"
DNS: Final = "192.0.2.53"
"""Address of the cluster's DNS, if CoreDNS is among the programs."""
NAME: Final = "node"
SECOND: Final = "second"
SECOND_ADDRESS: Final = "192.0.2.3"
SECOND_PODS: Final = "203.0.113.0/25"
SERVICES: Final = "198.51.100.0/24"
API: Final = f"https://{ADDRESS}:6443"
API_SERVICE: Final = "198.51.100.1:443"
"""Address at which pods reach the API server, ``kubernetes.default.svc``."""
ETCD: Final = "http://127.0.0.1:2379"
CONTAINERD: Final = "/run/containerd/containerd.sock"
TIMEOUT_S: Final = 120.0
"""Seconds that a component may take to become ready on a busy machine."""

CONTAINERD_CONFIG: Final = """
version = 2
root = "{where}/containerd"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{where}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""

COREFILE: Final = """
. {{
    bind {address}
    kubernetes cluster.local {{
        kubeconfig {kubeconfig}
        ttl 0
    }}
}}
"""

# The kubelet and the runtime use these directories at fixed paths. The second node gets its own copies of them, but
# shares the volumes with the first node as if they were on network storage.
ENTER_SECOND: Final = """
set -eu
mount --make-rshared /
mount -t tmpfs -o mode=0755 tmpfs /run
for place in /var/log /var/lib/cni; do
    mkdir -p "$0$place"
    mount --bind "$0$place" $place
done
mkdir /run/whole-proc
mount -t proc proc /run/whole-proc
ip link set lo up
echo ready
exec sleep infinity
"""


class KubeletNode:
    """A kubelet with its container runtime.

    ``where`` contains the state and logs of both. ``cluster`` contains the files that all nodes share.
    """

    def __init__(self, cluster: Path, where: Path, name: str, address: str) -> None:
        self.cluster = cluster
        self.where = where
        self.name = name
        self.address = address
        self.inside: Sequence[str] = ()
        """Command prefix with which a program enters the node's namespaces."""
        self.root = Path("/")
        """Path at which this process sees the node's root file system."""
        self.mounts = Path("/proc/self/mountinfo")
        self._parts: list[subprocess.Popen[bytes]] = []

    @cached_property
    def minor(self) -> int:
        """Return the Kubernetes minor version."""
        said = subprocess.run(
            [self._program("kubelet"), "--version"], capture_output=True, text=True, check=True
        ).stdout
        found = re.match(r"Kubernetes v1\.(\d+)\.", said)
        assert found is not None, said
        return int(found[1])

    def kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl, and return its result even if it fails."""
        command = ["kubectl", f"--kubeconfig={self.cluster}/kubeconfig", *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True)

    def ctr(self, *arguments: str) -> str:
        """Run containerd's ``ctr`` client and return its output. The command must succeed."""
        command = [*self.inside, "ctr", "--namespace=k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"ctr {arguments}: {done.stderr}"
        return done.stdout

    def digest(self) -> str:
        """Return the digest of this project's image in the runtime."""
        for line in self.ctr("images", "list").splitlines():
            name, _, digest, *_ = line.split()
            if name == f"{pods.IMAGE}:latest":
                return digest
        raise AssertionError("the runtime has no image of ours")

    def _network(self, addresses: str) -> None:
        """Write the CNI configuration, which connects pods to the node with a bridge."""
        (self.where / "resolv.conf").write_text(f"nameserver {DNS}\n")
        ipam = {"type": "host-local", "ranges": [[{"subnet": addresses}]], "routes": [{"dst": "0.0.0.0/0"}]}
        bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True, "ipam": ipam}
        # This plugin implements ``hostPort``.
        ports = {"type": "portmap", "capabilities": {"portMappings": True}, "snat": True}
        self._write("cni/pods.conflist", {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]})

    def _start_runtime(self) -> None:
        config = self.where / "containerd.toml"
        config.write_text(CONTAINERD_CONFIG.format(where=self.where, pause=PAUSE))
        self._spawn(["containerd", "--config", str(config)])
        asked = [*self.inside, "ctr", "version"]
        self._until("containerd", "containerd", lambda: subprocess.run(asked, capture_output=True).returncode == 0)
        self.ctr("images", "import", str(self.cluster / IMAGES))
        self.ctr("images", "tag", f"{pods.IMAGE}:latest", "localhost/agent-shim:latest")
        self.ctr("images", "tag", f"{pods.IMAGE}:latest", f"localhost/agent-shim@{self.digest()}")

    def _start_kubelet(self) -> None:
        config: dict[str, Any] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.where.relative_to(self.cluster.parent)}",
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "enableControllerAttachDetach": False,
            # Keep the usual OOM score and a low limit on open files, because some machines do not allow changing the
            # score or raising the limit.
            "oomScoreAdj": 0,
            "maxOpenFiles": 16384,
            "clusterDNS": [DNS],
            "clusterDomain": "cluster.local",
            "resolvConf": str(self.where / "resolv.conf"),
            # Ignore how full the machine's disk is. Otherwise the kubelet might remove images or evict pods.
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "50Mi"},
            "syncFrequency": "2s",
            # The interval at which the kubelet checks whether a volume is too large.
            "volumeStatsAggPeriod": "2s",
            "nodeStatusUpdateFrequency": "2s",
        }
        options: dict[str, Any] = {
            "kubeconfig": self.cluster / "kubeconfig",
            "container-runtime-endpoint": f"unix://{CONTAINERD}",
            "root-dir": self.where / "kubelet",
            "cert-dir": self.where / "kubelet/pki",
            "volume-plugin-dir": self.where / "plugins",
            "hostname-override": self.name,
            "node-ip": self.address,
        }
        if self.minor < 24:
            options["container-runtime"] = "remote"
        if self.minor >= 31:
            # The machine that runs the tests may have cgroup v1.
            config["failCgroupV1"] = False
        options["config"] = self._write("kubelet.json", config)
        self._spawn([self._program("kubelet"), *_options(options)])
        ready = ("get", "node", self.name, "-o", 'jsonpath={.status.conditions[?(@.type=="Ready")].status}')
        self._until("the node", "kubelet", lambda: self.kubectl(*ready).stdout == "True")

    def _write(self, name: str, content: Any) -> Path:
        path = self.where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def _program(self, name: str) -> str:
        return str(self.cluster / PROGRAMS / name)

    def _spawn(self, command: Sequence[str]) -> None:
        with self._log(Path(command[0]).name).open("wb") as log:
            self._parts.append(subprocess.Popen([*self.inside, *command], stdout=log, stderr=subprocess.STDOUT))

    def _log(self, part: str) -> Path:
        return self.where / f"{part}.log"

    def _until(self, what: str, part: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_so():
            ended = [process.args for process in self._parts if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                end = "\n".join(self._log(part).read_text(errors="replace").splitlines()[-30:])
                pytest.fail(f"{what} does not get ready; ended: {ended}; the end of its log:\n{end}", pytrace=False)
            time.sleep(0.2)


class FirstNode(KubeletNode):
    """The cluster's control plane and its first node."""

    def __init__(self, where: Path) -> None:
        super().__init__(where, where, NAME, ADDRESS)
        self.times: dict[str, float] = {}
        """Seconds from the start of the node to the end of each step."""
        self.workers: list[KubeletNode] = [self]

    def start(self) -> None:
        """Start the node and wait until a pod can be created.

        On failure, fail the test with the failed component's log.
        """
        began = time.monotonic()
        for step in (
            self._connect,
            self._start_control_plane,
            self._start_runtime,
            self._start_kubelet,
            self._start_network_programs,
        ):
            step()
            self.times[step.__name__.removeprefix("_")] = time.monotonic() - began

    @contextmanager
    def second(self) -> Iterator[KubeletNode]:
        """Run a second node during the block. Its pods must be deleted before the block ends."""
        made = Second(self)
        self.workers.append(made)
        try:
            made.start()
            yield made
        finally:
            self.workers.remove(made)
            made.stop()

    @property
    def authority(self) -> Path:
        """Path of the API server's self-signed certificate."""
        return self.where / "api/apiserver.crt"

    def _connect(self) -> None:
        """Give the node an address that pods can reach through their bridge."""
        for command in (f"link add {NAME} type bridge", f"address add {ADDRESS}/25 dev {NAME}", f"link set {NAME} up"):
            _ip(command)
        self._network(PODS)

    def _start_control_plane(self) -> None:
        etcd = {"listen-client-urls": ETCD, "advertise-client-urls": ETCD, "listen-peer-urls": "http://127.0.0.1:2380"}
        # etcd's data is discarded at the end, so it need not be synced to disk.
        self._spawn(["etcd", "--data-dir", str(self.where / "etcd"), "--unsafe-no-fsync", *_options(etcd)])
        self._write_credentials()
        key = self.where / "service-accounts.pem"
        api = {
            "etcd-servers": ETCD,
            "bind-address": ADDRESS,
            "secure-port": "6443",
            "advertise-address": ADDRESS,
            "cert-dir": self.where / "api",
            "token-auth-file": self.where / "tokens.csv",
            "authorization-mode": "RBAC",
            "service-account-issuer": API,
            "service-account-key-file": key,
            "service-account-signing-key-file": key,
            "service-cluster-ip-range": SERVICES,
            "allow-privileged": "true",
            "kubelet-preferred-address-types": "InternalIP",
        }
        self._spawn([self._program("kube-apiserver"), *_options(api)])
        self._until("the API server", "kube-apiserver", lambda: self.kubectl("get", "--raw", "/readyz").stdout == "ok")
        client = {"kubeconfig": self.where / "kubeconfig", "leader-elect": "false"}
        manager = {
            **client,
            "cert-dir": self.where / "manager",
            "pvclaimbinder-sync-period": "1s",
            "service-account-private-key-file": key,
            "root-ca-file": self.authority,
            "enable-hostpath-provisioner": "true",
        }
        if self.minor < 24:
            manager["port"] = "0"
        self._spawn([self._program("kube-controller-manager"), *_options(manager)])
        self._spawn([self._program("kube-scheduler"), *_options({**client, "cert-dir": self.where / "scheduler"})])

    def _start_network_programs(self) -> None:
        """Start the cluster's DNS server and the program that enforces NetworkPolicies, if these programs are
        available.
        """
        kubeconfig = self.where / "kubeconfig"
        if self.has("coredns"):
            _ip(f"address add {DNS}/32 dev {NAME}")
            file = self._write("Corefile", COREFILE.format(address=DNS, kubeconfig=kubeconfig))
            self._spawn([self._program("coredns"), "-conf", str(file)])
            # No kube-proxy runs here, so add a DNAT rule for the only Service that is needed.
            address, _, port = API_SERVICE.partition(":")
            to = ["-d", address, "-p", "tcp", "--dport", port, "-j", "DNAT", "--to-destination", f"{ADDRESS}:6443"]
            subprocess.run(["iptables", "-t", "nat", "-A", "PREROUTING", *to], check=True)
        if self.has("kube-router"):
            # kube-router uses iptables, which sees packets between pods on the same bridge only with this setting.
            Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("1")
            parts = {"run-router": "false", "run-service-proxy": "false", "run-firewall": "true"}
            options = {**parts, "kubeconfig": kubeconfig, "hostname-override": NAME, "iptables-sync-period": "1s"}
            self._spawn([self._program("kube-router"), *_options(options)])

    def has(self, program: str) -> bool:
        """Return True if an optional program is available."""
        return Path(self._program(program)).exists()

    def _write_credentials(self) -> None:
        token = secrets.token_hex()
        self._write("tokens.csv", f'{token},admin,admin,"system:masters"\n')
        cluster = {"server": API, "insecure-skip-tls-verify": True}
        names = {"cluster": "here", "user": "admin"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": names}],
            "current-context": "here",
        }
        self._write("kubeconfig", config)
        key = self.where / "service-accounts.pem"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)


class Second(KubeletNode):
    """A node with its own network and mounts, connected to the first node's bridge."""

    def __init__(self, first: FirstNode) -> None:
        super().__init__(first.where, first.where / SECOND, SECOND, SECOND_ADDRESS)

    def start(self) -> None:
        """Start the second node in its own namespaces, and wait until a pod can be created on it."""
        self.where.mkdir()
        holder = subprocess.Popen(
            ["unshare", "--mount", "--net", "sh", "-c", ENTER_SECOND, str(self.where)], stdout=subprocess.PIPE
        )
        self._parts.append(holder)
        assert holder.stdout is not None
        with holder.stdout as said:
            assert said.readline() == b"ready\n"
        self.inside = ("nsenter", f"--target={holder.pid}", "--mount", "--net", "--")
        self.root = Path(f"/proc/{holder.pid}/root")
        self.mounts = Path(f"/proc/{holder.pid}/mountinfo")
        _ip(f"link add {SECOND} type veth peer name eth0 netns {holder.pid}")
        _ip(f"link set {SECOND} master {NAME} up")
        _ip(f"address add {SECOND_ADDRESS}/25 dev eth0", self.inside)
        _ip("link set eth0 up", self.inside)
        _ip(f"route add {PODS} via {ADDRESS}", self.inside)
        _ip(f"route replace {SECOND_PODS} via {SECOND_ADDRESS}")
        for group in (*CGROUPS.glob(self.cluster.name), *CGROUPS.glob(f"*/{self.cluster.name}")):
            (group / SECOND).mkdir(exist_ok=True)
        self._network(SECOND_PODS)
        self._start_runtime()
        self._start_kubelet()

    def stop(self) -> None:
        """Terminate the kubelet and the runtime, and remove the node and its state from the cluster."""
        for part in reversed(self._parts):
            part.terminate()
            part.wait()
        # Containers of deleted pods may keep the network namespace alive for a while, so delete its veth pair here.
        _ip(f"link delete {SECOND}")
        self.kubectl("delete", "node", SECOND)
        shutil.rmtree(self.where, ignore_errors=True)


def _ip(command: str, inside: Sequence[str] = ()) -> None:
    subprocess.run([*inside, "ip", *command.split()], check=True)


def _options(values: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def here() -> Path:
    """Return the node's directory. Fail the test if this process is not running in a node's namespaces."""
    if NODE not in os.environ:
        pytest.fail("there is no node here: these tests are run by ./dev test-kubernetes", pytrace=False)
    return Path(os.environ[NODE])
