"""The image's PID 1 restarts a crashed agent without restarting the jobs, and shuts the container down gracefully."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from agent_shim.core.paths import Paths
from tests.image.site import SETTINGS, ContainerSite
from tests.support import jobs, pods
from tests.support.environment import AGENT
from tests.support.pods import Container, Podman

pytestmark = pytest.mark.image

READY = ("agent-shim", "probe", "ready")
AGENT_PID = ("pgrep", "--full", "bin/bosh-agent")

TIERS = {
    "all capabilities": ("--cap-add=all",),
    "default capabilities": (),
    "a user namespace": ("--cap-add=all", "--uidmap=0:200000:65536", "--gidmap=0:200000:65536"),
    "no capabilities": ("--cap-drop=all",),
    "no capabilities, nobody's files": (
        *("--cap-drop=all", "--security-opt=no-new-privileges", "--user=1000:1000"),
        *("--read-only", "--read-only-tmpfs=false", "--volume={volume}:/var/vcap"),
    ),
}


def draining(seconds: float, *, leaves: str) -> dict[str, str]:
    """Return a job whose drain script writes to the ``leaves`` file and then takes ``seconds`` to finish."""
    drain = f"#!/bin/sh\necho drained > {leaves}\nsleep {seconds}\necho 0\n"
    return jobs.sleeper(Paths(), "sleeper") | {"bin/drain": drain}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


async def pid_of_job(container: Container) -> str:
    return (await container.exec("cat", "/var/vcap/sys/run/sleeper/sleeper.pid")).strip()


@pytest.mark.parametrize("options", TIERS.values(), ids=TIERS.keys())
async def test_container_starts_with_every_tested_user_and_capability_set(
    podman: Podman, image: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    tmp_path.chmod(0o777)
    options = ("--network=none", *(option.format(volume=tmp_path) for option in options))
    async with pods.running(
        podman, image, "env", "-i", "/opt/agent_shim/launch", "-P", "x", options=options
    ) as container:
        await container.until(1, *READY)

        assert (await container.exec("cat", "/proc/1/comm")).strip() == "s6-svscan"
        assert await container.stop() == 0


async def test_crashed_agent_is_restarted_and_jobs_continue(site: ContainerSite) -> None:
    async with site.container() as container:
        await container.put(SETTINGS, site.settings())
        await site.deploy()
        # Wait until the agent has installed its packet filter rules, which must not block the restarted agent's
        # connection to the bus.
        await container.until(0, "nft", "list", "table", "inet", "agent_shim")
        before = await pid_of_job(container), await container.exec(*AGENT_PID)
        await container.exec("pkill", "-KILL", "--full", "bin/bosh-agent")
        await container.until(1, "sh", "-c", f"pgrep --full bin/bosh-agent | grep -q '^{before[1].strip()}$'")
        await site.until_state("running")

        assert await pid_of_job(container) == before[0]
        assert await container.exec(*AGENT_PID) != before[1]


@pytest.mark.parametrize("signal", ["TERM", "INT", "PWR"])
async def test_stop_signal_to_pid_1_causes_an_orderly_stop(site: ContainerSite, signal: str) -> None:
    leaves = "/var/vcap/data/trace"
    async with site.container("env", "-i", "/sbin/init") as container:
        await container.put(SETTINGS, site.settings())
        await site.deploy({"sleeper": draining(0.5, leaves=leaves)})
        await container.signal(signal)

        assert await container.ended() == 0
        assert "all jobs stopped in order" in container.logs()
        assert "not clean" not in container.logs()


async def test_unclean_container_stop_is_visible_in_the_exit_code(site: ContainerSite) -> None:
    async with site.container("/sbin/init", options=("--env=AGENT_SHIM_GRACE=4",)) as container:
        await container.put(SETTINGS, site.settings())
        await site.deploy({"sleeper": draining(600, leaves="/dev/null")})
        async with asyncio.timeout(30):
            await container.signal("TERM")

            assert await container.ended() == 1
        assert "drain scripts were cut short" in container.logs()


async def test_stop_signal_aborts_a_drain_that_is_already_running(site: ContainerSite) -> None:
    """When the kubelet evicts a pod, it gives the preStop hook one second, and then the container two more. The jobs
    must be stopped within this time.
    """
    leaves = "/var/vcap/data/trace"
    async with site.container("/sbin/init") as container:
        await container.put(SETTINGS, site.settings())
        await site.deploy({"sleeper": draining(600, leaves=leaves)})
        hook = asyncio.create_task(container.status_of("agent-shim", "drain", "--timeout", "900"))
        await container.until(0, "grep", "-q", ".", leaves)
        async with asyncio.timeout(60):
            await container.signal("TERM")
            assert await container.ended() == 1
            await hook

        assert "not clean: drain scripts were cut short" in container.logs()


async def test_operator_can_log_in_with_bosh_ssh(site: ContainerSite) -> None:
    key = site.scratch / "key"
    await asyncio.to_thread(run, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    async with site.container("env", "-i", "/sbin/init") as container:
        await container.put(SETTINGS, site.settings())
        await site.until_pong()
        setup = {"user": "bosh_jane", "public_key": key.with_suffix(".pub").read_text()}
        reply = await site.director.run(AGENT, "ssh", "setup", setup)
        known = site.scratch / "known_hosts"
        known.write_text(f"{await container.address()} {reply['host_public_key']}\n")
        ssh = ("ssh", "-i", str(key), "-o", f"UserKnownHostsFile={known}", "-o", "BatchMode=yes")
        login = (*ssh, f"bosh_jane@{await container.address()}", "sudo", "-n", "id", "-un")
        done = await asyncio.to_thread(run, *login)
        await site.director.run(AGENT, "ssh", "cleanup", {"user_regex": "^bosh_jane$"})

        assert (done.returncode, done.stdout) == (0, "root\n"), done.stderr
        assert await container.status_of("pgrep", "-x", "sshd") == 1


async def test_agent_does_not_inherit_the_container_environment(podman: Podman, image: str) -> None:
    """A pod's environment variables must not reach job scripts."""
    options = ("--network=none", "--env=SECRET=x", "--env=KUBERNETES_PORT=y", "--env=AGENT_SHIM_GRACE=9")
    async with pods.running(podman, image, options=options) as container:
        await container.until(1, *READY)
        pid = (await container.exec(*AGENT_PID)).strip()
        environment = (await container.exec("cat", f"/proc/{pid}/environ")).split("\0")
        names = {line.partition("=")[0] for line in environment}

        assert {"SECRET", "KUBERNETES_PORT"} & names == set()
        assert "AGENT_SHIM_GRACE=9" in environment


async def test_pid_1_reaps_orphans(podman: Podman, image: str) -> None:
    async with pods.running(podman, image, options=("--network=none",)) as container:
        await container.until(1, *READY)
        waits = "until test -e /tmp/go; do sleep 0.1; done"
        orphan = (await container.exec("sh", "-c", f"({waits}) >/dev/null 2>&1 & echo $!")).strip()
        assert await container.status_of("test", "-d", f"/proc/{orphan}") == 0

        await container.exec("touch", "/tmp/go")
        await container.until(1, "test", "-d", f"/proc/{orphan}")
