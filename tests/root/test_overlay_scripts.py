"""Tests the stemcell overlay's scripts, run as in the image: init with its services and a real agent, and the
`sv`, `service` and `systemctl` commands. Needs root and the s6 and cron packages.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_shim.demo.director import RpcTimeoutError
from tests.support.machine import machine
from tests.support.pod import AGENT, PodInstance
from tests.support.source import ROOT
from tests.support.waiting import TIMEOUT_S

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("s6-svscan") is None, reason="needs the package s6"),
]

ARGUMENTS = "-C /var/vcap/bosh/agent.json"
INSTALL = f"""
set -e
mount -t tmpfs -o mode=0755 tmpfs /opt
cp -r {ROOT}/stemcell_overlay/rootfs/opt/agent_shim /opt
mkdir -p /opt/agent_shim/bin /opt/agent_shim/s6/bin
ln -s /usr/bin/s6-* /opt/agent_shim/s6/bin
printf '#!/bin/sh\\nexec {sys.executable} -m agent_shim.cli "$@"\\n' >/opt/agent_shim/bin/agent-shim
printf '#!/bin/sh\\nexec {sys.executable} -m agent_shim.cli run "$@"\\n' >/opt/agent_shim/bin/bosh-agent
chmod 755 /opt/agent_shim/bin/*
mkdir /opt/tools
for name in sv service systemctl; do ln -s /opt/agent_shim/stand-ins/control /opt/tools/$name; done
"""


@pytest.fixture
def pod(pod: PodInstance) -> PodInstance:
    pod.start_container()
    pod.machine.run(INSTALL)
    return pod


@contextmanager
def init(pod: PodInstance) -> Iterator[subprocess.Popen[bytes]]:
    """Run the image's init in the container during the block."""
    with (pod.scratch / "init.log").open("ab") as log:
        argv = ["env", f"PYTHONPATH={ROOT}", "/opt/agent_shim/init/start", *ARGUMENTS.split()]
        started = pod.machine.popen(argv, stdout=log, stderr=log)
    try:
        yield started
    finally:
        pod.machine.run("/opt/agent_shim/s6/bin/s6-svscanctl -q /run/agent_shim/services 2>/dev/null || true")
        started.wait(60)


async def answers(pod: PodInstance) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                await pod.director.value(AGENT, "ping", timeout=1)
                return
            except RpcTimeoutError:
                continue


async def until(pod: PodInstance, command: str) -> None:
    """Wait until a shell command succeeds in the container."""
    async with asyncio.timeout(TIMEOUT_S):
        while pod.machine.run(f"({command}) >/dev/null 2>&1 && echo yes || true") == "":
            await asyncio.sleep(0.1)


def tool(pod: PodInstance, command: str) -> str:
    """Run a shell command with the overlay's replacement programs in PATH. Return its stdout and stderr,
    followed by a line with its exit code.
    """
    return pod.machine.run(f"export PATH=/opt/tools:$PATH; ({command}) 2>&1; echo $?")


async def with_a_job(pod: PodInstance) -> str:
    """Deploy a job and return the pid of its process."""
    await answers(pod)
    await pod.deploy()
    return number(pod)


def number(pod: PodInstance) -> str:
    return pod.machine.run("cat /var/vcap/sys/run/web/web.pid 2>/dev/null || true").strip()


async def test_agent_disabled_by_a_release_still_supervises_jobs(pod: PodInstance) -> None:
    """os-conf's disable_agent job stops the agent's service. On a VM, monit then continues to supervise the jobs."""
    with init(pod):
        before = await with_a_job(pod)

        assert tool(pod, "sv stop agent").startswith("ok: down: agent: ")
        assert tool(pod, "sv kill agent | sed 's/ (.*//'") == "ok: down: agent:\n0\n"
        await until(pod, "/opt/agent_shim/bin/agent-shim status | grep -q 'no Director'")
        assert tool(pod, "sv status agent | sed 's/ (.*//'") == "down: agent:\n0\n"
        assert tool(pod, "systemctl is-active bosh-agent") == "inactive\n3\n"
        with pytest.raises(RpcTimeoutError):
            await pod.director.value(AGENT, "ping", timeout=0.5)
        assert number(pod) == before
        pod.machine.run(f"kill -KILL {before}")
        await until(pod, f"test -s /var/vcap/sys/run/web/web.pid && ! grep -qx {before} /var/vcap/sys/run/web/web.pid")
        after = number(pod)

        assert tool(pod, "sv start agent").startswith("ok: run: agent: ")
        await answers(pod)
        assert (await pod.until("running"))["job_state"] == "running"
        assert number(pod) == after


async def test_agent_stopped_for_a_handback_is_not_restarted_and_jobs_keep_running(pod: PodInstance) -> None:
    with init(pod):
        before = await with_a_job(pod)

        assert tool(pod, "sv exit agent").startswith("ok: down: agent: ")
        assert tool(pod, "pgrep monit") == "1\n"
        pod.machine.run(f"kill -0 {before}")

        assert tool(pod, "sv start agent").startswith("ok: run: agent: ")
        await answers(pod)


LIMITS = """
pid=$(pgrep monit | awk '{print $1}')
while [ "$pid" -gt 1 ]; do
    prlimit --pid "$pid" --nofile=777:888
    pid=$(ps -o ppid:1= -p "$pid")
done
"""
"""Sets limits for monit and its ancestors, as os-conf's ``limits`` job does."""


async def test_limits_that_a_release_sets_for_monit_apply_to_jobs(pod: PodInstance) -> None:
    with init(pod):
        before = await with_a_job(pod)
        assert tool(pod, "pgrep bosh-agent") == tool(pod, "pgrep monit")

        pod.machine.run(LIMITS)
        pod.machine.run(f"kill -KILL {before}")
        await until(pod, f"test -s /var/vcap/sys/run/web/web.pid && ! grep -qx {before} /var/vcap/sys/run/web/web.pid")

        limits = pod.machine.run(f"prlimit --pid {number(pod)} --nofile --output=SOFT,HARD --noheadings").split()
        assert limits == ["777", "888"]


async def test_container_shutdown_stops_the_jobs_in_order(pod: PodInstance) -> None:
    with init(pod) as started:
        before = await with_a_job(pod)
        (inside,) = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split() or [str(started.pid)]

        os.kill(int(inside), 15)

        assert await asyncio.to_thread(started.wait, 60) == 0
        assert tool(pod, f"kill -0 {before} 2>/dev/null") == "1\n"
        assert number(pod) == "", "its stop program ran"


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("systemctl is-active cron.service", "active\n0\n"),
        ("systemctl --quiet is-active cron", "0\n"),
        ("systemctl stop cron && systemctl is-active cron", "inactive\n3\n"),
        ("systemctl stop cron; systemctl reload-or-restart cron && systemctl is-active cron", "active\n0\n"),
        ("systemctl disable --now cron && systemctl is-active cron", "inactive\n3\n"),
        ("systemctl daemon-reload && systemctl enable cron && systemctl reset-failed", "0\n"),
        ("systemctl is-enabled cron", "enabled\n0\n"),
        ("systemctl start nothing", "Unit nothing.service not found.\n5\n"),
        ("systemctl is-active nothing", "inactive\n3\n"),
        ("systemctl is-system-running", "offline\n1\n"),
        ("systemctl restart ssh", "ssh is a part of the agent, which manages it\n0\n"),
        ("systemctl status chronyd", "inactive\n3\n"),
        ("service cron restart && service cron status", "cron is running\n0\n"),
        ("service cron stop; service cron status", "cron is not running\n3\n"),
        ("service nothing start", "nothing: unrecognized service\n1\n"),
        ("service --status-all | grep agent", " [ + ]  agent\n0\n"),
        ("service cron 2>&1 | cut -c -27", "Usage: service < option > |\n0\n"),
        ("sv restart cron | sed 's/(.*/…/'", "ok: run: cron: …\n0\n"),
        ("sv -w 3 down cron | sed 's/(.*/…/'", "ok: down: cron: …\n0\n"),
        ("sv down cron >/dev/null; sv status cron | sed 's/(.*/…/'", "down: cron: …\n0\n"),
        ("sv start nothing", "fail: nothing: unable to change to service directory: file does not exist\n1\n"),
        ("sv status", "usage: sv [-v] [-w sec] command services\n100\n"),
    ],
)
async def test_service_commands_answer_like_the_real_programs(pod: PodInstance, command: str, wanted: str) -> None:
    if shutil.which("cron") is None:
        pytest.skip("needs the package cron")
    with init(pod):
        await until(pod, "/opt/tools/systemctl is-active cron agent")

        assert tool(pod, command) == wanted


async def test_runit_service_is_run_by_the_init(pod: PodInstance) -> None:
    pod.machine.run(
        "mkdir -p /etc/sv/own && printf '#!/bin/sh\\nexec sleep 1000\\n' >/etc/sv/own/run && chmod 755 /etc/sv/own/run"
    )
    with init(pod):
        await until(pod, "/opt/tools/systemctl is-active agent")

        assert tool(pod, "sv start own").startswith("ok: run: own: (pid ")
        assert tool(pod, "systemctl stop own && pgrep -fx 'sleep 1000'") == "1\n"


@pytest.mark.attack("a job makes cron run its programs outside its cgroup")
async def test_only_root_may_install_a_crontab(pod: PodInstance) -> None:
    """With a crontab, a job could have cron run a program outside the job's cgroup, where neither stopping the job
    nor its limits would affect the program.
    """
    if shutil.which("crontab") is None:
        pytest.skip("needs the package cron")
    pod.machine.run(
        f"install -m 600 {ROOT}/stemcell_overlay/rootfs/etc/cron.allow /etc/cron.allow; "
        "mount -t tmpfs tmpfs /var/spool/cron; install -d -m 1730 -g crontab /var/spool/cron/crontabs"
    )
    write = "echo '* * * * * true' | {} crontab {}"

    as_vcap = tool(pod, write.format("setpriv --reuid=vcap --regid=vcap --clear-groups --", "-"))
    assert as_vcap.endswith("\n1\n")
    assert "not allowed" in as_vcap
    assert tool(pod, write.format("", "-u vcap -")) == "0\n"


ALONE = "unshare --pid --fork --mount-proc"


def test_pid_1_is_the_init_except_for_compile_and_version_commands(tmp_path: Path) -> None:
    with machine(tmp_path) as box:
        box.run(INSTALL)
        for path in ("init/start", "bin/bosh-agent"):
            box.run(f"printf '#!/bin/sh\necho {path} $*\n' >/opt/agent_shim/{path}")

        assert box.run(f"{ALONE} /opt/agent_shim/launch -P x") == "init/start -P x\n"
        assert box.run(f"{ALONE} /opt/agent_shim/launch compile a.tgz") == "bin/bosh-agent compile a.tgz\n"
        for question in ("-v", "-P ubuntu -version", "--help"):
            assert box.run(f"{ALONE} /opt/agent_shim/launch {question}") == f"bin/bosh-agent {question}\n"


FINISH = """
cd /mnt
(trap 'echo told >told; exit' TERM; echo >ready; while :; do sleep 0.05; done) &
until [ -e ready ]; do sleep 0.05; done
echo 3 >exit_code
exec /opt/agent_shim/init/finish
"""


def test_pid_1_sends_sigterm_to_remaining_processes_before_it_exits(tmp_path: Path) -> None:
    """When PID 1 exits, the kernel kills the remaining processes. SIGTERM lets them complete their writes first."""
    with machine(tmp_path) as box:
        box.run(INSTALL)

        assert box.run(f"{ALONE} sh -c {shlex.quote(FINISH)}; echo $?") == "3\n"
        assert box.run("cat /mnt/told") == "told\n"
