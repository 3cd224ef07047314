"""Tests operator access: the agent sets up users, keys and passwords from its settings and from requests over the bus,
and operators log in with OpenSSH.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from agent_shim.demo.pki import Authority
from agent_shim.host import network
from tests.support.fleet import Fleet
from tests.support.machine import Machine
from tests.support.pod import pod as pods
from tests.support.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("sshd", path="/usr/sbin") is None, reason="needs openssh-server"),
]

AGENT = "5b6f0e0c-53a4-4e0e-8d4c-6a3f0b1c2d3e"
NETWORKS = {"default": {"type": "manual", "ip": "127.0.0.1", "netmask": "255.0.0.0", "default": ["dns", "gateway"]}}


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """Create an operator's key pair and return the path of its private key."""
    path = tmp_path / "operator"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


def login(fleet: Fleet, key: Path, user: str, host_key: str, command: str) -> subprocess.CompletedProcess[str]:
    """Log in like ``bosh ssh``, trusting only the host key that the agent reported."""
    known = key.with_name("known_hosts")
    known.write_text(f"[127.0.0.1]:{fleet.ssh_port} {host_key}")
    options = [f"UserKnownHostsFile={known}", "StrictHostKeyChecking=yes", "BatchMode=yes", "IdentitiesOnly=yes"]
    argv = ["ssh", "-F", "none", "-i", str(key), *(f"-o{option}" for option in options), "-p", str(fleet.ssh_port)]
    return subprocess.run([*argv, f"{user}@127.0.0.1", command], capture_output=True, text=True, timeout=60)


def shadow(machine: Machine) -> dict[str, str]:
    lines = (machine.root / "etc/shadow").read_text().splitlines()
    return dict(line.split(":")[:2] for line in lines)


async def test_a3_operator_logs_in_through_the_director_until_the_cleanup(fleet: Fleet, key: Path) -> None:
    machine = await fleet.add(AGENT, NETWORKS)
    for path in (machine.root / "etc/ssh").glob("ssh_host_*"):
        path.unlink()
    params = {"user": "bosh_jane", "public_key": key.with_suffix(".pub").read_text()}

    found = await fleet.director.value(AGENT, "ssh", "setup", params)
    inside = login(fleet, key, "bosh_jane", found["host_public_key"], "id -un; id -nG; pwd; ls -d /var/vcap/bosh")

    assert inside.returncode == 0, inside.stderr
    name, groups, home, seen = inside.stdout.splitlines()
    assert (name, home, seen) == ("bosh_jane", "/var/vcap/bosh_ssh/bosh_jane", "/var/vcap/bosh")
    assert {"vcap", "admin", "bosh_sudoers", "bosh_sshers"} <= set(groups.split())
    assert await fleet.director.value(AGENT, "ssh", "cleanup", {"user_regex": "^bosh_jane"}) == {
        "command": "cleanup",
        "status": "success",
    }
    assert login(fleet, key, "bosh_jane", found["host_public_key"], "true").returncode == 255
    assert not bool(network.listeners(fleet.ssh_port))


async def test_keys_and_passwords_from_the_settings_are_installed(fleet: Fleet, key: Path) -> None:
    """Root gets vcap's password as well, unless the settings contain ``keep_root_password``."""
    public = key.with_suffix(".pub").read_text().strip()
    hashed = "$6$salt$" + "x" * 86
    one = await fleet.add(AGENT, NETWORKS, bosh={"authorized_keys": [public], "password": hashed})

    host_key = one.root / "etc/ssh/ssh_host_rsa_key.pub"
    await until(lambda: (shadow(one)["vcap"], shadow(one)["root"]) == (hashed, hashed))
    assert (one.root / "home/vcap/.ssh/authorized_keys").read_text() == public
    await until(lambda: bool(network.listeners(fleet.ssh_port)))
    one.run("usermod -a -G bosh_sshers vcap")  # vcap is added to this group when the stemcell is built.
    inside = login(fleet, key, "vcap", host_key.read_text(), "id -un")
    assert inside.stdout == "vcap\n", inside.stderr

    keeping = {"password": hashed, "keep_root_password": True}
    other = await fleet.add("another", NETWORKS, bosh=keeping)
    await until(lambda: shadow(other)["vcap"] == hashed)
    assert shadow(other)["root"] != hashed


async def test_image_password_is_removed_if_the_settings_contain_none(tmp_path: Path) -> None:
    """The password that stemcells set for vcap is publicly known."""
    async with pods(tmp_path) as pod:
        pod.start_container()
        pod.machine.run("echo 'vcap:$6$salt$known' | chpasswd -e")
        await pod.start_agent()

        await until(lambda: shadow(pod.machine)["vcap"] == "*")


async def test_a7_cas_from_update_settings_are_trusted_until_they_are_removed(tmp_path: Path) -> None:
    """A recreated container has the image's trust store, so the CAs must be installed again."""
    authority, hashed = Authority("of the Director"), "$6$salt$" + "y" * 86
    verify = "openssl verify -no-CAstore -no-CApath -CAfile /etc/ssl/certs/ca-certificates.crt /mnt/leaf.pem"
    async with pods(tmp_path) as pod:
        seen = []

        def look() -> None:
            seen.append(pod.machine.run(f"{verify} >/dev/null 2>&1 && echo yes || echo no"))

        pod.env = {"password": hashed}
        for life in range(2):
            pod.start_container()
            pod.machine.run("mount -t tmpfs -o mode=0755 tmpfs /usr/local/share/ca-certificates")
            (pod.machine.root / "mnt/leaf.pem").write_text(authority.server().certificate)
            look()
            await pod.start_agent()
            if life == 0:
                await pod.run("update_settings", {"trusted_certs": authority.ca})
            else:  # Wait, because the agent answers pings before it has installed the CAs.
                await until(lambda: "boot step trusted certificates: done" in pod.log)
            look()
            assert shadow(pod.machine)["vcap"] == hashed
            if life == 0:
                pod.kill()
        assert await pod.run("update_settings", {"trusted_certs": ""}) == "ok"
        look()
        pod.kill()
    assert seen == ["no\n", "yes\n", "no\n", "yes\n", "no\n"]
