"""Tests the overlay's shell scripts, run in a scratch directory. The programs that they call are replaced by stand-ins
that record the calls.

The root tests run the scripts with the real init, cron and agent, and the image tests run them as PID 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.source import ROOT

SOURCE = ROOT / "stemcell_overlay/rootfs/opt/agent_shim"
MOVED = (
    *("/opt/agent_shim", "/var/vcap/bosh", "/etc/resolv", "/run/systemd/system", "/run/agent_shim", "/dev/shm"),
    *("/usr/bin/systemctl", "/usr/sbin/", "/etc/network"),
)
ENVIRONMENT = {"PATH": os.environ["PATH"]}


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """Copy the overlay to a scratch directory, and change the absolute paths in its scripts to paths in that
    directory.
    """
    home = tmp_path / "opt/agent_shim"
    shutil.copytree(SOURCE, home)
    places = [*home.glob("init/*"), *home.glob("services/*/*"), *home.glob("stand-ins/*"), home / "launch"]
    for script in places:
        text = script.read_text()
        for path in MOVED:
            text = text.replace(path, f"{tmp_path}{path}")
        script.write_text(text)
    for directory in ("etc/resolvconf/resolv.conf.d", "var/vcap/bosh", "usr/bin", "usr/sbin", "tools"):
        (tmp_path / directory).mkdir(parents=True)
    return tmp_path


def recorder(place: Path, body: str = "") -> None:
    """Create a program that appends its name and arguments to the ``told`` file in the scratch directory and then runs
    ``body``.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    told = next(up for up in place.parents if (up / "tools").is_dir()) / "told"
    place.write_text(f'#!/bin/sh\necho "${{0##*/}} $*" >>{told}\n{body}\n')
    place.chmod(0o755)


def told(top: Path) -> list[str]:
    return (top / "told").read_text().splitlines() if (top / "told").exists() else []


def run(program: Path, *arguments: str, cwd: Path, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{cwd.parent / 'tools'}:{cwd / 'tools'}:{ENVIRONMENT['PATH']}"
    env = {**ENVIRONMENT, "PATH": path, **environ}
    argv = [str(program), *arguments]
    return subprocess.run(argv, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, umask=0o077)


# --- launch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("init", (), "start "),
        ("init", ("-P", "ubuntu"), "start "),
        ("runsvdir-start", (), "start "),
        ("bosh-agent", ("-P", "ubuntu", "-C", "x y"), "bosh-agent -P ubuntu -C x y"),
        ("bosh-agent", ("compile", "a.tgz"), "bosh-agent compile a.tgz"),
        ("bosh-agent", ("-v",), "bosh-agent -v"),
        ("init", ("--help",), "bosh-agent --help"),
        ("runsvdir-start", ("-P", "ubuntu", "-v"), "bosh-agent -P ubuntu -v"),
        ("launch", (), "bosh-agent "),
    ],
)
def test_launch_script_executes_the_agent_or_the_init_depending_on_its_name(
    top: Path, name: str, arguments: tuple[str, ...], said: str
) -> None:
    home = top / "opt/agent_shim"
    recorder(home / "init/start")
    recorder(home / "bin/bosh-agent", 'pwd; echo "$LANG $HOME $MALLOC_ARENA_MAX $(umask) ${PATH%%:*}"')
    (top / "usr/bin" / name).symlink_to(home / "launch")

    done = run(top / "usr/bin" / name, *arguments, cwd=top, HOME="")

    assert (done.returncode, done.stderr, told(top)) == (0, "", [said])
    if said.startswith("bosh-agent"):
        where = top if "compile" in arguments else top / "var/vcap/bosh"
        assert done.stdout.splitlines() == [str(where), f"C.UTF-8 /root 2 0022 {top}/var/vcap/bosh/bin"]


# --- the init ---------------------------------------------------------------------------------------------------------


def test_init_sets_up_services_and_signal_handlers_and_passes_few_environment_variables(top: Path) -> None:
    home, bosh = top / "opt/agent_shim", top / "var/vcap/bosh"
    recorder(home / "s6/bin/s6-svscan", "env")
    bosh.rmdir()

    done = run(home / "init/start", "-P", "x", cwd=top, SECRET="s", TZ="UTC", AGENT_SHIM_GRACE="5")

    place = top / "run/agent_shim/services"
    links = {link.name: link.readlink().name for link in (place / ".s6-svscan").iterdir()}
    environ = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert (done.returncode, told(top)) == (0, ["s6-svscan ."])
    assert links == {"finish": "finish", "SIGTERM": "stop", "SIGINT": "stop", "SIGPWR": "stop"}
    assert {each.parent.name for each in place.glob("*/run")} == {path.name for path in (home / "services").iterdir()}
    assert environ.keys() - {"PWD", "OLDPWD", "SHLVL", "_"} == {
        *("PATH", "LANG", "HOME", "TZ", "AGENT_SHIM_ARGUMENTS", "AGENT_SHIM_GRACE")
    }
    assert {link.name for link in (bosh / "bin").iterdir()} == {"monit", "bosh-agent"}


@pytest.mark.parametrize("is_there", [True, False])
def test_init_mounts_shared_memory_if_its_directory_is_missing(top: Path, is_there: bool) -> None:
    """LXD containers have no ``/dev/shm``."""
    programs, shared = top / "opt/agent_shim/s6/bin", top / "dev/shm"
    recorder(programs / "s6-svscan")
    recorder(programs / "mount")
    (shared if is_there else shared.parent).mkdir(parents=True)

    run(top / "opt/agent_shim/init/start", cwd=top)

    mounts = [] if is_there else [f"mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs {shared}"]
    assert told(top) == [*mounts, "s6-svscan ."]
    assert shared.is_dir()


# --- container shutdown -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "drains", "code"),
    [([0], 1, 0), ([1], 1, 1), ([2], 1, 1), ([69, 69, 0], 3, 0), ([69] * 9, 5, 1)],
)
def test_stop_script_waits_for_a_restarting_agent_and_records_the_drain_exit_code(
    top: Path, codes: list[int], drains: int, code: int
) -> None:
    home = top / "opt/agent_shim"
    (top / "codes").write_text("".join(f"{each}\n" for each in codes))
    take = f"code=$(head -n 1 {top}/codes); sed -i 1d {top}/codes; exit $code"
    recorder(home / "bin/agent-shim", take)
    recorder(top / "tools/s6-svscanctl")
    recorder(top / "tools/sleep")

    done = run(home / "init/stop", cwd=top, AGENT_SHIM_GRACE="7")

    assert (done.returncode, done.stderr) == (0, "")
    drained = [line for line in told(top) if line.startswith("agent-shim")]
    assert drained == ["agent-shim drain --hurry --timeout 7"] * drains
    assert told(top)[-1] == "s6-svscanctl -t ."
    assert (top / "exit_code").read_text() == f"{code}\n"


def test_stop_script_uses_the_grace_period_in_agent_json_if_no_variable_is_set(top: Path) -> None:
    recorder(top / "opt/agent_shim/bin/agent-shim")
    recorder(top / "tools/s6-svscanctl")

    run(top / "opt/agent_shim/init/stop", cwd=top)

    assert told(top)[0] == "agent-shim drain --hurry"


@pytest.mark.parametrize(("noted", "code"), [("0\n", 0), ("1\n", 1), (None, 1)])
def test_container_exits_with_the_recorded_drain_exit_code_or_with_1(top: Path, noted: str | None, code: int) -> None:
    if noted is not None:
        (top / "exit_code").write_text(noted)

    assert run(top / "opt/agent_shim/init/finish", cwd=top).returncode == code


# --- services ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("service", "program"), [("cron", "cron"), ("rsyslog", "rsyslogd")])
@pytest.mark.parametrize("uid", ["0", "1000"])
@pytest.mark.parametrize("is_there", [True, False])
def test_init_service_stays_down_if_its_program_is_missing_or_the_user_is_not_root(
    top: Path, service: str, program: str, uid: str, is_there: bool
) -> None:
    recorder(top / "tools/s6-svc")
    recorder(top / "tools/rm")
    (top / "tools/id").write_text(f"#!/bin/sh\necho {uid}\n")
    (top / "tools/id").chmod(0o755)
    if is_there:
        recorder(top / "usr/sbin" / program, "echo said >&2")

    done = run(top / f"opt/agent_shim/services/{service}/run", cwd=top)

    wanted = {"cron": ["rm -f /run/crond.pid", "cron -f"], "rsyslog": ["rsyslogd -n -iNONE"]}[service]
    starts = is_there and uid == "0"
    assert told(top) == (wanted if starts else ["s6-svc -d ."])
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\n" if starts else "", "")


def lxd_interfaces(top: Path, addressed: str) -> None:
    """Create the files that the LXD CPI writes for two interfaces.

    ``addressed`` is a shell pattern for the names of the interfaces that have an address.
    """
    for name in ("eth0", "eth1"):
        path = top / "etc/network/interfaces.d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# Using LXD DHCP\nauto {name}\niface {name} inet dhcp\n")
    for tool, said in (("id", "0"), ("hostname", "vm")):
        recorder(top / "tools" / tool, f"echo {said}")
    recorder(top / "tools/ip", f'case "$*" in *"show dev "{addressed}" "*) echo inet 10.0.0.2/24 ;; esac')
    recorder(top / "tools/s6-svc")
    recorder(top / "tools/udhcpc")


@pytest.mark.parametrize(("addressed", "asked"), [("none", ["eth0", "eth1"]), ("eth1", ["eth0"])])
def test_dhcp_service_requests_addresses_for_interfaces_that_have_none(
    top: Path, addressed: str, asked: list[str]
) -> None:
    lxd_interfaces(top, addressed)
    done = run(top / "opt/agent_shim/services/dhcp/run", cwd=top)

    script = top / "opt/agent_shim/services/dhcp/lease"
    assert done.stderr == ""
    assert sorted(line for line in told(top) if line.startswith("udhcpc")) == [
        f"udhcpc -f -i {name} -A 3 -x hostname:vm -s {script}" for name in asked
    ]


def test_dhcp_service_stays_down_if_all_interfaces_have_addresses(top: Path) -> None:
    """Usually, the container runtime has already configured the network."""
    lxd_interfaces(top, "eth?")
    run(top / "opt/agent_shim/services/dhcp/run", cwd=top)

    assert told(top)[-1] == "s6-svc -d ."
    assert not any(line.startswith("udhcpc") for line in told(top))


@pytest.mark.parametrize(
    ("before", "after"),
    [("", "search example\nnameserver 10.0.0.1\n"), ("nameserver 9.9.9.9\n", "nameserver 9.9.9.9\n")],
)
def test_dhcp_lease_sets_address_and_route_but_keeps_existing_name_servers(top: Path, before: str, after: str) -> None:
    recorder(top / "tools/ip")
    (top / "etc/resolv.conf").write_text(before)
    lease = {"interface": "eth0", "ip": "10.0.0.2", "mask": "24", "router": "10.0.0.1", "dns": "10.0.0.1"}
    run(top / "opt/agent_shim/services/dhcp/lease", "bound", cwd=top, **lease, domain="example")

    assert told(top) == [
        "ip -4 address replace 10.0.0.2/24 dev eth0",
        "ip -4 route replace default via 10.0.0.1 dev eth0",
    ]
    assert (top / "etc/resolv.conf").read_text() == after


@pytest.mark.parametrize("is_off", [True, False])
def test_agent_service_passes_init_arguments_to_the_agent_and_can_turn_off_the_bus(top: Path, is_off: bool) -> None:
    recorder(top / "opt/agent_shim/launch", 'echo "[$AGENT_SHIM_BUS]" >&2')
    if is_off:
        (top / "off_bus").touch()

    done = run(top / "opt/agent_shim/services/agent/run", cwd=top, AGENT_SHIM_ARGUMENTS="-P ubuntu -C file")

    assert told(top) == ["launch -P ubuntu -C file"]
    assert done.stdout == ("[off]\n" if is_off else "[]\n")


def test_rsyslog_rotate_script_reloads_rsyslog(top: Path) -> None:
    recorder(top / "usr/bin/systemctl")

    run(top / "opt/agent_shim/stand-ins/rsyslog-rotate", cwd=top)

    assert told(top) == ["systemctl --quiet reload rsyslog"]


@pytest.mark.parametrize("name", ["control", "resolvectl", "rsyslog-rotate"])
def test_stand_ins_call_the_real_programs_under_systemd(top: Path, name: str) -> None:
    place = top / "opt/agent_shim/stand-ins" / name
    (top / "run/systemd/system").mkdir(parents=True)
    recorder(place.with_name(f"{name}.distrib"))

    assert run(place, "a", "b", cwd=top).returncode == 0
    assert told(top) == [f"{name}.distrib a b"]


# --- name servers -----------------------------------------------------------------------------------------------------


BEFORE = "search x\nnameserver 192.0.2.1\n"
FIRST = "nameserver {} # set by resolvectl\n"


@pytest.mark.parametrize(
    ("commands", "after"),
    [
        (["resolvectl dns bosh-dns 169.254.0.2"], FIRST.format("169.254.0.2") + BEFORE),
        (["resolvectl --no-pager dns lo a b"], FIRST.format("a") + FIRST.format("b") + BEFORE),
        (["resolvectl dns lo a", "resolvectl dns lo b"], FIRST.format("b") + BEFORE),
        (["resolvectl dns lo a", "resolvectl revert lo"], BEFORE),
        (["resolvectl domain lo ~.", "resolvectl flush-caches", "resolvectl log-level info"], BEFORE),
        (["resolvconf -u"], FIRST.format("10.0.0.1") + BEFORE),
        (["resolvconf -u", "resolvconf -u"], FIRST.format("10.0.0.1") + BEFORE),
        (["resolvconf -u", "resolvconf -d eth0"], BEFORE),
        (["resolvconf -a eth0"], FIRST.format("10.0.0.9") + BEFORE),
        (["resolvconf --updates-are-enabled"], BEFORE),
    ],
)
def test_resolvectl_and_resolvconf_put_link_name_servers_first_until_reverted(
    top: Path, commands: list[str], after: str
) -> None:
    stand_ins = top / "opt/agent_shim/stand-ins"
    (stand_ins / "resolvconf").symlink_to("resolvectl")
    (top / "etc/resolv.conf").write_text(BEFORE)
    (top / "etc/resolvconf/resolv.conf.d/head").write_text("# head\nnameserver 10.0.0.1\n")

    for command in commands:
        name, *arguments = command.split()
        done = run(stand_ins / name, *arguments, cwd=top, stdin="nameserver  10.0.0.9 x\n")
        assert (done.returncode, done.stderr) == (0, "")

    assert (top / "etc/resolv.conf").read_text() == after


def test_resolvectl_lists_name_servers_and_replaces_a_resolv_conf_link(top: Path) -> None:
    """If resolv.conf is a regular file, it must be changed in place, because it may be a mount. If it is a link, its
    target belongs to systemd-resolved and does not exist in a container.
    """
    resolvectl, file = top / "opt/agent_shim/stand-ins/resolvectl", top / "etc/resolv.conf"
    file.write_text(BEFORE)
    inode = file.stat().st_ino
    run(resolvectl, "dns", "lo", "a", cwd=top)
    assert file.stat().st_ino == inode
    assert run(resolvectl, "dns", cwd=top).stdout == "a\n192.0.2.1\n"
    assert run(resolvectl, cwd=top).stdout == file.read_text()
    assert "localhost" in run(resolvectl, "query", "localhost", cwd=top).stdout

    file.rename(top / "elsewhere")
    file.symlink_to(top / "elsewhere")
    run(resolvectl, "revert", "lo", cwd=top)
    assert not file.is_symlink()
    assert file.read_text() == BEFORE
