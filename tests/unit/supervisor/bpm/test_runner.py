"""Decisions of the runner of bpm.yml; ``integration/test_bpm_runner.py`` and ``root/test_bpm.py`` run processes."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent_shim.core.errors import ConfigError, HostError
from agent_shim.core.paths import Paths
from agent_shim.host import capabilities, clock, files, proc, process, sandbox, sandbox_exec
from agent_shim.supervisor import process_record
from agent_shim.supervisor.bpm import runner
from agent_shim.supervisor.bpm.config import Limits, Process, Unsafe, Volume
from agent_shim.supervisor.bpm.runner import Bpm, MemoryKill
from agent_shim.supervisor.ctl_programs import Programs
from agent_shim.supervisor.plan import BpmCall
from agent_shim.supervisor.process_record import Pidfile

PLAIN = Process("web", "/bin/web")
CALL = BpmCall("start", "web", "web")
LIMIT = 64 << 20
NO_LIMITS = sandbox.Isolation(3, "", memory=False, processes=False)


def made(base: Path, **options: Any) -> Bpm:
    paths = Paths(base)
    return Bpm(paths, Programs(base, base / "out"), **options)


@pytest.fixture
def bpm(tmp_path: Path) -> Bpm:
    """With a job ``web`` whose process has a limit of memory and a pidfile."""
    found = made(tmp_path)
    configure(found, f"limits: {{memory: {LIMIT}b}}")
    pidfile = found._pidfile("web", "web")
    pidfile.parent.mkdir(parents=True)
    pidfile.touch()
    return found


def configure(bpm: Bpm, more: str, modified: float = 1000.0) -> Path:
    path = bpm._paths.jobs / "web/config/bpm.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"processes: [{{name: web, executable: /bin/web, {more}}}]\n")
    os.utime(path, (modified, modified))
    return path


class Cage:
    """The cgroups of a process: the kernel's part, for any kernel."""

    def __init__(self) -> None:
        self.made: list[tuple[int | None, int | None]] = []
        self.living = [(7, 70)]
        self.counted: tuple[int, int] | None = (0, 0)
        self.after_removal: tuple[int, int] | None = None

    def make(self, *, memory: int | None, processes: int | None) -> list[str]:
        self.made.append((memory, processes))
        return ["/cgroup"]

    def members(self) -> list[tuple[int, int]]:
        return self.living

    def memory(self) -> tuple[int, int] | None:
        return self.counted

    def remove(self) -> None:
        self.counted = self.after_removal


@pytest.fixture
def cage(monkeypatch: pytest.MonkeyPatch) -> Cage:
    found = Cage()
    monkeypatch.setattr(Bpm, "_cage", lambda *_: found)
    return found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Processes that get KILL."""
    found: list[tuple[int, int]] = []

    def send(identity: tuple[int, int], number: signal.Signals) -> None:
        assert number is signal.SIGKILL
        found.append(identity)

    monkeypatch.setattr(process, "send", send)
    return found


def privileged(monkeypatch: pytest.MonkeyPatch, *names: str, uid: int = 0) -> None:
    """Have these capabilities, and 11 and 12 as the numbers of a job's user."""
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(files, "owner_ids", lambda _: (11, 12))
    monkeypatch.setattr(capabilities, "privileges", lambda: capabilities.Privileges(frozenset(names)))


# --- the spec of an execution -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "unsafe", "has_view", "namespaces"),
    [
        (1, Unsafe(), True, ["mnt", "pid", "ipc", "uts"]),
        (1, Unsafe(host_pid_namespace=True), True, ["mnt", "ipc", "uts"]),
        (1, Unsafe(privileged=True), True, ["mnt", "pid", "ipc", "uts"]),
        (2, Unsafe(), True, []),
        (2, Unsafe(privileged=True), False, []),
        (3, Unsafe(), False, []),
    ],
)
def test_isolation_is_that_of_the_level(
    bpm: Bpm, cage: Cage, level: int, unsafe: Unsafe, has_view: bool, namespaces: list[str]
) -> None:
    """A privileged process needs namespaces to be hidden from others: Landlock would bind it for ever."""
    wanted = msgspec.structs.replace(PLAIN, unsafe=unsafe)
    order = bpm.order("web", wanted, NO_LIMITS._replace(level=level))

    assert (order["places"] is not None, order["namespaces"]) == (has_view, namespaces)
    assert order["keeps_privileges"] is unsafe.privileged
    assert order["may_signal"] is unsafe.host_pid_namespace
    assert cage.made == [(None, None)]


@pytest.mark.parametrize(
    ("uid", "user", "is_privileged", "ids", "numbers"),
    [
        (0, "vcap", False, (11, 12), [13]),
        (0, "vcap", True, (None, None), [13]),
        (0, None, False, (None, None), [13]),
        (1000, "vcap", False, (None, None), []),
    ],
)
def test_root_gives_up_its_user_and_all_that_was_not_asked_for(
    tmp_path: Path,
    cage: Cage,
    monkeypatch: pytest.MonkeyPatch,
    uid: int,
    user: str | None,
    is_privileged: bool,
    ids: tuple[int | None, int | None],
    numbers: list[int],
) -> None:
    """A privileged process stays root; an agent that is not root has nothing to give."""
    privileged(monkeypatch, "NET_RAW", "CHOWN", uid=uid)
    unsafe = Unsafe(privileged=is_privileged)
    wanted = msgspec.structs.replace(PLAIN, capabilities=("net_raw", "SYS_ADMIN"), unsafe=unsafe)
    order = made(tmp_path, user=user).order("web", wanted, NO_LIMITS)

    assert ((order["uid"], order["gid"]), order["capabilities"]) == (ids, numbers)
    assert order["cgroups"] == ["/cgroup"]
    assert cage.made == [(None, None)]


def test_limits_are_those_that_the_container_can_set(bpm: Bpm, cage: Cage) -> None:
    """Others are left to a watchdog, or warned of."""
    wanted = msgspec.structs.replace(PLAIN, limits=Limits(memory=5, processes=6, core_file_size=0, open_files=9))
    for memory, processes in ((True, False), (False, True)):
        order = bpm.order("web", wanted, NO_LIMITS._replace(memory=memory, processes=processes))

    assert cage.made == [(5, None), (None, 6)]
    assert order["cgroups"] == ["/cgroup"]
    assert order["limits"] == {"RLIMIT_NOFILE": 9, "RLIMIT_CORE": 0}


@pytest.mark.parametrize(
    ("hard", "held", "expected"),
    [(100, frozenset[str](), 100), (100, {"SYS_RESOURCE"}, 500), (resource.RLIM_INFINITY, frozenset[str](), 500)],
)
def test_a_limit_is_at_most_the_containers(
    monkeypatch: pytest.MonkeyPatch, hard: int, held: frozenset[str], expected: int
) -> None:
    """Unless there is none, or the agent may raise it."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, hard))

    assert runner._most(resource.RLIMIT_NOFILE, 500, held) == expected


def seen(places: list[sandbox_exec.BindMount]) -> dict[str, str]:
    """Map each path to its permissions: ``w`` to write, ``x`` to execute."""
    return {each["path"]: "w" * each["write"] + "x" * each["run"] for each in places}


@pytest.mark.parametrize("has_disks", [True, False])
def test_without_namespaces_a_job_sees_its_own_and_what_all_share(bpm: Bpm, tmp_path: Path, has_disks: bool) -> None:
    """Beside its own directories the packages, also those that are used in place, and a file of each job for DNS."""
    paths = bpm._paths
    (paths.jobs / "other").mkdir()
    (paths.jobs / "other/.bosh").touch()
    elsewhere = tmp_path / "elsewhere/tool"
    elsewhere.mkdir(parents=True)
    paths.packages.mkdir()
    (paths.packages / "tool").symlink_to(elsewhere)
    wanted = msgspec.structs.replace(PLAIN, ephemeral_disk=has_disks, persistent_disk=has_disks)

    assert seen(bpm._places("web", wanted, is_apart=False)) == {
        **dict.fromkeys(sandbox.SYSTEM, "x"),
        "/sys": "",
        str(paths.instance): "",
        **dict.fromkeys(runner.SCRATCH, "w"),
        str(paths.jobs / "other/.bosh"): "",
        **dict.fromkeys(map(str, (paths.packages, paths.data_packages, paths.jobs / "web", elsewhere)), "x"),
        **dict.fromkeys(map(str, (paths.data / "web/tmp", paths.sys / "log/web", paths.sys / "run/web")), "w"),
        **(dict.fromkeys(map(str, (paths.data / "web", paths.store / "web")), "w") if has_disks else {}),
    }


def test_with_namespaces_a_job_has_temporary_directories_of_its_own() -> None:
    places = made(Paths().base)._places("web", PLAIN, is_apart=True)
    found = {each["path"]: (each["source"], each["write"]) for each in places}

    own = ("/var/vcap/data/web/tmp", True)
    assert [found[path] for path in runner.TEMPORARY] == [own, own]
    assert not {"/dev", "/proc"} & found.keys()


async def test_a_shell_joins_the_process_without_its_cgroups(
    bpm: Bpm, cage: Cage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own memory and processes are the operator's; without namespaces there is nothing to enter."""
    wanted = msgspec.structs.replace(PLAIN, limits=Limits(memory=5, processes=6))
    bpm._isolation = sandbox.Isolation(1, "", memory=True, processes=True)
    monkeypatch.setattr(bpm, "find", lambda *_: None)
    with pytest.raises(HostError, match="^process is not running or could not be found$"):
        await bpm.shell_order("web", wanted)

    monkeypatch.setattr(bpm, "find", lambda *_: (7, 70))
    assert (await bpm.shell_order("web", wanted))["enter"] == 7
    bpm._isolation = bpm._isolation._replace(level=2)
    assert (await bpm.shell_order("web", wanted))["enter"] is None
    assert cage.made == [(None, None)] * 2


# --- before a start ---------------------------------------------------------------------------------------------------


def test_directories_of_a_job_are_its_own(bpm: Bpm) -> None:
    """Also that on the persistent disk; the log may be read by a group."""
    paths = bpm._paths
    wanted = msgspec.structs.replace(PLAIN, persistent_disk=True)
    with pytest.raises(HostError, match="^requested persistent disk does not exist$"):
        bpm._make_directories("web", wanted)
    paths.store.mkdir()
    (paths.sys / "log").mkdir()
    bpm._make_directories("web", wanted)

    places = (paths.store / "web", paths.data / "web", paths.data / "web/tmp", paths.sys / "run/web")
    assert {path.stat().st_mode & 0o7777 for path in places} == {0o700}
    assert (paths.sys / "log/web").stat().st_mode & 0o7777 == 0o750
    assert (paths.sys / "log/web/web.stdout.log").stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize(
    ("uid", "processes", "lacking"),
    [
        (0, True, []),
        (0, False, ["limits.processes"]),
        (1000, True, ["capability NET_RAW", "limits.open_files of 101", "unsafe.privileged"]),
    ],
)
def test_only_what_cannot_be_had_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, processes: bool, lacking: list[str]
) -> None:
    """Capabilities of an agent that is not root do not reach its processes."""
    privileged(monkeypatch, "NET_RAW", "SYS_ADMIN", "SYS_RESOURCE", uid=uid)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    limits = Limits(processes=5, open_files=101)
    wanted = msgspec.structs.replace(PLAIN, limits=limits, capabilities=("NET_RAW",), unsafe=Unsafe(privileged=True))
    bpm, isolation = made(tmp_path, is_strict=True), NO_LIMITS._replace(processes=processes)
    if not lacking:
        bpm._complain("web", wanted, isolation)
        return
    with pytest.raises(HostError) as refused:
        bpm._complain("web", wanted, isolation)
    assert str(refused.value) == f"bpm/web/web cannot have {', '.join(lacking)} in this container"


def test_a_key_without_a_meaning_is_told_once_for_each_content(bpm: Bpm, caplog: pytest.LogCaptureFixture) -> None:
    for more in ("odd: 1", "odd: 1", "other: 1"):
        configure(bpm, more)
        bpm.definition("web", "web")

    told = [record.message.rpartition("unknown key ")[2] for record in caplog.records]
    assert [each.partition(" ")[0] for each in told] == ["processes[0].odd", "processes[0].other"]


def test_volumes_of_the_command_line_are_checked(bpm: Bpm, tmp_path: Path) -> None:
    bpm.check_volumes("web", [Volume(f"{tmp_path}/data/other")])
    with pytest.raises(ConfigError, match="must be within"):
        bpm.check_volumes("web", [Volume(f"{tmp_path}/data/other"), Volume("/etc")])


# --- which process it is ----------------------------------------------------------------------------------------------

STARTED_AT = 1000.0


@pytest.mark.parametrize(
    ("pid", "state", "caged", "modified", "mark", "is_found"),
    [
        (7, "S", None, STARTED_AT + 1, None, True),
        (7, "Z", None, STARTED_AT + 1, None, False),
        (7, "", None, STARTED_AT + 1, None, False),
        (1, "S", None, STARTED_AT + 1, None, False),
        pytest.param(os.getpid(), "S", None, STARTED_AT + 1, None, False, id="its own"),
        (7, "S", "bpm/web/web", STARTED_AT + 900, None, True),
        (7, "S", "bpm/web/other", STARTED_AT + 1, "bpm/web/web", False),
        (7, "S", None, STARTED_AT + 900, "bpm/web/web", True),
        (7, "S", None, STARTED_AT + 900, "bpm/web/other", False),
        (7, "S", None, STARTED_AT + 900, None, False),
        (7, "S", None, STARTED_AT - 1, None, False),
    ],
)
def test_a_number_in_a_pidfile_is_no_proof(
    bpm: Bpm,
    monkeypatch: pytest.MonkeyPatch,
    pid: int,
    state: str,
    caged: str | None,
    modified: float,
    mark: str | None,
    is_found: bool,
) -> None:
    """Its cgroup is, or a start just before the pidfile was written, or the mark of this agent."""
    stat = proc.Stat(pid, state, 1, pid, pid, 0, 70, 0) if state else None
    monkeypatch.setattr(process_record, "read_own", lambda _: Pidfile(pid, modified, 1))
    monkeypatch.setattr(proc, "stat", lambda _: stat)
    monkeypatch.setattr(bpm._programs.ownership, "label_of", lambda _: caged)
    monkeypatch.setattr(clock, "wall_time_of", lambda _: STARTED_AT)
    value = None if mark is None else process_record.mark(mark, bpm._paths.base)
    monkeypatch.setattr(proc, "variable", lambda *_: value)

    assert bpm.find("web", "web") == ((pid, 70) if is_found else None)


def test_without_a_pidfile_there_is_no_process(bpm: Bpm) -> None:
    assert bpm.find("web", "nothing") is None


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_kill_of_the_kernel_is_reported_once_and_explains_one_exit(
    bpm: Bpm, cage: Cage, sent: list[tuple[int, int]]
) -> None:
    """The kernel has killed one process; the others of the cgroup follow it."""
    assert bpm.kill_hogs() == []
    cage.counted = (1, 77)

    assert bpm.kill_hogs() == [MemoryKill("web", "web", 77, LIMIT)]
    assert sent == [(7, 70)]
    assert bpm.kill_hogs() == []
    assert [bpm.was_killed_for_memory(CALL) for _ in range(2)] == [True, False]


def test_a_kill_that_is_found_at_the_exit_is_reported_later(bpm: Bpm, cage: Cage, sent: list[tuple[int, int]]) -> None:
    cage.counted = (1, 77)

    assert [bpm.was_killed_for_memory(CALL) for _ in range(2)] == [True, False]
    assert bpm.kill_hogs() == [MemoryKill("web", "web", 77, LIMIT)]
    assert (bpm.kill_hogs(), sent) == ([], [])


@pytest.mark.parametrize("kept", [None, (5, 77)])
@pytest.mark.parametrize("is_next_killed", [False, True])
def test_a_kill_is_not_lost_with_the_cgroup_and_not_counted_for_the_next_process(
    bpm: Bpm, cage: Cage, sent: list[tuple[int, int]], kept: tuple[int, int] | None, is_next_killed: bool
) -> None:
    """A cgroup that cannot be removed continues to count."""
    cage.counted, cage.after_removal = (5, 77), kept
    bpm._open_cage("web", "web")

    assert cage.memory() == kept
    if is_next_killed:
        cage.counted = (6, 78) if kept else (1, 78)
    assert bpm.was_killed_for_memory(CALL) is is_next_killed
    peaks = [77, 78] if is_next_killed else [77]
    assert bpm.kill_hogs() == [MemoryKill("web", "web", peak, LIMIT) for peak in peaks]
    assert sent == []


def test_without_a_limit_in_the_kernel_nothing_was_killed(bpm: Bpm, cage: Cage) -> None:
    cage.counted = None
    bpm._open_cage("web", "web")

    assert not bpm.was_killed_for_memory(CALL)
    assert bpm.kill_hogs() == []


@pytest.mark.parametrize(
    ("limit", "exact_kb", "used_kb"),
    [
        ("limits: {memory: 64M}", {20: 30_000, 10: 30_000}, 0),
        ("limits: {memory: 64M}", {20: 30_000, 10: None}, 70_000),
        ("limits: {memory: 64M}", {20: 40_000, 10: 30_000}, 70_000),
        ("limits: {}", {20: 40_000, 10: 40_000}, 0),
    ],
)
def test_the_tree_of_a_process_counts_shared_memory_once(
    bpm: Bpm,
    cage: Cage,
    sent: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    exact_kb: dict[int, int | None],
    used_kb: int,
) -> None:
    """Where it cannot be counted exactly, by its resident memory. The main process is killed first."""
    configure(bpm, limit)
    cage.counted = None
    table = {
        20: proc.Stat(20, "S", 1, 20, 20, 0, 200, 40_000),
        10: proc.Stat(10, "S", 20, 20, 20, 0, 100, 40_000),
        30: proc.Stat(30, "S", 1, 30, 30, 0, 300, 99_000_000),
    }
    monkeypatch.setattr(bpm, "find", lambda *_: (20, 200))
    monkeypatch.setattr(proc, "table", lambda: table)
    monkeypatch.setattr(proc, "proportional_kb", exact_kb.get)

    assert bpm.kill_hogs() == ([MemoryKill("web", "web", used_kb * 1024, LIMIT)] if used_kb else [])
    assert sent == ([(20, 200), (10, 100)] if used_kb else [])
    assert bpm.was_killed_for_memory(CALL) is bool(used_kb)


def test_a_limit_is_read_again_when_the_file_has_changed(bpm: Bpm) -> None:
    """Without a limit, or a file, there is none."""
    assert bpm._memory_limit("web", "web") == LIMIT
    configure(bpm, "limits: {memory: 1M}", 1001.0)
    assert bpm._memory_limit("web", "web") == 1 << 20
    configure(bpm, "limits: {}", 1002.0)
    assert bpm._memory_limit("web", "web") == 0
    configure(bpm, "limits: 1", 1003.0)
    assert bpm._memory_limit("web", "web") == 0
    assert bpm._memory_limit("web", "nothing") == 0
    assert bpm._memory_limit("nothing", "nothing") == 0
