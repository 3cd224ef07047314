"""Tests the cgroups of single processes with simulated hierarchies. ``root/test_bpm.py`` uses real cgroups."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_shim.host import cgroups, job_cgroups, proc


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a directory that looks like an agent's cgroup with delegated controllers."""
    for directory in (tmp_path, tmp_path / "agent_shim"):
        directory.mkdir(exist_ok=True)
        (directory / "cgroup.subtree_control").write_text("cpu memory" if directory == tmp_path else "")
    hierarchy = cgroups.Hierarchy(2, (tmp_path,))
    monkeypatch.setattr(job_cgroups, "hierarchies", lambda: (("memory", hierarchy), ("pids", hierarchy)))
    return tmp_path


def test_job_cgroup_sets_limits_on_cgroup_v2(own: Path) -> None:
    """The memory limit and the process limit are set in the same directory.

    Swap is disabled, and an OOM kill affects all processes in the job cgroup.
    """
    joined = job_cgroups.JobCgroup("a/b").make(memory=1 << 20, processes=7)

    group = own / "agent_shim/a%2fb"
    assert joined == [str(group)]
    written = {path.name: path.read_text() for path in group.iterdir()}
    assert written == {"memory.max": "1048576", "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "7"}
    # Only controllers that have not been delegated yet are requested.
    assert (own / "cgroup.subtree_control").read_text() == "+pids"


def test_job_cgroup_members_include_nested_cgroups(own: Path) -> None:
    """A job may create nested cgroups in its own cgroup."""
    job_cgroups.JobCgroup("a/b@/c").make(memory=1 << 20)
    below = own / "agent_shim/a%2fb@%2fc/theirs"
    below.mkdir()
    (below.parent / "cgroup.procs").write_text("")
    (below / "cgroup.procs").write_text(f"{os.getpid()}\n")

    assert [pid for pid, _ in job_cgroups.JobCgroup("a/b@/c").members()] == [os.getpid()]


@pytest.mark.parametrize(
    ("path", "is_in"),
    [
        ("/x/agent_shim/web@%2fvar", True),
        ("/x/agent_shim/web@%2fvar/below", True),
        ("/x/agent_shim/web@%2fvar2", False),
        ("/x/web@%2fvar", False),
        ("/", False),
    ],
)
def test_processes_in_a_job_cgroup_and_below_it_are_found(
    monkeypatch: pytest.MonkeyPatch, path: str, is_in: bool
) -> None:
    """The processes in a job cgroup must still be found, because agents before 0.3 put processes into such cgroups
    instead of starting them under keepers.
    """
    monkeypatch.setattr(proc, "groups", lambda pid: {"pids": path} if pid == os.getpid() else {})
    itself = proc.stat(os.getpid())
    assert itself is not None

    assert job_cgroups.members_of("web@/var") == [itself.identity] * is_in


def test_job_cgroup_limits_are_independent(own: Path) -> None:
    """Setting a process limit sets no memory limit, and OOM kills are counted only if there is a memory limit."""
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


def test_job_cgroup_reports_kills_and_peak_memory(own: Path) -> None:
    cage = job_cgroups.JobCgroup("a")
    assert cage.memory() is None
    cage.make(memory=1 << 20, processes=None)
    (own / "agent_shim/a/memory.events").write_text("low 0\noom 2\noom_kill 3\n")
    (own / "agent_shim/a/memory.peak").write_text("1048576\n")

    assert cage.memory() == (3, 1 << 20)


def test_cgroup_controller_that_cannot_be_delegated_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses to delegate a controller while processes are in the agent's cgroup.

    The directory that the agent created for the attempt must be removed.
    """
    hierarchy = cgroups.Hierarchy(2, (tmp_path,))
    monkeypatch.setattr(job_cgroups, "hierarchies", lambda: (("memory", hierarchy),))
    (tmp_path / "cgroup.subtree_control").mkdir()  # A directory in place of the file makes the write fail.

    assert job_cgroups.offered() == frozenset()
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.subtree_control"]


@pytest.mark.parametrize(
    ("kind", "members", "is_offered"),
    [
        ("domain", "", True),
        ("domain", "1\n", False),
        ("domain threaded", "", False),
        (None, "1\n", True),
    ],
)
def test_no_controller_is_enabled_in_a_cgroup_that_contains_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, members: str, is_offered: bool
) -> None:
    """The kernel would allow the ``pids`` controller to be enabled in a cgroup that contains processes. After that,
    however, no process could enter a nested cgroup: the cgroup becomes "domain threaded", and nested cgroups are
    invalid (Documentation/admin-guide/cgroup-v2.rst, "Threads").

    The root cgroup, which has no type, is an exception. In a container on cgroup v2, the agent's cgroup contains the
    container's processes.
    """
    hierarchy = cgroups.Hierarchy(2, (tmp_path,))
    monkeypatch.setattr(job_cgroups, "hierarchies", lambda: (("pids", hierarchy),))
    (tmp_path / "cgroup.subtree_control").write_text("")
    (tmp_path / "cgroup.procs").write_text(members)
    if kind is not None:
        (tmp_path / "cgroup.type").write_text(f"{kind}\n")
    monkeypatch.setattr(Path, "mkdir", _make_cgroup)
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)

    assert job_cgroups.offered() == (frozenset({"pids"}) if is_offered else frozenset())
    assert (tmp_path / "cgroup.subtree_control").read_text() == ("+pids" if is_offered else "")


def _make_cgroup(path: Path, *args: Any, **options: Any) -> None:
    """Create a directory with a controller's file in it, as the kernel does for a new cgroup."""
    os.mkdir(path)  # noqa: PTH102 - Path.mkdir is replaced
    (path / "pids.max").write_text("max")


@pytest.mark.parametrize(("version", "marked", "beside"), [(2, True, True), (2, False, False), (1, True, False)])
def test_job_cgroups_are_created_alongside_the_agent_cgroup_if_the_parent_is_delegated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, marked: bool, beside: bool
) -> None:
    """systemd marks a cgroup in which the unit may create further cgroups. Without the mark, job cgroups are created in
    the agent's own cgroup.
    """

    def mark(path: Path, name: str) -> bytes:
        if path == tmp_path and marked and name == "user.delegate":
            return b"1"
        raise OSError(61, "No data available")

    monkeypatch.setattr(os, "getxattr", mark)

    hierarchy = cgroups.Hierarchy(version, (tmp_path / "agent", tmp_path))
    assert job_cgroups.parent_of_job_cgroups(hierarchy) == (tmp_path if beside else tmp_path / "agent")
