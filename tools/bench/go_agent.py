"""``./dev run python -m tools.bench.go_agent BINARY [--monit MONIT] [PART...]``: run ``./dev bench`` for the Go agent.

BINARY is a bosh-agent and MONIT its monit (default: the one on PATH). Use monit 5.2.5, as on stemcells, because later
versions reject the agent's start requests. Parts and other options are passed to ``./dev bench``. Memory and CPU time
are sums over both programs.

Needs root, because everything runs in new mount, network and pid namespaces. They have an empty ``/var/vcap``, a
syslog, and read-only access to the rest of the disk except ``/tmp``. When the measurement ends, the kernel kills all
processes in the namespaces.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

SCRIPT: Final = Path(__file__).with_name("go_agent.sh")
PARTS: Final = ("boots", "pings", "installs", "lifecycles", "archives", "idle", "deploys")
"""Parts of the benchmark that measure the Go agent as well. The others start several agents, which would all need the
same port for monit, or restart jobs so often that monit would need hours.
"""

_INSIDE: Final = """
set -eu
ip link set lo up
mkdir -p /var/vcap
for place in /var/vcap /run; do mount -t tmpfs tmpfs $place; done
mount --bind /tmp /tmp
mount -o remount,bind,ro /
"$1" -c "$SYSLOG" &
until [ -S /run/log ]; do sleep 0.05; done
"$@" || exit
"""

_SYSLOG: Final = """
import socket
listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
listening.bind("/run/log")
while True:
    listening.recv(65536)
"""
"""A syslog server that discards messages. Without one, the Go agent would try to connect ten times a second."""


def main() -> int:
    """Measure the Go agent and print JSON to standard output. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--monit", default=shutil.which("monit"), type=Path, help="default: the one on PATH")
    args, rest = parser.parse_known_args()
    if os.geteuid() != 0:
        parser.error("the namespaces need root")
    for program in (args.binary, args.monit):
        if program is None or not os.access(program, os.X_OK):
            parser.error(f"there is no program {program or 'monit'}")
    binary, monit = args.binary.resolve(), args.monit.resolve()
    command = f"{shlex.join(map(str, (SCRIPT, binary, monit)))} {{config}} {{base}}"
    if not set(rest) & set(PARTS):
        rest.extend(PARTS)
    bench = [sys.executable, "-m", "tools.bench", "--agent-command", command, "--agent-name", name(monit), *rest]
    namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    inside = ["sh", "-c", _INSIDE, "sh", *bench]
    return subprocess.run([*namespaces, *inside], env={**os.environ, "SYSLOG": _SYSLOG}, check=False).returncode


def name(monit: Path) -> str:
    """Return the name of the agent for the column heading, with monit's version."""
    said = subprocess.run([monit, "-V"], capture_output=True, text=True, check=True).stdout
    return f"Go agent and monit {said.split('version', 1)[1].split()[0]}"


if __name__ == "__main__":
    sys.exit(main())
