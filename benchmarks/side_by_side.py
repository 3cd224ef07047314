"""``./dev run python -m benchmarks.side_by_side``: the same 20 jobs under this supervisor and under Debian's monit.

Each supervisor runs in its own pid namespace (needs root), at the same time, for three minutes: all jobs are started,
some are killed, one grows, one falls silent, all are stopped. Prints a table. Docs/supervision.md tells the outcome.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent_shim.core.paths import Paths
from agent_shim.host import proc, reaper
from agent_shim.supervisor.supervisor import JobFile, Supervisor

STARTED_S: Final = 55.0
"""Time from the start to its observation. The others likewise."""
KILLED_S: Final = 40.0
STOPPED_S: Final = 75.0
TROUBLE_S: Final = 5.0
"""Age at which the first process of its job begins to grow, or falls silent."""

_GROW: Final = f"import time; time.sleep({TROUBLE_S}); held = bytearray(b'x' * (150 << 20)); time.sleep(100000)"
_SERVE: Final = """
import socket, sys, time
server, until = socket.create_server(("127.0.0.1", int(sys.argv[1]))), time.time() + float(sys.argv[2])
server.settimeout(0.2)
while time.time() < until:
    try:
        server.accept()[0].close()
    except OSError:
        pass
server.close()
time.sleep(100000)
"""
_UNREAPED: Final = "import os, sys, time; os.fork() or os.execv(sys.argv[1], sys.argv[1:]); time.sleep(100000)"
_FIRST: Final = "[ -e $pidfile.first ] || first=1; : >$pidfile.first"
KILL: Final = "kill $(cat $pidfile)"
LASTS: Final = "exec /bin/sleep 100000"


@dataclass(frozen=True, slots=True)
class Job:
    """Scripts with ``$pidfile``. ``$d`` writes the pidfile, then runs ``daemon``. ``$q`` lasts and writes none."""

    start: str = "$d &"
    stop: str | None = KILL
    statements: str = ""
    timeout: int = 30
    is_killed: bool = False
    daemon: str = LASTS


def jobs(python: str, port: int) -> dict[str, Job]:
    """The jobs by their special property."""
    py = f"{python} -S -E -c"
    serve = f"exec {py} {shlex.quote(_SERVE)} {port}"
    return {
        "executes its daemon": Job("exec $d", is_killed=True),
        "forks twice": Job("setsid $d & exit 0", is_killed=True),
        "stays beside its daemon": Job("$d & wait", is_killed=True),
        "starts slowly, in time": Job("sleep 5; $d &"),
        "exceeds its start timeout": Job("sleep 12; $d &", timeout=5),
        "writes its pidfile late": Job("setsid sh -c 'sleep 12; exec '$d & exit 0", timeout=5),
        "never starts": Job("echo no such table; exit 1"),
        "finds a stale pidfile": Job(),
        "ignores TERM": Job("trap '' TERM; $d &", timeout=5),
        "leaves a child in another session": Job("setsid $q & $d &", is_killed=True),
        "leaves such a child without environment": Job(daemon=f"env -i setsid $q & {LASTS}", is_killed=True),
        "its stop program hangs": Job(stop=f"{KILL}; exec sleep 100000", timeout=5),
        "its stop program only removes the pidfile": Job(stop="rm -f $pidfile", timeout=5),
        "has no stop program": Job(stop=None, is_killed=True),
        "ends every two seconds": Job(daemon="exec /bin/sleep 2"),
        "others depend on it": Job(is_killed=True),
        "depends on that one": Job(statements="depends on job16"),
        "its parent does not reap it": Job(f"{py} {shlex.quote(_UNREAPED)} $d &", is_killed=True),
        "exceeds its memory limit": Job(
            daemon=f'{_FIRST}\n[ "$first" ] || {LASTS}\nexec {py} {shlex.quote(_GROW)}',
            statements="if totalmem > 100 Mb for 2 cycles then restart",
        ),
        "its port falls silent": Job(
            daemon=f'{_FIRST}\n[ "$first" ] || {serve} 100000\n{serve} {TROUBLE_S}',
            statements=f"if failed port {port} with timeout 2 seconds for 2 cycles then restart",
        ),
    }


class World:
    """The jobs below one directory, and their effects visible from outside."""

    def __init__(self, base: Path, port: int) -> None:
        self.base = base
        self.jobs = {f"job{number}": job for number, job in enumerate(jobs(sys.executable, port).values(), 1)}
        base.mkdir(parents=True)
        for name, job in self.jobs.items():
            self._write(name, job)
        stranger = subprocess.Popen(["/bin/sleep", "100000"])
        self.stranger = stranger.pid
        self._file("job8", "pid").write_text(f"{stranger.pid}\n")

    def _file(self, name: str, kind: str) -> Path:
        return self.base / f"{name}.{kind}"

    def _write(self, name: str, job: Job) -> None:
        pidfile, marks = self._file(name, "pid"), self._file(name, "marks")
        mark = f'echo "$$ $(/bin/date +%s.%N)" >>{marks}'
        known = f"d={self._file(name, 'd')} q={self._file(name, 'q')} pidfile={pidfile}"
        self._script(self._file(name, "d"), f"{known}\n{mark}\necho $$ >{pidfile}\n{job.daemon}")
        self._script(self._file(name, "q"), f"{mark}\n{LASTS}")
        self._script(self._file(name, "start"), f"{known}\n{job.start}")
        if job.stop is not None:
            self._script(self._file(name, "stop"), f"{known}\n{job.stop}")

    def _script(self, path: Path, body: str) -> None:
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def monit(self, name: str) -> str:
        """The file of a job."""
        job = self.jobs[name]
        lines = [
            f"check process {name} with pidfile {self._file(name, 'pid')}",
            f'start program "{self._file(name, "start")}" with timeout {job.timeout} seconds',
        ]
        if job.stop is not None:
            lines.append(f'stop program "{self._file(name, "stop")}" with timeout {job.timeout} seconds')
        return "\n".join([*lines, *filter(None, [job.statements]), "group vcap", ""])

    def marks(self, name: str) -> list[tuple[int, float]]:
        """Return the number and the start time of each process that a job has started."""
        path = self._file(name, "marks")
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(int(pid), float(at)) for pid, at in (line.split() for line in lines)]

    def living(self, name: str) -> int:
        """How many of them live."""
        found = [proc.stat(pid) for pid in {pid for pid, _ in self.marks(name)}]
        return sum(stat is not None and stat.is_alive for stat in found)

    def kill(self) -> dict[str, float]:
        """Kill the processes of the jobs to kill. Return the times."""
        killed = {}
        for name, job in self.jobs.items():
            path = self._file(name, "pid")
            if job.is_killed and path.exists() and (stat := proc.stat(int(path.read_text()))):
                subprocess.run(["kill", "-9", str(stat.pid)], check=False)
                killed[name] = time.time()
        return killed


Told = dict[str, str]
"""Report of a supervisor on each job."""


async def observe(
    world: World, start: Callable[[], Awaitable[None]], told: Callable[[], Told], stop: Callable[[], Awaitable[None]]
) -> dict[str, Any]:
    """Play all events with the jobs. Return the observations by job."""
    seen: dict[str, dict[str, Any]] = {name: {} for name in world.jobs}
    begun_at = time.time()
    await start()
    await asyncio.sleep(STARTED_S)
    states = told()
    for name, facts in seen.items():
        marks = world.marks(name)
        facts["started"] = round(marks[0][1] - begun_at, 1) if marks else None
        facts["begun"], facts["living"], facts["told"] = len(marks), world.living(name), states.get(name, "")
    killed = world.kill()
    await asyncio.sleep(KILLED_S)
    states = told()
    for name, at in killed.items():
        later = [begun for _, begun in world.marks(name) if begun > at]
        seen[name]["back"] = round(later[0] - at, 2) if later else None
        seen[name]["living after"], seen[name]["told after"] = world.living(name), states.get(name, "")
    for name in ("job19", "job20"):
        seen[name]["begun_at"] = [round(at - begun_at, 1) for _, at in world.marks(name)]
    seen["job17"]["begun in all"] = len(world.marks("job17"))
    stopped_at = time.time()
    await stop()
    while time.time() < stopped_at + STOPPED_S:
        states = told()
        for name, facts in seen.items():
            is_over = states.get(name, "").lower() in ("not monitored", "stopped", "unmonitored")
            if is_over and "stopped" not in facts:
                facts["stopped"], facts["left"] = round(time.time() - stopped_at, 1), world.living(name)
        await asyncio.sleep(0.5)
    for name, facts in seen.items():
        facts["left at the end"] = world.living(name)
    stranger = proc.stat(world.stranger)
    seen["job8"]["stranger lives"] = stranger is not None and stranger.is_alive
    return seen


async def ours(base: Path) -> dict[str, Any]:
    """Run this supervisor as the daemon does."""
    world = World(base / "jobs", 28001)
    paths = Paths(base / "vcap")
    for directory in (paths.monit, paths.shim_run, paths.mirror):
        directory.mkdir(parents=True)
    with reaper.reaping():
        async with Supervisor(paths, on_event=lambda _: None) as supervisor:
            await supervisor.configure([JobFile(name, "", world.monit(name)) for name in world.jobs])
            running = asyncio.create_task(supervisor.run())
            found = await observe(
                world,
                supervisor.start,
                lambda: {info.process.name: info.state for info in supervisor.services()},
                lambda: supervisor.stop(wait=False),
            )
            running.cancel()
            return found


async def monit(base: Path) -> dict[str, Any]:
    """Run Debian's monit with a stemcell's cycle, one for each job: a monit starts its jobs one after the other."""
    world = World(base / "jobs", 28002)
    groups = [[name] for name in world.jobs if name not in ("job16", "job17")] + [["job16", "job17"]]
    controls = [_control(base, world, names) for names in groups]

    def told() -> Told:
        found = {}
        for control in controls:
            for line in _ask(control, "summary", "-B").splitlines():
                name, _, rest = line.strip().partition(" ")
                if name in world.jobs:
                    found[name] = rest.replace("Process", "").replace("|", "/").strip()
        return found

    async def start() -> None:
        for control in controls:
            await asyncio.create_subprocess_exec("monit", "-I", "-c", control, stdout=subprocess.DEVNULL)

    async def stop() -> None:
        for control in controls:
            _ask(control, "-g", "vcap", "stop")

    return await observe(world, start, told, stop)


def _control(base: Path, world: World, names: list[str]) -> Path:
    """The control file of a monit for some jobs."""
    place = base / names[0]
    place.mkdir()
    control = place / "monitrc"
    control.touch(mode=0o600)
    control.write_text(
        f"set daemon 10\nset idfile {place}/id\nset statefile {place}/state\nset pidfile {place}/monit.pid\n"
        f"set httpd unixsocket {place}/socket allow vcap:vcap\nset logfile {place}/log\n"
        + "".join(world.monit(name) for name in names)
    )
    return control


def _ask(control: Path, *words: str) -> str:
    return subprocess.run(["monit", "-c", control, *words], capture_output=True, text=True, check=False).stdout


def apart(which: str, base: Path) -> subprocess.Popen[str]:
    """Run one of the two in its own pid namespace, whose end ends all its processes."""
    program = [sys.executable, "-m", "benchmarks.side_by_side", which, str(base)]
    inside = ["sh", "-c", '"$@"; exit $?', "sh", *program]
    return subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "--", *inside],
        stdout=subprocess.PIPE,
        text=True,
    )


def start_words(facts: dict[str, Any]) -> str:
    copies = "" if facts["living"] <= 1 else f", {facts['living']} running"
    if facts["started"] is None:
        return f"not running, reported {facts['told']}"
    return f"after {facts['started']:g} s, started {facts['begun']}x{copies}, reported {facts['told']}"


def trouble_words(name: str, facts: dict[str, Any]) -> str:
    if name in ("job19", "job20"):
        again = facts["begun_at"][1:]
        return f"again {again[0] - facts['begun_at'][0] - TROUBLE_S:.0f} s after the fault" if again else "nothing"
    if name == "job17":
        return "restarted with it" if facts["begun in all"] > 1 else "not restarted with it"
    if "told after" not in facts:
        return "-"
    back = f"back after {facts['back']:g} s" if facts["back"] is not None else "not back"
    return f"{back}, reported {facts['told after']}"


def stop_words(facts: dict[str, Any]) -> str:
    if "stopped" not in facts:
        return f"not reported as stopped, {facts['left at the end']} remain"
    left = f"{facts['left']} remained, {facts['left at the end']} at the end" if facts["left"] else "none remained"
    return f"reported after {facts['stopped']:g} s, {left}"


def table(found: dict[str, dict[str, Any]]) -> str:
    """Both beside each other."""
    lines = [
        "| the job | | started | after the kill or fault | stopped |",
        "|---|---|---|---|---|",
    ]
    for name, label in zip(found["ours"], jobs("", 0), strict=True):
        for which, title in (("ours", f"| {label} | agent_shim"), ("monit", "| | monit")):
            facts = found[which][name]
            words = [start_words(facts), trouble_words(name, facts), stop_words(facts)]
            if "stranger lives" in facts:
                words[2] += "; the stranger " + ("survived" if facts["stranger lives"] else "was killed")
            lines.append(" | ".join([title, *words]) + " |")
    return "\n".join(lines)


def main() -> int:
    if len(sys.argv) > 1:
        run = {"ours": ours, "monit": monit}[sys.argv[1]]
        json.dump(asyncio.run(run(Path(sys.argv[2]))), sys.stdout)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        both = {which: apart(which, Path(scratch) / which) for which in ("ours", "monit")}
        found = {which: json.loads(one.communicate()[0]) for which, one in both.items()}
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
