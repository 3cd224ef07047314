"""Tests the SSH server that the agent starts, in a private network. The users who log in with OpenSSH have been created
by ``ssh`` requests.
"""

from __future__ import annotations

import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.root.conftest import Inside
from tests.support.machine import Machine
from tests.support.source import ROOT

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("sshd", path="/usr/sbin") is None, reason="needs openssh-server"),
]

DIES = ["setpriv", "--pdeathsig", "KILL"]
"""Command prefix that has the process killed when the test process that started it is killed."""

_AGENT = """
from types import SimpleNamespace
from agent_shim.daemon import boot
from agent_shim.actions.access import SshParams, ssh
from agent_shim.core.settings import Effective, Network, Settings, UpdateSettings
from agent_shim.services.sshd import Sshd
from agent_shim.services.users import Users
paths = Paths()
boot.make_tree(paths)
users = Users(paths)
sshd = Sshd(paths, {port}, lambda: bool(users.made()))
network = Network(type="manual", ip="127.0.0.1", netmask="255.0.0.0", default=["gateway"])
settings = SimpleNamespace(current=Effective(Settings("agent-1", networks={{"a": network}}), UpdateSettings()))
agent = SimpleNamespace(users=users, sshd=sshd, settings=settings)
"""


@dataclass
class Alone:
    """A machine with a private network. Each request is answered by a newly started agent."""

    box: Machine
    inside: Inside
    prefix: list[str]
    key: Path
    """The operator's private key. Its directory is visible both inside and outside the machine."""

    def agent(self, body: str, *, port: int = 22) -> Any:
        return self.inside(_AGENT.format(port=port) + body, *self.prefix)

    def setup(self, user: str, *, port: int = 22) -> Any:
        key = self.key.with_suffix(".pub").read_text()
        return self.agent(f"return await ssh(agent, 'setup', SshParams({user!r}, {key!r}))", port=port)

    def cleanup(self, pattern: str = "^bosh_", *, port: int = 22) -> Any:
        return self.agent(f"return await ssh(agent, 'cleanup', SshParams(user_regex={pattern!r}))", port=port)

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the private network, wait until it has exited, and return its exit code and output."""
        running = self.box.popen([*self.prefix, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = running.communicate(timeout=60)
        return subprocess.CompletedProcess(argv, running.returncode, str(out), str(err))

    def login(self, user: str, host_key: str, command: str, *, port: int = 22) -> subprocess.CompletedProcess[str]:
        """Log in like ``bosh ssh``, trusting only the host key that the agent reported."""
        known = self.key.with_name("known_hosts")
        known.write_text(f"[127.0.0.1]:{port} {host_key}" if port != 22 else f"127.0.0.1 {host_key}")
        return self.run(*self.command_of("ssh", known), "-p", str(port), f"{user}@127.0.0.1", command)

    def copy(self, user: str, host_key: str, path: str, target: str) -> subprocess.CompletedProcess[str]:
        known = self.key.with_name("known_hosts")
        known.write_text(f"127.0.0.1 {host_key}")
        return self.run(*self.command_of("scp", known), f"{user}@127.0.0.1:{path}", target)

    def command_of(self, program: str, known: Path) -> list[str]:
        inside = {path: str(Machine.SCRATCH / path.name) for path in (self.key, known)}
        options = [
            f"UserKnownHostsFile={inside[known]}",
            "StrictHostKeyChecking=yes",
            "BatchMode=yes",
            "IdentitiesOnly=yes",
        ]
        return [program, "-F", "none", "-i", inside[self.key], *(f"-o{option}" for option in options)]

    def servers(self) -> list[str]:
        """Return the command lines of all sshd processes that listen for connections."""
        return [line for line in self.box.run("ps -ewwo args --no-headers").splitlines() if "[listener]" in line]


@pytest.fixture(scope="module")
def network(box: Machine) -> Iterator[list[str]]:
    """Create a private network and return the command prefix that runs a command in it."""
    holder = box.popen(
        [*DIES, "unshare", "-n", "sh", "-c", "ip link set lo up && echo $$ && exec sleep 999"], stdout=-1
    )
    assert holder.stdout is not None
    pid = holder.stdout.readline().decode().strip()
    try:
        yield ["nsenter", "-t", pid, "-n", "--"]
    finally:
        holder.kill()
        holder.communicate()


@pytest.fixture
def alone(
    box: Machine, network: list[str], inside: Inside, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Alone]:
    key = box.root / str(Machine.SCRATCH / "operator").lstrip("/")
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        box.run("mount -t tmpfs -o mode=0755 tmpfs /run")
        sudoers = box.root / "etc/sudoers.d/bosh_sudoers"
        shutil.copy(ROOT / "stemcell_overlay/rootfs/etc/sudoers.d/bosh_sudoers", sudoers)
        sudoers.chmod(0o440)
    alone = Alone(box, inside, network, key)
    assert alone.servers() == []
    try:
        yield alone
    finally:
        alone.cleanup()
        assert alone.servers() == []


def test_ssh_setup_lets_an_operator_log_in(alone: Alone) -> None:
    for path in (alone.box.root / "etc/ssh").glob("ssh_host_*"):
        path.unlink()
    found = alone.setup("bosh_jane")
    done = alone.login("bosh_jane", found["host_public_key"], "id -un; id -nG; pwd; sudo -n id -un")

    assert (found["command"], found["status"], found["ip"]) == ("setup", "success", "127.0.0.1")
    assert done.returncode == 0, done.stderr
    name, groups, home, root = done.stdout.splitlines()
    assert (name, home, root) == ("bosh_jane", "/var/vcap/bosh_ssh/bosh_jane", "root")
    assert set(groups.split()) == {"bosh_jane", "vcap", "admin", "bosh_sudoers", "bosh_sshers"}
    assert stat.S_IMODE((alone.box.root / "etc/ssh/ssh_host_rsa_key").stat().st_mode) == 0o600
    assert "Accepted publickey for bosh_jane" in (alone.box.vcap / "bosh/log/sshd.log").read_text()


def test_sshd_started_at_boot_has_a_host_key(alone: Alone) -> None:
    """If the settings contain ``authorized_keys``, the agent starts sshd at boot, before any request can
    have created a host key.
    """
    key = alone.key.with_suffix(".pub").read_text()
    for path in (alone.box.root / "etc/ssh").glob("ssh_host_*"):
        path.unlink()
    alone.agent(f"await users.setup('bosh_boot', {key!r}); await sshd.settle()")
    told = (alone.box.root / "etc/ssh/ssh_host_rsa_key.pub").read_text()

    assert alone.login("bosh_boot", told, "id -un").stdout == "bosh_boot\n"


def test_ssh_host_key_is_kept_when_the_public_key_file_is_missing(alone: Alone) -> None:
    first = alone.agent("return await sshd.host_key()")
    key = alone.box.root / "etc/ssh/ssh_host_rsa_key"
    private = key.read_bytes()
    key.with_suffix(".pub").unlink()
    second = alone.agent("return await sshd.host_key()")

    assert first.startswith("ssh-rsa ")
    assert second.split()[:2] == first.split()[:2]
    assert key.read_bytes() == private
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.with_suffix(".pub").stat().st_mode) == 0o644


def test_failure_to_create_an_ssh_host_key_is_reported_and_leaves_no_user(alone: Alone) -> None:
    """The test makes ssh-keygen itself fail. A read-only /etc would not test this, because the agent would already fail
    to create the user.
    """
    (alone.box.root / "etc/ssh/ssh_host_rsa_key.pub").unlink(missing_ok=True)
    alone.box.run("mount --bind /dev/null /usr/bin/ssh-keygen")
    try:
        error = alone.setup("bosh_any")
    finally:
        alone.box.run("umount /usr/bin/ssh-keygen")

    assert error == "Getting host public key: cannot run ssh-keygen: Permission denied"
    assert "bosh_any" not in (alone.box.root / "etc/passwd").read_text()


def test_sshd_runs_only_while_an_operator_may_log_in(alone: Alone) -> None:
    key = alone.setup("bosh_one")["host_public_key"]
    assert alone.setup("bosh_two")["host_public_key"] == key
    assert len(alone.servers()) == 1

    alone.cleanup("^bosh_one$")
    assert len(alone.servers()) == 1
    assert alone.login("bosh_two", key, "true").returncode == 0
    assert alone.login("bosh_one", key, "true").returncode == 255

    alone.cleanup("^bosh_two$")
    assert alone.servers() == []
    assert alone.run("ss", "-Htln").stdout == ""


def test_ssh_session_outlives_the_server(alone: Alone) -> None:
    key = alone.setup("bosh_long")["host_public_key"]
    known = alone.key.with_name("known_hosts")
    known.write_text(f"127.0.0.1 {key}")
    talking = alone.box.popen(
        [
            *DIES,
            *alone.prefix,
            *alone.command_of("ssh", known),
            "bosh_long@127.0.0.1",
            "echo here; read line; echo got $line",
        ],
        stdin=-1,
        stdout=-1,
        stderr=-1,
    )
    assert talking.stdout is not None
    assert talking.stdout.readline() == b"here\n"
    alone.agent("sshd.is_needed = lambda: False\nawait sshd.settle()")
    assert alone.servers() == []
    out, _ = talking.communicate(b"it\n", timeout=30)

    assert out == b"got it\n"


@pytest.mark.attack("an SSH user reads another operator's log archive")
def test_log_archive_can_be_fetched_with_scp_only_by_the_requesting_user(alone: Alone) -> None:
    key = alone.setup("bosh_cli")["host_public_key"]
    bundle = alone.agent(
        "from agent_shim.actions.logs import LogBundle, bundle_logs\n"
        "from agent_shim.services.logs.archives import Logs\n"
        "agent.logs = Logs(paths)\n"
        "(paths.log / 'a.log').write_text('line')\n"
        "return await bundle_logs(agent, LogBundle('bosh_cli', 'job', []))"
    )
    got = alone.copy("bosh_cli", key, bundle["logs_tar_path"], f"{Machine.SCRATCH}/got.tgz")
    other = alone.setup("bosh_other") and alone.copy("bosh_other", key, bundle["logs_tar_path"], "/dev/null")

    assert got.returncode == 0, got.stderr
    listed = alone.box.run(f"sha512sum {Machine.SCRATCH}/got.tgz && tar -tzf {Machine.SCRATCH}/got.tgz").split()
    assert f"sha512:{listed[0]}" == bundle["sha512"]
    assert listed[2:] == ["./a.log"]
    assert "Permission denied" in other.stderr


@pytest.mark.attack("an SSH user logs in with a password, or with a key planted for another user")
@pytest.mark.parametrize("user", ["root", "vcap", "nobody"])
def test_sshd_admits_only_operators(alone: Alone, user: str) -> None:
    key = alone.setup("bosh_any")["host_public_key"]
    public = alone.key.with_suffix(".pub").read_text()
    home = alone.box.vcap / "home" / user
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh/authorized_keys").write_text(public)
    alone.box.run(f"chown -R {user} /var/vcap/home/{user}")
    passwd, group = (alone.box.root / "etc" / name for name in ("passwd", "group"))
    kept = passwd.read_text(), group.read_text()
    passwd.write_text("".join(":".join(_at_home(line.split(":"), user)) + "\n" for line in kept[0].splitlines()))
    if user == "root":
        group.write_text(kept[1].replace("bosh_sshers:x:1003:", "bosh_sshers:x:1003:root,"))
    try:
        done = alone.login(user, key, "true")
    finally:
        passwd.write_text(kept[0])
        group.write_text(kept[1])

    assert done.returncode == 255
    said = (alone.box.vcap / "bosh/log/sshd.log").read_text().splitlines()[-3:]
    assert any("not allowed because" in line for line in said), said


def _at_home(entry: list[str], user: str) -> list[str]:
    """Return a line of /etc/passwd. If it is the line for ``user``, replace the home directory and the shell so that
    the user can log in.
    """
    return [*entry[:5], f"/var/vcap/home/{user}", "/bin/bash"] if entry[0] == user else entry


@pytest.mark.attack("an SSH user logs in with a password, or with a key planted for another user")
def test_sshd_rejects_passwords(alone: Alone) -> None:
    key = alone.setup("bosh_any")["host_public_key"]
    known = alone.key.with_name("known_hosts")
    known.write_text(f"127.0.0.1 {key}")
    options = ["-oPubkeyAuthentication=no", "-v"]
    done = alone.run(*alone.command_of("ssh", known), *options, "bosh_any@127.0.0.1", "true")

    assert "Permission denied (publickey)." in done.stderr


def test_sshd_listens_on_the_configured_port(alone: Alone) -> None:
    key = alone.setup("bosh_port", port=2222)["host_public_key"]

    assert alone.login("bosh_port", key, "echo yes", port=2222).stdout == "yes\n"
    assert "0.0.0.0:2222" in alone.run("ss", "-Htln").stdout

    alone.setup("bosh_port", port=2222)
    assert len(alone.servers()) == 1


@pytest.fixture
def other_server(alone: Alone) -> Iterator[Callable[[str], None]]:
    """Provide a function that starts another server on port 22 of an address."""
    listening: list[subprocess.Popen[bytes]] = []

    def listen(address: str) -> None:
        code = (
            f"import socket, time; s = socket.create_server(({address!r}, 22)); print('up', flush=True); time.sleep(99)"
        )
        listening.append(alone.box.popen([*DIES, *alone.prefix, "python3", "-c", code], stdout=-1))
        assert (out := listening[0].stdout) is not None
        assert out.readline() == b"up\n"

    yield listen
    for process in listening:
        process.kill()
        process.communicate()


def test_existing_ssh_server_is_used_and_left_running(alone: Alone, other_server: Callable[[str], None]) -> None:
    other_server("0.0.0.0")

    assert alone.setup("bosh_any")["status"] == "success"
    assert alone.servers() == []
    assert alone.cleanup()["status"] == "success"
    assert ":22 " in alone.run("ss", "-Htln").stdout


@pytest.mark.attack("a job listens on the port for metrics or sshd")
def test_job_listening_on_the_sshd_port_is_reported(alone: Alone) -> None:
    """Docker allows all users to listen on port 22. If the agent mistook a job for the SSH server, the operator would
    get the wrong host key without an explanation.
    """
    code = (
        "import os, socket, time; os.setresuid(1234, 1234, 1234);"
        "s = socket.create_server(('0.0.0.0', 2022)); print('up', flush=True); time.sleep(99)"
    )
    job = alone.box.popen([*DIES, *alone.prefix, "python3", "-c", code], stdout=-1)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == b"up\n"
        error = alone.setup("bosh_any", port=2022)
    finally:
        alone.box.run("pkill -KILL -U 1234")  # Killing `job` would kill only nsenter.
        job.communicate()

    assert error == "Starting sshd: port 2022 is in use by a process of user 1234, which is not sshd; stop it"
    assert "bosh_any" not in (alone.box.root / "etc/passwd").read_text()


@pytest.mark.attack("a job listens on the port for metrics or sshd")
def test_job_process_named_sshd_is_left_alone(alone: Alone) -> None:
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    code = f"{ignore}print('up', flush=True); time.sleep(99)"
    arguments = ["sshd: /usr/sbin/sshd -f /var/vcap/data/sys/run/agent_shim/sshd_config", "-c", code]
    become = f"import os; os.setresuid(1234, 1234, 1234); os.execv('/usr/bin/python3', {arguments!r})"
    job = alone.box.popen([*DIES, "python3", "-c", become], stdout=-1)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == b"up\n"
        alone.cleanup()

        assert job.poll() is None
    finally:
        alone.box.run("pkill -KILL -U 1234")  # Killing `job` would kill only nsenter.
        job.communicate()


def test_failed_sshd_is_reported_and_leaves_no_user(alone: Alone, other_server: Callable[[str], None]) -> None:
    # A server that cannot be reached from outside must not be mistaken for an existing SSH server.
    other_server("127.0.0.1")
    error = alone.agent(
        "from agent_shim.services import sshd as module\n"
        "module.CONFIG += 'NoSuchOption yes\\n'\n"
        f"return await ssh(agent, 'setup', SshParams('bosh_any', {alone.key.with_suffix('.pub').read_text()!r}))"
    )

    assert error.startswith("Starting sshd: it ended with code 255: ")
    assert "Bad configuration option: NoSuchOption" in error
    assert alone.servers() == []
    assert "bosh_any" not in (alone.box.root / "etc/passwd").read_text()


def test_container_without_sshd_is_reported_and_leaves_no_user(alone: Alone) -> None:
    alone.box.run("mkdir -p /tmp/empty && cp -a /usr/sbin/user* /tmp/empty/ && mount --bind /tmp/empty /usr/sbin")
    try:
        error = alone.setup("bosh_any")
        passwd = (alone.box.root / "etc/passwd").read_text()
    finally:
        alone.box.run("umount /usr/sbin")

    assert error == "Starting sshd: nothing listens on port 22, and sshd (package openssh-server) is not installed"
    assert "bosh_any" not in passwd


def test_sshd_that_is_being_stopped_is_replaced(alone: Alone) -> None:
    alone.agent(
        "import signal\n"
        "from agent_shim.host import proc\n"
        "sshd.is_needed = lambda: True\n"
        "await sshd.settle()\n"
        "(pid,) = [pid for pid in proc.table() if proc.command_line(pid).startswith('sshd: ')]\n"
        "os.kill(pid, signal.SIGSTOP)\n"
        "sshd.is_needed = lambda: False\n"
        "stopping = asyncio.create_task(sshd.settle())\n"
        "await asyncio.sleep(0)\n"
        "sshd.is_needed = lambda: True\n"
        "await asyncio.gather(stopping, *(sshd.settle() for _ in range(5)))"
    )

    assert len(alone.servers()) == 1


def test_concurrent_ssh_requests_share_one_server(alone: Alone) -> None:
    key = alone.key.with_suffix(".pub").read_text()
    alone.agent(f"await asyncio.gather(*(ssh(agent, 'setup', SshParams(f'bosh_n{{i}}', {key!r})) for i in range(10)))")
    assert len(alone.servers()) == 1
    alone.agent(
        "await asyncio.gather(\n"
        "    *(ssh(agent, 'cleanup', SshParams(user_regex=f'^bosh_n{i}$')) for i in range(10)),\n"
        f"    ssh(agent, 'setup', SshParams('bosh_last', {key!r})),\n"
        ")"
    )

    assert alone.login("bosh_last", alone.setup("bosh_last")["host_public_key"], "true").returncode == 0


def test_sshd_that_does_not_listen_is_stopped(alone: Alone) -> None:
    """If a server that does not listen kept running, the next request would mistake it for a working one."""
    server = alone.key.with_name("deaf")
    server.write_text("#!/bin/sh\nexec sleep 4711\n")
    server.chmod(0o755)
    alone.box.run(f"mount --bind {Machine.SCRATCH / 'deaf'} /usr/sbin/sshd")
    try:
        error = alone.agent(
            "from agent_shim.services import sshd as module\n"
            "module.LISTEN_TIMEOUT_S = 0.2\n"
            f"return await ssh(agent, 'setup', SshParams('bosh_any', {alone.key.with_suffix('.pub').read_text()!r}))"
        )
    finally:
        alone.box.run("umount /usr/sbin/sshd")

    assert error == "Starting sshd: it does not listen on port 22 after 0 seconds"
    assert "4711" not in alone.box.run("ps -ewwo args --no-headers")
