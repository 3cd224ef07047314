"""Tests that each value in the metrics and in the status comes from the right source."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from agent_shim.bulk import workers
from agent_shim.core import keep_running
from agent_shim.core.settings import Mbus
from agent_shim.core.spec import ApplySpec
from agent_shim.daemon import status_report
from agent_shim.daemon.runtime import Runtime
from agent_shim.supervisor import monit_api
from agent_shim.supervisor.history import Happening


def live(tmp_path: Path, **others: Any) -> Runtime:
    """Return a runtime in which each figure has a different value so that the tests notice mixed-up sources."""
    mbus = Mbus(("nats://127.0.0.1:1",), "ca", "certificate", "key")
    process = SimpleNamespace(name="web", state="running")
    services = [SimpleNamespace(process=process, pid=0, faults=[], state="running", last_exit="")]
    agent = SimpleNamespace(
        tasks=SimpleNamespace(running=object(), waiting=2),
        supervisor=SimpleNamespace(
            services=lambda: services, job_state=lambda: "running", events=lambda name: [Happening(7.0, f"{name} up")]
        ),
        vitals=SimpleNamespace(figures=lambda: "figures"),
        spec=SimpleNamespace(current=ApplySpec(deployment="dep", name="group", index=3, id="an-id", az="z4")),
        disks=SimpleNamespace(progress=SimpleNamespace(share=0.5), is_mounted=False),
        paths=SimpleNamespace(etc=tmp_path, bosh_etc=tmp_path),
    )
    made = {
        "phase": "running",
        "agent": agent,
        "bus": SimpleNamespace(mbus=mbus, is_connected=True, stats="stats"),
        "heartbeat": SimpleNamespace(sent_at=None),
        "alerts": SimpleNamespace(sent=11, dropped=12, collapsed=13),
        "firewall": SimpleNamespace(obstacle=""),
        "address_watch": SimpleNamespace(missing={"a": "", "b": "", "c": "", "d": "", "e": ""}),
        "certificate_watch": SimpleNamespace(ends={"client": 7.0}),
        "standalone": None,
        "job_recovery": SimpleNamespace(obstacle=""),
    }
    return cast("Runtime", SimpleNamespace(**made | others))


def test_metrics_readings_contain_the_values_from_every_component(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "os-release").write_text('PRETTY_NAME="Debian GNU/Linux 12"\nID=debian\nVERSION_CODENAME=bookworm\n')
    (tmp_path / "stemcell_version").write_text("1.2\n")
    blobs = SimpleNamespace(counts=Counter({("in", "done"): 21}), sizes=Counter({"in": 22}))
    monkeypatch.setattr(workers, "transfers", blobs)
    monkeypatch.setattr(keep_running, "failures", {"rules": 23})

    found: Any = status_report.readings(live(tmp_path))

    assert (found.bus.connected, found.bus.heartbeat_age, found.bus.stats) == (True, None, "stats")
    assert found.alerts == {"sent": 11, "dropped": 12, "collapsed": 13}
    assert (found.tasks_running, found.tasks_waiting) == (1, 2)
    assert (found.figures, found.stemcell) == ("figures", ("debian-bookworm", "1.2"))
    assert found.instance == {"deployment": "dep", "group": "group", "index": "3", "id": "an-id", "az": "z4"}
    assert [each.process.name for each in found.processes] == ["web"]
    assert found.failures == {"rules": 23}
    assert (found.firewall_enforced, found.addresses_missing, found.certificates) == (True, 5, {"client": 7.0})
    assert (found.disk.is_mounted, found.disk.is_migrating, found.disk.migrated) == (False, True, 0.5)
    assert (found.blobs, found.blob_bytes) == ({("in", "done"): 21}, {"in": 22})


def live_with_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the runtime from ``live``, with additional members that the status needs."""
    monkeypatch.setattr(monit_api, "describe", lambda service: {"name": service.process.name})
    made: Any = live(tmp_path)
    made.bus.stats = SimpleNamespace(last_error="reset")
    made.heartbeat.sent_at = time.monotonic() - 7.5
    made.certificate_watch.warnings = ["it ends soon"]
    made.address_watch.missing = {"10.0.0.1": "default"}
    agent = made.agent
    agent.settings = SimpleNamespace(current=SimpleNamespace(agent_id="a-1", mbus=made.bus.mbus))
    agent.tasks.running = SimpleNamespace(method="apply", progress="3 of 4", begun_at=time.monotonic() - 3605.5)
    agent.disks = SimpleNamespace(progress="3 MiB", problem=AsyncMock(return_value=""), is_mounted=True)
    agent.vitals.sample = AsyncMock(return_value={"load": ["1"]})
    isolation = SimpleNamespace(_asdict=lambda: {"level": 2})
    agent.supervisor.bpm = SimpleNamespace(isolation=AsyncMock(return_value=isolation))
    return made


async def test_status_values_come_from_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await status_report.status(live_with_status(tmp_path, monkeypatch), "running", 61)

    del found["version"]
    # On a busy machine, the heartbeat's age and the task's duration may be larger.
    assert 7 <= found["bus"].pop("heartbeat_secs") < 3605 <= found.pop("task_secs")
    assert found == {
        "phase": "running",
        "uptime_secs": 61,
        "agent_id": "a-1",
        "bus": {"is_used": True, "connected": True, "error": "reset"},
        "deployment": "dep",
        "instance": "group/an-id",
        "job_state": "running",
        "task": "apply",
        "task_progress": "3 of 4",
        "disk": "migration, 3 MiB",
        "warnings": ["no interface has the address 10.0.0.1 (default)", "it ends soon"],
        "tasks_waiting": 2,
        "vitals": {"load": ["1"]},
        "firewall": {"enforced": True, "why": ""},
        "bpm": {"level": 2},
        "processes": [{"name": "web", "events": [{"at": 7.0, "text": "web up", "count": 1}]}],
    }


@pytest.mark.parametrize(
    ("problem", "is_mounted", "disk"),
    [("", True, "mounted"), ("", False, "none"), ("disk a is busy", True, "disk a is busy")],
)
async def test_status_without_a_task_shows_disk_firewall_and_credential_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str, is_mounted: bool, disk: str
) -> None:
    made = live_with_status(tmp_path, monkeypatch)
    made.heartbeat.sent_at = None
    made.agent.tasks.running = None
    made.agent.spec.current = ApplySpec()
    made.agent.disks = SimpleNamespace(progress=None, problem=AsyncMock(return_value=problem), is_mounted=is_mounted)
    made.agent.settings.current.mbus = Mbus(("nats://127.0.0.1:1",), "ca", "another", "key")
    made.firewall.obstacle = "no nft"

    found = await status_report.status(made, "running", 61)

    assert (found["bus"]["heartbeat_secs"], found["instance"]) == (None, "")
    assert found["firewall"] == {"enforced": False, "why": "no nft"}
    assert (found["task"], found["task_progress"], found["task_secs"], found["disk"]) == ("", "", 0, disk)
    assert "the bus cannot be reached with the credentials in the settings" in " ".join(found["warnings"])
    made.bus.is_connected = False
    assert "credentials" not in " ".join((await status_report.status(made, "running", 61))["warnings"])


def test_metrics_of_an_idle_agent_show_no_task_or_migration(tmp_path: Path) -> None:
    idle = live(tmp_path, firewall=SimpleNamespace(obstacle="no nft"))
    idle.agent.tasks.running = None
    cast("Any", idle.agent).disks = SimpleNamespace(progress=None, is_mounted=True)

    found = status_report.readings(idle)

    assert (found.tasks_running, found.firewall_enforced) == (0, False)
    assert (found.disk.is_mounted, found.disk.is_migrating, found.disk.migrated) == (True, False, 0.0)


def test_readiness_shows_no_job_output(tmp_path: Path) -> None:
    """Anyone may query the readiness, and the output of a job's scripts may contain secrets."""
    names = "pre-start: 1 of 2 pre-start scripts failed. Failed Jobs: a-b. Successful Jobs: c."
    alone = SimpleNamespace(obstacle=f"{names} a-b: token: secret", failure="x")

    assert status_report.readiness(live(tmp_path, standalone=alone), "jobs") == (False, names)
    assert status_report.readiness(live(tmp_path, standalone=SimpleNamespace(obstacle=names)), "jobs")[1] == names


@pytest.mark.parametrize(
    ("others", "is_ready", "state", "is_blocked"),
    [
        ({}, True, "running", False),
        ({"job_recovery": SimpleNamespace(obstacle="no disk")}, True, "running", True),
        ({"standalone": SimpleNamespace(obstacle="deploying", failure="")}, False, "starting", False),
        ({"standalone": SimpleNamespace(obstacle="exit 3", failure="exit 3")}, False, "failing", True),
        ({"standalone": SimpleNamespace(obstacle="", failure="")}, True, "running", False),
    ],
)
def test_instance_without_deployed_jobs_is_not_running(
    tmp_path: Path, others: dict[str, Any], is_ready: bool, state: str, is_blocked: bool
) -> None:
    found: Any = status_report.readings(live(tmp_path, **others))

    assert (found.is_ready, found.job_state, found.jobs_blocked) == (is_ready, state, is_blocked)


@pytest.mark.parametrize(
    ("level", "others", "answer"),
    [
        ("jobs", {}, (True, "jobs are running")),
        ("jobs", {"phase": "booting"}, (False, "booting")),
        ("boot", {"bus": SimpleNamespace(is_connected=False)}, (True, "booted")),
        ("agent", {"bus": SimpleNamespace(is_connected=False)}, (False, "not connected to the message bus")),
        ("agent", {}, (True, "connected")),
        ("jobs", {"standalone": SimpleNamespace(obstacle="no jobs yet")}, (False, "no jobs yet")),
    ],
)
def test_readiness_has_three_levels(
    tmp_path: Path, level: str, others: dict[str, Any], answer: tuple[bool, str]
) -> None:
    assert status_report.readiness(live(tmp_path, **others), level) == answer


def test_readiness_lists_jobs_that_are_failing(tmp_path: Path) -> None:
    made: Any = live(tmp_path)
    dead = SimpleNamespace(
        process=SimpleNamespace(name="db", state="failing"), pid=0, faults=[], state="failing", last_exit="exit 3"
    )
    made.agent.supervisor = SimpleNamespace(
        services=lambda: [*live(tmp_path).agent.supervisor.services(), dead], job_state=lambda: "failing"
    )

    assert status_report.readiness(made, "jobs") == (False, "jobs are failing: db (failing after exit 3)")


def test_readiness_does_not_read_process_figures(tmp_path: Path) -> None:
    """Process figures require a scan of all processes. Anyone who can reach the endpoint could otherwise cause any
    number of such scans.
    """
    made = live(tmp_path)
    cast("Any", made.agent).supervisor = SimpleNamespace(job_state=lambda: "running")

    assert status_report.readiness(made, "jobs") == (True, "jobs are running")
