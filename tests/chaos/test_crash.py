"""Chaos cases in group C: the agent crashes, is restarted or is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from agent_shim.core.paths import Paths
from agent_shim.demo.director import RpcRemoteError
from agent_shim.demo.release import archive
from tests.chaos.case import case
from tests.support.instance import AGENT, RunningAgent
from tests.support.kills import Told, changes, killed, places_of_state, recorded, sweep, tidied
from tests.support.programs import HERE as PROGRAMS
from tests.support.stand import CannotInjectError, NotHeldError, Stand, asked, at_most, commands, expect, refused, until
from tests.support.stand_jobs import checked, deployed, reaches

MB = 1 << 20


@case(
    "C-01",
    "the agent is killed at random moments while 200 jobs run",
    scale="20 kills instead of 100",
    has_full=True,
    is_long=True,
)
async def test_killed_agent_is_restarted_without_restarting_jobs(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(200)
    stand.remember()
    chance, longest = random.Random(1), 0.0
    for _ in range(stand.of(20, 100)):
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        beats = len(stand.monitor.of("heartbeat", AGENT))
        await stand.kill_agent()
        longest = max(longest, await stand.answers(5))
    await until(
        lambda: len(stand.monitor.of("heartbeat", AGENT)) > beats, 5, "no heartbeat arrived after the last kill"
    )
    stand.tell(f"the agent was back after at most {longest:.2f} s, and no job was restarted")


@case(
    "C-02",
    "the agent is killed at every system call with which an apply changes a file (2 packages, 2 jobs)",
    scale="every eighth call",
    has_full=True,
    is_long=True,
)
async def test_apply_killed_at_any_system_call_can_be_repeated(stand: Stand) -> None:
    world = stand.world
    await stand.boot()
    spec = world.spec(2, 2, MB // 4)
    await world.run("prepare", spec)
    await world.run("apply", spec)
    await stand.stop()
    stand.remember()
    clean = _installed(world, "1")

    async def apply(version: str) -> Told:
        spec = world.spec(2, 2, MB // 4, version=version)
        told = await killed(stand, int(version[1:]), "all", [world.base], partial(_ask, stand, "apply", spec))
        await world.run("apply", spec)
        where = f"after the kill at {told.get('call')} of {told.get('path')}"
        is_same = _installed(world, version) == clean
        expect(is_same, f"{where}: the repeated apply did not produce the same files as one without a kill")
        await _reports(stand, version, where)
        await tidied([world.base], where)
        for path in world.store.iterdir():
            path.unlink()
        return told

    count, last = await sweep(apply, stand.of(8, 1))
    stand.tell(
        f"killed {count} times, the last time at call {last}; "
        "each repeated apply produced the same files as one without a kill"
    )


async def _reports(stand: Stand, version: str, where: str) -> None:
    """Check that ``get_state`` reports the spec with this ``version`` as applied."""
    seen = (await stand.call("get_state"))["configuration_hash"]
    expect(seen == version, f"{where}: get_state reports version {seen}, but {version} was applied")


async def _ask(stand: Stand, method: str, *arguments: object) -> None:
    await stand.world.run(method, *arguments)


def _installed(world: RunningAgent, version: str) -> dict[str, tuple[int, bytes]]:
    """Return the mode and digest of each package and job file.

    Check that each file named ``version`` contains the expected version. These files are then treated as empty so that
    the results for two versions can be compared.
    """
    found = {}
    for place in (world.base / "packages", world.base / "jobs"):
        for top in place.iterdir():
            for path in (one for one in top.rglob("*") if one.is_file()):
                content = path.read_bytes()
                if path.name == "version":
                    expect(content == version.encode(), f"{path} contains {content!r} instead of version {version}")
                    content = b""
                found[str(path.relative_to(world.base))] = path.stat().st_mode, hashlib.sha256(content).digest()
    return found


@case(
    "C-03",
    "the agent is killed at every system call that writes state: settings, specs, tasks, disks, jobs, backups",
    scale="every third call",
    has_full=True,
    is_long=True,
)
async def test_state_files_are_complete_after_the_agent_is_killed_during_a_write(stand: Stand) -> None:
    world = stand.world
    await stand.boot()
    await stand.deploy(2)
    stand.remember()
    stand.omit("I2", "each round stops and starts the jobs")
    base, wrong, written = world.base, list[str](), set[str]()
    places = places_of_state(base)

    def look() -> None:
        wrong.extend(stand.witness.documents())

    async def work(version: str) -> None:
        for request in changes(stand, version):
            await world.run(*request)

    async def point(version: str) -> Told:
        told = await killed(stand, int(version[1:]), "root", places, partial(work, version))
        written.add(Path(told.get("path", "")).name.lstrip(".").partition(".tmp-")[0])
        where = f"after the kill at {told.get('call')} of {told.get('path')}"
        expect(not wrong, f"{where}: {'; '.join(wrong)}")
        await work(version)
        await _reports(stand, version, where)
        await tidied(places, where)
        return told

    async def boot() -> None:
        os.kill(stand.pid, signal.SIGCONT)
        await stand.answers(60)  # slow, because every system call that the agent makes is traced
        await world.until_running()

    async def boot_point(version: str) -> Told:
        command = world.command
        world.command = f"sh -c {shlex.quote(STANDING)} sh {command}"
        await stand.kill_agent()
        before = world.agent
        await until(
            lambda: world.agent is not before and _stands(stand.pid), 10, "the init did not start the next agent"
        )
        world.command = command
        told = await killed(stand, int(version[1:]), "root", places, boot)
        written.add(Path(told.get("path", "")).name.lstrip(".").partition(".tmp-")[0])
        where = f"after the kill during a start at {told.get('call')} of {told.get('path')}"
        expect(not wrong, f"{where}: {'; '.join(wrong)}")
        await world.until_running()
        await tidied(places, where)
        return told

    stand.between = look
    count, last = await sweep(point, stand.of(3, 1))
    await world.until_running()
    boots, last_of_boot = await sweep(boot_point, stand.of(3, 1))
    stand.between = lambda: None
    names = {name for name in written if name.endswith(".json")}
    expect(len(names) >= 5, f"expected kills during writes of at least 5 state files, but hit only {sorted(names)}")
    at_work = f"killed {count} times during requests, the last time at call {last}"
    in_boots = f"{boots} times during starts, the last time at call {last_of_boot}"
    stand.tell(
        f"{at_work}, and {in_boots}; "
        f"{len(names)} state files were being written, each had its old or its new content, and every start succeeded"
    )


STANDING: Final = 'kill -STOP $$; exec "$@"'
"""A shell script that stops itself so that a tracer can attach to it, and then execs the agent."""


def _stands(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tT" in Path(f"/proc/{pid}/status").read_text()
    return False


@case("C-04", "the agent is killed, and a job exits before the next agent starts", is_long=True)
async def test_only_the_job_that_died_while_the_agent_was_down_is_reported_and_restarted(stand: Stand) -> None:
    await stand.boot()
    await stand.deploy(20)
    victim, pid = next(iter(stand.live().items()))
    state = Paths(stand.world.base).supervisor_state
    # Wait until the agent has saved that the job is running. Otherwise the next agent would not notice that the job has
    # died.

    def saved() -> str:
        return str(json.loads(state.read_bytes().splitlines()[-1])["services"][victim]["state"])

    await until(lambda: saved() == "running", 10, "the agent did not save that the job runs")
    stand.remember()
    stand.dies(victim)
    stand.between = lambda: os.kill(pid, signal.SIGKILL)
    await stand.kill_agent()
    back = await stand.answers(5)
    stand.between = lambda: None
    again = await until(lambda: stand.live().get(victim, pid) != pid, 10, "the job that died was not restarted")
    told = {one["name"]: one for one in (await asked(stand, "status"))["processes"]}
    expect(
        told[victim]["last_exit"] == "SIGKILL",
        f"the agent does not report the exit that the keeper observed (SIGKILL): {told[victim]}",
    )
    stand.tell(
        f"the agent was back after {back:.2f} s and the job {again:.2f} s later; the job's exit was reported "
        "correctly; the other 19 kept running"
    )


@case(
    "C-05",
    "PID 1 gets SIGTERM while 20 jobs run, one of which ignores SIGTERM, and another needs 8 s to exit",
    is_long=True,
)
async def test_sigterm_to_pid_1_stops_all_jobs_and_kills_only_one_that_ignores_sigterm(stand: Stand) -> None:
    stand.contain()
    await stand.boot()
    jobs = {f"job{n}": _obedient(f"job{n}") for n in range(18)}
    jobs["deaf"] = checked("deaf", "echo $$ > {run}/deaf.pid; trap '' TERM; while :; do sleep 0.1; done")
    jobs["slow"] = _obedient("slow", "sleep 8;")
    await deployed(stand, jobs)
    for name in jobs:
        await reaches(stand, name, "running", 20)
    stand.remember()
    stand.involved = set(jobs)
    stand.told = {r"^deaf .* Execution failed - alert, severity 1$": 1}
    stand.expected_ends += 1
    begun_at = time.monotonic()
    os.kill(stand.pid, signal.SIGTERM)
    await until(lambda: len(stand.ends) == 1, 29, "process 1 did not exit")
    took = at_most(time.monotonic() - begun_at, 29, "process 1 took {:.2f} s to exit")
    ended = (stand.world.base / "data/ended").read_text().split()
    expect(len(set(ended)) == 19, f"only {len(set(ended))} of 19 jobs exited by themselves")
    expect(stand.ends == [1], f"process 1 exited with {stand.ends[0]} instead of 1, although a job had to be killed")
    await stand.answers(10)
    for name in jobs:
        await reaches(stand, name, "running", 10)
    wrong = {name: pids for name, pids in stand.world.starts().items() if len(pids) != 2}
    expect(not wrong, f"these jobs were not restarted exactly once: {wrong}")
    stand.tell(f"exit code 1 after {took:.1f} s: 1 job was killed, 19 exited by themselves; the next agent started all")


def _obedient(name: str, farewell: str = "") -> tuple[str, dict[str, str]]:
    """Return a job whose process exits on SIGTERM after writing the job's name to ``data/ended``."""
    trap = f"trap '{farewell} echo {name} >> {{base}}/data/ended; exit 0' TERM"
    monit, programs = checked(name, f"echo $$ > {{run}}/{name}.pid; {trap}; while :; do sleep 0.1; done")
    return monit.replace('/ctl stop" with timeout 3 seconds', '/ctl stop" with timeout 20 seconds'), programs


@case("C-06", "the agent gets SIGTERM while it compiles a package, and the compiling processes ignore SIGTERM")
async def test_sigterm_kills_compilation_processes_and_removes_their_files(stand: Stand) -> None:
    await stand.boot()
    stand.remember()
    script = f"echo $$ > {stand.world.base}/data/compiling\ntrap '' TERM\nsleep 100006 & sleep 100007\n"
    blob = stand.world.blob("source", archive({"packaging": script}))
    await stand.call("compile_package", blob["blobstore_id"], blob["sha1"], "p", "1", {})
    await until((stand.world.base / "data/compiling").exists, 5, "the packaging script did not start")
    stand.expected_ends += 1
    agent = stand.world.agent
    assert agent is not None
    begun_at = time.monotonic()
    agent.send(signal.SIGTERM)
    await agent.wait()
    took = at_most(time.monotonic() - begun_at, 5, "the agent took {:.2f} s to exit")
    await stand.answers(10)
    expect(commands("sleep 100006") + commands("sleep 100007") == 0, "processes of the compilation are still running")
    left = list((stand.world.base / "data/compile").glob("*"))
    expect(not left, f"files of the compilation were left behind: {left}")
    stand.tell(f"the agent exited after {took:.2f} s, and no process or file of the compilation was left")


@case("C-07", "the container is killed and restarted with a new root file system and the old data")
async def test_jobs_start_once_in_a_restarted_container_despite_stale_pidfiles(stand: Stand) -> None:
    stand.contain()
    await stand.boot()
    await stand.deploy(5)
    stand.remember()
    stand.involved = set(stand.world.starts())
    base = stand.world.base

    def reset() -> None:
        for place in base.iterdir():
            if place.is_dir() and not place.is_symlink() and place.name != "data":
                shutil.rmtree(place)
            elif not place.is_dir() or place.is_symlink():
                place.unlink()
        for number in range(5):
            (base / f"data/sys/run/job{number}/job{number}.pid").write_text("1\n")  # All pidfiles name PID 1.
        (base / "data/sys/run/stale").touch()

    stand.between = reset
    await stand.kill_agent()
    begun_at = time.monotonic()
    await stand.answers(10)
    await stand.world.until_running()
    took = at_most(time.monotonic() - begun_at, 10, "the jobs ran only after {:.2f} s")
    wrong = {name: pids for name, pids in stand.world.starts().items() if len(pids) != 2}
    expect(not wrong, f"these jobs were not restarted exactly once: {wrong}")
    expect(not (base / "data/sys/run/stale").exists(), "the run directory of the previous container was not cleared")
    stand.tell(f"all jobs were running after {took:.1f} s; 5 pidfiles with pid 1 were ignored")


@case("C-08", "the agent is replaced while 50 jobs and an errand run", is_long=True)
async def test_replacing_the_agent_keeps_jobs_running_and_reports_the_lost_errand(stand: Stand) -> None:
    await stand.boot()
    world = stand.world
    await stand.deploy(50)
    stand.script("job0", "run", f"touch {world.base}/data/in-errand\nsleep 2\necho done")
    stand.remember()
    stand.expected_ends += 1
    task = (await stand.call("run_errand", "job0"))["agent_task_id"]
    await until((world.base / "data/in-errand").exists, 5, "the errand did not start")
    agent = world.agent
    assert agent is not None
    agent.send(signal.SIGTERM)
    await agent.wait()
    back = await stand.answers(5)
    # As with the Go agent, a script that was running when the agent exited is lost, and the Director gets an error.
    error = await refused(stand, "get_task", task)
    expect("could not be found" in error, f"expected an error that the task could not be found, but got: {error}")
    stand.tell(
        f"the new agent answered after {back:.2f} s; none of 50 jobs was restarted; the errand was reported as lost, "
        "as under the Go agent"
    )


@case(
    "C-09",
    "an unexpected exception in each part of the agent that it restarts, first once, then repeatedly",
    is_long=True,
)
async def test_failed_agent_part_is_restarted_and_repeated_failures_restart_the_agent(stand: Stand) -> None:
    if "-m agent_shim.cli" not in stand.world.command:
        raise CannotInjectError("needs an agent written in Python")
    part = stand.world.scratch / "part"
    stand.world.command = stand.world.command.replace("-m agent_shim.cli", f"{PROGRAMS / 'failpoints.py'} {part}")
    await stand.boot()
    await stand.deploy(3)
    stand.remember()

    async def fail(name: str) -> None:
        label = f'agent_shim_part_failures_total{{part="{name}"}}'
        before = stand.metric(label)
        part.write_text(name)
        os.kill(stand.pid, signal.SIGRTMIN)
        await until(
            lambda: stand.ends or stand.metric(label) > before,
            10,
            f"the metrics did not count a failure of the part '{name}'",
        )

    part.write_text("")
    os.kill(stand.pid, signal.SIGRTMIN)
    await until(part.read_text, 10, "the agent did not list its parts")
    names = part.read_text().splitlines()
    for name in names:
        await fail(name)
        await stand.answers(5)
    expect(not stand.ends, f"the agent exited with {stand.ends} although each part failed only once")
    beat = await stand.heartbeat(31)
    stand.expected_ends += 2
    for pause in (0.5, 1, 2, 4, 8):
        await fail("tasks")
        with contextlib.suppress(NotHeldError):
            await until(lambda: stand.ends, pause, "the agent did not exit")
        if stand.ends:
            break  # the agent has been replaced, and the signal would kill the new one during its boot
    await until(lambda: stand.ends, 5, "the agent did not exit although its task queue kept failing")
    first = await stand.answers(5)
    part.write_text("supervisor")
    os.kill(stand.pid, signal.SIGRTMIN)
    await until(lambda: len(stand.ends) == 2, 10, "the agent did not exit although its supervisor failed")
    back = max(first, await stand.answers(5))
    await stand.world.until_running()
    stand.tell(
        f"{len(names)} parts; a heartbeat arrived within {beat:.0f} s; "
        f"if the task queue keeps failing, the agent exits and is back after {back:.1f} s"
    )


@case("C-10", "a second agent is started with the same directories")
async def test_second_agent_with_the_same_directories_is_refused(stand: Stand) -> None:
    await stand.boot()
    stand.remember()
    begun_at = time.monotonic()
    done = await asyncio.to_thread(
        subprocess.run, stand.world.argv(), capture_output=True, text=True, timeout=20, check=False
    )
    took = at_most(time.monotonic() - begun_at, 20, "the second agent took {:.2f} s to exit")
    expect(done.returncode == 3, f"the second agent exited with {done.returncode} instead of 3")
    expect(
        str(stand.pid) in done.stderr,
        f"the second agent's error does not contain the pid of the first: {done.stderr[-200:]}",
    )
    stand.tell(f"it exited with code 3 after {took:.2f} s and reported the other agent")


VICTIMS: Final = ("caller", "all", "root")
"""The processes to kill, in turn: first only the worker, which makes the calls, then the agent and its worker, and then
only the agent.
"""


@case(
    "C-11",
    "a worker, the agent, or both are killed at every system call with which the worker installs packages",
    scale="3 calls of each kind",
    has_full=True,
    is_long=True,
)
async def test_package_is_complete_or_absent_after_agent_or_worker_is_killed(stand: Stand) -> None:
    world = stand.world
    await stand.boot()
    spec = await stand.deploy(2)
    places = [world.base / "data/packages", world.base / "data/tmp"]
    answers: dict[str, str] = {}

    async def apply(version: str) -> None:
        try:
            packages = {name: {**package, "version": version} for name, package in packed.items()}
            await world.run("apply", {**spec, "configuration_hash": version, "packages": packages})
        except RpcRemoteError as exc:
            answers[version] = str(exc)
            raise

    # Use two packages with the same blob, because these are unpacked one after the other, always in the same order.
    blob = world.blob("large", _large())
    packed = {name: {"name": name, **blob} for name in ("large0", "large1")}
    await apply("first")
    clean = _tree(world.base / "packages/large0")
    stand.remember()
    jobs = stand.live()
    calls = await recorded(stand, places, partial(apply, "second"))
    chosen = list(_chosen(calls, stand.pid, stand.of(len(VICTIMS), len(calls))))
    kills, kinds = Counter[str](), set[str]()
    for number, victim in chosen:
        version, agent = f"{victim}-{number}", stand.pid
        told = await killed(stand, number, victim, places, partial(apply, version))
        where = f"after the kill of {victim} at {told.get('call')} of {told.get('path')}"
        expect(told != {}, f"the apply did not reach call {number}, although an earlier apply made {len(calls)} calls")
        half = [path for path in places[0].glob("*/[!.]*") if _tree(path) != clean]
        expect(not half, f"{where}: an incomplete package has its final name: {half[:1]}")
        if agent not in told["killed"]:
            answer = answers.get(version, "")
            expect(
                "was killed by SIGKILL" in answer,
                f"{where}: the error does not say that the worker was killed: {answer}",
            )
            kinds.add(told["call"])
        kills[victim] += 1
        await apply(version)
        expect(
            all(_tree(world.base / "packages" / name) == clean for name in packed),
            f"{where}: the repeated apply did not produce the same files as one without a kill",
        )
        expect(
            len(list(places[0].glob("*/*"))) == len(packed), f"{where}: a package of another version was not removed"
        )
        await _reports(stand, version, where)
        expect(stand.live() == jobs, f"{where}: jobs were restarted: {jobs} became {stand.live()}")
        await tidied([world.base], where)
    _check_syncs(calls, places[0])
    await world.run("start")  # needed because an apply makes the agent forget the jobs, but leaves them running
    await world.until_running()
    done = f"{kills.total()} kills at {len(kinds)} kinds of system calls, {kills['caller']} of them of the worker alone"
    stand.tell(f"{done}; each package was complete or absent, and each repeated apply had the same result")


def _large() -> bytes:
    """Return a package of a few megabytes."""
    content = random.Random(11).randbytes(4 << 20)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as tar:
        for number in range(3):
            kinds = {"": tarfile.DIRTYPE, "/file": tarfile.REGTYPE, "/link": tarfile.SYMTYPE, "/hard": tarfile.LNKTYPE}
            for name, kind in kinds.items():
                member = tarfile.TarInfo(f"{number}{name}")
                member.type, member.mode = kind, 0o755
                member.linkname = f"{number}/file" if kind == tarfile.LNKTYPE else "file"
                member.size = len(content) // 3 + 1 if kind == tarfile.REGTYPE else 0
                tar.addfile(member, io.BytesIO(content[number * len(content) // 3 :] + b"....."))
    return out.getvalue()


def _tree(top: Path) -> dict[str, tuple[int, bytes]]:
    """Return the mode and content of every file under ``top``."""
    found = {}
    for path in top.rglob("*"):
        content = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(top))] = path.lstat().st_mode, content
    return found


def _chosen(calls: Sequence[Told], agent: int, most: int) -> Iterator[tuple[int, str]]:
    """Choose the system calls at which to kill. Yield pairs of a call number and an entry of ``VICTIMS``.

    At most ``most`` calls are chosen for each system call name, evenly spaced.
    """
    kinds = defaultdict[str, list[int]](list)
    for told in calls:
        if told["pid"] != agent:
            kinds[told["call"]].append(told["number"])
    for numbers in kinds.values():
        count = min(most, len(numbers))
        for turn in range(count):
            yield numbers[turn * (len(numbers) - 1) // max(1, count - 1)], VICTIMS[turn % len(VICTIMS)]
    missing = {"rename", "syncfs", "symlinkat", "mkdirat", "openat"} - set(kinds)
    expect(not missing, f"the worker made none of the expected system calls {sorted(missing)}")


def _check_syncs(calls: Sequence[Told], packages: Path) -> None:
    """Check that the file system is synced between a package's last change and its rename, and again after the rename.

    Without a sync, data survives if the process is killed, but not if the machine crashes.
    """
    renamed = 0
    for at, told in enumerate(calls):
        path = Path(told["path"])
        if told["call"] != "rename" or not path.is_relative_to(packages) or not path.name.startswith("."):
            continue
        renamed += 1
        before = [
            one["call"] for one in calls[:at] if Path(one["path"]).is_relative_to(path) or one["call"] == "syncfs"
        ]
        expect(before[-1:] == ["syncfs"], f"{path.name} was renamed after {before[-1:]} instead of after syncfs")
        after = [one["call"] for one in calls[at:]]
        expect("syncfs" in after, f"syncfs was not called after {path.name} was renamed")
    expect(renamed == 2, f"expected 2 renamed packages, but there were {renamed}")
