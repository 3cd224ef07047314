"""Tests that release programs inherit nothing from the agent's parent, such as environment variables, descriptors or
signal settings.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from agent_shim.demo.release import archive
from tests.support import jobs
from tests.support.pod import PodInstance

pytestmark = pytest.mark.root

PARENT: Final = """
import os, signal, sys
for number in (3, 7, 100):
    os.dup2(os.open("/etc/shadow", os.O_RDONLY), number, inheritable=True)
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.umask(0)
os.chdir("/tmp")
os.setgroups([0, 4, 1001])
open("/proc/self/oom_score_adj", "w").write("300")
os.environ |= {
    "LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "secret", "NOTIFY_SOCKET": "/run/notify",
    "WATCHDOG_USEC": "600000000", "WATCHDOG_PID": str(os.getpid()), "CREDENTIALS_DIRECTORY": "/run/credentials",
    "MALLOC_ARENA_MAX": "2", "AGENT_SHIM_GRACE": "7", "INHERITED": "yes",
}
os.execv(sys.argv[1], sys.argv[1:])
"""
SEEN: Final = "/var/vcap/sys/log/web/seen"
LOOK: Final = f"""#!/bin/sh
to={SEEN}.NAME
while read -r line; do echo "$line"; done </proc/$$/status >$to.status
tr '\\0' '\\n' </proc/$$/environ >$to.environ
cat /proc/$$/oom_score_adj >$to.oom
(ls -l /proc/$$/fd >$to.files)
umask >$to.umask
readlink /proc/$$/cwd >$to.directory
mv $to.status $to
"""
"""A script that records in several files everything that it has inherited. The file without a suffix is created last.

dash blocks signals while it starts a program, so the script reads its own status before it starts any program.
"""
PROGRAMS: Final = {
    "bin/pre-start": "",
    "bin/post-start": "",
    "bin/drain": "echo 0",
    "bin/run": "",
    "bin/stopper": "kill $(cat /var/vcap/sys/run/web/web.pid)",
    "bin/starter": "echo $$ >/var/vcap/sys/run/web/web.pid; exec sleep 1000",
    "bin/hook": "",
    "bin/caged": "exec sleep 1000",
}
MONIT: Final = """
check process web with pidfile /var/vcap/sys/run/web/web.pid
  start program "/var/vcap/jobs/web/bin/starter"
  stop program "/var/vcap/jobs/web/bin/stopper"
  group vcap
check process caged with pidfile /var/vcap/sys/run/bpm/web/caged.pid
  start program "/var/vcap/jobs/bpm/bin/bpm start web -p caged"
  stop program "/var/vcap/jobs/bpm/bin/bpm stop web -p caged"
  group vcap
"""
BPM: Final = """
processes:
- name: caged
  executable: /var/vcap/jobs/web/bin/caged
  hooks: {pre_start: /var/vcap/jobs/web/bin/hook}
"""
OWN: Final = ("LISTEN_", "NOTIFY_", "WATCHDOG_", "CREDENTIALS_", "MALLOC_", "AGENT_SHIM_")
PYTHONS_OWN: Final = 3 << 31
"""Bits of the signals 32 and 33, which the C library uses internally and which newer versions of Python leave blocked
in children.
"""


@pytest.fixture
def pod(pod: PodInstance) -> PodInstance:
    pod.prefix = [sys.executable, "-c", PARENT]
    return pod


async def test_job_program_inherits_nothing_from_the_agents_parent(pod: PodInstance) -> None:
    web = {path: LOOK.replace("NAME", Path(path).name) + end for path, end in PROGRAMS.items()}
    packaging = (LOOK.replace(SEEN, "/var/vcap/data/seen")).replace("NAME", "packaging")
    await pod.start()
    await pod.apply({"web": {"monit": MONIT, "config/bpm.yml": BPM, **web}})
    await pod.run("run_script", "pre-start", {})
    await pod.run("start")
    await pod.until("running")
    await pod.run("run_script", "post-start", {})
    await pod.run("run_errand")
    await pod.run("drain", "shutdown")
    await pod.run("stop")
    blob = jobs.blob(pod.scratch / "blobs", archive({"packaging": packaging}))
    await pod.run("compile_package", blob["blobstore_id"], blob["sha1"], "p", "1", {})

    logs = pod.vcap / "data/sys/log/web"
    found = {path.name.removeprefix("seen."): path for path in (*logs.glob("seen.*"), *pod.vcap.glob("data/seen.*"))}
    names = {Path(path).name for path in PROGRAMS} | {"packaging"}
    assert names <= found.keys()
    assert {name: inherited(found, name) for name in names} == {name: expected(name) for name in names}


def inherited(found: Mapping[str, Path], name: str) -> dict[str, object]:
    """Parse the files in which a program has recorded what it inherited."""
    status = dict(re.findall(r"(\w+):[ \t]*(.*)", found[name].read_text()))
    kinds = {kind: found[f"{name}.{kind}"].read_text() for kind in ("environ", "oom", "files", "umask", "directory")}
    files = re.findall(r" (\d+) -> (.*)", kinds["files"])
    return {
        "variables": sorted(line.partition("=")[0] for line in kinds["environ"].splitlines() if line.startswith(OWN)),
        "descriptors": sorted(number for number, path in files if not path.endswith(f"/{name}")),
        "of the parent": [path for _, path in files if path == "/etc/shadow"],
        "blocked": int(status["SigBlk"], 16) & ~PYTHONS_OWN,
        "ignored": int(status["SigIgn"], 16) & ~PYTHONS_OWN,
        "umask": kinds["umask"].strip(),
        "oom score": kinds["oom"].strip(),
        "groups": status["Groups"].split(),
        "directory": kinds["directory"].strip(),
    }


DIRECTORIES = {"caged": "/var/vcap/jobs/web", "packaging": "/var/vcap/data/compile/p"}


def expected(name: str) -> dict[str, object]:
    """Return what each program should inherit. Programs that run as root keep root's groups, and the OOM score is the
    container's.
    """
    return {
        "variables": [],
        "descriptors": ["0", "1", "2"],
        "of the parent": [],
        "blocked": 0,
        "ignored": 1 << signal.SIGQUIT - 1 if name == "packaging" else 0,  # bash ignores SIGQUIT.
        "umask": "0022",
        "oom score": "300",
        "groups": [] if name == "caged" else ["0", "4", "1001"],
        "directory": DIRECTORIES.get(name, "/var/vcap/empty"),
    }
