"""Tests this project's Prometheus files with a real Prometheus (Debian package ``prometheus``).

promtool accepts the files, and the alerting rules fire for real agents.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_shim.core.paths import Paths
from agent_shim.demo.pki import Authority
from agent_shim.edges.metrics import Metrics
from agent_shim.host import process
from agent_shim.host.process import Process
from tests.support import jobs
from tests.support.ports import free_port
from tests.unit.edges.test_metrics import FULL

pytestmark = pytest.mark.slow

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Return a directory with a short path, because a socket path can have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="scraped-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def tool(name: str) -> str:
    """Return the path of a program in the Debian package."""
    found = shutil.which(name)
    assert found, f"{name} is missing: ./dev ci installs it (Debian package prometheus)"
    return found


def checked(*words: str, given: bytes = b"") -> str:
    done = subprocess.run([tool("promtool"), *words], input=given, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return (done.stdout + done.stderr).decode()


def test_promtool_accepts_the_metrics() -> None:
    made = Metrics(lambda: FULL, ["ping"])
    made.action_done("ping", "done", 0.001)

    assert checked("check", "metrics", given=asyncio.run(made.render())) == ""


def test_alerting_rules_pass_their_promtool_tests() -> None:
    assert "SUCCESS" in checked("test", "rules", str(DEPLOY / "prometheus/rules_test.yaml"))
    assert "SUCCESS" in checked("check", "config", str(DEPLOY / "prometheus/prometheus.yaml"))


def test_scrape_config_for_bosh_exporter_has_one_target_per_agent(scratch: Path) -> None:
    """bosh_exporter lists an address once for each process, and includes other deployments' addresses."""
    for name in ("rules.yaml", "prometheus-bosh.yaml"):
        shutil.copy(DEPLOY / "prometheus" / name, scratch)
    found = [("mine", "web"), ("mine", "db"), ("other", "web")]
    groups = [
        {
            "targets": ["10.0.0.1"] if deployment == "mine" else ["10.0.0.2"],
            "labels": {"__meta_bosh_deployment": deployment, "__meta_bosh_job_process_name": process_name},
        }
        for deployment, process_name in found
    ]
    (scratch / "bosh_target_groups.json").write_text(json.dumps(groups))
    config = str(scratch / "prometheus-bosh.yaml")

    assert "SUCCESS" in checked("check", "config", config)
    answer = checked("check", "service-discovery", "--timeout=10s", config, "agent-shim")
    kept = {
        tuple(sorted(one["labels"].items())) for one in json.JSONDecoder().raw_decode(answer[answer.index("[") :])[0]
    }
    # Compare sets of labels, because Prometheus scrapes targets with the same labels only once.
    (target,) = (dict(labels) for labels in kept - {()})
    assert target.items() >= {"instance": "10.0.0.1:9190", "job": "agent-shim", "bosh_deployment": "mine"}.items()


@dataclass
class ScrapedAgent:
    """A running agent whose metrics are available at ``port``."""

    paths: Paths
    port: int
    process: Process


@asynccontextmanager
async def agent(scratch: Path, config: dict[str, Any], *prefix: str) -> AsyncIterator[ScrapedAgent]:
    """Run an agent whose files are in ``scratch``. When the block ends, the agent and its jobs are stopped."""
    scratch.mkdir(exist_ok=True)
    port = free_port()
    written = scratch / "agent.json"
    written.write_text(
        json.dumps({**config, "AgentShim": {"http": f"127.0.0.1:{port}", **config.get("AgentShim", {})}})
    )
    base = scratch / "vcap"
    (base / "data").mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "agent_shim.cli"]
    log = scratch / "agent.log"
    running = process.spawn(
        [*prefix, *argv, "run", "-C", str(written), "-b", str(base)], env=dict(os.environ), stdout=log, stderr=log
    )
    try:
        yield ScrapedAgent(Paths(base), port, running)
    finally:
        drain = [*argv, "drain", "--timeout", "5", "-b", str(base)]
        if prefix:
            drain = ["nsenter", "-t", str(running.pid), "-m", "-U", "--preserve-credentials", *drain]
        await process.spawn(drain, env=dict(os.environ), stdout=log, stderr=log).wait()
        await running.terminate(10)


def write_jobs(scratch: Path, files: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Write the jobs in ``files``. Return the configuration of an agent that deploys them."""
    for job, content in files.items():
        for name, text in content.items():
            path = scratch / "rendered/jobs" / job / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.lstrip("\n"))
    return {"AgentShim": {"spec": str(scratch / "rendered")}}


@asynccontextmanager
async def prometheus(scratch: Path, targets: list[int]) -> AsyncIterator[int]:
    """Run Prometheus with the project's rules, but with shorter waiting times and one scrape per second.

    Yield its port.
    """
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "2s"
    (scratch / "rules.yaml").write_text(yaml.safe_dump(rules))
    scrape = {
        "job_name": "agent-shim",
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in targets]}],
    }
    config = {"rule_files": [str(scratch / "rules.yaml")], "scrape_configs": [scrape]}
    (scratch / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    argv = [
        tool("prometheus"),
        f"--config.file={scratch / 'prometheus.yaml'}",
        f"--storage.tsdb.path={scratch / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = scratch / "prometheus.log"
    server = process.spawn(argv, env=dict(os.environ), stdout=log, stderr=log)
    try:
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(get, port, "/-/ready"):
                await asyncio.sleep(0.1)
        yield port
    finally:
        await server.terminate(20)


def get(port: int, path: str) -> bytes:
    """Return a server's response, or an empty value if nothing listens on the port."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            content: bytes = answer.read()
            return content
    except OSError:
        return b""


async def firing_alerts(port: int) -> set[tuple[str, str]]:
    """Return the firing alerts, each with its name and the process, disk or certificate that it concerns."""
    answer = json.loads(await asyncio.to_thread(get, port, "/api/v1/alerts") or "{}")
    return {
        (one["labels"]["alertname"], next((one["labels"][name] for name in ABOUT if name in one["labels"]), ""))
        for one in answer.get("data", {}).get("alerts", [])
        if one["state"] == "firing"
    }


ABOUT = ("process", "disk", "certificate")


def in_own_mounts() -> list[str]:
    """Return a command prefix that runs a program in a private mount namespace."""
    return ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]


async def until(port: int, wanted: tuple[str, str]) -> None:
    seen: set[tuple[str, str]] = set()
    try:
        async with asyncio.timeout(60):
            while wanted not in (seen := await firing_alerts(port)):
                await asyncio.sleep(0.5)
    except TimeoutError:
        pytest.fail(f"{wanted} does not fire, but {seen}")


async def test_alerting_rules_fire_for_crash_loops_full_disks_and_old_certificates(scratch: Path) -> None:
    """Other rules may fire only if they concern the same crash loop or disk."""
    crashing, filling, ending = scratch / "crashing", scratch / "filling", scratch / "ending"
    dies = jobs.process(Paths(crashing / "vcap"), "dies", "echo $$ >$pidfile; sleep 0.3; exit 3", "true")
    fills = jobs.sleeper(Paths(filling / "vcap"), "fills")
    fills["bin/pre-start"] = f"#!/bin/sh\nhead -c 15900000 /dev/zero >{filling}/vcap/data/big\n"
    pair = Authority("bosh", bits=2048).server("agent", valid=(-3600.0, 86400.0))
    settings = {
        "agent_id": "ending",
        "mbus": f"https://mbus:secret@127.0.0.1:{free_port()}",
        "env": {
            "bosh": {"mbus": {"cert": {"ca": "", "certificate": pair.certificate, "private_key": pair.private_key}}}
        },
    }
    ending.mkdir()
    (ending / "settings.json").write_text(json.dumps(settings))
    source = {
        "Infrastructure": {"Settings": {"Sources": [{"Type": "File", "SettingsPath": f"{ending}/settings.json"}]}}
    }
    mount = 'mount -t tmpfs -o size=16m tmpfs "$0" && exec "$@"'
    async with AsyncExitStack() as stack:
        fleet = [
            await stack.enter_async_context(agent(crashing, write_jobs(crashing, {"dies": dies}))),
            await stack.enter_async_context(
                agent(
                    filling,
                    write_jobs(filling, {"fills": fills}),
                    *in_own_mounts(),
                    *("sh", "-c", mount, str(filling / "vcap/data")),
                )
            ),
            await stack.enter_async_context(agent(ending, source)),
        ]
        server = await stack.enter_async_context(prometheus(scratch, [one.port for one in fleet]))
        await until(server, ("AgentShimCertificateEnds", "server"))
        await until(server, ("AgentShimProcessCrashLoops", "dies"))
        await until(server, ("AgentShimDiskFull", "ephemeral"))
        fired = await firing_alerts(server)

    assert {name for name, _ in fired} <= {
        "AgentShimCertificateEnds",
        "AgentShimProcessCrashLoops",
        "AgentShimProcessDown",
        "AgentShimProcessUnstable",
        "AgentShimDiskFull",
        "AgentShimNotReady",
    }
