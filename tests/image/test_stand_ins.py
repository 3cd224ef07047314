"""Tests the stand-ins for the commands that releases use to control system services, in a container without systemd."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support import pods
from tests.support.pods import Container, Podman

pytestmark = [pytest.mark.image, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def container(podman: Podman, image: str) -> AsyncIterator[Container]:
    async with pods.running(podman, image, options=("--network=none",)) as made:
        await made.until(0, "systemctl", "is-active", "cron", "rsyslog")
        yield made


async def shell_output(container: Container, command: str) -> str:
    """Run a shell command in the container. Return its stdout and stderr, followed by a line with its exit code."""
    return await container.exec("sh", "-c", f"{command} 2>&1; echo $?")


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("systemctl is-active rsyslog.service", "active\n0\n"),
        ("systemctl --quiet is-active rsyslog", "0\n"),
        ("systemctl stop cron && systemctl is-active cron", "inactive\n3\n"),
        ("systemctl start cron && systemctl is-active cron", "active\n0\n"),
        ("systemctl daemon-reload && systemctl enable rsyslog && systemctl reset-failed", "0\n"),
        ("systemctl reload rsyslog", "0\n"),
        ("systemctl start nothing", "Unit nothing.service not found.\n5\n"),
        ("systemctl is-active nothing", "inactive\n3\n"),
        ("systemctl is-system-running", "offline\n1\n"),
        (
            "systemctl restart systemd-resolved",
            "systemd-resolved belongs to the host of this container: nothing is done\n0\n",
        ),
        ("systemctl restart ssh", "ssh is a part of the agent, which manages it\n0\n"),
        ("service rsyslog restart && service rsyslog status", "rsyslog is running\n0\n"),
        ("service nothing start", "nothing: unrecognized service\n1\n"),
        ("service sudo status", "0\n"),
        ("service --status-all | grep cron", " [ + ]  cron\n0\n"),
        ("sv restart cron | sed 's/(.*/…/'", "ok: run: cron: …\n0\n"),
        ("sv status rsyslog | sed 's/(.*/…/'", "run: rsyslog: …\n0\n"),
        ("sv start nothing", "fail: nothing: unable to change to service directory: file does not exist\n1\n"),
        (
            "sv -w 3 restart agent | sed 's/(.*/…/'; while ! agent-shim probe ready 2>&1 | grep waiting; do :; done",
            "ok: run: agent: …\nwaiting for settings\n0\n",
        ),
    ],
)
async def test_service_commands_answer_like_the_real_programs(container: Container, command: str, wanted: str) -> None:
    assert await shell_output(container, command) == wanted


async def test_runit_service_from_a_release_is_supervised(container: Container) -> None:
    await container.exec(
        *("sh", "-c"),
        "mkdir -p /etc/sv/own && printf '#!/bin/sh\\nexec sleep 1000\\n' >/etc/sv/own/run && chmod 755 /etc/sv/own/run",
    )

    assert (await shell_output(container, "sv start own")).startswith("ok: run: own: (pid ")
    assert await shell_output(container, "systemctl stop own && pgrep -fx 'sleep 1000'") == "1\n"


async def test_syslog_messages_are_written_to_var_log_syslog(container: Container) -> None:
    await container.exec("logger", "--tag", "somebody", "hello")

    await container.until(0, "grep", "-q", "somebody: hello", "/var/log/syslog")


async def test_resolvectl_adds_and_removes_the_bosh_dns_name_server(container: Container) -> None:
    """bosh-dns adds its name server with resolvectl when it starts, and removes it when it stops."""
    await container.exec("sh", "-c", "echo 'nameserver 192.0.2.1' >/etc/resolv.conf")
    await container.exec("resolvectl", "dns", "bosh-dns", "169.254.0.2")
    await container.exec("resolvectl", "domain", "bosh-dns", "~.")

    assert await shell_output(container, "resolvectl dns") == "169.254.0.2\n192.0.2.1\n0\n"
    assert (
        await shell_output(container, "resolvectl revert bosh-dns; cat /etc/resolv.conf") == "nameserver 192.0.2.1\n0\n"
    )


async def test_logrotate_rotates_only_system_logs(container: Container) -> None:
    """The agent rotates job logs itself. If logrotate copied and truncated the same files, lines would be lost."""
    await container.exec(
        "sh", "-c", "mkdir -p /var/vcap/data/sys/log/job; yes | head -c 60M >/var/vcap/data/sys/log/job/job.log"
    )
    await container.exec("logger", "before")
    await container.until(0, "grep", "-q", "before", "/var/log/syslog")

    assert await shell_output(container, "ls /etc/cron.daily/logrotate") == "/etc/cron.daily/logrotate\n0\n"
    await container.exec("logrotate", "--force", "/etc/logrotate.conf")

    assert await shell_output(container, "ls /var/vcap/data/sys/log/job") == "job.log\n0\n"
    assert await shell_output(container, "ls /var/log/syslog.1") == "/var/log/syslog.1\n0\n"
    await container.exec("logger", "after")
    await container.until(0, "grep", "-q", "after", "/var/log/syslog")
    assert await shell_output(container, "grep -c before /var/log/syslog") == "0\n1\n"


CHPST = [
    ("-u vcap id", 0),
    ("-u vcap:adm:tty id", 0),
    ("-u :5:6:7 id", 0),
    ("-u :5 id", 111),
    ("-u nobody-knows id", 111),
    ("-u vcap: id", 111),
    ("-U vcap:adm sh -c 'echo $UID $GID; id'", 0),
    ("-o 50 sh -c 'ulimit -n; ulimit -Hn'", 0),
    ("-o 99999999 sh -c 'ulimit -n'", 0),
    ("-o much true", 100),
    ("-m 90000000 -d 80000000 sh -c 'ulimit -a'", 0),
    ("-d 80000000 -m 90000000 sh -c 'ulimit -a'", 0),
    ("-p 4000 -f 100000 -c 0 -t 5 -r 90000000 sh -c 'ulimit -a'", 0),
    ("-b zero sh -c 'echo $0'", 0),
    ("-P sh -c '[ $(ps -o sid= -p $$) = $$ ] && echo leader'", 0),
    ("-e /tmp/env sh -c 'echo \"[$A][$HOME][$N][$E]\"'", 0),
    ("-e /nowhere true", 111),
    ("-n 5 nice", 0),
    ("-n -5 nice", 111),
    ("-n x nice", 100),
    ("-/ /nowhere true", 111),
    ("-/ / sh -c pwd", 0),
    ("-012 sh -c '[ -e /proc/self/fd/0 ] || [ -e /proc/self/fd/1 ] || [ -e /proc/self/fd/2 ]'", 1),
    ("-l /tmp/free echo taken", 0),
    ("-L /tmp/free echo taken", 0),
    ("-L /tmp/held echo taken", 111),
    ("-l /nowhere/lock true", 111),
    ("-v -- sh -c 'kill -PIPE $$; echo alive'", 128 + 13),
    ("sh -c 'grep Sig[BIC] /proc/self/status'", 0),
    ("sh -c 'exit 7'", 7),
    ("no-such-program", 111),
    ("-z true", 100),
    ("-u vcap", 100),
    ("", 100),
]


@pytest.mark.parametrize(("arguments", "code"), CHPST)
async def test_chpst_behaves_like_runits_chpst(container: Container, arguments: str, code: int) -> None:
    """If the base image contains runit, our chpst must behave like runit's, except for its error messages."""
    await container.exec(
        "sh",
        "-c",
        "mkdir -p /tmp/env/directory; cd /tmp/env; "
        "printf 'a \\t \\nb' >A; : >HOME; printf 'x\\0y' >N; echo >E; echo >.no; "
        "flock -n /tmp/held sleep 60 </dev/null >/dev/null 2>&1 &",
    )
    real, ours = [
        await container.exec("sh", "-c", f"{program} {arguments} 2>/dev/null; echo $?")
        for program in ("/usr/bin/chpst", "/opt/agent_shim/stand-ins/chpst")
    ]

    assert ours == real
    assert ours.splitlines()[-1] == str(code)


async def test_chpst_passes_its_environment_on_unchanged(container: Container) -> None:
    """Our chpst is a Python program. Without a locale in the environment, Python sets LC_CTYPE, which must not reach
    the program that chpst executes.
    """
    seen = await container.exec("env", "-i", "A=b", "/opt/agent_shim/stand-ins/chpst", "/usr/bin/env")

    assert seen == "A=b\n"


async def test_resolvconf_puts_the_name_server_from_the_head_file_first(container: Container) -> None:
    """bosh-dns on older stemcells writes its server to ``resolv.conf.d/head`` and calls resolvconf."""
    script = """
    mkdir -p /etc/resolvconf/resolv.conf.d; head=/etc/resolvconf/resolv.conf.d/head
    printf 'nameserver 192.0.2.1\nsearch x\n' >/etc/resolv.conf
    printf '# bosh-dns\nnameserver 169.254.0.2\n' >$head
    resolvconf -u; resolvconf -u; grep -c . /etc/resolv.conf; head -n 2 /etc/resolv.conf | cut -d ' ' -f 2
    : >$head; resolvconf -u; cat /etc/resolv.conf
    """

    assert await container.exec("sh", "-ec", script) == ("3\n169.254.0.2\n192.0.2.1\nnameserver 192.0.2.1\nsearch x\n")
