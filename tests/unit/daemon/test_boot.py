"""Tests the directories that the boot creates, the leftovers that it removes, and the steps that run late."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from agent_shim.core.paths import Paths
from agent_shim.daemon import boot
from agent_shim.daemon.job_recovery import JobRecovery
from agent_shim.host import cgroups, files
from tests.support.world import world


def test_boot_removes_task_results_from_earlier_versions(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    left = paths.tmp / "outcomes/3"
    left.parent.mkdir(parents=True)
    left.write_text("a secret")

    boot.make_tree(paths)

    assert not left.parent.exists()


async def test_boot_removes_temporary_files_of_a_killed_agent(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    boot.make_tree(paths)
    left = [files.sibling(place / "a.json") for place in (paths.bosh, paths.mirror, paths.monit, paths.instance)]
    for path in left:
        path.write_text("half")

    await boot.tree_step(paths).run()

    assert [path for path in left if path.exists()] == []


def test_boot_makes_agent_directories_private(tmp_path: Path) -> None:
    """The directories contain sockets, process plans, settings, and blobs with rendered templates. All of these are
    secret.
    """
    paths = Paths(tmp_path)
    boot.make_tree(paths)

    closed = (paths.shim_run, paths.sensitive_blobs, paths.blobs, paths.bosh, paths.mirror, paths.dynamic_disks)
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in closed} == {
        path.name: "0o700" for path in closed
    }
    assert stat.S_IMODE((paths.sensitive_blobs / "tmp").stat().st_mode) == 0o750
    boot.make_tree(paths)
    paths.shim_run.chmod(0o755)  # the next boot must restore the mode
    paths.sensitive_blobs.chmod(0o755)
    boot.make_tree(paths)
    assert [stat.S_IMODE(path.stat().st_mode) for path in closed[:2]] == [0o700, 0o700]


def test_job_directories_have_the_same_modes_as_under_the_go_agent(tmp_path: Path) -> None:
    """The expected modes are those of ``SetupLogDir``, ``SetupRunDir`` and ``SetupDataDir`` in
    platform/linux_platform.go.
    """
    paths = Paths(tmp_path)
    boot.make_tree(paths)

    modes = {
        paths.bosh_etc: "0o755",
        paths.agent_log: "0o750",
        paths.log: "0o750",
        paths.run: "0o1777",
        paths.data_sys: "0o750",
        paths.jobs: "0o750",
        paths.data_jobs: "0o750",
    }
    assert {path: oct(stat.S_IMODE(path.stat().st_mode)) for path in modes} == modes


async def test_boot_steps_that_the_bus_does_not_need_are_run_late(tmp_path: Path) -> None:
    """Late steps run while the agent connects, because the programs that they run take most of a second."""
    async with world(tmp_path) as made:
        steps = boot.steps(made.agent, JobRecovery(made.agent, made.events.append))

    late = {step.name for step in steps if step.late}
    assert late == {"authorized keys", "passwords", "ssh server", "trusted certificates"}
    assert not [step for step in steps if step.late and step.vital]


async def test_boot_removes_leftovers_of_a_killed_agent(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        paths = made.agent.paths
        left = [files.sibling(paths.packages / "a"), paths.compile / "a", files.sibling(paths.bundled_logs / "a.tgz")]
        for path in left:
            path.mkdir(parents=True)
        steps = {step.name: step for step in boot.steps(made.agent, JobRecovery(made.agent, made.events.append))}

        await steps["leftovers from interrupted work"].run()

    assert [path for path in left if path.exists()] == []


async def test_agent_without_root_clears_memory_oom_group_or_reports_that_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a container runs as an ordinary user, the runtime may have made this user the owner of the cgroup. If the
    agent cannot write to the cgroup, the boot step must report what an out-of-memory kill would do.
    """
    group = tmp_path / "cgroup/memory.oom.group"
    group.parent.mkdir()
    group.write_text("1")
    found = cgroups.Cgroup(memory=cgroups.Hierarchy(2, (group.parent,)))
    async with world(tmp_path / "world") as made:
        steps = {step.name: step for step in boot.steps(made.agent, JobRecovery(made.agent, made.events.append))}
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 1000)
            patch.setattr(made.agent.paths, "is_system", True)
            patch.setattr(cgroups, "find", lambda: found)
            assert await steps["out-of-memory kills"].run() is None
            assert group.read_text() == "0"

            def refuse(_: cgroups.Cgroup) -> bool:
                raise OSError(30, "Read-only file system")

            patch.setattr(cgroups, "end_oom_group", refuse)
            assert await steps["out-of-memory kills"].run() == (
                "an out-of-memory kill ends all jobs, unless the kubelet has singleProcessOOMKill set: "
                "Read-only file system"
            )
