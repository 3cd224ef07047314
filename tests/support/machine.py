"""Simulates a machine with its own mount and PID namespaces, cgroups, ``/var/vcap`` and ``/etc``. Needs root.

The machine shares the rest of the file system with the host, but read-only, because a tool with a wrong path could
delete a home directory. ``/home``, ``/tmp``, ``/var/log`` and similar directories are replaced with empty ones, and no
user has a home directory at its real path. The test's scratch directory is at ``/mnt``. PID 1 is a small reaper. When
it exits, the kernel kills every process on the machine. ``Machine.root`` gives access to the machine's files from
outside. Volumes outlive the machine, so a new machine with the same volumes represents the same container after a
restart or re-creation.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from tests.support.own_cgroups import joining, own_cgroups

_INIT = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.write(int(sys.argv[1]), b"up")
os.close(int(sys.argv[1]))
while True:
    signal.pause()
"""

_SETUP = """
set -eu
mkdir -p /var/vcap
{aside}
mount --rbind {scratch} /mnt
mount -t tmpfs -o mode=0755 tmpfs {scratch}/etc
cp -a /etc/. {scratch}/users/. {scratch}/etc
mount --bind {scratch}/etc /etc
mount -t tmpfs -o mode=0755 tmpfs /var/vcap
{volumes}
for place in /home /tmp /var/tmp /var/log /var/mail; do mount -t tmpfs -o mode=1777 tmpfs $place; done
{network}
for place in /run {closed}; do mount -t tmpfs -o mode=0755 tmpfs $place; done
{back}
mkdir -m 700 /home/vcap
chown vcap:vcap /home/vcap
mount -o remount,bind,ro /
exec {python} -c "$INIT" {ready}
"""

CODE = Path(__file__).parents[2]
"""Directory of this checkout, which contains the agent."""

COMMAND_TIMEOUT_S = 100
"""Time limit for a command. It is shorter than the limit at which a hanging test aborts the whole run, so a hanging
command fails only its own test.
"""

NEEDED = (CODE, Path(sys.base_prefix))
"""Directories with the agent and the interpreter, which every user of a machine must be able to read."""

ETC = Path("/etc")
GROUPS = {"vcap": 1000, "admin": 1001, "bosh_sudoers": 1002, "bosh_sshers": 1003}


@dataclass
class Machine:
    """A running machine. ``pid`` is the pid of its PID 1 as seen from outside."""

    SCRATCH: ClassVar = Path("/mnt")
    """Path of the test's scratch directory inside the machine."""

    pid: int
    cgroups: list[tuple[Path, Path]]
    """The cgroups in which the machine's programs run."""

    @property
    def root(self) -> Path:
        """Path of the machine's root directory as seen from outside."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def vcap(self) -> Path:
        return self.root / "var/vcap"

    def pids(self) -> list[int]:
        """Return the pids of the machine's processes as seen from outside, without those that jobs run in their own
        cgroups.

        The pids are read from the machine's cgroup, because on a busy machine a scan of all processes takes so long
        that it misses short-lived ones.
        """
        if self.cgroups:
            return list(map(int, (self.cgroups[0][0] / "cgroup.procs").read_text().split()))
        inside = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [pid for pid in found if _namespace(pid) == inside]

    def popen(self, argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program inside the machine."""
        inside = ["nsenter", "-t", str(self.pid), "-m", "-p", "-n", "--", *argv]
        return subprocess.Popen(joining(self.cgroups, inside), **options)

    def run(self, command: str) -> str:
        """Run a shell command inside the machine and return its output. Fail the test if the command fails."""
        done = self.popen(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = done.communicate(timeout=COMMAND_TIMEOUT_S)
        assert done.returncode == 0, f"{command}: {err.decode()}"
        return out.decode()

    def write(self, path: str, document: Any, *, mode: int = 0o600) -> None:
        """Write a JSON file at an absolute path inside the machine."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(document))
        place.chmod(mode)


def _namespace(pid: int) -> Path | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}/ns/pid").readlink()
    return None


@contextmanager
def machine(
    scratch: Path, volumes: Mapping[str, Path] = MappingProxyType({}), *, has_network: bool = False
) -> Iterator[Machine]:
    """Run a machine during the block. Everything that runs in it is killed at the end.

    ``volumes`` maps absolute paths inside the machine, below ``/var/vcap``, to directories that are mounted there. With
    ``has_network`` the machine gets its own network namespace, which has only a loopback interface. Otherwise it shares
    the host's network, but cannot change the host's packet filter.
    """
    for name in ("etc", "users"):
        (scratch / name).mkdir()
    _make_users(scratch / "users")
    reading, writing = os.pipe()
    closed, aside, back = revealing(scratch, Machine.SCRATCH)
    mounts = [f"mkdir -p {point}; mount --bind {shlex.quote(str(path))} {point}" for point, path in volumes.items()]
    setup = _SETUP.format(
        scratch=shlex.quote(str(scratch)),
        closed=closed,
        aside=aside,
        back=back,
        volumes="\n".join(mounts),
        network="ip link set lo up"
        if has_network
        else "! test -e /usr/sbin/nft || mount --bind /dev/null /usr/sbin/nft",
        python=shlex.quote(sys.executable),
        ready=writing,
    )
    namespaces = ["--mount", "--pid", *(["--net"] if has_network else [])]
    with own_cgroups("machine") as places:
        keeper = subprocess.Popen(
            joining(places, ["unshare", *namespaces, "--fork", "--mount-proc", "--kill-child", "sh", "-c", setup]),
            env={**os.environ, "INIT": _INIT},
            pass_fds=[writing],
        )
        os.close(writing)
        try:
            assert os.read(reading, 2) == b"up", "the machine did not come up"
            children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
            yield Machine(int(children[0]), places)
        finally:
            os.close(reading)
            keeper.kill()
            keeper.wait()


def revealing(scratch: Path, seen: Path) -> tuple[str, str, str]:
    """Return three strings for a shell script that keeps ``NEEDED`` readable for every user in a new mount namespace.

    A path in ``NEEDED`` may be below a directory that only root can enter. The first string lists these directories,
    over which the caller must mount new ones. The second string contains the commands to run before that. They
    bind-mount ``NEEDED`` read-only below ``scratch``. The third string contains the commands to run afterwards. They
    bind-mount these copies at the original paths. By then, ``scratch`` must be visible at ``seen``.
    """
    places = [path for path in NEEDED if not path.is_relative_to("/usr")]
    closed = {str(up) for path in places for up in path.parents if not up.stat().st_mode & stat.S_IXOTH}
    aside, back = [], []
    for number, path in enumerate(places):
        kept, shown = shlex.quote(str(scratch / f"needed{number}")), shlex.quote(str(seen / f"needed{number}"))
        aside.append(f"mkdir -p {kept}; mount --bind {shlex.quote(str(path))} {kept}; mount -o remount,bind,ro {kept}")
        place = shlex.quote(str(path))
        back.append(f"mkdir -p {place}; mount --bind {shown} {place}")
    outermost = [path for path in closed if not any(path.startswith(f"{other}/") for other in closed)]
    return shlex.join(outermost), "\n".join(aside), "\n".join(back)


def _make_users(copy: Path) -> None:
    """Write the simulated machine's user and group files to ``copy``: the host's entries and those of a stemcell.

    Host entries with the same ids or names as a stemcell's are left out. The host's users get a home directory that
    does not exist.
    """

    def others(file: str, column: int) -> list[list[str]]:
        entries = [line.split(":") for line in (ETC / file).read_text().splitlines()]
        return [entry for entry in entries if entry[0] not in GROUPS and entry[column] not in map(str, GROUPS.values())]

    groups = others("group", 2) + [[name, "x", str(number), ""] for name, number in GROUPS.items()]
    users = [[*entry[:5], "/nonexistent", entry[6]] for entry in others("passwd", 2)]
    users.append(["vcap", "x", "1000", "1000", "", "/home/vcap", "/bin/bash"])
    shadow = [line for line in (ETC / "shadow").read_text().splitlines() if not line.startswith("vcap:")]
    for name, text in (
        ("group", "".join(f"{':'.join(entry)}\n" for entry in groups)),
        ("passwd", "".join(f"{':'.join(entry)}\n" for entry in users)),
        ("shadow", "\n".join([*shadow, "vcap:*:19000:0:99999:7:::", ""])),
    ):
        shutil.copy2(ETC / name, copy / name)
        (copy / name).write_text(text)
