"""Cgroups for single processes, in version 2. Those of version 1 are made for real by the tests that need root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_shim.host import cgroups, job_cgroups, proc


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Our cgroup, which hands down what it is asked to."""
    for directory in (tmp_path, tmp_path / "agent_shim"):
        directory.mkdir(exist_ok=True)
        (directory / "cgroup.subtree_control").write_text("cpu memory" if directory == tmp_path else "")
    hierarchy = cgroups.Hierarchy(2, (tmp_path,))
    monkeypatch.setattr(job_cgroups, "hierarchies", lambda: (("memory", hierarchy), ("pids", hierarchy)))
    monkeypatch.setattr(job_cgroups, "tracker", lambda: cgroups.Tree("", hierarchy, "/"))
    return tmp_path


def test_job_cgroup_sets_limits_on_cgroup_v2(own: Path) -> None:
    """One directory has both limits. There is no swap, and all processes are killed when memory runs out."""
    joined = job_cgroups.JobCgroup("a/b").make(memory=1 << 20, processes=7)

    group = own / "agent_shim/a%2fb"
    assert joined == [str(group)]
    written = {path.name: path.read_text() for path in group.iterdir()}
    assert written == {"memory.max": "1048576", "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "7"}
    # Only controllers that are not delegated yet are requested.
    assert (own / "cgroup.subtree_control").read_text() == "+pids"


def test_job_cgroup_without_a_limit_only_groups_processes(own: Path) -> None:
    """Nothing is limited and no memory is counted, which is how the kernel expresses that there is no limit."""
    assert job_cgroups.JobCgroup("a").make() == [str(own / "agent_shim/a")]
    assert list((own / "agent_shim/a").iterdir()) == []
    (own / "agent_shim/a/memory.max").write_text("max\n")
    assert job_cgroups.JobCgroup("a").memory() is None


def test_job_cgroup_is_not_created_without_permission(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are then identified by descent."""
    monkeypatch.setattr(job_cgroups, "tracker", lambda: None)

    assert job_cgroups.JobCgroup("a").make() == []
    assert job_cgroups.JobCgroup("a").is_empty()
    assert job_cgroups.members("") == {}
    assert not (own / "agent_shim/a").exists()


def test_job_cgroup_members_include_nested_cgroups(own: Path) -> None:
    """A job may create cgroups below its own."""
    job_cgroups.JobCgroup("a/b@/c").make()
    below = own / "agent_shim/a%2fb@%2fc/theirs"
    below.mkdir()
    (below.parent / "cgroup.procs").write_text("")
    (below / "cgroup.procs").write_text(f"{os.getpid()}\n")

    assert job_cgroups.members("@/c") == {os.getpid(): "a/b@/c"}
    assert job_cgroups.members("@/d") == {}
    assert [pid for pid, _ in job_cgroups.JobCgroup("a/b@/c").members()] == [os.getpid()]


def test_job_cgroup_limits_are_independent(own: Path) -> None:
    """A process limit does not affect memory and swap, and only a memory limit counts kills."""
    memory, processes = job_cgroups.JobCgroup("m"), job_cgroups.JobCgroup("p")
    memory.make(memory=1 << 20)
    processes.make(processes=7)

    assert {path.name for path in (own / "agent_shim/m").iterdir()} == {
        "memory.max",
        "memory.swap.max",
        "memory.oom.group",
    }
    assert {path.name for path in (own / "agent_shim/p").iterdir()} == {"pids.max"}
    assert memory.memory() == (0, 0)
    assert processes.memory() is None


def test_job_cgroup_memory_is_read_from_the_memory_controller_only(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_cgroups.JobCgroup("a").make(memory=1 << 20)
    for controller, found in (("memory", (0, 0)), ("pids", None)):
        hierarchies = ((controller, cgroups.Hierarchy(2, (own,))),)
        monkeypatch.setattr(job_cgroups, "hierarchies", lambda given=hierarchies: given)
        assert job_cgroups.JobCgroup("a").memory() == found


@pytest.mark.parametrize(("populated", "is_empty"), [(1, False), (0, True)])
def test_job_cgroup_population_is_read_from_the_kernel(own: Path, populated: int, is_empty: bool) -> None:
    group = job_cgroups.JobCgroup("a")
    group.make()
    (own / "agent_shim/a/cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")

    assert group.is_empty() is is_empty


def test_job_cgroup_v1_is_empty_if_it_can_be_removed(own: Path) -> None:
    """Groups below it count. A file stands for a process here, because a directory with either cannot be removed."""
    group = job_cgroups.JobCgroup("a")
    group.make()
    (own / "agent_shim/a/below").mkdir()
    (own / "agent_shim/a/below/process").touch()
    assert not group.is_empty()
    (own / "agent_shim/a/below/process").unlink()

    assert group.is_empty()
    assert not (own / "agent_shim/a").exists()


def test_job_cgroup_kills_all_processes_at_once(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing group has none to kill."""
    job_cgroups.JobCgroup("a").make()
    job_cgroups.JobCgroup("a").kill()
    job_cgroups.JobCgroup("b").kill()
    assert (own / "agent_shim/a/cgroup.kill").read_text() == "1"
    assert not (own / "agent_shim/b").exists()
    monkeypatch.setattr(job_cgroups, "tracker", lambda: None)
    job_cgroups.JobCgroup("a").kill()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/x/agent_shim/web@%2fvar", "web@/var"),
        ("/x/agent_shim/web@%2fvar/below", "web@/var"),
        ("/x/agent_shim", None),
        ("/y/agent_shim/web@%2fvar", None),
        ("/", None),
    ],
)
def test_job_name_of_a_process_is_read_from_its_cgroup_path(
    own: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str | None
) -> None:
    """The path must begin with that of the agent."""
    monkeypatch.setattr(job_cgroups, "tracker", lambda: cgroups.Tree("", cgroups.Hierarchy(2, (own,)), "/x"))
    monkeypatch.setattr(proc, "groups", lambda _: {"": path})

    assert job_cgroups.name_of(4711) == name


def test_job_cgroup_reports_kills_and_peak_memory(own: Path) -> None:
    """The values are the number of kills and the highest use."""
    cage = job_cgroups.JobCgroup("a")
    assert cage.memory() is None
    cage.make(memory=1 << 20, processes=None)
    (own / "agent_shim/a/memory.events").write_text("low 0\noom 2\noom_kill 3\n")
    (own / "agent_shim/a/memory.peak").write_text("1048576\n")

    assert cage.memory() == (3, 1 << 20)


def test_cgroup_controller_that_cannot_be_delegated_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses if processes are in the agent's cgroup. The attempt leaves nothing behind."""
    hierarchy = cgroups.Hierarchy(2, (tmp_path,))
    monkeypatch.setattr(job_cgroups, "hierarchies", lambda: (("memory", hierarchy),))
    (tmp_path / "cgroup.subtree_control").mkdir()  # cannot be written

    assert job_cgroups.offered() == frozenset()
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.subtree_control"]


@pytest.mark.parametrize(("version", "marked", "beside"), [(2, True, True), (2, False, False), (1, True, False)])
def test_job_cgroups_are_created_beside_the_agent_if_delegated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, marked: bool, beside: bool
) -> None:
    """systemd marks the cgroups that a unit may divide. A group without the mark is left unchanged."""

    def mark(path: Path, name: str) -> bytes:
        if path == tmp_path and marked and name == "user.delegate":
            return b"1"
        raise OSError(61, "No data available")

    monkeypatch.setattr(os, "getxattr", mark)

    hierarchy = cgroups.Hierarchy(version, (tmp_path / "agent", tmp_path))
    assert job_cgroups.place(hierarchy) == (tmp_path if beside else tmp_path / "agent")
