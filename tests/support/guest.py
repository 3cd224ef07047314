"""Runs tests in a virtual machine if they need what the host cannot provide: systemd as PID 1, cgroup v2 without v1,
hanging disks or changed clocks.

    python -m tests.support.guest [--limit SECONDS] [--image] COMMAND…

runs a command as root on a copy of this project in the guest, and exits with the command's exit code. The CPU is
emulated, so the guest needs no virtualization support. The guest affects nothing on the host, and has no network. Files
are copied in as a tar archive on one disk, and copied out as a tar archive on another. With ``--image``, a third disk
with our image's files is mounted at ``/image`` so that podman in the guest can run containers from it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support import pods

ROOT: Final = Path(__file__).parents[2]
CACHE: Final = ROOT / ".guest"
KEEPER: Final = "agent_shim/host/keeper"
SUITE: Final = "trixie"
PYTHON: Final = "3.13"
"""The Python version of the guest's distribution."""
PACKAGES: Final = (
    "aardvark-dns crun dbus dmsetup e2fsprogs initramfs-tools iproute2 iptables kmod linux-image-cloud-amd64 mount "
    "netavark nftables openssl podman procps python3 python3-venv runc strace sudo systemd tini udev util-linux"
)
IMAGE: Final = Path("/image")
"""The directory in the guest at which our image's files are mounted."""
LOCK: Final = ROOT / "requirements/dev.lock"
PLATFORMS: Final = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 28, 34)))
PLACE: Final = "/opt/agent_shim"
"""The guest's virtual environment. It has the same path as in the image, and its Python imports the project from the
archive that was copied in.
"""
LINKS: Final = ("bosh-agent", "bpm", "monit")
"""Links to the ``agent-shim`` command, as in the image."""
LIMIT: Final = 3600.0
"""Maximum number of seconds from power-on to power-off."""
IMAGE_SIZE: Final = "1G"
OUT: Final = 1 << 30
"""Maximum size in bytes of the files copied out."""

_SERVICE: Final = """
[Unit]
Description=The command of the second disk
After=multi-user.target
[Service]
ExecStart=/usr/local/sbin/guest
# As under a container runtime, the tests get a part of the cgroup tree in which they may create cgroups.
Delegate=yes
DelegateSubgroup=command
TimeoutStopSec=5
[Install]
WantedBy=graphical.target multi-user.target
"""
_SCRIPT: Final = f"""#!/bin/sh
exec </dev/null >/dev/ttyS1 2>&1
stty -F /dev/ttyS1 raw
mkdir -p /project /out {IMAGE}
[ ! -e /dev/vdd ] || mount -o ro /dev/vdd {IMAGE}
tar -C /project -xf /dev/vdb
cd /project
export PATH={PLACE}/bin:$PATH HOME=/root LANG=C.UTF-8
sh /project/.command
echo $? >/out/status
tar -C /out -cf /dev/vdc .
systemctl --force poweroff
"""
_INITRD: Final = "printf 'MODULES=list\n' >/etc/initramfs-tools/conf.d/guest; printf 'virtio_blk\nvirtio_pci\next4\n' \
>>/etc/initramfs-tools/modules; update-initramfs -u -k all >/dev/null"
_UNWANTED: Final = (
    "e2scrub_reap.service getty-static.service getty@tty1.service serial-getty@ttyS0.service modprobe@drm.service "
    "modprobe@fuse.service modprobe@efi_pstore.service systemd-journal-catalog-update.service timers.target "
    "systemd-udev-load-credentials.service systemd-hostnamed.socket podman.socket podman.service "
    "podman-auto-update.service podman-restart.service podman-clean-transient.service"
)
"""Services that are disabled because they would take half a minute on an emulated CPU."""
_SITE: Final = "/project\n"


_SIGN: Final = Path("/etc/systemd/system/guest.service")


def is_here() -> bool:
    """Return True inside the guest, where a test may change anything."""
    return _SIGN.exists()


class GuestError(Exception):
    """The guest could not be created, or did not finish its command."""


def run(command: Sequence[str], out: Path, *, limit: float = LIMIT, has_image: bool = False) -> int:
    """Run a command in a new guest, in the guest's copy of this project. Return the command's exit code.

    The command's output is streamed to standard output. Files that it leaves in the guest's ``/out`` are copied to
    ``out``. With ``has_image``, our image is built first and passed to the guest. Raises ``GuestError`` if the command
    does not finish.
    """
    base = _base()
    with tempfile.TemporaryDirectory(prefix="agent-shim-guest-") as name:
        scratch = Path(name)
        _pack(scratch / "in", command)
        with (scratch / "out").open("wb") as file:
            file.truncate(OUT)
        if has_image:
            _write_image(scratch)
        status = _boot(base, scratch, limit)
        try:
            with tarfile.open(scratch / "out") as tar:
                tar.extractall(out, filter="data")
            return int((out / "status").read_text())
        except (OSError, ValueError, tarfile.TarError) as exc:
            said = (scratch / "console").read_text(errors="replace")[-3000:]
            why = f"it ended with {status}" if status is not None else f"it was ended after {limit:g} s"
            raise GuestError(f"cannot finish {shlex.join(command)} in the guest: {why}\n{said}") from exc


def _boot(base: Path, scratch: Path, limit: float) -> int | None:
    """Run the guest until it powers off. Return the emulator's exit code, or None after a timeout."""
    disks = [f"file={base / 'root'},snapshot=on", f"file={scratch / 'in'},readonly=on", f"file={scratch / 'out'}"]
    disks += [f"file={disk},readonly=on" for disk in [scratch / "image"] if disk.exists()]
    line = "root=/dev/vda rw console=ttyS0 quiet panic=-1 init=/usr/lib/systemd/systemd"
    argv: list[str | Path] = [
        "qemu-system-x86_64",
        *("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "3072"),
        *("-kernel", base / "vmlinuz", "-initrd", base / "initrd", "-append", line),
        *(word for disk in disks for word in ("-drive", f"{disk},format=raw,if=virtio")),
        *("-display", "none", "-monitor", "none", "-nic", "none", "-no-reboot"),
        *("-serial", f"file:{scratch / 'console'}", "-serial", "stdio"),
    ]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as emulator:
        try:
            return emulator.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            emulator.kill()


def _write_image(scratch: Path) -> None:
    """Build the image, and write its files to the disk image ``scratch/image``."""
    podman = pods.podman(scratch)
    image = pods.build(podman, pods.base_image(podman, scratch))
    try:
        tree = podman("image", "mount", image).strip()
        subprocess.run(["mkfs.ext4", "-q", "-d", tree, scratch / "image", IMAGE_SIZE], check=True)
    finally:
        podman.run("image", "unmount", image)


def _pack(disk: Path, command: Sequence[str]) -> None:
    """Write the tar archive for the guest: the project's files (tracked by git, or new and not ignored), the compiled
    keeper, and the command to run.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    subprocess.run([sys.executable, "hatch_build.py"], cwd=ROOT, check=True)
    with tarfile.open(disk, "w") as tar:
        # The compiled keeper is included because the guest has no compiler.
        for name in [*names, KEEPER]:
            if name and os.path.lexists(ROOT / name):
                tar.add(ROOT / name, name, filter=_of_root)
        script = f"export NO_COLOR=1 SHIM_TEST_SLOW=4\nexec {shlex.join(command)}\n".encode()
        member = tarfile.TarInfo(".command")
        member.size = len(script)
        tar.addfile(member, io.BytesIO(script))


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _base() -> Path:
    """Return the root file system, the kernel and the initrd. They are rebuilt every week to include security updates.

    The ``packages`` file in their directory lists the installed package versions.
    """
    told = [
        SUITE,
        PYTHON,
        PACKAGES,
        _SERVICE,
        _SCRIPT,
        _SITE,
        _INITRD,
        _UNWANTED,
        LOCK.read_text(),
        time.strftime("%Gw%V"),
    ]
    told += [*_scripts(), *LINKS]
    key = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
    base = CACHE / key
    if not base.exists():
        sys.stderr.write(f"guest: making {SUITE} for {key} (once)\n")
        shutil.rmtree(CACHE, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="agent-shim-guest-") as name:
            tree, half = Path(name, "root"), CACHE / f"{key}.part"
            half.mkdir(parents=True)
            try:
                _make(tree, half)
            except subprocess.CalledProcessError as exc:
                raise GuestError(f"cannot make the guest: {exc}") from exc
            half.rename(base)
    sys.stderr.write(f"guest: {SUITE} of {key}, made {time.strftime('%F', time.gmtime(base.stat().st_mtime))}\n")
    return base


def _make(tree: Path, half: Path) -> None:
    def do(*argv: str | Path) -> None:
        subprocess.run(argv, check=True, stdout=sys.stderr)

    do("mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES.replace(' ', ',')}", SUITE, tree)
    for path, content, mode in (
        ("etc/systemd/system/guest.service", _SERVICE, 0o644),
        ("usr/local/sbin/guest", _SCRIPT, 0o755),
        ("etc/hosts", "127.0.0.1 localhost guest\n", 0o644),
        ("etc/hostname", "guest\n", 0o644),
        ("etc/machine-id", "", 0o444),
        ("etc/fstab", "", 0o644),
    ):
        (tree / path).write_text(content)
        (tree / path).chmod(mode)
    wheels = ["--only-binary=:all:", "--python-version", PYTHON, *(f"--platform={one}" for one in PLATFORMS)]
    do(sys.executable, "-m", "pip", "download", "-qq", "--require-hashes", "-r", LOCK, "-d", tree / "wheels", *wheels)
    shutil.copy(LOCK, tree / "wheels/lock")
    install = f"{PLACE}/bin/pip install -qq --no-index --find-links /wheels --require-hashes -r /wheels/lock"
    inside = f"python3 -m venv {PLACE} && {install} && rm -r /wheels && systemctl enable -q guest"
    inside += f" && systemctl mask -q {_UNWANTED} && {_INITRD}"
    do("env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "chroot", tree, "sh", "-c", inside)
    (tree / PLACE[1:] / f"lib/python{PYTHON}/site-packages/project.pth").write_text(_SITE)
    for script in _scripts():
        name, _, target = script.partition("=")
        module, _, function = target.partition(":")
        place = tree / PLACE[1:] / "bin" / name
        place.write_text(
            f"#!{PLACE}/bin/python3\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        place.chmod(0o755)
    for name in LINKS:
        (tree / PLACE[1:] / "bin" / name).symlink_to("agent-shim")
    with (half / "packages").open("wb") as versions:
        subprocess.run(["chroot", tree, "dpkg-query", "--show"], check=True, stdout=versions)
    for name in ("vmlinuz", "initrd"):
        shutil.copy(next((tree / "boot").glob(f"{name}*")), half / name)
    do("mkfs.ext4", "-q", "-d", tree, half / "root", "4G")


def _scripts() -> list[str]:
    """Return an entry ``name=module:function`` for each command that the project installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [f"{name}={target}" for name, target in project["scripts"].items()]


def main() -> int:
    """Run the command in the guest and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.guest", description=__doc__)
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS")
    parser.add_argument("--image", action="store_true", help="build our image and mount it in the guest")
    parser.add_argument("--out", type=Path, default=None, metavar="DIRECTORY", help="for what is left in /out")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as unwanted:
        try:
            return run(asked.command, asked.out or Path(unwanted), limit=asked.limit, has_image=asked.image)
        except GuestError as exc:
            sys.stderr.write(f"guest: {exc}\n")
            return 70


if __name__ == "__main__":
    sys.exit(main())
