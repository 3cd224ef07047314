"""Runs a command in new namespaces in which it can start a Kubernetes node. Missing programs are built first.

The whole node (etcd, the API server, containerd, the kubelet and the containers) shares one network, mount and PID
namespace with the command, and is killed when the command exits. Its mounts, addresses and ports are not visible
outside.

``KUBERNETES_PROGRAMS`` names a directory with the four programs from another Kubernetes version. It must also contain
etcd, containerd and runc if that version needs newer versions than this machine has. If it contains CoreDNS and
kube-router, the cluster has a DNS server and enforces NetworkPolicies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_shim.core.errors import ShimError
from tests.support import pods
from tests.support.kubernetes import build, rendered
from tests.support.kubernetes.node import CGROUPS, IMAGES, NODE, PAUSE, PROGRAMS

# The kubelet would set these kernel parameters for the whole machine. Therefore, ordinary files that the kubelet can
# write to are mounted over them. Directories with fixed paths, such as /var/log, are replaced with the node's own
# directories. The mount tree is shared, because containers with a mount propagation other than "private" need that.
ENTER = """
set -eu
mount --make-rshared /
mount -t tmpfs -o mode=0755 tmpfs /run
# The cluster also creates the volumes of claims in a fixed directory (/tmp/hostpath_pv).
for place in /var/log /var/lib/cni /tmp/hostpath_pv; do
    mkdir -p $place "$SHIM_TEST_NODE$place"
    mount --bind "$SHIM_TEST_NODE$place" $place
done
for name in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
    kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
    mkdir -p "$SHIM_TEST_NODE/proc/${name%/*}"
    cat /proc/sys/$name >"$SHIM_TEST_NODE/proc/$name"
    mount --bind "$SHIM_TEST_NODE/proc/$name" /proc/sys/$name
done
# A user namespace may mount its own /proc only if a /proc without mounts below it is visible.
mkdir /run/whole-proc
mount -t proc proc /run/whole-proc
! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified
ip link set lo up
exec catatonit -- "$@"
"""


def run_as_node(command: list[str]) -> int:
    """Run a command in new namespaces in which it can start a node (``node.FirstNode``).

    Return the command's exit code, or 1 if it could not be run.
    """
    if os.geteuid() != 0:
        sys.stderr.write("cannot start a node: it takes root\n")
        return 1
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent_shim"
    given = os.environ.get("KUBERNETES_PROGRAMS")
    try:
        programs = Path(given).resolve() if given else build.cached(cache)
    except ShimError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="agent-shim-node-", ignore_cleanup_errors=True) as scratch:
        node = Path(scratch)
        (node / PROGRAMS).symlink_to(programs)
        _save_images(node)
        alone = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with _cgroup(node.name):
            environment = {**os.environ, NODE: scratch, "PATH": f"{programs}:{os.environ['PATH']}"}
            done = subprocess.run([*alone, "sh", "-c", ENTER, "sh", *command], env=environment)
    return done.returncode


def _save_images(node: Path) -> None:
    """Save the images for the pods in one archive that the node can import, because there is no registry."""
    podman = pods.podman(node)
    base = node / "base"
    base.mkdir()
    debian = pods.base_image(podman, base)
    example = pods.example(podman, pods.build(podman, debian))
    unmodified = [pods.build(podman, debian, stage) for stage in ("system", "volume")]
    (node / "releases").mkdir()
    release = rendered.make(podman, pods.build(podman, debian, "renderer"), node / "releases")
    root = node / "pause"
    root.mkdir()
    shutil.copy(shutil.which("catatonit") or "catatonit", root / "pause")
    packed = subprocess.run(["tar", "-C", str(root), "-c", "pause"], capture_output=True, check=True).stdout
    podman("import", "--quiet", "--change", 'ENTRYPOINT ["/pause", "-P"]', "-", PAUSE, stdin=packed)
    images = [pods.IMAGE, example, *unmodified, release, PAUSE]
    podman("save", "--quiet", "--multi-image-archive", "--output", str(node / IMAGES), *images)


@contextmanager
def _cgroup(name: str) -> Iterator[None]:
    """Create a parent cgroup for all pods in every hierarchy. At the end of the block, remove these cgroups and their
    children.
    """
    roots = [path for path in CGROUPS.iterdir() if (path / "cgroup.procs").exists() and path.name != "unified"]
    groups = [root / name for root in (roots if not (CGROUPS / "cgroup.controllers").exists() else [CGROUPS])]
    for group in groups:
        group.mkdir()
    try:
        yield
    finally:
        deadline = time.monotonic() + 10
        for group in groups:
            while group.exists():
                # A killed process may still count as a member of the cgroup for a moment.
                try:
                    for directory, _, _ in os.walk(group, topdown=False):
                        Path(directory).rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
