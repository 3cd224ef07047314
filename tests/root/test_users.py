"""Tests the SSH users that the agent creates, and vcap's keys and password, on a test machine with its own /etc."""

from __future__ import annotations

import stat
import sys

import pytest

from tests.root.conftest import Inside
from tests.support.machine import CODE, Machine

pytestmark = pytest.mark.root

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA jane"
KILLING = """
import ctypes
while True:
    ctypes.CDLL(None).kill(-1, 9)
"""
"""Kills all other processes of its user in a loop."""
AS_VCAP = ("setpriv", "--reuid=vcap", "--regid=vcap", "--clear-groups")
FILLING = """
import os, sys
number = 0
while True:
    number += 1
    try:
        os.chdir(sys.argv[1])
        os.makedirs("a/b", exist_ok=True)
        open(f"a/b/{number}", "w").close()
    except OSError:
        pass
"""
USERS = "from agent_shim.services.users import Users\nusers = Users(Paths())\n"


def setup(user: str, key: str = KEY) -> str:
    return f"{USERS}return await users.setup({user!r}, {key!r})"


def cleanup(pattern: str) -> str:
    return f"{USERS}return await users.cleanup({pattern!r})"


def accounts(box: Machine) -> list[str]:
    return [line.split(":")[0] for line in (box.root / "etc/passwd").read_text().splitlines()]


def groups_of(box: Machine, user: str) -> set[str]:
    return set(box.run(f"id -nG {user}").split())


def test_user_tools_in_a_test_machine_cannot_change_the_host(box: Machine) -> None:
    """If the tools could change the host, a test might remove users or files from it."""
    homes = {line.split(":")[5] for line in (box.root / "etc/passwd").read_text().splitlines()}

    assert homes == {"/nonexistent", "/home/vcap"}
    touched = box.run(f"cd / && touch {CODE}/probe usr/probe probe 2>&1 || true")
    assert touched.count("Read-only file system") == 3
    assert box.run("ls /home") == "vcap\n"


def test_ssh_user_without_the_bosh_prefix_is_created_but_not_removed(box: Machine, inside: Inside) -> None:
    inside(setup("jane_doe", "public-key"))
    inside(setup("jane_doe", KEY))

    assert groups_of(box, "jane_doe") == {"jane_doe", "vcap", "admin", "bosh_sudoers", "bosh_sshers"}
    assert box.run("stat -c '%a %U' /var/vcap/bosh_ssh/jane_doe") == "700 jane_doe\n"
    assert box.run("cat /var/vcap/bosh_ssh/jane_doe/.ssh/authorized_keys") == KEY
    assert inside(cleanup("jane")) == []
    assert accounts(box).count("jane_doe") == 1


@pytest.mark.attack("a request passes an existing account or an option as the name of an SSH user")
@pytest.mark.parametrize("user", ["root", "vcap"])
def test_ssh_user_with_an_existing_accounts_name_is_rejected(box: Machine, inside: Inside, user: str) -> None:
    before = (groups_of(box, user), (box.root / "etc/passwd").read_text())

    assert inside(setup(user)) == (
        f"Creating user: cannot use the name {user!r}: it belongs to another user of this machine"
    )
    assert (groups_of(box, user), (box.root / "etc/passwd").read_text()) == before


def test_ssh_user_has_the_same_groups_home_and_modes_as_with_the_go_agent(box: Machine, inside: Inside) -> None:
    for key in ("ssh-rsa BBBB\n", KEY):
        inside(setup("bosh_abc", key))

        assert box.run("cat /var/vcap/bosh_ssh/bosh_abc/.ssh/authorized_keys") == key
        assert accounts(box).count("bosh_abc") == 1
        assert groups_of(box, "bosh_abc") == {"bosh_abc", "vcap", "admin", "bosh_sudoers", "bosh_sshers"}
    assert box.run("stat -c '%a %U' /var/vcap/bosh_ssh/bosh_abc") == "700 bosh_abc\n"
    assert box.run("stat -c '%a %U' /var/vcap/bosh_ssh/bosh_abc/.ssh") == "700 bosh_abc\n"
    assert box.run("cd /var/vcap/bosh_ssh/bosh_abc/.ssh && stat -c '%a %U %n' *") == "600 bosh_abc authorized_keys\n"
    assert box.run("getent passwd bosh_abc").endswith(":/var/vcap/bosh_ssh/bosh_abc:/bin/bash\n")
    assert stat.S_IMODE((box.vcap / "bosh_ssh").stat().st_mode) == 0o755


def test_concurrent_ssh_requests_each_create_their_user(box: Machine, inside: Inside) -> None:
    inside(f"{USERS}await asyncio.gather(*(users.setup(f'bosh_p{{i}}', {KEY!r}) for i in range(4)))")

    assert {f"bosh_p{i}" for i in range(4)} <= set(accounts(box))
    assert groups_of(box, "bosh_p3") >= {"bosh_sshers"}


def test_ssh_cleanup_removes_matching_users(box: Machine, inside: Inside) -> None:
    for user in ("bosh_x1", "bosh_x2", "bosh_y1"):
        inside(setup(user))

    assert sorted(inside(cleanup("x[0-9]$"))) == ["bosh_x1", "bosh_x2"]
    assert inside(cleanup("x[0-9]$")) == []
    assert inside(cleanup("^vcap|root$")) == []
    assert {"bosh_y1", "vcap", "root"} <= set(accounts(box))
    assert not (box.vcap / "bosh_ssh/bosh_x1").exists()
    assert (box.vcap / "bosh_ssh/bosh_y1").exists()


STAYING = {
    "other sessions": [
        ["setsid", "--fork", "sleep", "600"],
        ["setsid", "sh", "-c", "while :; do (sleep 0.01 &) ; done"],
    ],
    "killing": [["setsid", sys.executable, "-S", "-c", KILLING]],
    "filling": [["setsid", sys.executable, "-S", "-c", FILLING, "/var/vcap/bosh_ssh/bosh_stays"]] * 2,
}
"""Commands for processes that make it hard to remove their user: one leaves its session and forks endlessly, one kills
every process that switches to the user, and one keeps creating files in the home directory.
"""


@pytest.mark.attack("an SSH user leaves processes that survive the clean-up")
@pytest.mark.parametrize("commands", STAYING.values(), ids=STAYING.keys())
def test_processes_of_a_removed_ssh_user_are_killed(box: Machine, inside: Inside, commands: list[list[str]]) -> None:
    """If a process remained, it would belong to the next user who gets the same uid."""
    inside(setup("bosh_stays"))
    number, home = box.run("id -u bosh_stays").strip(), "/var/vcap/bosh_ssh/bosh_stays"
    as_user = ["setpriv", "--reuid", "bosh_stays", "--regid", "bosh_stays", "--clear-groups"]
    staying = [box.popen([*as_user, *argv]) for argv in commands]
    try:
        box.run(f"until test $(pgrep -cu {number}) -ge {len(commands)}; do sleep 0.02; done")
        if FILLING in commands[0]:
            box.run(f"until test -d {home}/a/b; do sleep 0.02; done")

        assert inside(cleanup("^bosh_stays")) == ["bosh_stays"]
        assert box.run(f"pgrep -u {number} || true") == ""
        assert not (box.root / home[1:]).exists()
    finally:
        box.run(f"pkill -KILL -u {number} || true")
        for each in staying:
            each.kill()
            each.wait()


def test_user_removal_kills_no_process_in_the_host_pid_namespace(box: Machine, inside: Inside) -> None:
    """In the host's PID namespace, other containers' processes can have the same uid. The agent recognizes this case
    because the root directory of PID 1 is not its own.
    """
    inside(setup("bosh_seen"))
    box.run(
        "mkdir -p /mnt/own && mount -t tmpfs tmpfs /mnt/own && cd / && for each in *; do"
        " if test -L $each; then cp -d $each /mnt/own; elif test -d $each -a $each != mnt;"
        " then mkdir /mnt/own/$each && mount --rbind /$each /mnt/own/$each; fi; done"
    )
    other = box.popen(["setpriv", "--reuid", "bosh_seen", "--regid", "bosh_seen", "--clear-groups", "sleep", "600"])
    try:
        box.run("until pgrep -u bosh_seen sleep >/dev/null; do sleep 0.02; done")
        assert inside(cleanup("^bosh_seen"), "chroot", "/mnt/own") == ["bosh_seen"]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        box.run("umount -l /mnt/own")


def test_missing_group_leaves_no_partial_ssh_user(box: Machine, inside: Inside) -> None:
    group = box.root / "etc/group"
    text = group.read_text()
    group.write_text("".join(line for line in text.splitlines(keepends=True) if not line.startswith("admin:")))
    try:
        error = inside(setup("bosh_half"))
    finally:
        group.write_text(text)

    assert error == ("Adding user to groups: cannot run usermod: exit status 6: usermod: group 'admin' does not exist")
    assert "bosh_half" not in accounts(box)
    assert not (box.vcap / "bosh_ssh/bosh_half").exists()


def test_agent_without_useradd_or_root_creates_no_user(box: Machine, inside: Inside) -> None:
    """useradd may be missing in a minimal image."""
    inside(setup("bosh_first"))
    box.run("mount --bind /dev/null /usr/sbin/useradd")
    try:
        error = inside(setup("bosh_none"))
    finally:
        box.run("umount /usr/sbin/useradd")
    assert error == "Creating user: cannot run useradd: Permission denied"

    error = inside(setup("bosh_none"), "setpriv", "--reuid", "65534", "--clear-groups")
    assert error == "Creating user: cannot make users: the agent is not root"
    assert "bosh_none" not in accounts(box)


def test_vcap_authorized_keys_replace_the_previous_keys(box: Machine, inside: Inside) -> None:
    for keys in (["ssh-rsa AAAA", "ssh-rsa BBBB"], ["ssh-rsa CCCC", "ssh-rsa DDDD"]):
        inside(f"{USERS}await users.authorize_vcap({keys!r})")

    assert box.run("cat /home/vcap/.ssh/authorized_keys") == "ssh-rsa CCCC\nssh-rsa DDDD"
    assert box.run("cd /home/vcap && stat -c '%a %U' .ssh .ssh/authorized_keys") == "700 vcap\n600 vcap\n"


@pytest.mark.attack("an SSH user replaces the directory or file for SSH keys with a link, a FIFO or another directory")
def test_vcap_keys_are_not_written_through_a_link(box: Machine, inside: Inside) -> None:
    """If root followed the link, vcap could make root create files in directories that only root may write to."""
    box.run("rm -rf /home/vcap/.ssh && mkdir -m 700 /etc/victim && ln -s /etc/victim /home/vcap/.ssh")
    try:
        error = inside(f"{USERS}await users.authorize_vcap(['ssh-rsa AAAA'])")
    finally:
        box.run("rm /home/vcap/.ssh")

    assert error.startswith("cannot authorize keys for vcap: cannot run /bin/sh: exit status ")
    assert list((box.root / "etc/victim").iterdir()) == []


@pytest.mark.attack("an SSH user replaces the directory or file for SSH keys with a link, a FIFO or another directory")
def test_operator_keys_are_not_written_through_a_link(box: Machine, inside: Inside) -> None:
    """Before a user is set up a second time, the operator may have replaced the .ssh directory with a link to one of
    root's directories or to another user's keys.
    """
    inside(setup("bosh_sly"))
    as_sly = "setpriv --reuid=bosh_sly --regid=bosh_sly --clear-groups"
    box.run("mkdir -m 700 /etc/aim && echo kept >/etc/aim/authorized_keys")
    home = "/var/vcap/bosh_ssh/bosh_sly"

    box.run(f"cd {home} && {as_sly} rm -rf .ssh && {as_sly} ln -s /etc/aim .ssh")
    error = inside(setup("bosh_sly", "ssh-rsa AAAA"))

    assert error.startswith("Setting ssh public key: cannot run /bin/sh: exit status ")
    box.run(f"cd {home} && {as_sly} rm .ssh && {as_sly} mkdir -m 700 .ssh")
    box.run(f"{as_sly} ln -s /etc/aim/authorized_keys {home}/.ssh/authorized_keys")
    inside(setup("bosh_sly", "ssh-rsa BBBB"))

    assert box.run("ls /etc/aim; cat /etc/aim/authorized_keys") == "authorized_keys\nkept\n"
    assert box.run(f"cat {home}/.ssh/authorized_keys") == "ssh-rsa BBBB"
    assert inside(cleanup("^bosh_sly$")) == ["bosh_sly"]
    assert box.run("cat /etc/aim/authorized_keys") == "kept\n"


@pytest.mark.attack("an SSH user replaces the directory or file for SSH keys with a link, a FIFO or another directory")
@pytest.mark.parametrize("planted", ["mkfifo", "mkdir", "ln -s /etc/led-to"])
def test_object_planted_at_the_authorized_keys_path_does_not_block_the_agent(
    box: Machine, inside: Inside, planted: str
) -> None:
    """Opening a FIFO at this path would block each boot until a timeout."""
    box.run("rm -rf /home/vcap/.ssh")
    as_vcap = "setpriv --reuid=vcap --regid=vcap --clear-groups"
    box.run(f"cd /home/vcap && {as_vcap} mkdir .ssh && {as_vcap} {planted} .ssh/authorized_keys.new")

    inside(f"{USERS}await users.authorize_vcap(['ssh-rsa AAAA'])")

    assert box.run("cat /home/vcap/.ssh/authorized_keys") == "ssh-rsa AAAA"
    assert not (box.root / "etc/led-to").exists()


@pytest.mark.attack("an SSH user replaces the directory or file for SSH keys with a link, a FIFO or another directory")
def test_user_that_stops_the_key_writer_delays_the_agent_only_briefly(box: Machine, inside: Inside) -> None:
    """A process that runs as vcap sends SIGSTOP to the process that writes vcap's keys."""
    stopping = box.popen([*AS_VCAP, "setsid", sys.executable, "-S", "-c", KILLING.replace("9", "19")])
    try:
        box.run("until pgrep -u vcap >/dev/null; do sleep 0.02; done")
        for _ in range(20):  # Retry, because the writer may finish before it is stopped.
            if error := inside(f"{USERS}await users.authorize_vcap(['ssh-rsa AAAA'])"):
                break
    finally:
        box.run("pkill -KILL -u vcap || true")
        stopping.wait()

    assert error == "cannot authorize keys for vcap: cannot run /bin/sh: no result within 10 seconds"


@pytest.mark.parametrize("keep_root", [True, False])
def test_password_is_set_for_vcap_and_root_unless_root_keeps_its_own(
    box: Machine, inside: Inside, keep_root: bool
) -> None:
    hashed = f"$6$salt$hash{keep_root}"
    inside(f"{USERS}await users.set_passwords({hashed!r}, keep_root={keep_root})")
    shadow = dict(line.split(":")[:2] for line in (box.root / "etc/shadow").read_text().splitlines())

    assert shadow["vcap"] == hashed
    assert (shadow["root"] == hashed) is not keep_root
