"""The image, built from the Dockerfile: what is in it, and that it comes up by itself."""

from __future__ import annotations

import json

import pytest

from agent_shim import __version__
from tests.image import pods
from tests.image.pods import Podman
from tests.image.site import SETTINGS, Site, get
from tests.support.environment import AGENT

pytestmark = pytest.mark.image

TOOLS = "bash tar sed umount mkdir rm ln ip chgrp sync cp chown chpst"
"""What commands of CPIs call."""


async def test_settings_are_waited_for(site: Site) -> None:
    """Without settings, and with half of them, the agent is alive and says what it waits for."""
    async with site.container() as container:
        assert await get(container, "/healthz") == (200, "ok\n")
        assert await get(container, "/readyz?level=agent") == (503, "waiting for settings\n")
        await container.put(SETTINGS, site.settings()[:100])
        assert await get(container, "/readyz?level=agent") == (503, "waiting for settings\n")
        await container.put(SETTINGS, site.settings())
        await site.until_pong()

        assert (await get(container, "/readyz?level=agent"))[0] == 200
        assert "agent_shim_bus_connected 1.0" in (await get(container, "/metrics"))[1]
        status = json.loads(await container.exec("agent-shim", "status", "--json"))
        assert (status["agent_id"], status["bus"]["connected"]) == (AGENT, True)


async def test_running_needs_nothing_from_outside(podman: Podman, image: str) -> None:
    """Without any network the agent lives, waits, and leaves its program as it was."""
    async with pods.running(podman, image, options=("--network=none",)) as container:
        await container.until(0, "agent-shim", "probe", "live")

        assert await container.status_of("agent-shim", "probe", "ready") == 1
        assert [path for path in await container.changed() if path.startswith(("/opt", "/usr", "/lib"))] == []


def test_configuration_of_the_image(podman: Podman, image: str) -> None:
    """No entry point stands before the command of a CPI; no volume and no port that a CPI has not asked for."""
    config = json.loads(podman("image", "inspect", image))[0]["Config"]

    assert config.get("Entrypoint") is None
    assert config["Cmd"] == ["/sbin/init"]
    assert config["StopSignal"] == "SIGTERM"
    assert not config.get("Volumes")
    assert not config.get("ExposedPorts")
    assert not config.get("User")
    assert config["Labels"]["io.bosh.stemcell.version"] == __version__


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("id -u vcap", "1000"),
        ("id -nG vcap | tr ' ' '\\n' | grep -c -e bosh_sshers -e admin", "2"),
        ("stat -c '%a %U:%G' /var/vcap/bosh", "700 root:root"),
        ("stat -c '%a %U:%G' /home/vcap", "700 vcap:vcap"),
        ("stat -c '%a %U:%G' /etc/shadow", "640 root:shadow"),
        ("visudo -c >/dev/null && echo good", "good"),
        ("locale -a | grep -i en_us", "en_US.utf8"),
        (f"for tool in {TOOLS}; do command -v $tool >/dev/null || echo $tool; done", ""),
        ("ls /etc/ssh/ssh_host_* /etc/pip.conf /run/secrets /opt/agent_shim/bin/pip 2>/dev/null", ""),
        ("cat /var/vcap/bosh/etc/operating_system", "ubuntu"),
    ],
)
def test_contents_of_the_image(podman: Podman, image: str, command: str, output: str) -> None:
    """Users, modes, tools and what must not be there."""
    run = podman.run("run", "--rm", "--network=none", image, "sh", "-c", command)

    assert run.stdout.decode().strip() == output


def test_every_module_is_compiled(podman: Podman, image: str) -> None:
    """Nothing is compiled at run time: each module lies there compiled, with a stamp that is never looked at."""
    script = """
import importlib.util, pathlib
lib = pathlib.Path("/opt/agent_shim/lib")
compiled = [pathlib.Path(importlib.util.cache_from_source(path)) for path in lib.rglob("*.py")]
missing = [path for path in compiled if not path.exists() or path.read_bytes()[4:8] != b"\\1\\0\\0\\0"]
print(len(compiled) > 100, missing)
"""
    said = podman("run", "--rm", "--network=none", image, "/opt/agent_shim/bin/python3", "-c", script)

    assert said.strip() == "True []"
