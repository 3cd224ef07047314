"""``./dev test-lxd``: build a stemcell, then run an LXD daemon and this directory's tests in new namespaces.

With ``LXD=incus``, an Incus daemon is used instead.

The daemon, its bridge with a DHCP server, and the containers share the new network, mount and PID namespaces, and
disappear together with them. If ``LXD_CPI`` names a binary from bosh-lxd-cpi-release, that binary creates the
containers; e28a247 is the last revision that supports containers. Otherwise, the tests make the same calls as that CPI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.lxd.cpi import CLIENT, DAEMON, IS_INCUS, PATH
from tests.support import pods
from tests.support.source import ROOT

PACKAGES = "incus-base incus-client dnsmasq-base" if IS_INCUS else "lxd lxd-client lxcfs dnsmasq-base"
STEMCELL = "SHIM_TEST_STEMCELL"
"""Environment variable with the directory of the unpacked stemcell. LXD's files are stored next to it."""

ENTER = """
set -eu
mount --make-rprivate /
# Mount /sys again, because LXD looks for its bridge in /sys/class/net, which shows the network namespace in which /sys
# was mounted.
cgroups=$(mktemp -d)
mount --rbind /sys/fs/cgroup "$cgroups"
mount -t sysfs sysfs /sys
# LXC 7, which Incus uses, supports only cgroup v2. On a machine with the hybrid layout, show it only the v2 hierarchy,
# which has no controllers there.
if [ "${LXD:-}" = incus ] && [ -d "$cgroups/unified" ]; then
    cgroups=$cgroups/unified
fi
mount --rbind "$cgroups" /sys/fs/cgroup
ip link set lo up
exec catatonit -- "$@"
"""


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments and return its exit code. If a prerequisite is missing, print a message and
    return 1.
    """
    missing = [name for name in (DAEMON, CLIENT, "dnsmasq") if shutil.which(name, path=PATH) is None]
    if os.geteuid() != 0 or missing:
        why = f"{' and '.join(missing)} missing: apt-get install {PACKAGES}" if missing else "it takes root"
        print(f"cannot start {DAEMON}: {why}", file=sys.stderr)
        return 1
    # Keep the path short, because LXD creates Unix sockets in this directory.
    with tempfile.TemporaryDirectory(prefix="lxd-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        # Root in an unprivileged container is an ordinary user on the host, but must be able to enter the directory.
        Path(scratch).chmod(0o711)
        stemcell = make_stemcell(Path(scratch))
        alone = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        pytest = [sys.executable, "-m", "pytest", "-qm", "lxd", "--timeout=900", "-o", "faulthandler_timeout=0"]
        environment = {**os.environ, STEMCELL: str(stemcell)}
        command = [*alone, "sh", "-c", ENTER, "sh", *pytest, "tests/lxd", *arguments]
        return subprocess.run(command, env=environment, check=False).returncode


def make_stemcell(scratch: Path) -> Path:
    """Build the image and its stemcell with ``./dev stemcell``. Return the directory with the unpacked stemcell."""
    podman = pods.podman(scratch)
    image = pods.build(podman, pods.base_image(podman, scratch))
    make = [sys.executable, str(ROOT / "stemcell_overlay/stemcell.py"), f"--image={image}", f"--out={scratch}"]
    environment = {**os.environ, "CONTAINERS_CONF": str(podman.config)}
    made = subprocess.run(make, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    unpacked = scratch / "stemcell"
    unpacked.mkdir()
    subprocess.run(["tar", "-C", str(unpacked), "-xf", made], check=True)
    Path(made).unlink()
    return unpacked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
