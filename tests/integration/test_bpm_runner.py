"""Tests real processes that a supervisor starts from bpm.yml files in a scratch tree, at different isolation levels."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock

import msgspec
import pytest

from agent_shim.core.errors import ConfigError, HostError
from agent_shim.core.paths import Paths
from agent_shim.host import capabilities, clock, files, job_cgroups, proc, process, sandbox, sandbox_exec
from agent_shim.host.process import Process
from agent_shim.supervisor import bpm_runner
from agent_shim.supervisor.bpm.calls import BpmCall, bpm_label
from agent_shim.supervisor.ctl_programs import Programs
from agent_shim.supervisor.supervisor import JobFile, Supervisor
from tests.support.programs import is_alive, number_of_program
from tests.support.programs.jobs import JobTree, in_state, info
from tests.support.waiting import until

needs_landlock = pytest.mark.skipif(not sandbox_exec.landlock_version(), reason="this kernel has no Landlock")
START = BpmCall("start", "web", "web")


@pytest.fixture
def world(world: JobTree) -> JobTree:
    """Provide a scratch tree with log directories."""
    world.paths.log.mkdir(parents=True)
    world.paths.sys.symlink_to(world.paths.data_sys)
    return world


def job(world: JobTree, script: str, more: str = "", name: str = "web") -> JobFile:
    """Add a job with one process, which runs the shell code ``script``.

    ``more`` is YAML text with additional keys of this process.
    """
    directory = world.paths.jobs / "web"
    (directory / "bin").mkdir(parents=True, exist_ok=True)
    (directory / "config").mkdir(exist_ok=True)
    program = directory / "bin" / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    config = directory / "config/bpm.yml"
    config.write_text(f"processes:\n- name: {name}\n  executable: {program}\n  args: [1.10, yes]\n{more}")
    tool = "/var/vcap/jobs/bpm/bin/bpm"
    flag = "" if name == "web" else f" -p {name}"
    return JobFile(
        "web",
        "",
        f"""check process {name} with pidfile {pidfile(world.paths, name)}
  start program "{tool} start web{flag}"
  stop program "{tool} stop web{flag}"
  group vcap
""",
    )


async def limit_isolation(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    """Use isolation level ``level``, or the container's own level if that is weaker."""
    found = await sandbox.isolation()
    monkeypatch.setattr(sandbox, "isolation", AsyncMock(return_value=found._replace(level=max(level, found.level))))


@pytest.fixture
def no_cgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a container in which bpm processes get neither isolation nor cgroups."""
    nothing = sandbox.Isolation(3, "", memory=False, processes=False)
    monkeypatch.setattr(sandbox, "isolation", AsyncMock(return_value=nothing))


def pidfile(paths: Paths, name: str = "web") -> Path:
    return paths.sys / f"run/bpm/web/{name}.pid"


def output(world: JobTree, stream: str = "stdout") -> str:
    return (world.paths.sys / f"log/web/web.{stream}.log").read_text()


async def until_printed(world: JobTree, text: str) -> None:
    path = world.paths.sys / "log/web/web.stdout.log"
    await until(lambda: path.exists() and text in path.read_text(), text)


@pytest.mark.parametrize("level", [1, 2, 3])
async def test_bpm_process_runs_with_the_context_that_bpm_documents(
    world: JobTree, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'echo "args $*"; env | sort; pwd; umask; echo ready; exec sleep 600'
    more = "  env: {NAME: value, LANG: C}\n  ephemeral_disk: true\n  limits: {open_files: 123}\n"
    if (await sandbox.isolation()).level > level:
        pytest.skip("this container does not allow it")
    await limit_isolation(monkeypatch, level)
    file = job(world, f"ulimit -n; {script}", more)
    async with world.supervising(file) as supervisor:
        found = await in_state(supervisor, "web", "running")
        await until_printed(world, "ready")

        lines = output(world).splitlines()
        home = world.paths.data / "web"
        assert lines[:2] == ["123", "args 1.10 yes"]
        environment = dict(line.partition("=")[::2] for line in lines if "=" in line)
        assert environment.pop("PWD") == str(world.paths.jobs / "web")
        assert environment.pop("PATH").startswith(f"{world.paths.jobs}/web/bin:/usr/local/bin:")
        assert environment == {"NAME": "value", "LANG": "C", "HOME": str(home), "TMPDIR": f"{home}/tmp"}
        assert int(pidfile(world.paths).read_text()) == found.pid
        stat = proc.stat(found.pid)
        assert stat is not None
        assert stat.session == found.pid
        status = Path(f"/proc/{found.pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert "CapEff:\t0000000000000000" in status
        assert (home.stat().st_mode & 0o777, (home / "tmp").stat().st_mode & 0o777) == (0o700, 0o700)
        assert (world.paths.sys / "log/web/web.stderr.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("number", "more"), [("TERM", ""), ("INT", "  shutdown_signal: INT\n")])
async def test_bpm_stop_signals_the_process_and_kills_its_children(
    world: JobTree, monkeypatch: pytest.MonkeyPatch, number: str, more: str
) -> None:
    await limit_isolation(monkeypatch, 3)
    child_of = "env -i setsid sleep 601"
    trap = f"trap 'sleep 0.1; echo bye; exit 0' {number}"
    file = job(world, f"{child_of} & {trap}; echo ready; while :; do sleep 0.05; done", more)
    async with world.supervising(file) as supervisor:
        pid = (await in_state(supervisor, "web", "running")).pid
        await until_printed(world, "ready")
        below = proc.descent(proc.children(proc.table()), [pid])
        child = await until(
            lambda: next((each for each in below if proc.command_line(each) == "sleep 601"), 0), "a child"
        )
        await supervisor.stop(wait=True)

        assert output(world) == "ready\nbye\n"
        assert (is_alive(pid), is_alive(child), pidfile(world.paths).exists()) == (False, False, False)
        assert supervisor.killed == []


@pytest.mark.parametrize("has_time", [True, False])
async def test_bpm_process_that_ignores_sigterm_gets_sigquit_then_sigkill(
    world: JobTree, monkeypatch: pytest.MonkeyPatch, has_time: bool
) -> None:
    """The waiting time after each signal is simulated: it expires as soon as the process has printed the signal's
    name.
    """
    monkeypatch.setattr(bpm_runner, "SIGNAL_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(bpm_runner, "QUIT_TIMEOUT_S", 3600.0)
    file = job(world, "trap 'echo TERM' TERM; trap 'echo QUIT' QUIT; echo ready; while :; do sleep 0.05; done")
    wait, unsaid = Process.wait, ["TERM", "QUIT"]

    async def wait_for_name(self: Process) -> int | None:
        if has_time and unsaid:
            await until_printed(world, unsaid.pop(0))
            raise TimeoutError
        return await wait(self)

    async with world.supervising() as supervisor:
        await supervisor.configure([file])
        pid = (await supervisor.bpm.start(START)).pid
        await until_printed(world, "ready")
        monkeypatch.setattr(Process, "wait", wait_for_name)
        async with asyncio.timeout(60):
            await supervisor.bpm.stop(START, by=float("inf") if has_time else time.monotonic())

        assert not is_alive(pid)
        assert supervisor.killed == ["web"]
        if has_time:
            # Compare only the first words. Without isolation, the remaining processes get SIGTERM again and may print
            # more.
            assert output(world).split()[:3] == ["ready", "TERM", "QUIT"]


@pytest.mark.parametrize("level", [1, 2, 3])
async def test_bpm_process_started_by_a_script_is_adopted(
    world: JobTree, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await limit_isolation(monkeypatch, level)
    file = job(world, "echo started; exec sleep 600")
    async with world.supervising() as supervisor:
        first = await supervisor.bpm.start(START)
        again = await supervisor.bpm.start(START)
        assert again.pid == first.pid
        await supervisor.configure([file])
        await supervisor.start()
        found = await in_state(supervisor, "web", "running")

        assert found.pid == first.pid
        await until_printed(world, "started")
        assert output(world) == "started\n"
        await supervisor.stop(wait=True)
        assert not is_alive(first.pid)


def cgroups_of(world: JobTree) -> list[str]:
    """Return the names of the job cgroups for the scratch tree ``world``."""
    ending = f"@{world.base}".replace("/", "%2f")
    tops = [job_cgroups.parent_of_job_cgroups(hierarchy) / "agent_shim" for _, hierarchy in job_cgroups.hierarchies()]
    return [each.name for top in tops if top.is_dir() for each in top.iterdir() if each.name.endswith(ending)]


async def test_bpm_errand_returns_its_exit_code_and_leaves_no_process(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errand's children must be killed even if its init died first. At isolation level 3, they survive the init."""
    await limit_isolation(monkeypatch, 3)
    job(world, "setsid sleep 602 & echo $!; exit 3")
    async with world.supervising() as supervisor:
        bpm = supervisor.bpm
        assert await bpm.run(START, [], {}) == 3
        assert not is_alive(int(output(world)))
        assert not pidfile(world.paths).exists()
        assert cgroups_of(world) == []

        # Kill the errand's init, which would otherwise kill the remaining processes.
        job(world, "setsid sleep 602 & echo $! >>$HOME/tmp/left; kill -9 $PPID; exec sleep 603")
        assert await bpm.run(START, [], {}) not in (0, 3)
        assert not is_alive(int((world.paths.data / "web/tmp/left").read_text()))


async def test_bpm_run_does_nothing_while_the_process_is_running(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    await limit_isolation(monkeypatch, 3)
    job(world, "echo started; exec sleep 600")
    async with world.supervising() as supervisor:
        bpm = supervisor.bpm
        await bpm.start(START)
        await until_printed(world, "started")
        before = output(world)
        assert await bpm.run(START, [], {}) == 0
        assert output(world) == before


async def test_children_of_a_dead_bpm_process_are_killed_before_the_next_start(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a PID namespace, a killed init's children survive and could still listen on the port that the new process
    needs.
    """
    await limit_isolation(monkeypatch, 3)
    job(world, "setsid sleep 604 & echo $! >$HOME/tmp/left; kill -9 $PPID; exec sleep 605")
    async with world.supervising() as supervisor:
        bpm = supervisor.bpm
        first = (await bpm.start(START)).pid
        await until(lambda: not is_alive(first), "its end")
        left = int((world.paths.data / "web/tmp/left").read_text())
        assert is_alive(left)

        job(world, "exec sleep 600")
        assert (await bpm.start(START)).pid != first
        assert not is_alive(left)


async def test_next_agent_adopts_a_bpm_process_without_saved_state(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the adopted process is stopped, its cgroup must be removed, because the next process would inherit the
    cgroup's statistics.
    """
    removed = []
    monkeypatch.setattr(job_cgroups.JobCgroup, "remove", lambda _: removed.append("removed"))
    job(world, "exec sleep 600")
    async with world.supervising() as supervisor:
        pid = (await supervisor.bpm.start(START)).pid
        assert len(removed) == 1
    async with world.supervisor() as supervisor:
        found = supervisor.bpm.find("web", "web")
        assert found is not None
        assert found[0] == pid
        await supervisor.bpm.stop(START)
        assert len(removed) == 2
        assert supervisor.bpm.find("web", "web") is None


def started_at(pid: int) -> float:
    """Return the wall-clock time at which a process was started."""
    stat = proc.stat(pid)
    assert stat is not None
    return clock.wall_time_of(stat.start_ticks)


@pytest.mark.parametrize("later_s", [-60, -0.5, 900])
async def test_bpm_pidfile_without_a_matching_process_is_ignored(world: JobTree, later_s: float) -> None:
    """A process belongs to the pidfile only if both were created at about the same time. Otherwise, the pid has been
    reused.
    """
    job(world, "exec sleep 600")
    other = process.spawn(["sleep", "600"], env={})
    async with world.supervising() as supervisor:
        pidfile(world.paths).parent.mkdir(parents=True)
        pidfile(world.paths).write_text(str(other.pid))
        os.utime(pidfile(world.paths), (started_at(other.pid) + later_s,) * 2)
        assert supervisor.bpm.find("web", "web") is None
        for pid in (os.getpid(), 1):
            pidfile(world.paths).write_text(str(pid))
            os.utime(pidfile(world.paths), (started_at(pid) + 1,) * 2)
            assert supervisor.bpm.find("web", "web") is None
        pid = (await supervisor.bpm.start(START)).pid
        os.utime(pidfile(world.paths), (started_at(pid) + later_s,) * 2)
        found = supervisor.bpm.find("web", "web")
        assert found is not None
        assert found[0] == pid
        await supervisor.bpm.stop(START)
    await other.terminate(1)


def test_unknown_bpm_key_is_logged_once_per_file_content(world: JobTree, caplog: pytest.LogCaptureFixture) -> None:
    bpm = world.supervisor().bpm
    for more in ("  odd: 1\n", "  odd: 1\n", "  other: 1\n"):
        job(world, "true", more)
        bpm.definition("web", "web")

    logged = [record.message.rpartition("unknown key ")[2] for record in caplog.records]
    assert [each.partition(" ")[0] for each in logged] == ["processes[0].odd", "processes[0].other"]


async def test_bpm_pre_start_hook_runs_first_and_its_failure_is_reported(world: JobTree) -> None:
    empty = Paths(world.base).empty
    empty.mkdir(exist_ok=True)
    hook = world.base / "hook"
    hook.write_text("#!/bin/sh\necho hook $NAME in $(pwd) >>$LOG\nexit $WITH\n")
    hook.chmod(0o755)
    more = f"  hooks: {{pre_start: {hook}}}\n  env: {{NAME: n, WITH: '0', LOG: {world.log}}}\n"
    async with world.supervising(job(world, "exec sleep 600", more)) as supervisor:
        await in_state(supervisor, "web", "running")
        assert world.lines() == [f"hook n in {empty}"]
        await supervisor.stop(wait=True)
        job(world, "exec sleep 600", more.replace("'0'", "'3'"))
        await supervisor.start()
        found = await in_state(supervisor, "web", "down")

        assert found.reason.startswith(f"cannot start: the pre_start hook {hook} failed: exit 3")


@pytest.mark.parametrize("end", ["running", "stopped"])
async def test_bpm_hook_slower_than_the_start_timeout_is_neither_killed_nor_rerun(world: JobTree, end: str) -> None:
    hook = world.base / "hook"
    hook.write_text(f"#!/bin/sh\necho $$ >>{world.log}\nuntil [ -e {world.base}/go ]; do sleep 0.05; done\n")
    hook.chmod(0o755)
    slow = job(world, "exec sleep 600", f"  hooks: {{pre_start: {hook}}}\n")
    slow = msgspec.structs.replace(slow, text=slow.text.replace('start web"', 'start web" with timeout 1 seconds'))
    async with world.supervising(slow) as supervisor:
        found = await in_state(supervisor, "web", "down")
        assert found.reason == "cannot start: no process after 1 seconds, and its start still runs"
        (first,) = await until(world.lines, "the hook has begun")
        await asyncio.sleep(3 * world.timing.cycle)
        assert is_alive(int(first))
        if end == "running":
            (world.base / "go").touch()
        else:
            await supervisor.stop(wait=True)
            assert not is_alive(int(first))
        await in_state(supervisor, "web", end)

        assert world.lines() == [first]


async def test_bpm_errand_fails_if_its_processes_cannot_be_killed(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    await limit_isolation(monkeypatch, 3)
    job(world, "setsid sleep 604 & echo $! >$HOME/tmp/left; exec sleep 605")
    async with world.supervising() as supervisor:
        running = asyncio.create_task(supervisor.bpm.run(START, [], {}))
        left = await until(lambda: number_of_program(world.paths.data / "web/tmp/left", "sleep"))
        (kept,) = supervisor.keepers.of([bpm_label("web", "web")])
        os.kill(kept.pid, signal.SIGKILL)
        os.kill(kept.state.program, signal.SIGKILL)
        with pytest.raises(HostError, match=r"cannot end \d+ \(sleep\)"):
            await running
        while orphans := await supervisor.keepers.orphans([bpm_label("web", "web")]):
            for orphan in orphans:
                process.send((orphan.pid, orphan.start), signal.SIGKILL)
        assert not is_alive(left)


async def test_bpm_start_and_stop_fail_while_processes_of_a_killed_keeper_remain(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remaining processes might belong to the bpm process, so starting a second one would be wrong."""
    await limit_isolation(monkeypatch, 3)
    job(world, "setsid sleep 604 & echo $! >$HOME/tmp/left; exec sleep 605")
    async with world.supervising() as supervisor:
        bpm = supervisor.bpm
        first = (await bpm.start(START)).pid
        left = await until(lambda: number_of_program(world.paths.data / "web/tmp/left", "sleep"))
        (kept,) = supervisor.keepers.of([bpm_label("web", "web")])
        os.kill(kept.pid, signal.SIGKILL)
        os.kill(first, signal.SIGKILL)
        await until(lambda: kept.is_lost and not is_alive(first))

        with pytest.raises(HostError, match=r"cannot end remaining processes of the last run: \d+ \(sleep\)"):
            await bpm.start(START)
        with pytest.raises(HostError, match=r"cannot end \d+ \(sleep\)"):
            await bpm.stop(BpmCall("stop", "web", "web"))
        while orphans := await supervisor.keepers.orphans([bpm_label("web", "web")]):
            for orphan in orphans:
                process.send((orphan.pid, orphan.start), signal.SIGKILL)
        assert not is_alive(left)
        await bpm.stop(BpmCall("stop", "web", "web"))


@pytest.mark.usefixtures("no_cgroups")
async def test_bpm_hook_is_killed_when_the_process_start_is_cancelled(world: JobTree) -> None:
    """If the hook survived, two hooks would run at the same time after the next start."""
    hook = world.base / "hook"
    hook.write_text(f"#!/bin/sh\necho $$ >>{world.log}\nexec sleep 604\n")
    hook.chmod(0o755)
    job(world, "exec sleep 600", f"  hooks: {{pre_start: {hook}}}\n")
    async with world.supervising() as supervisor:
        bpm = supervisor.bpm
        starting = asyncio.create_task(bpm.start(START))
        pid = int((await until(world.lines, "a hook"))[0])
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not is_alive(pid)


@pytest.mark.usefixtures("no_cgroups")
async def test_bpm_memory_kill_is_not_attributed_to_the_next_start(world: JobTree) -> None:
    job(world, "exec sleep 600", "  limits: {memory: 4K}\n")
    async with world.supervising() as supervisor:
        bpm = supervisor.bpm
        hog = await bpm.start(START)
        await until(bpm.kill_hogs, "a hog")
        await hog.wait()
        job(world, "exec sleep 600")
        await bpm.start(START)
        assert not bpm.was_killed_for_memory(START)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (None, "cannot run {jobs}/web/bin/web"),
        ("processes: []\n", 'process "web" not present in job configuration ({jobs}/web/config/bpm.yml)'),
        (
            "processes: [{name: web, executable: /bin/sh, persistent_disk: true}]",
            "requested persistent disk does not exist",
        ),
    ],
)
async def test_failed_bpm_start_error_matches_the_original_bpm(world: JobTree, config: str | None, why: str) -> None:
    file = job(world, "exec sleep 600")
    if config is None:
        (world.paths.jobs / "web/bin/web").unlink()
    else:
        (world.paths.jobs / "web/config/bpm.yml").write_text(config)
    async with world.supervising(file) as supervisor:
        found = await in_state(supervisor, "web", "down")

        assert why.format(jobs=world.paths.jobs) in found.reason


async def test_bpm_job_cannot_make_its_own_directory_writable_with_unrestricted_volumes(world: JobTree) -> None:
    file = job(world, "")
    own = world.paths.jobs / "web"
    (own / "config").mkdir(exist_ok=True)
    volumes = "".join(f"{{path: {path}, writable: true}}, " for path in (own, f"{own}/*", world.paths.jobs, world.base))
    job(world, "", f"  unsafe: {{unrestricted_volumes: [{volumes}]}}\n")
    async with world.supervising(file) as supervisor:
        wanted = supervisor.bpm.definition("web", "web")
        apart = sandbox.Isolation(1, "", memory=False, processes=False)
        places = supervisor.bpm.order("web", wanted, apart)["binds"]

    writable = [each["path"] for each in places or () if each["write"]]
    assert not [path for path in writable if path.startswith(str(own))]
    assert {str(world.paths.jobs), str(world.base)} <= set(writable)


@pytest.mark.usefixtures("no_cgroups")
@pytest.mark.parametrize("is_strict", [True, False])
async def test_unavailable_bpm_limits_and_capabilities_are_reported(
    world: JobTree, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_strict: bool
) -> None:
    limits = "{processes: 5, open_files: 101, core_file_size: 102}"
    file = job(
        world, "exec sleep 600", f"  limits: {limits}\n  capabilities: [NET_RAW]\n  unsafe: {{privileged: true}}\n"
    )
    nothing = capabilities.privileges()._replace(effective=frozenset())
    monkeypatch.setattr(capabilities, "privileges", lambda: nothing)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    strict = partial(Supervisor, world.paths, notify=world.events.append, timing=world.timing, is_strict=is_strict)
    monkeypatch.setattr(world, "supervisor", strict)
    async with world.supervising(file) as supervisor:
        found = await in_state(supervisor, "web", "down" if is_strict else "running")

        files = "limits.open_files of 101, limits.core_file_size of 102"
        lacking = f"capability NET_RAW, limits.processes, {files}, unsafe.privileged"
        said = f"bpm/web/web cannot have {lacking} in this container"
        assert said in (found.reason if is_strict else caplog.text)


@pytest.mark.parametrize(
    ("uid", "user", "is_privileged", "ids", "names"),
    [
        (0, "vcap", False, (11, 12), ["NET_RAW"]),
        (0, "vcap", True, (None, None), ["NET_RAW"]),
        (0, None, False, (None, None), ["NET_RAW"]),
        (1000, "vcap", False, (None, None), []),
    ],
)
def test_bpm_process_gets_only_the_configured_capabilities(
    world: JobTree,
    monkeypatch: pytest.MonkeyPatch,
    uid: int,
    user: str | None,
    is_privileged: bool,
    ids: tuple[int | None, int | None],
    names: list[str],
) -> None:
    more = f"  capabilities: [cap_net_raw, SYS_ADMIN]\n  unsafe: {{privileged: {str(is_privileged).lower()}}}\n"
    job(world, "true", f"{more}  limits: {{open_files: 500}}\n")
    held = capabilities.Privileges(frozenset({"NET_RAW", "CHOWN", "SYS_RESOURCE"}))
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(files, "owner_ids", lambda _: (11, 12))
    monkeypatch.setattr(capabilities, "privileges", lambda: held)
    monkeypatch.setattr(job_cgroups.JobCgroup, "make", lambda *_, **__: [])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    bpm = bpm_runner.Bpm(world.paths, Programs(world.paths), user=user, is_strict=True)
    isolation = sandbox.Isolation(3, "", memory=False, processes=False)
    order = bpm.order("web", bpm.definition("web", "web"), isolation)

    assert (order["uid"], order["gid"]) == ids
    assert order["capabilities"] == [capabilities.NAMES.index(name) for name in names]
    assert order["limits"] == {"RLIMIT_NOFILE": 500}


@pytest.mark.parametrize(
    ("level", "unsafe", "has_view", "namespaces"),
    [
        (1, "", True, ["mnt", "pid", "ipc", "uts"]),
        (1, "host_pid_namespace: true", True, ["mnt", "ipc", "uts"]),
        (1, "privileged: true", True, ["mnt", "pid", "ipc", "uts"]),
        (2, "", True, []),
        (2, "privileged: true", False, []),
        (3, "", False, []),
    ],
)
def test_bpm_mounts_and_namespaces_depend_on_the_isolation_level(
    world: JobTree,
    monkeypatch: pytest.MonkeyPatch,
    level: int,
    unsafe: str,
    has_view: bool,
    namespaces: list[str],
) -> None:
    """At level 2, a privileged process gets no Landlock rules, because they would restrict even root."""
    monkeypatch.setattr(job_cgroups.JobCgroup, "make", lambda *_, **__: [])
    job(world, "true", f"  unsafe: {{{unsafe}}}\n")
    bpm = world.supervisor().bpm
    isolation = sandbox.Isolation(level, "", memory=False, processes=False)
    order = bpm.order("web", bpm.definition("web", "web"), isolation)

    assert (order["binds"] is not None, order["namespaces"]) == (has_view, namespaces)
    assert order["keeps_privileges"] is unsafe.startswith("privileged")
    assert order["may_signal"] is unsafe.startswith("host")


@pytest.mark.parametrize("kept", [None, (5, 77)])
@pytest.mark.parametrize("is_next_killed", [False, True])
async def test_old_oom_kills_are_not_attributed_to_the_next_process_in_a_cgroup(
    world: JobTree, monkeypatch: pytest.MonkeyPatch, kept: tuple[int, int] | None, is_next_killed: bool
) -> None:
    counted: list[tuple[int, int] | None] = [(5, 77)]
    monkeypatch.setattr(job_cgroups.JobCgroup, "memory", lambda _: counted[-1])
    monkeypatch.setattr(job_cgroups.JobCgroup, "remove", lambda _: counted.append(kept))
    job(world, "true", "  limits: {memory: 64M}\n")
    async with world.supervisor() as supervisor:
        bpm = supervisor.bpm
        await bpm.stop(START)
        if is_next_killed:
            counted.append((6, 78) if kept else (1, 78))
        assert [bpm.was_killed_for_memory(START) for _ in range(2)] == [is_next_killed, False]
        peaks = [77, 78] if is_next_killed else [77]
        assert bpm.kill_hogs() == [bpm_runner.MemoryKill("web", "web", peak, 64 << 20) for peak in peaks]
        assert bpm.kill_hogs() == []


def test_changed_bpm_memory_limit_takes_effect(world: JobTree, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [0]
    monkeypatch.setattr(job_cgroups.JobCgroup, "memory", lambda _: (counted[0], 77))
    bpm = world.supervisor().bpm
    limits = []
    for more in ("{memory: 64M}", "{memory: 1M}", "{}", "1"):
        job(world, "true", f"  limits: {more}\n")
        # The first bpm.yml has the modification time 0, like a file from an archive without timestamps. The agent must
        # read it nevertheless.
        os.utime(world.paths.jobs / "web/config/bpm.yml", (counted[0],) * 2)
        counted[0] += 1
        assert bpm.was_killed_for_memory(START)
        limits += [hog.limit for hog in bpm.kill_hogs()]

    assert limits == [64 << 20, 1 << 20, 0, 0]


@pytest.mark.parametrize("level", [1, 2])
def test_bpm_process_can_read_dns_files_of_all_jobs_only_at_isolation_level_2(
    world: JobTree, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """bosh-dns sees all job directories at level 2, and exits if it cannot read the ``.bosh`` directory in one
    of them.
    """
    monkeypatch.setattr(job_cgroups.JobCgroup, "make", lambda *_, **__: [])
    job(world, "true")
    (world.paths.jobs / "other/.bosh").mkdir(parents=True)
    bpm = world.supervisor().bpm
    isolation = sandbox.Isolation(level, "", memory=False, processes=False)
    places = bpm.order("web", bpm.definition("web", "web"), isolation)["binds"] or []

    assert (str(world.paths.jobs / "other/.bosh") in [each["path"] for each in places]) == (level == 2)


PYTHON = os.path.realpath(sys.executable)
# Python may be installed in a directory that bpm hides from processes.
WITH_PYTHON = f"  unsafe: {{unrestricted_volumes: [{{path: {sys.base_prefix}, allow_executions: true}}]}}\n"
"""A part of bpm.yml that makes the interpreter available to isolated processes."""

HUNGRY = f"{PYTHON} -c 'import time; x = bytearray(80 << 20); time.sleep(600)' & wait"


async def test_bpm_process_above_its_memory_limit_is_killed_and_reported(world: JobTree) -> None:
    file = job(world, HUNGRY, WITH_PYTHON + "  limits: {memory: 48M}\n")
    async with world.supervising(file, world.job("other")) as supervisor:
        other = (await in_state(supervisor, "other", "running")).pid
        pid = (await in_state(supervisor, "web", "running")).pid
        watching = asyncio.create_task(supervisor.run())
        told = "Resource limit matched"
        await until(lambda: any(event.event == told for event in world.events))
        watching.cancel()
        await until(lambda: info(supervisor, "web").restarts > 0)

        event = next(event for event in world.events if event.event == told)
        assert event.service == "web"
        assert event.description.startswith("out of memory: process web of job web used ")
        assert event.description.endswith("its limit is 48.0 MiB: it was killed")
        await until(lambda: not is_alive(pid), "the process was killed")
        assert info(supervisor, "other").pid == other
        found = info(supervisor, "web")
        # With a cgroup, the kernel kills only the largest process, so the shell that started it exits with 0.
        assert found.last_exit in ("SIGKILL, out of memory", "exit 0, out of memory")
        assert found.oom_kills == sum(found.exits.values())
        ends = {event.description for event in world.events if event.event == "Does not exist"}
        assert ends == {"process is not running: killed because it exceeded its memory limit"}
        await supervisor.stop(wait=True)


HALVES = f"for half in 1 2; do {PYTHON} -c 'import time; x = bytearray(40 << 20); time.sleep(600)' & done; wait"


@pytest.mark.usefixtures("no_cgroups")
async def test_bpm_memory_limit_without_a_cgroup_counts_the_process_tree(world: JobTree) -> None:
    """Each process stays below the limit, but together they exceed it."""
    file = job(world, HALVES, WITH_PYTHON + "  limits: {memory: 64M}\n")
    async with world.supervising(file) as supervisor:
        pid = (await in_state(supervisor, "web", "running")).pid
        hogs = await until(supervisor.bpm.kill_hogs, "a hog")

        (hog,) = hogs
        assert (hog.job, hog.process, hog.limit) == ("web", "web", 64 << 20)
        assert hog.used > hog.limit
        await until(lambda: not is_alive(pid), "its end")
        await supervisor.stop(wait=True)


LOOK = r"""
import json, os, signal, sys
def can(do, *arguments):
    try:
        do(*arguments)
    except OSError:
        return False
    return True
other, base = int(os.environ["OTHER"]), os.environ["BASE"]
print(json.dumps({
    "own config": can(open, f"{base}/jobs/web/config/bpm.yml"),
    "other's config": can(open, f"{base}/jobs/other/bin/start"),
    "outside": can(open, f"{base}/secret", "w"),
    "own data": can(open, f"{base}/data/web/x", "w"),
    "own log": can(open, f"{base}/sys/log/web/x", "w"),
    "extra": can(open, f"{base}/extra/x", "w"),
    "own job": can(open, f"{base}/jobs/web/x", "w"),
    "signal": can(os.kill, other, 0),
    "memory": can(open, f"/proc/{other}/mem", "rb"),
    "setuid": can(os.setuid, 12345),
}))
sys.stdout.flush()
os.execv("/bin/sleep", ["sleep", "600"])
"""


@needs_landlock
async def test_isolated_bpm_process_can_access_only_its_own_files_and_processes(
    world: JobTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Leave out /tmp, because the scratch tree is there.
    monkeypatch.setattr(bpm_runner, "SCRATCH", ("/dev", "/proc"))
    script = world.paths.jobs / "web/look.py"
    extra = world.base / "extra"
    volumes = f"  ephemeral_disk: true\n  additional_volumes: [{{path: {extra}, writable: true}}]\n"
    file = job(world, "", WITH_PYTHON + volumes)
    script.write_text(LOOK)
    async with world.supervising(world.job("other")) as supervisor:
        other = (await in_state(supervisor, "other", "running")).pid
        config = world.paths.jobs / "web/config/bpm.yml"
        text = config.read_text().replace("args: [1.10, yes]", f"env: {{OTHER: {other}, BASE: {world.base}}}")
        (world.paths.jobs / "web/bin/web").write_text(f"#!/bin/sh\nexec {PYTHON} {script}\n")
        config.write_text(text)
        await supervisor.configure([world.job("other"), file])
        await supervisor.start()
        await until_printed(world, "}")

        allowed = {what for what, can in json.loads(output(world)).items() if can}
        assert allowed == {"own config", "own data", "own log", "extra"}


async def test_bpm_log_contains_each_step_and_error(world: JobTree) -> None:
    file = job(world, "exec sleep 600")
    async with world.supervising(file) as supervisor:
        await in_state(supervisor, "web", "running")
        await supervisor.stop(wait=True)
        (world.paths.jobs / "web/bin/web").unlink()
        config = world.paths.jobs / "web/config/bpm.yml"
        config.write_text("processes: 1\n")
        with pytest.raises(ConfigError):
            await supervisor.bpm.start(START)
        await supervisor.bpm.stop(BpmCall("stop", "nothing", "nothing"))

    path = world.paths.sys / "log/web/bpm.log"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["message"] for line in lines] == [
        "bpm.start.starting",
        "bpm.start.complete",
        "bpm.stop.starting",
        "bpm.stop.complete",
        "bpm.start.starting",
        "bpm.start.failed-to-start",
        "bpm.start.complete",
    ]
    assert [line["level"] for line in lines] == ["info"] * 5 + ["error", "info"]
    assert "found '1', expected a list" in lines[5]["data"].pop("error")
    assert {tuple(line["data"]) for line in lines} == {("job", "process")}
    assert {line["data"]["job"] for line in lines} == {"web"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert not (world.paths.sys / "log/nothing").exists()


async def test_bpm_creates_directories_with_private_modes(world: JobTree) -> None:
    volumes = [world.base / name for name in ("old", "new")]
    volumes[0].mkdir(mode=0o755)
    kept = world.paths.sys / "run/web"
    kept.mkdir(parents=True)
    kept.chmod(0o770)
    listed = ", ".join(f"{{path: {path}, writable: true}}" for path in volumes)
    world.paths.store.mkdir(exist_ok=True)
    disks = "  ephemeral_disk: true\n  persistent_disk: true\n"
    file = job(world, "exec sleep 600", f"{disks}  additional_volumes: [{listed}]\n")
    async with world.supervising(file) as supervisor:
        await in_state(supervisor, "web", "running")
        await supervisor.stop(wait=True)

    paths = world.paths
    own = [paths.sys / "run/bpm/web", paths.data / "web", paths.data / "web/tmp", paths.store / "web", *volumes]
    modes = [path.stat().st_mode & 0o7777 for path in (paths.sys / "log/web", kept, *own)]
    assert modes == [0o750, 0o770, *[0o700] * len(own)]
    assert (paths.sys / "run/bpm").stat().st_mode & 0o7777 == 0o755


async def test_bpm_start_is_retried_until_the_volume_of_another_job_exists(world: JobTree) -> None:
    """The agent must not create the directory itself. If it did, cloud_controller_ng in capi-release would never
    see valkey's socket in it.
    """
    volume = world.base / "valkey"
    file = job(world, "exec sleep 600", f"  additional_volumes: [{{path: {volume}, mount_only: true}}]\n")
    async with world.supervising(file) as supervisor:
        with pytest.raises(HostError, match=f"volume {volume} does not exist"):
            await supervisor.bpm.start(START)
        assert not volume.exists()
        volume.mkdir()
        await in_state(supervisor, "web", "running")


@pytest.mark.parametrize("how", ["cancelled", "ended"])
async def test_abandoned_bpm_errand_is_killed(world: JobTree, how: str) -> None:
    job(world, "echo ready; exec sleep 603")
    async with world.supervising() as supervisor:
        waiting = asyncio.create_task(supervisor.bpm.run(START, [], {}))
        await until_printed(world, "ready")
        (kept,) = supervisor.keepers.of(["bpm/web/web"])
        pid = kept.processes()[0].pid
        if how == "cancelled":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            await supervisor.bpm.end_run(START)
            assert await waiting != 0
        assert not is_alive(pid)
        await supervisor.bpm.end_run(START)
