"""Tests that the job in ``agent-shim-monit-release`` replaces a stemcell's monit and later restores it, while 50
processes keep running.

``MONIT_525`` is the path of monit 5.2.5. A newer version cannot be used, because its state file has a different format.
The job uses this checkout instead of the release's package, which takes minutes to build.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from agent_shim.core.paths import Paths
from tests.support import jobs, monitrc
from tests.support.machine import CODE, GROUPS, Machine, machine

MONIT = os.environ.get("MONIT_525", "")

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not MONIT, reason="no monit 5.2.5: set MONIT_525 to its path"),
]

TEMPLATES: Final = CODE / "tools/cpi_release/jobs/agent_shim_monit/templates"
NAMES: Final = [f"job{number}" for number in range(50)]
RUN: Final = "#!/bin/bash\nexec /mnt/monit -I -c /var/vcap/bosh/etc/monitrc\n"
CTL: Final = """#!/bin/sh
pidfile=/var/vcap/data/sys/run/{0}/{0}.pid
case $1 in
start) sleep 100000 & echo $! | tee -a /var/vcap/data/starts/{0} >$pidfile ;;
stop) kill $(cat $pidfile); rm -f $pidfile ;;
esac
"""
PYTHON: Final = f"""#!/bin/sh
while case $1 in -I|-S|-B) true ;; *) false ;; esac; do shift; done
cd {CODE} && exec {sys.executable} "$@"
"""
SV: Final = """#!/bin/sh
[ "$1" != kill ] || kill -9 $(cat /run/supervised)
"""
KEEPER: Final = """cd /
while :; do
    /etc/sv/monit/run >>/mnt/monit.out 2>&1 &
    echo $! >/run/supervised
    wait $!
    sleep 0.1
done
"""
KILLED: Final = """#!/bin/bash
set -T
trap '[ $((++steps)) -lt {step} ] || kill -9 $$' DEBUG
"""
"""Code that is put in front of a script to make it kill itself before its ``step``-th command."""
NEVER: Final = 1 << 30


class MonitVm:
    """A VM with monit 5.2.5, a loop that restarts monit like runsv, and the release's job. The job's pre-start has not
    run yet.
    """

    def __init__(self, made: Machine) -> None:
        self.machine, self.vcap = made, made.vcap
        shutil.copy(MONIT, made.root / "mnt/monit")
        for place in ("monit/job", "data/starts", "data/sys/run", "data/sys/log", "bosh/log"):
            (self.vcap / place).mkdir(parents=True)
        self.write("bosh/etc/monitrc", monitrc.control(cycle=2, run=Path("/run")), 0o600)
        self.write("bosh/bin/sv", SV)
        self.write("data/packages/agent_shim_monit/digest/python/bin/python3", PYTHON)
        for name in ("pre-start", "run"):
            self.write(f"data/jobs/agent_shim_monit/digest/bin/{name}", (TEMPLATES / name).read_text())
        self.write("data/jobs/agent_shim_monit/digest/config/http", "off\n")
        for kind in ("jobs", "packages"):
            (self.vcap / kind).mkdir(exist_ok=True)
        (self.vcap / "packages/agent_shim_monit").symlink_to("/var/vcap/data/packages/agent_shim_monit/digest")
        (self.vcap / "sys").symlink_to("/var/vcap/data/sys")
        self.deploy()
        for name in NAMES:
            (self.vcap / f"data/sys/run/{name}").mkdir()
            self.write(f"jobs/{name}/bin/ctl", CTL.format(name))
            self.write(f"monit/job/0000_{name}.monitrc", jobs.sleeper(Paths(), name)["monit"])
        # Start the processes directly, which is faster than with monit. From the tenth job on,
        # the processes do not have the variable that monit sets, as they would in a runc container.
        for jobs_of, mark in (("job?", "MONIT_SERVICE=${job##*/}"), ("job??", "")):
            start = f"{mark} $job/bin/ctl start >/dev/null 2>&1"
            self.machine.run(f"for job in /var/vcap/jobs/{jobs_of}; do {start}; done")
        self.pids = self.running()
        self.sv = made.root / "etc/sv/monit"
        self.sv.mkdir(parents=True)
        self.reset()
        self.keeper = made.popen(["sh", "-c", KEEPER])

    def write(self, name: str, text: str, mode: int = 0o755) -> None:
        place = self.vcap / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def reset(self) -> None:
        """Restore the stemcell's monit service and remove the job's copy of the package."""
        shutil.rmtree(self.vcap / "data/agent-shim-monit", ignore_errors=True)
        for path in self.sv.iterdir():
            path.unlink()
        (self.sv / "run").write_text(RUN)
        (self.sv / "run").chmod(0o755)

    def deploy(self) -> None:
        """Create the job's data directory and its link in ``jobs``, as the agent does."""
        own = self.vcap / "data/agent_shim_monit"
        own.mkdir()
        os.chown(own, 0, GROUPS["vcap"])
        own.chmod(0o770)
        (self.vcap / "jobs/agent_shim_monit").symlink_to("/var/vcap/data/jobs/agent_shim_monit/digest")

    def remove(self) -> None:
        """Remove the job and its package, then reload monit, as the agent does in ``apply``."""
        (self.vcap / "jobs/agent_shim_monit").unlink()
        shutil.rmtree(self.vcap / "data/packages/agent_shim_monit")
        self.reload()

    def open_to_jobs(self) -> list[Path]:
        """Return which of these paths jobs can write to: the interpreter that root runs, and its parent directories."""
        line = next(line for line in (TEMPLATES / "run").read_text().splitlines() if line.startswith("python="))
        program = self.vcap / line.removeprefix("python=/var/vcap/")
        way = [program, *(path for path in program.parents if path.is_relative_to(self.vcap))]
        return [path for path in way if path.stat().st_mode & 0o022]

    def reload(self) -> None:
        self.machine.run("PATH=/var/vcap/bosh/bin:$PATH; sv kill monit; sv start monit")

    def pre_start(self, step: int = 0) -> bool:
        """Run the pre-start. If ``step`` is not 0, kill it before its ``step``-th command. Return True if the pre-start
        completed.
        """
        text = (TEMPLATES / "pre-start").read_text()
        script = self.vcap / "data/pre-start"
        script.write_text(KILLED.format(step=step) + text if step else text)
        done = self.machine.popen(["env", "PATH=/var/vcap/bosh/bin:/usr/bin:/bin", "bash", "/var/vcap/data/pre-start"])
        code = done.wait(timeout=200)
        assert code == 0 or step, (self.machine.root / "mnt/monit.out").read_text()[-3000:]
        return code == 0

    def supervisor(self) -> str:
        """Return the name of the program that answers on monit's port: ``ours``, ``monit``, or "" if none does."""
        command = "curl -s --max-time 5 'http://127.0.0.1:2822/_status?format=text&level=summary' || true"
        said = self.machine.run(command)
        if "job0'" not in said:
            return ""
        return (
            "ours" if "agent_shim" in self.machine.run("tr '\\0' ' ' </proc/$(cat /run/monit.pid)/cmdline") else "monit"
        )

    def running(self) -> dict[str, int]:
        """Return the pid of each job whose pidfile names an existing process."""
        found = {}
        for name in NAMES:
            with suppress(OSError, ValueError):
                number = int((self.vcap / f"data/sys/run/{name}/{name}.pid").read_text())
                if (self.machine.root / f"proc/{number}").exists():
                    found[name] = number
        return found

    def starts(self) -> int:
        return sum(len((self.vcap / f"data/starts/{name}").read_text().split()) for name in NAMES)

    def summary_line(self, name: str) -> str:
        """Return the line about a service from monit's summary."""
        said = self.machine.run("curl -s 'http://127.0.0.1:2822/_status?format=text&level=summary'")
        return next(line for line in said.splitlines() if f"'{name}'" in line)


def until(fact: Callable[[], bool], seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture
def vm(tmp_path: Path) -> Iterator[MonitVm]:
    with machine(tmp_path, has_network=True) as made:
        found = MonitVm(made)
        yield found
        found.keeper.kill()
        found.keeper.wait()


def test_monit_release_replaces_and_restores_monit_with_fifty_processes(vm: MonitVm) -> None:
    """No process may be restarted. A service stopped under monit must stay stopped under its replacement, and vice
    versa.
    """
    until(lambda: vm.supervisor() == "monit")
    assert vm.pre_start()
    assert vm.supervisor() == "ours"
    assert vm.open_to_jobs() == []
    assert (vm.running(), vm.starts()) == (vm.pids, 50)

    vm.machine.run("curl -s -d action=stop http://127.0.0.1:2822/job7")
    until(lambda: "job7" not in vm.running())
    until(lambda: "not monitored" in vm.summary_line("job7") and "pending" not in vm.summary_line("job7"))
    state = vm.vcap / "monit/monit.state"
    until(lambda: monitrc.monitored(state)["job7"] == 0)
    # monit ignores a state file that was changed in the current second.
    until(lambda: time.time() > state.stat().st_ctime + 1)
    vm.remove()
    until(lambda: vm.supervisor() == "monit")
    time.sleep(5)  # Give monit two cycles in which it might wrongly start a process.
    assert "not monitored" in vm.summary_line("job7").lower()
    assert vm.running() == {name: pid for name, pid in vm.pids.items() if name != "job7"}
    assert vm.starts() == 50


def test_monit_release_pre_start_can_be_killed_before_each_command(vm: MonitVm) -> None:
    """After each kill, either monit or its replacement must be running, and so must all processes. It must be possible
    to run the pre-start again.
    """
    until(lambda: vm.supervisor() == "monit")
    step, is_whole = 0, False
    while not is_whole:
        step += 1
        is_whole = vm.pre_start(step)
        until(lambda: vm.supervisor() != "")
        assert (vm.running(), vm.starts()) == (vm.pids, 50), step
        if not is_whole and step % 8 == 0:
            assert vm.pre_start()
            assert (vm.running(), vm.starts()) == (vm.pids, 50), step
        if not is_whole:
            vm.reset()
            vm.reload()
    assert step > 20


def test_monit_release_restores_monit_if_its_replacement_does_not_start(vm: MonitVm) -> None:
    until(lambda: vm.supervisor() == "monit")
    vm.write("data/packages/agent_shim_monit/digest/python/bin/python3", "#!/bin/sh\nexit 1\n")
    # Shorten the pre-start's pauses. Otherwise, it would wait a minute for the replacement.
    vm.write("bosh/bin/sleep", "#!/bin/sh\nexec /bin/sleep 0.02\n")

    assert not vm.pre_start(step=NEVER)

    until(lambda: vm.supervisor() == "monit")
    assert (vm.sv / "run").read_text() == RUN
    assert (vm.running(), vm.starts()) == (vm.pids, 50)
