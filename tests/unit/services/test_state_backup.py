"""Tests backing up the agent's state to the data volume and restoring it to a new root file system."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.errors import BootError
from agent_shim.core.paths import Paths
from agent_shim.host import files, proc
from agent_shim.services import state_backup
from agent_shim.services.state_backup import StateBackup
from tests.support.waiting import until

Restart = Callable[[], None]
NEWS = '{"news": 1}'


class Killed(BaseException):
    """Simulates a SIGKILL. It is not an ``Exception``, so the agent does not catch it."""


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """Return the paths of an instance in its first container."""
    made = Paths(tmp_path / "vcap")
    make_root(made)
    return made


def make_root(paths: Paths) -> None:
    for path in (paths.bosh, paths.monit_job, paths.mirror, paths.shim_run):
        path.mkdir(parents=True, exist_ok=True)


def reset_root(paths: Paths) -> None:
    """Simulate a new root file system by removing everything except ``data``."""
    for path in paths.base.iterdir():
        if path != paths.data:
            files.remove_tree(path)
    make_root(paths)


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Restart:
    """Return a function that simulates a new container, in which each pid may belong to another process."""
    number = 0

    def begin_anew() -> None:
        nonlocal number
        number += 1
        monkeypatch.setattr(proc, "incarnation", lambda: f"container {number}")

    begin_anew()
    return begin_anew


async def start(paths: Paths, agent_id: str = "a-1") -> StateBackup:
    """Start a new agent, and return its backup."""
    made = StateBackup(paths)
    made.begin()
    await made.recover(agent_id)
    return made


def content(name: str, text: str) -> str:
    """Return JSON to store in a backed-up file."""
    return json.dumps({name: text})


def fill(paths: Paths, text: str = "x") -> dict[Path, str]:
    """Write text into every backed-up file. Return the contents, keyed by path."""
    contents = {}
    for file in state_backup.backup_files(paths):
        file.path.parent.mkdir(parents=True, exist_ok=True)
        contents[file.path] = content(file.path.name, text)
        file.path.write_text(contents[file.path])
    return contents


def found(paths: Paths) -> dict[Path, str]:
    return {file.path: file.path.read_text() for file in state_backup.backup_files(paths) if file.path.exists()}


async def test_state_is_restored_to_a_new_root_file_system(paths: Paths, restart: Restart) -> None:
    contents = fill(paths)
    await start(paths)
    restart()
    reset_root(paths)

    again = await start(paths)

    assert found(paths) == contents
    assert again.root_is_new
    assert {oct(path.stat().st_mode & 0o777) for path in (paths.spec, paths.update_settings)} == {"0o600"}
    assert oct(paths.dns_records.stat().st_mode & 0o777) == "0o640"


async def test_state_backup_is_complete_when_update_returns(paths: Paths) -> None:
    """Deletions must be backed up as well. Otherwise, for example, an unmounted disk would return after a restore."""
    fill(paths)
    agent = await start(paths)

    paths.update_settings.write_text(NEWS)
    paths.managed_disk.unlink()
    await agent.update()

    reset_root(paths)
    await start(paths)
    assert paths.update_settings.read_text() == NEWS
    assert not paths.managed_disk.exists()


async def test_state_backup_does_not_copy_unchanged_files(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(paths)
    await start(paths)
    before = {path: path.stat().st_ino for path in paths.mirror.iterdir()}

    agent = await start(paths)
    monkeypatch.setattr(asyncio, "to_thread", None)
    await agent.update()

    assert {path: path.stat().st_ino for path in paths.mirror.iterdir()} == before


async def test_state_backup_detects_changes_made_outside_the_agent(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPI may write ``update_settings.json`` into a running container."""
    monkeypatch.setattr(state_backup, "POLL_S", 0.01)
    agent = await start(paths)
    watching = asyncio.create_task(agent.watch())

    paths.update_settings.write_text(NEWS)

    await until((paths.mirror / "update_settings.json").exists)
    watching.cancel()


async def test_agent_restart_keeps_state_files_and_run_directory(paths: Paths) -> None:
    """The files on the root file system may be newer than the copy, and the run files belong to running jobs."""
    await start(paths)
    (paths.run / "web").mkdir()
    (paths.run / "web/web.pid").write_text("17")
    contents = fill(paths)

    agent = await start(paths)

    assert found(paths) == contents
    assert not agent.root_is_new
    assert agent.is_prepared
    assert (paths.run / "web/web.pid").read_text() == "17"


async def test_run_files_from_another_container_are_removed(paths: Paths, restart: Restart) -> None:
    await start(paths)
    (paths.run / "web").mkdir()
    (paths.run / "web/web.pid").write_text("17")
    (paths.run / "link").symlink_to(paths.base)
    restart()

    agent = await start(paths)

    assert list(paths.run.iterdir()) == []
    assert paths.bosh.is_dir()
    assert not agent.root_is_new
    assert agent.is_prepared


async def test_run_files_are_removed_if_the_root_file_system_is_new_but_the_pid_namespace_is_not(paths: Paths) -> None:
    """A pod's containers may share a PID namespace, so the same namespace does not mean that jobs are still running."""
    await start(paths)
    (paths.run / "web").mkdir()
    reset_root(paths)

    await start(paths)

    assert not (paths.run / "web").exists()


async def test_run_files_from_a_preceding_go_agent_are_kept(paths: Paths) -> None:
    """When this agent takes over from the Go agent, the pidfiles still name running processes."""
    (paths.run / "web").mkdir()
    paths.spec.write_text("{}")
    paths.settings_cache.write_text('{"agent_id": "a-1"}')

    await start(paths)

    assert (paths.run / "web").exists()
    assert (paths.mirror / "spec.json").read_text() == "{}"


async def test_interrupted_state_restore_is_retried(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = fill(paths)
    await start(paths)
    reset_root(paths)
    real = files.write_atomic
    left = 0

    def until_then(path: Path, data: bytes, **options: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        real(path, data, **options)

    kills = 0
    with monkeypatch.context() as patched:
        patched.setattr(files, "write_atomic", until_then)
        while not paths.stamp.exists() or left < 0:
            left = kills = kills + 1
            one = StateBackup(paths)
            with suppress(Killed):
                one.begin()
                await one.recover("a-1")

    again = await start(paths)

    assert kills >= len(contents)
    assert found(paths) == contents
    assert not again.root_is_new


async def test_pre_start_is_due_until_it_has_run(paths: Paths, restart: Restart) -> None:
    await start(paths)
    reset_root(paths)
    assert not (await start(paths)).is_prepared
    restart()

    agent = await start(paths)
    before = agent.is_prepared
    await agent.prepared()

    assert (before, agent.is_prepared) == (False, True)
    assert (await start(paths)).is_prepared
    reset_root(paths)
    assert not (await start(paths)).is_prepared


async def test_state_copy_from_another_agent_on_the_volume_is_set_aside(paths: Paths, restart: Restart) -> None:
    contents = fill(paths)
    paths.supervisor_state.write_text("{}")
    await start(paths, "a-1")
    restart()
    reset_root(paths)

    agent = await start(paths, "a-2")

    assert found(paths) == {}
    assert not paths.supervisor_state.exists()
    assert not agent.root_is_new
    aside = paths.mirror / "set_aside/a-1"
    assert {path.read_text() for path in aside.iterdir()} >= set(contents.values())
    assert (aside / "supervisor.json").exists()


@pytest.mark.parametrize("by", ["stamp", "settings of the Go agent"])
async def test_state_files_from_another_agent_on_the_root_file_system_are_set_aside(paths: Paths, by: str) -> None:
    """An image that was created from a container in use may contain the state files of the agent in that container."""
    fill(paths)
    if by == "stamp":
        await start(paths, "a-1")
        files.remove_tree(paths.data)
    paths.settings_cache.write_text('{"agent_id": "a-1", "vm": {}}')
    (paths.monit_job / "0000_web.monitrc").write_text("check process web")
    make_root(paths)

    one = StateBackup(paths)
    one.begin()
    paths.settings_cache.write_text('{"agent_id": "a-2"}')  # The agent has read the CPI's settings.
    await one.recover("a-2")

    assert found(paths) == {}
    assert list(paths.monit_job.iterdir()) == []
    assert (paths.bosh / "set_aside/a-1/spec.json").read_text() == content("spec.json", "x")


async def test_own_state_copy_replaces_files_of_another_agent_on_the_root_file_system(paths: Paths) -> None:
    """Another agent's files may be part of the image."""
    fill(paths, "mine")
    await start(paths, "a-1")
    reset_root(paths)
    fill(paths, "theirs")
    paths.settings_cache.write_text('{"agent_id": "a-2"}')

    await start(paths, "a-1")

    assert set(found(paths).values()) == {content(file.path.name, "mine") for file in state_backup.backup_files(paths)}


async def test_new_volume_gets_a_state_copy(paths: Paths) -> None:
    contents = fill(paths)
    await start(paths)
    files.remove_tree(paths.data)
    make_root(paths)

    agent = await start(paths)

    assert not agent.root_is_new
    reset_root(paths)
    await start(paths)
    assert found(paths) == contents


async def test_state_restore_does_not_remove_files_that_the_cpi_has_written(paths: Paths) -> None:
    """The Docker CPI copies update_settings.json into each new container."""
    await start(paths)
    reset_root(paths)
    paths.update_settings.write_text(NEWS)

    await start(paths)

    assert paths.update_settings.read_text() == NEWS
    assert (paths.mirror / "update_settings.json").read_text() == NEWS


async def test_state_from_a_newer_version_is_rejected_and_kept(paths: Paths) -> None:
    await start(paths)
    (paths.run / "web").mkdir()
    for stamp in (paths.stamp, paths.mirror / state_backup.STAMP):
        newer = json.loads(stamp.read_text()) | {"schema": state_backup.SCHEMA + 1, "more": True, "incarnation": "x"}
        before = stamp.read_text()
        stamp.write_text(json.dumps(newer))

        with pytest.raises(BootError, match=f"schema {state_backup.SCHEMA + 1} is of a newer version"):
            StateBackup(paths).begin()

        assert json.loads(stamp.read_text()) == newer
        stamp.write_text(before)
    assert (paths.run / "web").exists()


async def test_state_copy_with_a_broken_stamp_is_set_aside(paths: Paths) -> None:
    """Without a readable stamp, the copy may belong to another agent."""
    fill(paths)
    await start(paths)
    reset_root(paths)
    (paths.mirror / state_backup.STAMP).write_text("{ half")

    await start(paths)

    assert found(paths) == {}
    assert (paths.mirror / "set_aside/unnamed/spec.json").exists()


@pytest.mark.parametrize("damage", ["", None, "{ half", "\0\0\0"])
@pytest.mark.parametrize("whose", ["root", "copy", "both"])
async def test_same_container_is_recognized_without_a_stamp_by_pid_namespace_or_job_process(
    paths: Paths, restart: Restart, whose: str, damage: str | None
) -> None:
    """If one of the two stamps is valid, the PID namespace in it shows that the container is the same. If neither is, a
    job process that is still running is proof enough.
    """
    contents = fill(paths)
    await start(paths)
    (paths.run / "web").mkdir()
    stamps = [paths.stamp] * (whose != "copy") + [paths.mirror / state_backup.STAMP] * (whose != "root")
    for stamp in stamps:
        stamp.unlink() if damage is None else stamp.write_text(damage)

    again = StateBackup(paths)
    again.begin(lambda: whose == "both")
    await again.recover("a-1")

    assert (paths.run / "web").is_dir()
    assert (again.root_is_new, again.is_prepared) == (False, True)
    assert found(paths) == contents
    assert not (paths.mirror / "set_aside").exists()
    restart()
    assert not (await start(paths)).root_is_new  # This shows that the stamps were rewritten.


async def test_new_container_restores_a_state_copy_without_a_stamp(paths: Paths, restart: Restart) -> None:
    """The volume's lease shows that the copy belongs to this agent."""
    contents = fill(paths)
    await start(paths)
    restart()
    reset_root(paths)
    (paths.mirror / state_backup.STAMP).write_text("")

    agent = StateBackup(paths)
    agent.begin(former_holder="a-1")
    await agent.recover("a-1")

    assert agent.root_is_new
    assert found(paths) == contents


@pytest.mark.parametrize("damage", ["", "{ half", "\0\0\0"])
async def test_damaged_state_file_is_restored_from_its_copy(paths: Paths, damage: str) -> None:
    contents = fill(paths)
    await start(paths)
    for path in contents:
        path.write_text(damage)

    await start(paths)

    whole = {paths.stopped_marker} | ({paths.managed_disk, paths.shut_down} if damage == "{ half" else set())
    assert found(paths) == {path: damage if path in whole else text for path, text in contents.items()}


async def test_missing_state_file_is_restored_unless_the_agent_itself_deletes_such_files(paths: Paths) -> None:
    contents = fill(paths)
    await start(paths)
    for path in contents:
        path.unlink()

    await start(paths)

    removed = {paths.tasks, paths.managed_disk, paths.stopped_marker}
    assert found(paths) == {path: text for path, text in contents.items() if path not in removed}


async def test_failed_write_of_the_state_stamp_is_retried(paths: Paths, restart: Restart) -> None:
    paths.stamp.mkdir()
    agent = await start(paths)
    paths.stamp.rmdir()
    await agent.update()
    restart()

    again = await start(paths)

    assert paths.stamp.is_file()
    assert not again.root_is_new


async def test_failed_state_backup_is_retried(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = await start(paths)
    paths.spec.write_text(NEWS)

    def full(*_: object, **__: object) -> None:
        raise files.failed("write", OSError(28, "No space left on device"))

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_atomic", full)
        await agent.update()
    assert not (paths.mirror / "spec.json").exists()

    await agent.update()

    assert (paths.mirror / "spec.json").read_text() == NEWS


async def test_state_update_before_recovery_keeps_the_copy(paths: Paths) -> None:
    """Before recovery, the agent does not know whether the copy belongs to another agent."""
    fill(paths)
    await start(paths)
    reset_root(paths)
    agent = StateBackup(paths)
    agent.begin()

    await agent.update()

    assert (paths.mirror / "spec.json").exists()


async def test_forgetting_the_state_backup_removes_only_its_own_files(paths: Paths) -> None:
    """Files that the Go agent also uses are kept."""
    contents = fill(paths)
    await start(paths)
    paths.supervisor_state.write_text("{}")

    state_backup.forget(paths)

    assert list(paths.mirror.iterdir()) == []
    assert not paths.stamp.exists()
    assert found(paths) == contents


@pytest.mark.attack("a request passes a path or an option as the name of a blob, a blobstore provider or an agent")
@pytest.mark.parametrize("name", ["../../etc", "..", "a/b", "x" * 300])
async def test_hostile_agent_name_cannot_escape_the_backup_directory(paths: Paths, name: str) -> None:
    fill(paths)
    await start(paths, name)

    await start(paths, "a-2")

    assert len([path for path in (paths.bosh / "set_aside").iterdir() if (path / "spec.json").exists()]) == 1
