"""Tests ``agent-shim doctor`` on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_shim.cli import doctor
from agent_shim.cli.commands import main
from agent_shim.core.paths import Paths
from agent_shim.demo import pki
from tests.support.broker import NatsServer


def run_doctor(base: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the doctor. Return its exit code and its JSON report."""
    argv = [sys.executable, "-m", "agent_shim.cli", "doctor", "--json", "-b", str(base), *words]
    done = subprocess.run(argv, capture_output=True, timeout=60, check=False)
    assert done.stderr == b""
    return done.returncode, json.loads(done.stdout)


def finding(report: dict[str, Any], topic: str) -> dict[str, Any]:
    return next(one for one in report["findings"] if one["topic"] == topic)


def write_settings(base: Path, url: str, certificate: str, ca: str = "x", private_key: str = "") -> None:
    """Store settings under ``base``, with the bus address ``url`` and bus credentials."""
    settings = {
        "agent_id": "a1",
        "mbus": url,
        "env": {"bosh": {"mbus": {"cert": {"ca": ca, "certificate": certificate, "private_key": private_key}}}},
    }
    settings["networks"] = {"default": {"type": "manual", "ip": "198.51.100.77", "netmask": "255.255.255.0"}}
    (base / "bosh").mkdir()
    (base / "bosh/settings.json").write_text(json.dumps(settings))


def test_doctor_checks_everything_and_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    before = sorted(tmp_path.rglob("*"))

    code, report = run_doctor(tmp_path)

    assert code == int(any(one["verdict"] == "wrong" for one in report["findings"]))
    assert report["clean"] == (code == 0)
    topics = {one["topic"] for one in report["findings"]}
    assert {"user", "capabilities", "mounts", "bpm isolation", "cgroups", "disk space", "clock", "DNS"} <= topics
    assert {"addresses", "inotify", "kernel", "port 9190", "process 1", str(tmp_path / "data")} <= topics
    assert not [one for one in report["findings"] if "this check failed" in one["found"]]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.filterwarnings("ignore:Attribute's length")
def test_doctor_reports_unreachable_bus_expired_certificate_and_missing_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    write_settings(tmp_path, f"nats://127.0.0.1:{port}", pki.Authority().agent("a1", valid=pki.EXPIRED).certificate)

    code, report = run_doctor(tmp_path)

    assert code == 1
    assert finding(report, "bus")["found"] == f"127.0.0.1:{port}: Connection refused"
    assert finding(report, "bus certificate")["found"].startswith("expired")
    assert finding(report, "addresses")["found"] == "no interface has 198.51.100.77 (network default of the settings)"


async def test_doctor_bus_probe_causes_no_error_in_the_bus_server_log(tmp_path: Path) -> None:
    """The doctor completes the TLS handshake but does not log in, so the server logs no error."""
    async with NatsServer(tmp_path / "bus") as server:
        cert = server.mbus("a1")
        write_settings(tmp_path, server.url, cert.certificate, ca=cert.ca, private_key=cert.private_key)

        _, report = await asyncio.to_thread(run_doctor, tmp_path)

        assert finding(report, "bus") == finding(report, "bus") | {"verdict": "good"}
    assert "[ERR]" not in server.log.read_text()


def test_doctor_reports_a_port_used_by_another_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tmp_path / "agent.json"
        config.write_text(json.dumps({"AgentShim": {"http": f"127.0.0.1:{port}"}}))

        code, report = run_doctor(tmp_path, "-C", str(config))

    assert code == 1
    assert finding(report, f"port {port}")["found"] == "metrics and probes: another program listens there"


def test_doctor_reports_a_missing_configuration_file(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "agent_shim.cli", "doctor", "-b", str(tmp_path), "-C", str(tmp_path / "none")]
    done = subprocess.run(argv, capture_output=True, timeout=60, check=False, env=dict(os.environ))

    assert done.returncode == 78
    assert done.stderr.decode() == (
        f"agent-shim: cannot read the agent's configuration from {tmp_path}/none: No such file or directory\n"
    )


@pytest.mark.attack("a reader finds secrets in the log")
@pytest.mark.parametrize(
    "url",
    [
        "nats://user:CANARY@127.0.0.1:1",
        "nats://user:CANARY/more@127.0.0.1:1",
        "nats://user:#CANARY@127.0.0.1:1",
        "nats://user:4222?CANARY@127.0.0.1:1",
        "nats://user:CANARY@127.0.0.1:99999",
        "nats://user:CANARY@[::1",
        "nats://user:CANARY@[\u2100]:1",
        "nats://user:CANARY@:1",
        f"nats://user:CANARY@{'x' * 70}..invalid:1",
        "nats://user:CANARY@\x1b]0;CANARY\x07\x9b2J\u202e:1",
        "https://user:CANARY@0.0.0.0:1",
        "\ud800nats://user:CANARY@127.0.0.1:1",
    ],
)
def test_doctor_removes_secrets_and_control_characters_from_invalid_addresses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    write_settings(tmp_path, url, "none")
    report = doctor.examine(Paths(tmp_path), None)
    monkeypatch.setattr(doctor, "examine", lambda *_: report)
    for form in ([], ["--json"]):
        assert main(["doctor", *form, "-b", str(tmp_path)]) in (0, 1)
        out, err = capsys.readouterr()

        assert err == ""
        assert "addresses" in out
        assert "CANARY" not in out.replace("0;CANARY", "")
        assert [each for each in out if not each.isprintable() and each != "\n"] == []
