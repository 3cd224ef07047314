"""Tests the switch from Debian's monit to this agent and back, during which the jobs' processes keep running."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.go_agent import (
    NAMES,
    TASK,
    alive,
    leave_as_the_go_agent,
    start_monit,
    starts,
    until_monit_has,
    write_all_state_files,
)
from tests.support.machine import Machine
from tests.support.pod import PodInstance

pytestmark = pytest.mark.root


@pytest.fixture
def pod(pod: PodInstance) -> PodInstance:
    pod.keeps_root = True
    pod.start_container()
    return pod


async def test_takeover_from_monit_and_back_restarts_no_process(pod: PodInstance) -> None:
    """If a process dies while no supervisor is running, the agent must restart only this process."""
    machine = pod.machine
    leave_as_the_go_agent(machine)
    monit = start_monit(machine)
    await until_monit_has(machine, len(NAMES))
    before = starts(machine)
    assert [len(pids) for pids in before.values()] == [1, 1, 1]

    for _ in range(2):
        machine.run("kill $(cat /var/vcap/monit/monit.pid)")
        monit.wait()
        await pod.start_agent()
        state = await pod.until("running")
        assert [process["name"] for process in state["processes"]] == list(NAMES)

        pod.end_agent()
        said = machine.run(f"{sys.executable} -m agent_shim.cli handback")
        kept = [line for line in said.splitlines() if " keeps running with pid " in line]
        assert sorted(line.partition(" keeps ")[0] for line in kept) == sorted(NAMES)
        monit = start_monit(machine)
        await until_monit_has(machine, len(NAMES))
        assert starts(machine) == before
        assert alive(machine, before)
    machine.run("kill $(cat /var/vcap/monit/monit.pid)")
    monit.wait()

    machine.run(f"kill -9 {before['web'][0]}")
    await pod.start_agent()
    await pod.until("running")
    after = starts(machine)
    assert [len(pids) for pids in after.values()] == [2, 1, 1]
    assert alive(machine, after)


async def test_jobs_stopped_by_the_go_agent_stay_stopped(pod: PodInstance) -> None:
    machine = pod.machine
    leave_as_the_go_agent(machine)
    (machine.vcap / "monit/stopped").touch()
    await pod.start_agent()

    state = await pod.until("stopped")

    assert [process["state"] for process in state["processes"]] == ["unknown"] * 3
    assert starts(machine) == {name: [] for name in NAMES}
    await pod.run("start")
    await pod.until("running")


async def test_takeover_uses_the_go_agents_stored_state(pod: PodInstance) -> None:
    """The Go agent's state consists of the spec, the disk, an unfinished task, and settings from the Director that
    extend those from the CPI. A handback leaves the same files.
    """
    pod.kill()
    pod.attach("disk-1")
    (pod.volume("disk-1") / "data").write_text("precious")
    pod.start_container()
    machine = pod.machine
    leave_as_the_go_agent(machine)
    write_all_state_files(machine, "disk-1")
    before = state_files(machine)

    await pod.start_agent()

    state = await pod.until("running")
    assert (state["deployment"], state["job"]["name"]) == ("dep", "group")
    assert await pod.run("list_disk") == ["disk-1"]
    assert (machine.vcap / "store/data").read_text() == "precious"
    assert await pod.run("get_task", TASK) == "ok"

    pod.end_agent()
    said = machine.run(f"{sys.executable} -m agent_shim.cli handback")
    assert "disk disk-1: our marker is removed; /var/vcap/bosh/managed_disk_settings.json says it is the store" in said
    after = state_files(machine)
    del before["tasks.json"]  # The agent has completed the task, so the file is not needed any more.
    assert json.loads(after.pop("update_settings.json")).keys() == json.loads(before.pop("update_settings.json")).keys()
    assert json.loads(after.pop("settings.json"))["agent_id"] == json.loads(before.pop("settings.json"))["agent_id"]
    assert after == before
    assert not (pod.volume("disk-1") / ".agent_shim").exists()
    assert [path.name for path in (machine.vcap / "data/bosh").iterdir()] == ["lease.json"]


def state_files(machine: Machine) -> dict[str, str]:
    """Return the contents of the files below ``bosh`` that an agent writes, keyed by relative path."""
    place = machine.vcap / "bosh"
    found = {str(path.relative_to(place)): path for path in place.rglob("*") if path.is_file()}
    config = {"agent.json", "warden-cpi-agent-env.json", "agent_shim.lock", "log/current"}
    return {name: path.read_text() for name, path in found.items() if name not in config and "disks/" not in name}
