"""Tests what the image built from the Dockerfile contains, and how it runs without a CPI."""

from __future__ import annotations

import json
import os
import re
import shlex
import tarfile
from pathlib import Path

import pytest

from agent_shim import __version__
from tests.image.site import SETTINGS, ContainerSite, get
from tests.support import pods
from tests.support.environment import AGENT
from tests.support.pods import Podman

pytestmark = pytest.mark.image

TOOLS = "bash tar sed umount mkdir rm ln ip chgrp sync cp chown chpst"
"""Programs that CPIs' start commands call."""
AT_HAND = "tcpdump ping arping traceroute lsof strace resolvconf resolvectl"
"""Programs that operators use in ``bosh ssh`` sessions, and tcpdump, which ``bosh pcap`` needs."""
RSYSLOG = "imrelp omrelp lmnsd_gtls lmnsd_ossl mmjsonparse mmnormalize"
"""rsyslog modules that are loaded by the configuration of syslog-release or by custom rules that operators add to it.
"""


async def test_container_without_settings_waits_for_them(site: ContainerSite) -> None:
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


async def test_image_runs_without_a_network(podman: Podman, image: str) -> None:
    async with pods.running(podman, image, options=("--network=none",)) as container:
        await container.until(1, "agent-shim", "probe", "ready")

        assert await container.status_of("agent-shim", "probe", "live") == 0
        assert [path for path in await container.changed() if path.startswith(("/opt", "/usr", "/lib"))] == []


def test_image_has_no_entrypoint_volumes_or_ports(podman: Podman, image: str) -> None:
    """CPIs pass complete commands, which an entrypoint would break. They also declare volumes and ports themselves."""
    config = json.loads(podman("image", "inspect", image))[0]["Config"]

    assert config.get("Entrypoint") is None
    assert config["Cmd"] == ["/sbin/init"]
    assert config["StopSignal"] == "SIGTERM"
    assert not config.get("Volumes")
    assert not config.get("ExposedPorts")
    assert not config.get("User")
    assert {f"org.opencontainers.image.{name}" for name in ("created", "revision", "source", "version")} <= {
        *config["Labels"]
    }
    assert config["Labels"]["io.bosh.stemcell.version"] == __version__.replace(".dev0", "-dev")


MOST = 350_000_000
"""Maximum size in bytes of an image without compilers on a base as large as Debian's."""


@pytest.mark.skipif("TEST_BASE_IMAGE" in os.environ, reason="the base that was asked for has a size of its own")
def test_image_stays_below_its_size_limit(podman: Podman, image: str) -> None:
    assert int(podman("image", "inspect", "--format", "{{.Size}}", image)) < MOST


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
        (f"for tool in {TOOLS} {AT_HAND}; do command -v $tool >/dev/null || echo $tool; done", ""),
        (f"cd /usr/lib/*/rsyslog && for module in {RSYSLOG}; do ls $module.so >/dev/null; done && echo there", "there"),
        ("id -nG syslog", "syslog adm vcap"),
        ("cat /var/vcap/bosh/etc/static_libraries_list", "/usr/lib/libsupp.a"),
        ("ls /etc/ssh/ssh_host_* /etc/pip.conf /run/secrets /opt/agent_shim/bin/pip 2>/dev/null", ""),
        ("cat /var/vcap/bosh/etc/operating_system", "ubuntu"),
    ],
)
def test_image_has_the_expected_users_modes_and_tools(podman: Podman, image: str, command: str, output: str) -> None:
    run = podman.run("run", "--rm", "--network=none", image, "sh", "-c", command)

    assert run.stdout.decode().strip() == output


NEXT_PROGRAMS = """
for program in ls install cp tail stat chown timeout date sort df du; do
    $program --version | grep -q uutils || echo $program
done
sudo --version | grep -q sudo-rs || echo sudo
for python in /usr/bin/python3 /opt/agent_shim/bin/python3; do
    $python --version | grep -q ' 3\\.14' || echo $python
done
sshd -V 2>&1 | grep -q OpenSSH_10 || echo sshd
[ "$(readlink /usr/bin/chpst)" = /opt/agent_shim/stand-ins/chpst ] || echo chpst
"""


@pytest.mark.skipif(not pods.IS_NEXT, reason="this base is not like Ubuntu 26.04: run ./dev test-next")
def test_next_base_image_has_the_same_programs_as_ubuntu_26_04(podman: Podman, image: str) -> None:
    assert podman("run", "--rm", "--network=none", image, "bash", "-c", NEXT_PROGRAMS) == ""


def test_every_module_in_the_image_is_compiled(podman: Podman, image: str) -> None:
    """The compiled modules must have unchecked hashes so that Python does not recompile them or read their source."""
    script = """
import importlib.util, pathlib
lib = pathlib.Path("/opt/agent_shim/lib")
compiled = [pathlib.Path(importlib.util.cache_from_source(path)) for path in lib.rglob("*.py")]
missing = [path for path in compiled if not path.exists() or path.read_bytes()[4:8] != b"\\1\\0\\0\\0"]
print(len(compiled) > 100, missing)
"""
    said = podman("run", "--rm", "--network=none", image, "/opt/agent_shim/bin/python3", "-c", script)

    assert said.strip() == "True []"


EMPTY = ("etc/resolv.conf", "etc/hostname", "etc/machine-id")


def test_image_has_no_traces_of_the_build_machine(podman: Podman, image: str, tmp_path: Path) -> None:
    """The base image contains files from the machine on which it was built, such as resolv.conf, the host name and
    package logs.
    """
    container = podman("create", image, "true").strip()
    try:
        podman("export", "--output", str(tmp_path / "files"), container)
    finally:
        podman("rm", "--force", container)
    with tarfile.open(tmp_path / "files") as files:
        found = {member.name: member.size for member in files if member.isreg()}
    traces = {name: size for name, size in found.items() if name in EMPTY or name.startswith("var/log/apt/")}

    assert traces == dict.fromkeys(EMPTY, 0)
    assert "var/log/dpkg.log" not in found


@pytest.mark.parametrize("way", ["bash -lic", "sudo -i", "su - vcap -c", "sudo -i -u vcap", "su - bosh_a -c"])
async def test_operator_shells_find_agent_commands_and_show_the_instance_in_the_prompt(
    podman: Podman, image: str, way: str
) -> None:
    instance = "mkdir -p /var/vcap/instance && cd /var/vcap/instance && printf web >name && printf 0815 >id"
    user = "useradd -m -b /var/vcap/bosh_ssh -s /bin/bash bosh_a"
    show = 'bash -ic \'echo "$PATH"; echo "${PS1@P}"\''
    script = f"{instance} && mkdir -p /var/vcap/bosh_ssh && {user} && cd / && {way} {shlex.quote(show)} 2>/dev/null"
    script = script.replace("sudo -i -u vcap ", "sudo -i -u vcap bash -c ").replace("sudo -i '", "sudo -i bash -c '")
    path, prompt = podman("run", "--rm", "--tty", "--network=none", image, "bash", "-c", script).split()

    assert "/var/vcap/bosh/bin" in path.split(":")
    assert prompt in ("web/0815:~#", "web/0815:~$", "web/0815:/#", "web/0815:/$")


@pytest.mark.parametrize("way", [[], ["sudo"]])
def test_agent_commands_are_on_the_path(podman: Podman, image: str, way: list[str]) -> None:
    find = ["sh", "-c", "command -v agent-shim; command -v monit; command -v bpm"]
    said = podman("run", "--rm", "--network=none", image, *way, *find)

    assert said.split() == ["/usr/local/bin/agent-shim", "/usr/local/bin/monit", "/usr/local/bin/bpm"]


def test_bpm_monit_and_bosh_agent_commands_run_the_agent(podman: Podman, image: str) -> None:
    """The commands are links to ``agent-shim``. The wheel does not install them, so the image must."""
    ask = "bpm version; monit -V | tail -n 1; /opt/agent_shim/bin/bosh-agent -v"
    said = podman("run", "--rm", "--network=none", image, "sh", "-c", ask).splitlines()
    version = said[0]

    assert version.startswith(__version__.partition("+")[0])
    assert said[1] == f"emulated by agent-shim {version}"
    assert said[2].startswith(f"[Version] {version} (")


def test_bash_in_the_image_has_tab_completion_for_agent_shim(podman: Podman, image: str) -> None:
    said = podman("run", "--rm", "--tty", "--network=none", image, "bash", "-ic", "complete -p agent-shim")

    assert re.fullmatch(r"complete .*-F \w*agent_shim agent-shim", said.strip())


async def test_env_bosh_options_are_applied_or_refused_with_a_log_message(site: ContainerSite) -> None:
    """``swap_size`` must be rejected, because swap space belongs to the host."""
    settings = json.loads(site.settings())
    wishes = {"remove_static_libraries": True, "swap_size": 512, "agent": {"settings": {"tmpfs": True}}}
    settings["env"]["bosh"] |= wishes
    async with site.container() as container:
        listed = (await container.exec("cat", "/var/vcap/bosh/etc/static_libraries_list")).split()
        await container.exec("test", "-e", *listed[:1])
        await container.put(SETTINGS, json.dumps(settings))
        await site.until_pong()

        await container.until(1, "test", "-e", *listed[:1])
        kind = await container.exec("findmnt", "-no", "FSTYPE", "/var/vcap/bosh/settings")
        assert kind == "tmpfs\n"
        assert "env.bosh.swap_size: swap belongs to the host" in container.logs()


def test_vcap_needs_its_password_for_sudo(podman: Podman, image: str) -> None:
    """As on a stemcell, vcap is in the admin group, whose members may use sudo with their password
    (bosh-linux-stemcell-builder, stages/bosh_users).
    """
    tries = "sudo -n true 2>/dev/null || echo refused; echo secret | sudo -S -p '' id -un"
    script = f'echo vcap:secret | chpasswd; exec su vcap -s /bin/bash -c "{tries}"'

    assert podman("run", "--rm", "--network=none", image, "sh", "-c", script) == "refused\nroot\n"


async def test_bosh_pcap_can_capture_packets(podman: Podman, image: str) -> None:
    """``bosh pcap`` runs tcpdump with sudo in a ``bosh ssh`` session."""
    capture = "sudo -n tcpdump -i lo -c 2 -w - icmp 2>/tmp/said & until grep -q listening /tmp/said; do sleep 0.1; done"
    script = f"({capture}; ping -c 2 -q localhost >/dev/null; wait) | tcpdump -r - -n 2>/dev/null"
    user = 'useradd -m -G bosh_sudoers bosh_a && exec su bosh_a -s /bin/bash -c "$SCRIPT"'
    options = ("--rm", "--timeout=60", "--network=none", "--cap-add=NET_RAW", f"--env=SCRIPT={script}")
    said = podman("run", *options, image, "sh", "-c", user)

    assert "ICMP echo request" in said


def test_ordinary_users_can_ping(podman: Podman, image: str) -> None:
    ping = ("su", "nobody", "-s", "/bin/sh", "-c", "ping -c 1 -q localhost")
    said = podman("run", "--rm", "--network=none", "--cap-add=NET_RAW", image, *ping)

    assert "1 received" in said
