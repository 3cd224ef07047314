"""Chaos cases in group S: jobs die, crash in a loop, hang, write wrong pids, or hide processes from the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from agent_shim.demo.director import RpcTimeoutError
from agent_shim.host import proc
from tests.chaos.case import case
from tests.support import namespaces
from tests.support.instance import AGENT
from tests.support.readings import cpu_seconds
from tests.support.serving import serving
from tests.support.stand import CONNECTED, CannotInjectError, Stand, asked, at_most, commands, expect, small, until
from tests.support.stand_jobs import SLEEPER, checked, deployed, process_states, reaches, simple

RUN_TIMEOUT_S: Final = 2 * 3600
"""Maximum duration of all rounds of S-05 in seconds."""


@case("S-01", "200 jobs are killed at once", is_long=True)
async def test_all_killed_jobs_are_restarted_and_reported(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(200)
    stand.remember()
    before = stand.live()
    stand.dies(*before)
    begun_at = time.monotonic()
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)

    def again() -> int:
        return sum(pid != before[name] for name, pid in stand.live().items())

    first = await until(again, 1, "none of the killed jobs was restarted")
    await until(lambda: again() == len(before), 15, "not all killed jobs were restarted")
    last = at_most(time.monotonic() - begun_at, 16, "all killed jobs were restarted only after {:.2f} s")
    await stand.world.until_running()
    wrong = {name: pids for name, pids in stand.world.starts().items() if len(pids) != 2}
    expect(not wrong, f"these jobs were not restarted exactly once: {wrong}")
    await until(lambda: len(stand.alerts()) == len(before), 10, "there was not exactly one alert for each killed job")
    alerts = len(stand.alerts())
    stand.tell(f"the first job was back after {first * 1000:.0f} ms, the last after {last:.2f} s; {alerts} alerts")


@case(
    "S-02",
    "10 jobs exit immediately after each start",
    scale="1 minute instead of an hour",
    has_full=True,
    is_long=True,
)
async def test_jobs_that_exit_immediately_are_restarted_with_growing_delays(stand: Stand) -> None:
    await stand.boot()
    bad = {f"bad{n}": checked(f"bad{n}", f"echo x >> {{base}}/data/bad{n}.starts; exit 1") for n in range(10)}
    await deployed(stand, bad | {"good": simple("good")})
    await reaches(stand, "good", "running", 5)
    stand.remember()
    stand.involved = stand.failing = set(bad)
    stand.told = {rf"^{name} .* Execution failed - alert, severity 1$": None for name in bad}
    good = stand.live()["good"]
    minutes = stand.of(1, 60)
    await asyncio.sleep(60 * minutes)
    starts = [len((stand.world.base / f"data/bad{n}.starts").read_text().split()) for n in range(10)]
    at_most(max(starts), 23 + 6 * (minutes - 1), f"a job was started {{}} times in {minutes} min")
    expect(min(starts) >= 4, f"a job was started only {min(starts)} times, as if the agent had given up")
    states = await process_states(stand)
    expect(
        states["bad0"] == "failing" or states["bad0"] == "starting",
        f"a job that exits at once is reported as {states['bad0']}",
    )
    expect(stand.live()["good"] == good, "another job was restarted")
    count = f"{min(starts)}" if min(starts) == max(starts) else f"{min(starts)} to {max(starts)}"
    stand.tell(f"each job was started {count} times in {minutes} min, and reported as {states['bad0']}")


@case("S-03", "a daemon writes its pidfile late, or never", is_long=True)
async def test_daemon_with_a_late_or_missing_pidfile_is_started_only_once(stand: Stand) -> None:
    await stand.boot()
    late = "(setsid sleep 100001 & echo $! > {base}/data/late.pid; sleep 2; cp {base}/data/late.pid {run}/late.pid) &"
    never = "setsid sleep 100002 &"
    await deployed(stand, {"late": checked("late", late), "never": checked("never", never)})
    stand.remember()
    stand.involved = stand.failing = {"never"}
    stand.told = {"^never .* Execution failed - alert, severity 1$": None}
    stand.lasting = {"sleep 100002"}
    took = await reaches(stand, "late", "running", 10)
    await asyncio.sleep(8)
    count = commands("sleep 100002")
    expect(count <= 1, f"the daemon that writes no pidfile runs {count} times")
    late_count = commands("sleep 100001")
    expect(late_count == 1, f"the daemon with the late pidfile runs {late_count} times instead of once")
    stand.tell(
        f"the daemon with the late pidfile was running after {took:.1f} s; {count} instance of the other daemon was "
        "running"
    )


@case(
    "S-04",
    "wrong pidfiles: the pid of an unrelated process, of PID 1 or of the agent; garbage; an empty file, a sparse file, "
    "a link, a FIFO",
    attack="a job writes the pid of a root process or of another job's process into its pidfile",
)
async def test_wrong_pidfiles_are_ignored(stand: Stand) -> None:
    if namespaces.INSIDE not in os.environ:
        raise CannotInjectError("needs root to run with its own process 1")
    await stand.boot()
    stranger = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 - a process unrelated to the jobs
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
        for name in names:
            await reaches(stand, name, "running", 10)
        stand.remember()
        await stand.stop()
        expect(stranger.poll() is None, "the foreign process was killed")
        expect(not namespaces.signals_to_init(), f"process 1 got signals {namespaces.signals_to_init()}")
    finally:
        stranger.kill()
        stranger.wait()
    stand.tell(
        f"{len(names)} kinds of pidfiles were rejected; all jobs were started, and no other process got a signal"
    )


@case(
    "S-05",
    "pids are reused between the check of a process and the signal to it",
    scale="300 rounds instead of 10 000",
    has_full=True,
    is_long=True,
)
async def test_processes_with_reused_pids_receive_no_signals(stand: Stand) -> None:
    if os.geteuid() != 0:
        raise CannotInjectError("needs root to create a pid namespace")
    await stand.boot()
    stand.remember()
    rounds = str(stand.of(300, 10_000))
    program = [sys.executable, "-m", "tests.support.programs.reuse", str(stand.world.scratch / "reuse"), rounds, "5"]
    # Run a shell as PID 1 of the namespace so that it adopts the orphans that the program leaves behind.
    inside = ["sh", "-c", '"$@"; exit $?', "sh", *program]
    apart = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "--", *inside]
    done = await asyncio.to_thread(
        subprocess.run, apart, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    by_signal = {128 + number for number in (signal.SIGTERM, signal.SIGKILL)}
    expect(done.returncode not in by_signal, "the program that reuses pids got a signal")
    expect(done.returncode == 0, f"the program that reuses pids failed: {done.stderr[-500:]}")
    told = json.loads(done.stdout)
    expect(told["signalled"] == [], f"processes with reused pids got a signal: {told['signalled'][:3]}")
    expect(told["taken"] > 0.8 * told["rounds"], f"only {told['taken']} of {told['rounds']} pids could be reused")
    stand.tell(f"{told['taken']} pids were reused by other processes, none of which got a signal")


_STORM = """
import os
for _ in range({children}):
    if os.fork() == 0:
        for _ in range({each}):
            if os.fork() == 0:
                os._exit(0)
        os._exit(0)
    os.wait()
"""


@case("S-06", "50 000 orphans exit in 10 bursts while the agent is PID 1", is_long=True)
async def test_agent_as_pid_1_reaps_orphans_and_reports_errand_exit_codes(stand: Stand) -> None:
    stand.contain()
    await stand.boot()
    await stand.deploy(2)
    stand.script("job0", "run", "exit 7")
    stand.remember()
    inside = ["nsenter", "-t", str(stand.pid), "-p", "--", sys.executable, "-c", _STORM.format(children=50, each=100)]
    longest, wrong, before, begun_at = 0.0, 0, cpu_seconds(stand.pid), time.monotonic()
    for _ in range(10):
        storm = await asyncio.create_subprocess_exec(*inside)
        result = await stand.world.director.run(AGENT, "run_errand", "job0", timeout=30, limit=60)
        wrong += result["exit_code"] != 7
        expect(await storm.wait() == 0, "the program that creates orphans failed")
        longest = max(longest, await until(lambda: not _dead_children(stand.pid), 5, "not all orphans were reaped"))
    used = (cpu_seconds(stand.pid) - before) / (time.monotonic() - begun_at)
    expect(not wrong, f"{wrong} of 10 errands were reported with a wrong exit code")
    expect(longest <= 1, f"the orphans were reaped {longest:.2f} s after a burst, but the limit is 1 s")
    at_most(used, 0.9, "the agent used {:.2f} of a CPU")
    stand.tell(
        f"all were reaped at most {longest:.2f} s after each burst, with {used:.0%} of a CPU; 10 of 10 exit codes "
        "were right"
    )


def _dead_children(pid: int) -> int:
    return sum(stat.parent == pid and not stat.is_alive for stat in proc.table().values())


@case(
    "S-07",
    "a job ignores SIGTERM, forks when it receives it, and leaves children in their own sessions",
    attack="a job forks faster than its processes can be killed",
)
async def test_stop_kills_a_job_that_ignores_sigterm_and_forks(stand: Stand) -> None:
    await stand.boot()
    start = """echo $$ > {run}/deaf.pid
setsid sleep 100003 &
trap 'sleep 100004 &' TERM
while :; do sleep 0.2; done"""
    await deployed(stand, {"deaf": checked("deaf", start)})
    await reaches(stand, "deaf", "running", 5)
    stand.remember()
    stand.told = {"^deaf .* Execution failed - alert, severity 1$": 1}
    took = at_most(await stand.stop(), 45, "the stop took {:.2f} s")
    left = commands("sleep 100003") + commands("sleep 100004")
    expect(left == 0, f"{left} processes of the job are still running")
    stand.tell(f"no process was left {took:.1f} s after the stop")


@case("S-08", "the stop program hangs, fails, or is missing", is_long=True)
async def test_faulty_stop_programs_leave_no_processes(stand: Stand) -> None:
    await stand.boot()
    ctl = "echo $$ > {run}/{name}.pid; " + SLEEPER
    monit, programs = checked("missing", ctl)
    await deployed(
        stand,
        {
            "hangs": checked("hangs", ctl, "sleep 1000"),
            "fails": checked("fails", ctl, "exit 1"),
            "missing": (monit.replace("/ctl stop", "/none stop"), programs),
        },
    )
    for name in ("hangs", "fails", "missing"):
        await reaches(stand, name, "running", 5)
    stand.remember()
    begun_at = time.monotonic()
    await stand.stop(limit=60)
    took = at_most(time.monotonic() - begun_at, 60, "the stop took {:.2f} s")
    stand.told = {rf"^{name} .* Execution failed - alert, severity 1$": 1 for name in ("hangs", "fails", "missing")}
    expect(not stand.live(), f"jobs are still running after the stop: {stand.live()}")
    stand.tell(f"no process was left {took:.1f} s after the stop")


@case("S-09", "start programs hang, print endlessly, or leave their output open", is_long=True)
async def test_faulty_start_programs_neither_delay_other_jobs_nor_fill_the_disk(stand: Stand) -> None:
    await stand.boot()
    talk = "echo $$ > {run}/talks.pid; (yes | head -c 200000000); " + SLEEPER
    leave = "sleep 100005 & echo $$ > {run}/leaves.pid; " + SLEEPER
    jobs = {
        "hangs": checked("hangs", "sleep 1000"),
        "talks": checked("talks", talk),
        "leaves": checked("leaves", leave),
    }
    await deployed(stand, jobs | {"good": simple("good")})
    for name in ("good", "talks", "leaves"):
        await reaches(stand, name, "running", 10)
    stand.remember()
    stand.involved = stand.failing = {"hangs"}
    stand.told = {"^hangs .* Execution failed - alert, severity 1$": None}
    await asyncio.sleep(15)
    states = await process_states(stand)
    expect(states["hangs"] != "running", "the job whose start program hangs is reported as running")
    kept = max((path.stat().st_blocks * 512 for path in stand.world.base.rglob("*") if path.is_file()), default=0)
    expect(kept <= 2 << 20, f"{kept >> 20} MiB of output were kept, but the limit is 2")
    stand.tell(f"{kept >> 10} KiB of 200 MB of output were kept; other jobs started on time")


def unread(stand: Stand) -> None:
    """Send the agent's stderr into a pipe that nobody reads. Call this before ``boot``."""
    pipe = stand.world.scratch / "unread"
    os.mkfifo(pipe)
    stand.after.callback(os.close, os.open(pipe, os.O_RDWR))
    stand.prefix(f"""sh -c 'exec "$0" "$@" 2>{pipe}'""")


@case("S-10", "a job writes endlessly, nothing reads the agent's log, and the disk is full", is_long=True)
async def test_jobs_survive_endless_output_and_a_full_disk(stand: Stand) -> None:
    small(stand, "size=48m")
    unread(stand)
    await stand.boot()
    loop = "echo $$ > {run}/loud.pid; n=0; while :; do n=$((n+1)); echo $n > {run}/count; "
    loop += "head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >> {base}/data/sys/log/loud.log; done 2>/dev/null"
    await deployed(stand, {"loud": checked("loud", loop), "good": simple("good")})
    for name in ("loud", "good"):
        await reaches(stand, name, "running", 10)
    stand.remember()
    stand.omit("I9", "the log goes into a pipe that nothing reads, so I10 does not check it either")
    before = stand.live()
    data = stand.world.base / "data"

    def left() -> int:
        told = os.statvfs(data)
        return told.f_bavail * told.f_frsize

    for _ in range(1000):  # this logs 200 KiB, but a pipe has room for only 64 KiB
        await stand.call("ping")
    await until(lambda: left() < 1 << 20, 60, "the disk did not run full")
    os.kill(stand.pid, signal.SIGSTOP)
    await asyncio.sleep(5)
    os.kill(stand.pid, signal.SIGCONT)
    await stand.answers(5)
    beat = await stand.heartbeat(31)
    expect(stand.live() == before, "a job was restarted")
    expect("disk" in stand.monitor.of("heartbeat", AGENT)[-1].body["vitals"], "the heartbeat has no vitals of the disk")
    subprocess.run(["mount", "-o", "remount,size=400m", str(data)], check=True)
    os.kill(before["good"], signal.SIGKILL)
    stand.dies("good")
    again = await until(
        lambda: stand.live().get("good", before["good"]) != before["good"], 40, "the killed job was not restarted"
    )
    await stand.stop()
    stand.tell(
        f"no job was restarted; a heartbeat arrived within {beat:.0f} s; with free space, a job was back in "
        f"{again:.2f} s"
    )


COMMANDS: Final = ("start", "stop", "restart", "monitor", "unmonitor")
OUTCOMES: Final = {"start": 1, "stop": 0, "restart": 1}
"""Number of processes after the same command has been sent twice at the same time. For all other pairs, the number may
vary.
"""


@case("S-11", "each pair of commands is sent at the same time, to a running and to a stopped job", is_long=True)
async def test_concurrent_commands_never_start_a_job_twice(stand: Stand) -> None:
    await stand.boot()
    ctl = "echo $$ > {run}/{name}.pid; exec sleep 100011"
    await deployed(stand, {"racer": checked("racer", ctl)})
    await reaches(stand, "racer", "running", 10)
    stand.remember()
    stand.involved = {"racer"}

    def ask(action: str) -> Any:
        return asked(stand, "services", action=action, names=["racer"], wait=True)

    longest, races = 0.0, 0
    for before in ("start", "stop"):
        for first, second in itertools.product(COMMANDS, repeat=2):
            await ask(before)
            begun_at = time.monotonic()
            async with asyncio.timeout(30):
                await asyncio.gather(ask(first), ask(second))
            longest = at_most(max(longest, time.monotonic() - begun_at), 30, "a race took {:.2f} s")
            races += 1
            count = commands("sleep 100011")
            expect(count <= 1, f"{first} and {second} after {before} led to {count} processes")
            if first == second and first in OUTCOMES:
                wanted_state = "running" if OUTCOMES[first] else "stopped"
                told = f"{first} and {second} after {before} did not leave the job {wanted_state}"
                await until(lambda: commands("sleep 100011") == OUTCOMES[first], 10, told)  # noqa: B023
            [seen] = (await asked(stand, "services", action="show"))["services"]
            if seen["phase"] in ("running", "stopped"):
                wanted = int(seen["phase"] == "running")  # reached only once the start script has exec'd sleep
                other = f"{first} and {second}: the job is {seen['phase']}, but its process count is not {wanted}"
                await until(lambda: commands("sleep 100011") == wanted, 5, other)  # noqa: B023
    await ask("stop")
    expect(commands("sleep 100011") == 0, "the job runs although it was stopped last")
    await ask("start")
    await until(lambda: commands("sleep 100011") == 1, 5, "the job did not run although it was started last")
    stand.tell(f"{races} races, each decided within {longest:.2f} s; there were never two instances")


@case(
    "S-12",
    "invalid monit files with a dependency cycle, a missing dependency and a duplicate name, and a file with 500 "
    "checks",
)
async def test_invalid_monit_files_do_not_affect_other_jobs(stand: Stand) -> None:
    await stand.boot()
    jobs = {
        "cycle-a": _with(simple("cycle-a"), "depends on cycle-b"),
        "cycle-b": _with(simple("cycle-b"), "depends on cycle-a"),
        "lonely": _with(simple("lonely"), "depends on nobody"),
        "good": simple("good"),
        **{name: _placed(simple("twin"), "twin", name) for name in ("twin-a", "twin-b")},
    }
    many = "".join(simple(f"m{number}")[0].replace(f"jobs/m{number}/", "jobs/many/") for number in range(500))
    script = "#!/bin/sh\nexit 0\n"
    await deployed(stand, jobs | {"many": (many.replace("group vcap", "group vcap\n  mode manual"), {"ctl": script})})
    took = await reaches(stand, "good", "running", 10)
    stand.remember()
    states = await process_states(stand)
    stand.failing = states.keys() - {"good"}
    stand.told = {r"^m\d+ .* Execution failed - alert, severity 1$": None}
    wrong = {name: states.get(name) for name in ("cycle-a", "lonely") if states.get(name) == "running"}
    expect(not wrong, f"jobs with an invalid monit file are reported as running: {wrong}")
    expect(len(stand.world.starts().get("twin", ())) <= 1, "the check whose name is used twice was started twice")
    told = json.dumps(await asked(stand, "services", action="show"))
    for why in ("depends on itself", "which is not defined", "is defined already"):
        expect(why in told, f"the errors of the services do not include '{why}'")
    stand.tell(f"a job with a valid file was running after {took:.2f} s")


def _placed(job: tuple[str, dict[str, str]], name: str, place: str) -> tuple[str, dict[str, str]]:
    """Return a job whose directory is named ``place`` and whose monit check is named ``name``."""
    return job[0].replace(f"jobs/{name}/", f"jobs/{place}/"), job[1]


def _with(job: tuple[str, dict[str, str]], rule: str) -> tuple[str, dict[str, str]]:
    return f"{job[0].rstrip()}\n  {rule}\n", job[1]


@case("S-13", "a job's memory grows beyond the limit of a rule, which restarts it", is_long=True)
async def test_memory_rule_restarts_its_job_once(stand: Stand) -> None:
    await stand.boot()
    hungry = """echo $$ > {run}/hungry.pid
test -e {base}/data/grown && exec sleep 100008
touch {base}/data/grown
exec python3 -c 'import time; x = bytearray(200 << 20); time.sleep(100000)'"""
    rule = "if totalmem > 100 Mb for 2 cycles then restart"
    small = checked("small", f"echo $$ > {{run}}/small.pid\n{SLEEPER}", rules=rule)
    await deployed(stand, {"hungry": checked("hungry", hungry, rules=rule), "small": small, "good": simple("good")})
    await reaches(stand, "hungry", "running", 10)
    stand.remember()
    stand.involved = {"hungry"}
    stand.told = {r"^hungry \(127\.0\.0\.1\) - Resource limit matched - restart, severity 3$": 1}
    good = stand.live()["good"]
    took = await until(lambda: commands("sleep 100008") == 1, 60, "the job was not restarted")
    await asyncio.sleep(15)
    expect(commands("sleep 100008") == 1, "the job was restarted again")
    expect(stand.live()["good"] == good, "another job was restarted")
    count = len(stand.alerts("hungry"))
    stand.tell(f"restarted once, {took:.0f} s after it had grown; {count} alert{'' if count == 1 else 's'}")


@case("S-14", "the targets of network checks never answer, send one byte a second, or send endlessly", is_long=True)
async def test_hanging_network_checks_do_not_delay_restarts(stand: Stand) -> None:
    await stand.boot()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(600)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(600):
            writer.write(b"x")
            await asyncio.sleep(1)

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
            while not writer.is_closing():
                writer.write(bytes(1 << 16))
                await writer.drain()

    jobs = {"good": simple("good")}
    async with contextlib.AsyncExitStack() as opened:
        for name, serve in (("hangs", hang), ("drips", drip), ("pours", pour)):
            port = await opened.enter_async_context(serving(serve))
            rule = (
                f"if failed host 127.0.0.1 port {port} protocol http with timeout 2 seconds for 60 cycles then restart"
            )
            jobs[name] = checked(name, f"echo $$ > {{run}}/{name}.pid\n{SLEEPER}", rules=rule)
        await deployed(stand, jobs)
        for name in jobs:
            await reaches(stand, name, "running", 30)  # a process is ``starting`` until its first check
        stand.remember()
        await asyncio.sleep(25)
        before = stand.live()["good"]
        stand.dies("good")
        os.kill(before, signal.SIGKILL)
        took = await until(lambda: stand.live().get("good", before) != before, 2, "the killed job was not restarted")
    stand.tell(f"a job that died meanwhile ran again after {took * 1000:.0f} ms")


DAY: Final = 24 * 3600


@case(
    "S-15", "the clock jumps a day ahead, a day back, and to 1970", scale="no suspension, no leap second", is_long=True
)
async def test_clock_jumps_affect_only_certificate_checks(stand: Stand) -> None:
    library = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
    if library is None:
        raise CannotInjectError("needs the Debian package faketime")
    jump = stand.world.scratch / "jump"
    jump.write_text("+0\n")
    fake = f"LD_PRELOAD={library} FAKETIME_TIMESTAMP_FILE={jump} FAKETIME_NO_CACHE=1 FAKETIME_DONT_FAKE_MONOTONIC=1"
    stand.prefix(f"env {fake} FAKETIME_DISABLE_SHM=1")
    await stand.boot()
    await stand.deploy(3)
    stand.remember()
    gaps, shown = [], []
    for seconds in (DAY, -DAY, -int(time.time()) + 60):
        jump.write_text(f"{seconds:+d}\n")
        gaps.append(await stand.heartbeat(31.5))
        state = await stand.call("get_state", "full")
        shown += [one["uptime"]["secs"] for one in state["processes"]]
        expect(state["job_state"] == "running", f"job_state is {state['job_state']} instead of running")
        expect(min(shown) >= 0 and max(shown) < DAY, f"get_state reports uptimes of {min(shown)} to {max(shown)} s")
    # Force a reconnection, which must fail because no certificate is valid yet in 1970.
    stand.proxy.cut()
    links = stand.proxy.connections
    await until(lambda: stand.proxy.connections > links + 1, 20, "the agent did not try to connect again")
    expect(not await _is_back(stand), "the agent accepted a certificate that is not yet valid")
    jump.write_text("+0\n")
    back = await stand.answers(CONNECTED)
    rest = f"in 1970 the connection failed, and the agent was back {back:.1f} s after that"
    stand.tell(
        f"uptimes of {min(shown)} to {max(shown)} s, a heartbeat within {max(gaps):.0f} s after each jump; {rest}"
    )


async def _is_back(stand: Stand) -> bool:
    with contextlib.suppress(RpcTimeoutError):
        await stand.call("ping", timeout=1)
        return True
    return False
