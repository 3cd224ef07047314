"""Tests releases whose scripts call bpm. A Director deploys them to an agent that runs as root on its own machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support import jobs
from tests.support.fleet import Fleet
from tests.support.waiting import TIMEOUT_S

pytestmark = pytest.mark.root

AGENT = "7c1f9c1e-6f0f-4f5a-8c3d-2b1a54a7c9d2"
TOOL = "/var/vcap/jobs/bpm/bin/bpm"
SAID = "/var/vcap/data/said"
OTHER_BPM = "#!/bin/sh\necho the bpm of the release >&2\nexit 99\n"

MONIT = "".join(
    jobs.monit(
        name,
        Path(f"/var/vcap/sys/run/bpm/web/{name}.pid"),
        f"{TOOL} start web -p {name}",
        f"{TOOL} stop web -p {name}",
    )
    for name in ("web", "worker")
)
BPM_YML = """
processes:
- {name: web, executable: /var/vcap/jobs/web/bin/web, env: {NAME: web}}
- {name: worker, executable: /var/vcap/jobs/web/bin/web, env: {NAME: worker}}
- {name: errand, executable: /bin/sh, args: [-c, "id -u; ls /var/vcap/jobs; exit 5"]}
"""
WEB = """#!/bin/sh
trap 'echo $NAME ends; exit 0' TERM
echo $NAME starts
while :; do sleep 0.05; done
"""


TRACED = f"""
rm -f /tmp/trace  # remove the output of an earlier trace
setsid {TOOL} trace web >/tmp/trace 2>&1 & until grep -qs 'execve.*"sleep"' /tmp/trace; do sleep 0.05; done
grep -om1 '"sleep", "0.05"' /tmp/trace | tr -d '",'
kill -INT -$!; wait $!; echo $?
"""
"""Run ``bpm trace`` until it has shown an ``execve`` of sleep, interrupt it and print its exit code."""


def release() -> dict[str, str | bytes]:
    """Return a job with scripts that call bpm: its pre-start starts a process, its post-start lists processes, and its
    drain kills a process by pid.
    """
    return {
        "monit": MONIT,
        "config/bpm.yml": BPM_YML,
        "bin/web": WEB,
        "bin/pre-start": f"#!/bin/sh\nset -e\n{TOOL} start web\n{TOOL} pid web >{SAID}.pre-start\n",
        "bin/post-start": f"#!/bin/sh\n{TOOL} list | awk '$3 == \"running\" {{print $1, $2}}' >{SAID}.post-start\n",
        "bin/drain": f"#!/bin/sh\npid=$({TOOL} pid web) || exit 1\necho $pid >{SAID}.drain\nkill $pid\necho 0\n",
    }


@pytest.mark.parametrize("has_release", [False, True])
async def test_job_scripts_reach_the_agents_bpm(fleet: Fleet, has_release: bool) -> None:
    """All scripts must call the agent's own bpm, even if the bpm release is deployed on the same instance."""
    machine = await fleet.add(AGENT, {"default": {"type": "manual", "ip": "10.0.0.5", "netmask": "255.255.255.0"}})

    async def run(method: str, *arguments: Any) -> Any:
        return await fleet.director.run(AGENT, method, *arguments)

    def said(name: str) -> str:
        return machine.run(f"cat {SAID}.{name}").strip()

    assert machine.run(f"{TOOL} list") == "Name Pid Status\n"
    for version in ("1", "2"):
        wanted: dict[str, dict[str, str | bytes]] = {"web": release()}
        if has_release:
            wanted["bpm"] = {"monit": "", "bin/bpm": OTHER_BPM}
        packages = {"bpm": {"bin/bpm": OTHER_BPM}} if has_release else {}
        spec = jobs.spec(fleet.blobs(AGENT), wanted, packages, version=version)
        assert await run("prepare", spec) == "prepared"
        assert await run("apply", spec) == "applied"
        assert await run("run_script", "pre-start", {}) == {}
        assert await fleet.director.value(AGENT, "start") == "started"
        async with asyncio.timeout(TIMEOUT_S):
            while (await run("get_state"))["job_state"] != "running":
                pass
        assert await run("run_script", "post-start", {}) == {}
        running = dict(line.split() for line in said("post-start").splitlines())
        assert running == {"web": said("pre-start"), "web.worker": machine.run(f"{TOOL} pid web -p worker").strip()}
        assert machine.run(f"ps -o user= -p {running['web']}").strip() == "vcap"
        shown = machine.run(f"echo 'ls /var/vcap/jobs; id -un; kill -0 1 && echo init' | {TOOL} shell web")
        assert shown == "web\nvcap\ninit\n"
        assert machine.run(f"{TOOL} run web -p errand 2>/dev/null || echo $?") == "1000\nweb\n5\n"
        assert machine.run(TRACED) == "sleep 0.05\n0\n"

        assert await run("drain", "shutdown") == 0
        assert said("drain") == running["web"]
        assert await run("stop") == "stopped"
        assert machine.run("ps -u vcap -o pid= || true") == ""
        assert machine.run("ls -A /var/vcap/sys/run/bpm/web") == ""
        starts = machine.run("cat /var/vcap/sys/log/web/web.stdout.log")
        assert starts == "web starts\nweb ends\n" * int(version)
        assert machine.run(f"{TOOL} pid web 2>&1 || true") == "Error: process is not running or could not be found\n"
