"""Runs a stemcell's root file system as a container on a fully emulated arm64 machine.

Keepers cannot run under ``arm64.py``, whose emulator runs single programs on the host's kernel. They can run here,
because this machine boots its own Linux kernel from Debian. Its only disk contains the stemcell's files. PID 1 is a
small script that starts the stemcell in new namespaces, as a container runtime does, and then runs the commands that a
test sends. The machine reaches the host's loopback interface at the address ``HOST``. Needs root.
"""

from __future__ import annotations

import asyncio
import hashlib
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.support.environment import BLOBS
from tests.support.source import ROOT

HOST: Final = "10.0.2.2"
"""Address inside the machine's network at which programs on the host's loopback interface can be reached. qemu forwards
these connections.
"""
BOOT_TIMEOUT_S: Final = 600
CACHE: Final = ROOT / ".arm64-kernel"
SUITE: Final = "bookworm"
PACKAGES: Final = "linux-image-arm64,busybox-static"
MODULES: Final = "virtio_pci virtio_blk virtio_net virtio_console crc32c_generic ext4 9p 9pnet_virtio"
"""Kernel modules for the disk, the network, the console and the shared directory. ext4 needs crc32c_generic."""

_INIT: Final = f"""#!/bin/busybox sh
export PATH=/bin
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in {MODULES}; do modprobe $module; done
until [ -e /dev/vda ]; do sleep 0.1; done
mount -t ext4 /dev/vda /system
for each in proc sys dev; do mount -o move /$each /system/$each; done
exec switch_root /system /process-1
"""

_PROCESS_1: Final = f"""#!/bin/sh
# Start the stemcell. Then run the commands that arrive on the console, and print the output of each, a NUL, and its
# exit status.
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p {BLOBS}
mount -t 9p -o trans=virtio,version=9p2000.L blobs {BLOBS}
ip link set lo up
ip address add 10.0.2.15/24 dev eth0
ip link set eth0 up
unshare --mount --uts --ipc --pid --cgroup --fork --mount-proc env -i /usr/sbin/runsvdir-start \\
    </dev/null >/dev/console 2>&1 &
container=$!
exec </dev/hvc0 >/dev/hvc0 2>&1
stty raw -echo
printf '\\0%s\\n' 0
while read -r line; do
    eval "$line"
    printf '\\0%s\\n' "$?"
done
"""


@dataclass(frozen=True)
class Machine:
    """A running machine, and the container in it."""

    emulator: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def run(self, line: str) -> tuple[int, str]:
        """Run a shell command on the machine, outside the container. Return its exit code and output."""
        self.writer.write(f"{line}\n".encode())
        return await self.answer()

    async def answer(self) -> tuple[int, str]:
        """Wait for the last line passed to ``run`` to finish. Return its exit code and output."""
        output = (await self.reader.readuntil(b"\0")).decode(errors="replace").removesuffix("\0")
        return int(await self.reader.readline()), output

    async def exec(self, *command: str) -> str:
        """Run a command in the container and return its output. Fail the test if the command fails."""
        code, output = await self.run(f"nsenter --target $(pgrep -P $container) --all {shlex.join(command)}")
        if code != 0:
            pytest.fail(f"{shlex.join(command)} ended with {code}:\n{output}")
        return output

    async def stop(self) -> int:
        """Send SIGTERM to PID 1 of the container, as a runtime does to stop a container. Return its exit code."""
        return int((await self.run("kill -TERM $(pgrep -P $container); wait $container; echo $?"))[1])

    async def power_off(self) -> int:
        """Turn the machine off. Return the emulator's exit code."""
        self.writer.write(b"echo o >/proc/sysrq-trigger; sleep infinity\n")
        return await self.emulator.wait()


@asynccontextmanager
async def running(disk: Path, blobs: Path, log: Path) -> AsyncIterator[Machine]:
    """Run a machine for the duration of the block, which begins once the container has been started.

    Changes to the disk are lost. ``blobs`` is a host directory that is shared with the machine. The output of the
    kernel and the container is written to ``log``.
    """
    kernel, socket = _kernel(), log.with_suffix(".socket")
    connected: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    line = "root=/dev/vda rw console=ttyAMA0 quiet loglevel=1 panic=-1 net.ifnames=0"
    argv: list[str | Path] = [
        "qemu-system-aarch64",
        *("-machine", "virt", "-cpu", "cortex-a72", "-accel", "tcg,thread=multi", "-smp", "2", "-m", "2048"),
        *("-kernel", kernel / "vmlinuz", "-initrd", kernel / "initrd.img", "-append", line),
        *("-drive", f"file={disk},format=raw,if=virtio,snapshot=on"),
        *("-virtfs", f"local,path={blobs},mount_tag=blobs,security_model=none"),
        *("-netdev", "user,id=net,ipv6=off", "-device", "virtio-net-pci,netdev=net,romfile="),
        *("-chardev", f"socket,id=shell,path={socket}"),
        *("-device", "virtio-serial-pci", "-device", "virtconsole,chardev=shell"),
        *("-display", "none", "-monitor", "none", "-no-reboot", "-serial", f"file:{log}"),
    ]
    server = await asyncio.start_unix_server(lambda *streams: connected.put_nowait(streams), socket)
    emulator = await asyncio.create_subprocess_exec(*argv, stdin=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(BOOT_TIMEOUT_S):
            reader, writer = await connected.get()
            machine = Machine(emulator, reader, writer)
            await machine.answer()
        yield machine
        writer.close()
    finally:
        if emulator.returncode is None:
            emulator.kill()
            await emulator.wait()
        server.close()
        print(log.read_text(errors="replace"))  # noqa: T201 - pytest shows it if the test fails


def make_disk(root: Path, disk: Path) -> Path:
    """Create a disk image from ``root``, a directory with a stemcell's root file system. Return the image's path."""
    (root / "process-1").write_text(_PROCESS_1)
    (root / "process-1").chmod(0o755)
    subprocess.run(["mkfs.ext4", "-q", "-d", root, disk, "2G"], check=True)
    return disk


def _kernel() -> Path:
    """Return a directory with a kernel and an initrd. They are rebuilt every week to include security updates.

    Debian's own initrd is not used, because generating it in the emulator takes an hour.
    """
    key = hashlib.sha256("\0".join([SUITE, PACKAGES, _INIT, time.strftime("%Gw%V")]).encode()).hexdigest()[:16]
    kernel = CACHE / key
    if not kernel.exists():
        sys.stderr.write(f"arm64: unpacking the kernel of {SUITE} for arm64 (once)\n")
        shutil.rmtree(CACHE, ignore_errors=True)
        half, system, initrd = (CACHE / name for name in ("part", "system", "initrd"))
        half.mkdir(parents=True)
        unpack: list[str | Path] = [
            "mmdebstrap",
            "--quiet",
            "--arch=arm64",
            "--variant=extract",
            f"--include={PACKAGES}",
            SUITE,
            system,
        ]
        subprocess.run(unpack, check=True, stdout=sys.stderr)
        (image,) = (system / "boot").glob("vmlinuz-*")
        image.rename(half / "vmlinuz")
        for name in ("bin", "proc", "sys", "dev", "system", "lib/modules"):
            (initrd / name).mkdir(parents=True)
        (initrd / "init").write_text(_INIT)
        (initrd / "init").chmod(0o755)
        (system / "bin/busybox").rename(initrd / "bin/busybox")
        (modules,) = (system / "lib/modules").iterdir()
        modules.rename(initrd / "lib/modules" / modules.name)
        subprocess.run(["depmod", "--basedir", initrd, modules.name], check=True)
        pack = "find . | cpio --create --quiet --format=newc | gzip -1"
        with (half / "initrd.img").open("wb") as packed:
            subprocess.run(["sh", "-c", pack], cwd=initrd, check=True, stdout=packed)
        half.rename(kernel)
        shutil.rmtree(system)
        shutil.rmtree(initrd)
    return kernel
