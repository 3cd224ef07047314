"""Tests handing an instance back to the Go agent and monit: its processes keep running, and files are kept, changed or
removed as these programs require.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.errors import HostError
from agent_shim.core.paths import Paths
from agent_shim.daemon.handback import hand_back
from agent_shim.host import files, process
from agent_shim.services import state_backup
from agent_shim.services.disks import markers
from agent_shim.services.disks.markers import Marker
from tests.support.instance import AGENT, RunningAgent


async def test_handback_keeps_jobs_running_and_writes_their_monit_files(instance: RunningAgent) -> None:
    before = await instance.deploy(2, 1)
    for _ in range(2):
        kept = {path.name: path.read_bytes() for path in (instance.base / "bosh").glob("*s*.json")}
        await instance.stop_agent()

        status, output = await instance.execute("handback")

        assert status == 0
        for job, pid in before.items():
            assert f"{job} keeps running with pid {pid}" in output
            assert Path(f"/proc/{pid}").exists()
        monit = instance.base / "monit"
        assert sorted(path.name for path in (monit / "job").iterdir()) == ["0000_job1.monitrc", "0001_job0.monitrc"]
        assert (monit / "job/0001_job0.monitrc").read_text() == (instance.base / "jobs/job0/monit").read_text()
        assert not (monit / "stopped").exists()
        left = {path.name: path.read_bytes() for path in (instance.base / "bosh").glob("*s*.json")}
        assert left == {name: raw for name, raw in kept.items() if name != "agent_shim.json"}
        assert {path.name for path in (instance.base / "data/bosh").iterdir()} <= {"lease.json"}
        assert not (instance.base / "data/sys/run/agent_shim").exists()

        await instance.start_agent()
        await instance.until_running()
        assert instance.pids() == before
        assert {job: len(pids) for job, pids in instance.starts().items()} == {"job0": 1, "job1": 1}
        names = [process["name"] for process in (await instance.director.value(AGENT, "get_state"))["processes"]]
        assert names == ["job0", "job1"]


async def test_handback_fails_if_it_cannot_write_the_monit_files(
    instance: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without these files, monit would not supervise the jobs."""
    await instance.deploy(1)
    await instance.stop_agent()
    real = files.write_atomic

    def write(path: Path, *arguments: Any, **options: Any) -> None:
        if path.suffix == ".monitrc":
            raise HostError(errno.ENOSPC, f"cannot write {path}: No space left on device")
        real(path, *arguments, **options)

    monkeypatch.setattr(files, "write_atomic", write)
    with pytest.raises(HostError, match="cannot write .*0000_job0.monitrc: No space left on device"):
        hand_back(Paths(instance.base))
    assert (instance.base / "bosh/agent_shim.json").exists()


@pytest.mark.slow
async def test_handback_writes_no_monit_files_for_stopped_jobs(instance: RunningAgent) -> None:
    """monit would start the jobs whose monit files it finds."""
    await instance.deploy(2, 1)
    await instance.director.run(AGENT, "stop")
    await instance.stop_agent()

    _, output = await instance.execute("handback")

    assert "the jobs are stopped" in output
    assert list((instance.base / "monit/job").iterdir()) == []
    assert (instance.base / "monit/stopped").exists()
    await instance.start_agent()
    assert (await instance.director.value(AGENT, "get_state"))["job_state"] == "stopped"
    assert instance.pids() == {}


@pytest.mark.slow
async def test_handback_is_refused_while_an_agent_runs_and_reports_what_monit_would_start(
    instance: RunningAgent,
) -> None:
    before = await instance.deploy(3)
    status, output = await instance.execute("handback")
    assert (status, "cannot hand back: another agent, process" in output) == (3, True)
    assert (instance.base / "bosh/agent_shim.json").exists()
    await instance.stop_agent()
    victim = process.adopt(before["job0"])
    assert victim is not None
    await victim.terminate(1)
    pidfile = instance.base / "data/sys/run/job1/job1.pid"
    text = pidfile.read_text()
    pidfile.unlink()

    _, output = await instance.execute("handback")
    pidfile.write_text(text)

    assert "job0 does not run: monit will start it" in output
    assert f"job1 runs with pid {before['job1']}, not the one in {pidfile}: monit will start a second one" in output
    assert f"job2 keeps running with pid {before['job2']}" in output


@pytest.mark.slow
async def test_handback_without_an_earlier_agent_changes_nothing_and_can_be_repeated(instance: RunningAgent) -> None:
    instance.base.mkdir(exist_ok=True)
    before = sorted(instance.base.iterdir())

    status, output = await instance.execute("handback")
    assert (status, "no agent has run below" in output) == (0, True)
    assert sorted(instance.base.iterdir()) == before
    (instance.base / "bosh").mkdir()
    for _ in range(2):
        status, output = await instance.execute("handback")
        assert (status, "no jobs were supervised" in output) == (0, True)


def test_handback_names_the_disk_on_the_store_if_no_path_is_known(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "vcap")
    for path in (paths.bosh, paths.store):
        path.mkdir(parents=True)
    markers.write(paths.store, Marker("disk-2", "store"))
    paths.settings_cache.write_text('{"agent_id": "a-1", "disks": {"persistent": {"disk-1": "", "disk-2": ""}}}')

    report = hand_back(paths)

    assert f"disk disk-2: our marker is removed; {paths.managed_disk} says it is the store" in report
    assert not any("disk-1" in line for line in report)


def test_handback_removes_disk_markers(tmp_path: Path) -> None:
    """The Go agent would copy the markers to other disks."""
    paths = Paths(tmp_path / "vcap")
    paths.bosh.mkdir(parents=True)
    store, other = tmp_path / "disk-1", tmp_path / "disk-2"
    for volume in (store, other):
        volume.mkdir()
        (volume / "data").write_text("x")
    markers.write(store, Marker("disk-1", "store"))
    paths.managed_disk.write_text("disk-1")
    paths.settings_cache.write_text(
        f'{{"agent_id": "a-1", "disks": {{"persistent": {{"disk-1": "{store}", "disk-2": {{"path": "{other}"}}}}}}}}'
    )
    files.swap_link(store, paths.store)

    said = hand_back(paths)

    assert sorted(path.name for path in store.iterdir()) == ["data"]
    assert f"disk disk-1: our marker is removed; {paths.managed_disk} says it is the store" in said
    assert paths.managed_disk.read_text() == "disk-1"
    assert any("is a link to the disk" in line for line in said)
    assert not any("disk-2" in line for line in said)


@pytest.mark.parametrize(("name", "what"), [("supervisor_state", "jobs are"), ("settings_cache", "disks are")])
def test_handback_is_refused_if_a_state_file_is_damaged(tmp_path: Path, name: str, what: str) -> None:
    """If a damaged file were treated as empty, the handback would remove the state backup but leave the markers
    on the disks.
    """
    paths = Paths(tmp_path / "vcap")
    paths.bosh.mkdir(parents=True)
    paths.mirror.mkdir(parents=True)
    damaged = getattr(paths, name)
    damaged.write_text('{"sche')
    kept = [damaged, paths.mirror / state_backup.STAMP, paths.mirror / state_backup.SET_ASIDE]
    for path in kept[1:]:
        path.write_text("{}")

    with pytest.raises(HostError, match=f"cannot hand back: .*the {what} not known.*start the agent once"):
        hand_back(paths)

    assert all(path.exists() for path in kept)


def test_handback_removes_state_left_by_previous_agents(tmp_path: Path) -> None:
    """The state may contain secrets, and no agent would ever use it again."""
    paths = Paths(tmp_path / "vcap")
    (paths.mirror / state_backup.SET_ASIDE / "a-0").mkdir(parents=True)
    (paths.mirror / state_backup.SET_ASIDE / "a-0/update_settings.json").write_text("secret")
    paths.shut_down.parent.mkdir()
    paths.shut_down.write_text("a-1")
    paths.former_mbus.write_text("{}")

    hand_back(paths)

    assert list(paths.mirror.iterdir()) == []
    assert not paths.shut_down.exists()
    assert not paths.former_mbus.exists()
