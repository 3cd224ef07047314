"""Compares ``agent-shim monit`` with monit 5.2.5 (MONIT_525). Both supervise first 10, then 50, then 200 services,
which are configured with the same files.

Each start program is a shell script that starts a process and writes the pidfile. Both supervisors check the services
as often as monit does on a stemcell.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.support import monitrc
from tests.support.instance import INTERPRETER
from tests.support.ports import free_port
from tests.support.readings import cpu_seconds, memory_of, pss
from tools.bench.measuring import Figures, figure

SIZES: Final = (10, 50, 200)
CYCLE_S: Final = 10
SETTLING_S: Final = 2 * CYCLE_S
IDLE_S: Final = 6 * CYCLE_S
KILLED: Final = 3
LIMIT_S: Final = 900.0
ASKED: Final = 20
SERVICES_A_FILE: Final = 10
"""Number of services per file, because monit 5.2.5 reads at most 127 files."""
USER: Final = "vcap:random"

CTL: Final = """#!/bin/sh
pidfile=$2
case $1 in
    start) sleep 100000 & echo $! >"$pidfile" ;;
    stop) kill -9 "$(cat "$pidfile")"; rm -f "$pidfile" ;;
esac
"""


async def measure(_command: str, scale: float, found: Figures) -> None:
    """Measure ``agent-shim monit`` and monit 5.2.5. ``scale`` multiplies the idle time."""
    programs = {"shim": [INTERPRETER, "-m", "agent_shim.cli", "monit", "-I"]}
    if monit := os.environ.get("MONIT_525"):
        programs["monit"] = [monit, "-I"]
    for name, argv in programs.items():
        for size in SIZES:
            port = free_port()
            with tempfile.TemporaryDirectory(prefix="agent-shim-monit-") as where:
                await asyncio.to_thread(
                    MonitFiles(Path(where), size, port).measure, f"{name} {size}", argv, scale, found
                )


class MonitFiles:
    """The directory and configuration for a supervisor with ``size`` services."""

    def __init__(self, base: Path, size: int, port: int) -> None:
        self.base, self.port = base, port
        (base / "job").mkdir()
        (base / "ctl").write_text(CTL)
        (base / "ctl").chmod(0o755)
        self.pidfiles = [base / f"run-{number}" for number in range(size)]
        self.control = base / "monitrc"
        http = f"port {self.port} and use address 127.0.0.1 allow {USER}"
        self.control.write_text(monitrc.control(base, cycle=CYCLE_S, http=http, run=base))
        for first in range(0, size, SERVICES_A_FILE):
            (base / f"job/{first:04}_job.monitrc").write_text(
                "".join(
                    f"check process s{number} with pidfile {base}/run-{number}\n"
                    f'  start program "{base}/ctl start {base}/run-{number}"\n'
                    f'  stop program "{base}/ctl stop {base}/run-{number}"\n  group vcap\n'
                    for number in range(first, min(first + SERVICES_A_FILE, size))
                )
            )
        for path in (self.control, *(base / "job").iterdir()):
            path.chmod(0o600)

    def measure(self, name: str, argv: list[str], scale: float, found: Figures) -> None:
        environment = {**os.environ, "HOME": str(self.base)}
        base = ["-b", str(self.base)] if argv[1:2] == ["-m"] else []
        with (self.base / "out").open("wb") as out:
            daemon = subprocess.Popen([*argv, "-c", self.control, *base], env=environment, stdout=out, stderr=out)
        try:
            begun_at = time.monotonic()
            self.until(lambda: all(map(lives, self.pidfiles)))
            found[f"{name} services started"] = figure([time.monotonic() - begun_at], "s")
            self.until(lambda: self.page().count("<status>0</status>") > len(self.pidfiles))
            time.sleep(SETTLING_S)
            before = cpu_seconds(daemon.pid)
            time.sleep(IDLE_S * scale)
            share = (cpu_seconds(daemon.pid) - before) / (IDLE_S * scale) * 100
            found[f"{name} services, processor at rest"] = figure([share], "%")
            found[f"{name} services, RSS"] = figure([memory_of(daemon.pid, "Rss:")], "MB")
            found[f"{name} services, PSS"] = figure([pss(daemon.pid)], "MB")
            asked = [self.timed(self.page) for _ in range(ASKED)]
            found[f"{name} services, status page"] = figure([seconds * 1000 for seconds in asked], "ms")
            found[f"{name} services, killed, next one runs"] = figure(
                [self.replaced([pidfile]) for pidfile in self.pidfiles[:KILLED]], "s"
            )
            time.sleep(SETTLING_S)
            found[f"{name} services, all killed, all run"] = figure([self.replaced(self.pidfiles)], "s")
        finally:
            daemon.terminate()
            daemon.wait(60)
            for pidfile in self.pidfiles:
                if lives(pidfile):
                    os.kill(int(pidfile.read_text()), signal.SIGKILL)

    def replaced(self, pidfiles: list[Path]) -> float:
        """Kill the processes whose pids are in ``pidfiles``. Return the seconds until new processes have replaced all
        of them.
        """
        former = {pidfile: pidfile.read_text() for pidfile in pidfiles}
        begun_at = time.monotonic()
        for pid in former.values():
            os.kill(int(pid), signal.SIGKILL)
        self.until(lambda: all(lives(pidfile) and pidfile.read_text() != pid for pidfile, pid in former.items()))
        return time.monotonic() - begun_at

    def page(self) -> str:
        """Return the status page that the Go agent requests."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/_status2?format=xml")
        request.add_header("Authorization", f"Basic {base64.b64encode(USER.encode()).decode()}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode("latin-1"))

    @staticmethod
    def timed(call: Callable[[], object]) -> float:
        begun_at = time.monotonic()
        call()
        return time.monotonic() - begun_at

    def until(self, fact: Callable[[], bool]) -> None:
        begun_at = time.monotonic()
        while not holds(fact):
            if time.monotonic() - begun_at > LIMIT_S:
                raise TimeoutError((self.base / "out").read_text()[-500:])
            time.sleep(0.01)


def holds(fact: Callable[[], bool]) -> bool:
    try:
        return fact()
    except (OSError, ValueError):
        return False


def lives(pidfile: Path) -> bool:
    """Return True if a pidfile names a process that is not a zombie."""
    try:
        state = Path(f"/proc/{int(pidfile.read_text())}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return False
    return state != "Z"
