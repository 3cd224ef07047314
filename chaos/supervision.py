"""S: jobs that die, loop, hang, lie and hide."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from typing import Any, Final

from agent_shim.demo.release import archive
from benchmarks.world import NETWORKS
from chaos.cases import case
from chaos.stand import Stand, commands, expect, until

SLEEPER: Final = "exec sleep 100000"


def spec(stand: Stand, monits: dict[str, tuple[str, dict[str, str]]], version: str = "1") -> dict[str, Any]:
    """A spec of jobs given by their monit file, in which ``{{base}}`` is put in, and their programs."""
    base = stand.world.base
    files: dict[str, str | bytes] = {}
    for name, (monit, programs) in monits.items():
        files[f"{name}/monit"] = monit.replace("{base}", str(base))
        files |= {f"{name}/bin/{word}": text.replace("{base}", str(base)) for word, text in programs.items()}
    templates = [{"name": name, "version": version} for name in monits]
    first = next(iter(monits))
    return {
        "deployment": "chaos",
        "job": {"name": "chaos", "template": first, "version": version, "templates": templates},
        "index": 0,
        "id": "chaos-instance",
        "name": "chaos",
        "az": "z1",
        "networks": NETWORKS,
        "packages": {},
        "configuration_hash": version,
        "persistent_disk": 0,
        "rendered_templates_archive": stand.world.blob(f"chaos-{version}", archive(files)),
    }


def checked(
    name: str, start: str, stop: str = "kill $(cat {run}/{name}.pid)", rules: str = ""
) -> tuple[str, dict[str, str]]:
    """A job of one process with a ctl script."""
    run = "{base}/data/sys/run/" + name
    words = {"run": run, "name": name}
    for old, new in words.items():
        start, stop = start.replace("{" + old + "}", new), stop.replace("{" + old + "}", new)
    monit = f"""
check process {name} with pidfile {run}/{name}.pid
  start program "{{base}}/jobs/{name}/bin/ctl start" with timeout 3 seconds
  stop program "{{base}}/jobs/{name}/bin/ctl stop" with timeout 3 seconds
  group vcap
  {rules}
"""
    script = f"#!/bin/sh\nmkdir -p {run}\ncase $1 in\nstart)\n{start}\n;;\nstop)\n{stop}\n;;\nesac\n"
    return monit, {"ctl": script}


def simple(name: str) -> tuple[str, dict[str, str]]:
    """A job that sleeps."""
    return checked(name, f"echo $$ > {{run}}/{name}.pid\n{SLEEPER}")


async def deployed(stand: Stand, monits: dict[str, tuple[str, dict[str, str]]]) -> None:
    """Apply and start; whether all run is for the case to say."""
    wanted = spec(stand, monits)
    for method, *arguments in (("prepare", wanted), ("stop",), ("apply", wanted), ("start",)):
        await stand.world.run(method, *arguments)


async def process_states(stand: Stand) -> dict[str, str]:
    """What ``get_state full`` says of each process."""
    state = await stand.call("get_state", "full")
    return {one["name"]: one["state"] for one in state["processes"]}


async def reaches(stand: Stand, name: str, state: str, within: float) -> float:
    """Seconds until a process is said to be in a state."""
    begun_at = time.monotonic()
    seen = ""
    while time.monotonic() - begun_at < within:
        seen = (await process_states(stand)).get(name, "unknown")
        if seen == state:
            return time.monotonic() - begun_at
        await asyncio.sleep(0.02)
    expect(False, f"{name} is {seen} and not {state} after {within:g} s")
    return within


@case("S-01", "200 jobs are killed at once", is_long=True)
async def all_killed(stand: Stand) -> str:
    await stand.boot()
    await stand.deploy(200)
    stand.remember()
    stand.involved = None
    before = stand.live()
    begun_at = time.monotonic()
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)

    def again() -> int:
        return sum(pid != before[name] for name, pid in stand.live().items())

    first = await until(again, 1, "the first runs again")
    await until(lambda: again() == len(before), 15, "all run again")
    last = time.monotonic() - begun_at
    await stand.world.until_running()
    alerts = len(stand.alerts())
    return f"the first after {first * 1000:.0f} ms, the last after {last:.2f} s; {alerts} alerts"


@case("S-02", "10 jobs that exit at once", scale="1 min of an hour", is_long=True)
async def crash_loops(stand: Stand) -> str:
    await stand.boot()
    bad = {f"bad{n}": checked(f"bad{n}", f"echo x >> {{base}}/data/bad{n}.starts; exit 1") for n in range(10)}
    await deployed(stand, bad | {"good": simple("good")})
    await reaches(stand, "good", "running", 5)
    stand.remember()
    good = stand.live()["good"]
    await asyncio.sleep(60)
    starts = [len((stand.world.base / f"data/bad{n}.starts").read_text().split()) for n in range(10)]
    expect(max(starts) <= 14, f"{max(starts)} starts in a minute")
    expect(min(starts) >= 4, f"only {min(starts)} starts: given up")
    states = await process_states(stand)
    expect(states["bad0"] == "failing" or states["bad0"] == "starting", f"it is said to be {states['bad0']}")
    expect(stand.live()["good"] == good, "another job was restarted")
    return f"{min(starts)} to {max(starts)} starts in a minute; said to be {states['bad0']}"


@case("S-03", "a daemon writes its pidfile late, or never", is_long=True)
async def late_pidfile(stand: Stand) -> str:
    await stand.boot()
    late = "(setsid sleep 100001 & echo $! > {base}/data/late.pid; sleep 2; cp {base}/data/late.pid {run}/late.pid) &"
    never = "setsid sleep 100002 &"
    await deployed(stand, {"late": checked("late", late), "never": checked("never", never)})
    stand.remember()
    took = await reaches(stand, "late", "running", 10)
    await asyncio.sleep(8)
    count = commands("sleep 100002")
    expect(count <= 1, f"{count} instances of a daemon that writes no pidfile")
    expect(commands("sleep 100001") == 1, "not one instance of the late one")
    return f"the late one runs after {took:.1f} s; {count} instance of the other"


@case("S-04", "pidfiles that lie: a foreign process, 1, the agent, garbage, empty, sparse, a link, a FIFO")
async def lying_pidfiles(stand: Stand) -> str:
    await stand.boot()
    stranger = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 - one that has nothing to do with the jobs
    names = ["foreign", "one", "agent", "garbage", "empty", "sparse", "link", "fifo"]
    try:
        for name in names:
            run = stand.world.base / "data/sys/run" / name
            run.mkdir(parents=True)
            place = run / f"{name}.pid"
            match name:
                case "foreign" | "one" | "agent" | "garbage" | "empty":
                    numbers = {"foreign": str(stranger.pid), "one": "1", "agent": str(stand.pid), "garbage": "\0x7%"}
                    place.write_text(numbers.get(name, ""))
                case "sparse":
                    with place.open("wb") as file:
                        file.truncate(4 << 30)
                case "link":
                    place.symlink_to("/proc/1/stat")
                case "fifo":
                    os.mkfifo(place)
        ctl = "rm -f {run}/{name}.pid; echo $$ > {run}/{name}.pid; " + SLEEPER
        await deployed(stand, {name: checked(name, ctl) for name in names})
        stand.remember()
        for name in names:
            await reaches(stand, name, "running", 10)
        await stand.world.run("stop")
        expect(stranger.poll() is None, "a process of somebody else was killed")
    finally:
        stranger.kill()
        stranger.wait()
    return f"{len(names)} kinds: none believed, all jobs started, nobody else signalled"


@case("S-07", "a job ignores TERM, forks on TERM, and leaves children in sessions of their own")
async def deaf(stand: Stand) -> str:
    await stand.boot()
    start = """echo $$ > {run}/deaf.pid
setsid sleep 100003 &
trap 'sleep 100004 &' TERM
while :; do sleep 0.2; done"""
    await deployed(stand, {"deaf": checked("deaf", start)})
    await reaches(stand, "deaf", "running", 5)
    stand.remember()
    took = await stand.world.run("stop")
    left = commands("sleep 100003") + commands("sleep 100004")
    expect(left == 0, f"{left} processes of the job are left")
    return f"nothing left {took:.1f} s after stop was asked for"


@case("S-08", "the stop program hangs, fails, or is missing", is_long=True)
async def bad_stops(stand: Stand) -> str:
    await stand.boot()
    ctl = "echo $$ > {run}/{name}.pid; " + SLEEPER
    await deployed(
        stand,
        {
            "hangs": checked("hangs", ctl, "sleep 1000"),
            "fails": checked("fails", ctl, "exit 1"),
            "missing": checked("missing", ctl, "rm $0; exit 127"),
        },
    )
    for name in ("hangs", "fails", "missing"):
        await reaches(stand, name, "running", 5)
    stand.remember()
    took = await stand.world.run("stop")
    expect(not stand.live(), f"still there: {stand.live()}")
    return f"all gone {took:.1f} s after stop was asked for"


@case("S-09", "the start program hangs, prints without end, leaves its output open", is_long=True)
async def bad_starts(stand: Stand) -> str:
    await stand.boot()
    talk = "echo $$ > {run}/talks.pid; (yes | head -c 200000000); " + SLEEPER
    leave = "sleep 100005 & echo $$ > {run}/leaves.pid; " + SLEEPER
    jobs = {
        "hangs": checked("hangs", "sleep 1000"),
        "talks": checked("talks", talk),
        "leaves": checked("leaves", leave),
    }
    await deployed(stand, jobs | {"good": simple("good")})
    stand.remember()
    for name in ("good", "talks", "leaves"):
        await reaches(stand, name, "running", 10)
    await asyncio.sleep(15)
    states = await process_states(stand)
    expect(states["hangs"] != "running", "the one that hangs is said to be running")
    kept = max((path.stat().st_blocks * 512 for path in stand.world.base.rglob("*") if path.is_file()), default=0)
    expect(kept <= 2 << 20, f"{kept >> 20} MiB of output are kept")
    return f"{kept >> 10} KiB of 200 MB of output kept; the others are on time"


@case("S-12", "a cycle of dependencies, one that is missing, a name twice, 500 checks")
async def bad_files(stand: Stand) -> str:
    await stand.boot()
    jobs = {
        "cycle-a": _with(simple("cycle-a"), "depends on cycle-b"),
        "cycle-b": _with(simple("cycle-b"), "depends on cycle-a"),
        "lonely": _with(simple("lonely"), "depends on nobody"),
        "good": simple("good"),
    }
    many = "".join(simple(f"m{number}")[0].replace(f"jobs/m{number}/", "jobs/many/") for number in range(500))
    script = "#!/bin/sh\nexit 0\n"
    await deployed(stand, jobs | {"many": (many.replace("group vcap", "group vcap\n  mode manual"), {"ctl": script})})
    stand.remember()
    took = await reaches(stand, "good", "running", 10)
    states = await process_states(stand)
    wrong = {name: states.get(name) for name in ("cycle-a", "lonely") if states.get(name) == "running"}
    expect(not wrong, f"said to be running: {wrong}")
    return f"the good one runs after {took:.2f} s beside 500 others and three files with errors"


def _with(job: tuple[str, dict[str, str]], rule: str) -> tuple[str, dict[str, str]]:
    return f"{job[0].rstrip()}\n  {rule}\n", job[1]


@case("S-13", "a memory rule trips: a job grows beyond it and is restarted once", is_long=True)
async def memory_rule(stand: Stand) -> str:
    await stand.boot()
    hungry = """echo $$ > {run}/hungry.pid
test -e {base}/data/grown && exec sleep 100008
touch {base}/data/grown
exec python3 -c 'import time; x = bytearray(200 << 20); time.sleep(100000)'"""
    rule = "if totalmem > 100 Mb for 2 cycles then restart"
    await deployed(stand, {"hungry": checked("hungry", hungry, rules=rule), "good": simple("good")})
    await reaches(stand, "hungry", "running", 10)
    stand.remember()
    good = stand.live()["good"]
    took = await until(lambda: commands("sleep 100008") == 1, 60, "the restart")
    await asyncio.sleep(15)
    expect(commands("sleep 100008") == 1, "it was restarted again")
    expect(stand.live()["good"] == good, "another job was restarted")
    return f"restarted once, {took:.0f} s after it had grown; {len(stand.alerts('hungry'))} alerts"


@case("S-14", "the target of a check hangs, drips, never ends", is_long=True)
async def hanging_checks(stand: Stand) -> str:
    await stand.boot()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(600)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(600):
            writer.write(b"x")
            await asyncio.sleep(1)

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(bytes(1 << 16))
            await writer.drain()

    jobs = {"good": simple("good")}
    servers = []
    for name, serve in (("hangs", hang), ("drips", drip), ("pours", pour)):
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        servers.append(server)
        port = server.sockets[0].getsockname()[1]
        rule = f"if failed host 127.0.0.1 port {port} protocol http with timeout 2 seconds for 60 cycles then restart"
        jobs[name] = checked(name, f"echo $$ > {{run}}/{name}.pid\n{SLEEPER}", rules=rule)
    try:
        await deployed(stand, jobs)
        for name in jobs:
            await reaches(stand, name, "running", 10)
        stand.remember()
        await asyncio.sleep(25)
        before = stand.live()["good"]
        os.kill(before, signal.SIGKILL)
        took = await until(lambda: stand.live().get("good", before) != before, 2, "a job restarted meanwhile")
    finally:
        for server in servers:
            server.close()
    return f"a job that died meanwhile ran again after {took * 1000:.0f} ms"
