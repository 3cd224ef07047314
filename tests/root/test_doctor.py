"""Tests what the doctor reports in containers with all, some and no privileges."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from agent_shim.cli import doctor
from agent_shim.core.paths import Paths
from agent_shim.edges import control_client
from tests.support.machine import CODE, Machine

pytestmark = pytest.mark.root

FEW = "chown,dac_override,fowner,setuid,setgid,kill,net_bind_service,sys_chroot,audit_write"

THIEF = """
import socket, sys
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


def examined(box: Machine, *prefix: str) -> dict[str, Any]:
    argv = [*prefix, sys.executable, "-m", "agent_shim.cli", "doctor", "--json"]
    done = box.popen(argv, cwd=CODE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = done.communicate(timeout=60)
    assert err == b""
    report: dict[str, Any] = json.loads(out)
    return report


def verdict(report: dict[str, Any], topic: str) -> tuple[str, str]:
    found = next(one for one in report["findings"] if one["topic"] == topic)
    return found["verdict"], found["found"]


def with_capabilities(names: str) -> tuple[str, ...]:
    wanted = ",".join(f"+{name}" for name in names.split(","))
    return ("setpriv", f"--bounding-set=-all,{wanted}", "--inh-caps=-all")


def test_doctor_reports_root_with_all_capabilities_as_privileged(box: Machine) -> None:
    report = examined(box)

    assert report["tier"] == "privileged"
    assert verdict(report, "user") == ("good", "root: can run jobs as another user")
    assert verdict(report, "mounts")[0] == "good"


def test_doctor_reports_limited_mounts_but_usable_jobs_with_few_capabilities(box: Machine) -> None:
    report = examined(box, *with_capabilities(FEW))

    assert report["tier"] == "root with few capabilities"
    assert verdict(report, "user")[0] == "good"
    assert verdict(report, "mounts") == (
        "limited",
        "bind mount: Operation not permitted; tmpfs: Operation not permitted",
    )
    assert verdict(report, "capabilities")[0] == "limited"
    assert verdict(report, "ports below 1024")[0] == "good"


def test_doctor_reports_that_root_without_capabilities_cannot_run_jobs(box: Machine) -> None:
    report = examined(box, "setpriv", "--bounding-set=-all", "--inh-caps=-all")

    assert not report["clean"]
    assert verdict(report, "user")[0] == "wrong"
    assert verdict(report, "capabilities")[0] == "wrong"


def test_doctor_reports_that_vcap_lacks_write_access(box: Machine) -> None:
    box.run("install -d -o root -m 755 /var/vcap/data")

    report = examined(box, "setpriv", "--reuid=vcap", "--regid=vcap", "--clear-groups", "--no-new-privs")

    assert report["tier"] == "restricted: no root"
    assert verdict(report, "confinement")[1].startswith("no new privileges")
    assert verdict(report, "/var/vcap/data") == ("wrong", "cannot be written: Permission denied")
    assert verdict(report, "bpm isolation")[0] == "good"


@pytest.mark.attack("a job listens on the port for metrics or sshd")
def test_doctor_reports_another_process_on_the_agents_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process uses the port for metrics and probes, the agent runs without its HTTP server."""
    thief = subprocess.Popen(
        ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-c", THIEF], stdin=PIPE, stdout=PIPE, text=True
    )
    with thief:
        assert thief.stdout is not None
        port = int(thief.stdout.readline())
        (tmp_path / "agent.json").write_text(json.dumps({"AgentShim": {"http": f"0.0.0.0:{port}"}}))
        monkeypatch.setattr(control_client, "ask", lambda *_, **__: {"jobs": []})

        report = doctor.examine(Paths(tmp_path), tmp_path / "agent.json")
        thief.communicate()

    found = next(one for one in report.findings if one.topic == f"port {port}")
    assert (found.verdict, found.found) == ("wrong", "metrics and probes: another program listens there")
