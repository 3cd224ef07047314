"""Tests the daemon that replaces monit under real service managers: runit and s6 if they are installed, and systemd in
the virtual machine.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from agent_shim.host import process
from tests.integration.test_monit_daemon import MonitTree, free_ports
from tests.root.test_monit_release import PYTHON, TEMPLATES
from tests.support import guest
from tests.support.machine import CODE
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
IS_IN_GUEST: Final = pytest.mark.skipif(not guest.is_here(), reason="a part of ./dev test-vm")


class Manager(NamedTuple):
    """Shell commands with which a service manager controls a service.

    ``{service}`` is the ``monit`` service's directory, and ``{services}`` is its parent directory.
    """

    run: str
    is_known: str
    is_up: str
    up: str
    restart: str
    kill: str
    down: str


MANAGERS: Final = {
    "runit": Manager(
        run="runsvdir {services}",
        is_known="sv status {service} >/dev/null",
        is_up="sv status {service} | grep -q ^run",
        up="sv -w 100 start {service}",
        restart="sv -w 100 restart {service}",
        kill="sv kill {service}",
        down="sv -w 100 stop {service}",
    ),
    "s6": Manager(
        run="s6-svscan {services}",
        is_known="s6-svok {service} && s6-svstat {service} >/dev/null",
        is_up="[ $(s6-svstat -o up {service}) = true ]",
        up="s6-svc -wu -T 100000 -u {service}",
        restart="s6-svc -t {service}",
        kill="s6-svc -k {service}",
        down="s6-svc -wd -T 100000 -d {service}",
    ),
    "systemd": Manager(
        run="systemctl daemon-reload; exec sleep 1000",
        is_known="systemctl -q cat monit >/dev/null",
        is_up="systemctl -q is-active monit",
        up="systemctl start monit",
        restart="systemctl restart monit",
        kill="systemctl kill monit",
        down="systemctl stop monit",
    ),
}
UNIT: Final = Path("/etc/systemd/system/monit.service")
UNIT_TEXT: Final = """[Unit]
StartLimitIntervalSec=0
[Service]
ExecStart=/bin/bash -c 'PATH=/var/vcap/bosh/bin:$PATH exec nice -n -10 {service}/run'
Restart=always
KillMode=process
"""
"""The systemd unit as on stemcells (bosh_monit/assets/monit.service)."""
RUN: Final = """#!/bin/sh
cd {here} && exec {python} -m agent_shim.cli monit -I -c {control} -b {base} >>{out} 2>&1
"""


class MonitService:
    """The ``monit`` service on a machine. As on stemcells, it is not started at boot."""

    def __init__(self, vm: MonitTree, name: str, services: Path) -> None:
        self.vm, self.manager, self.service = vm, MANAGERS[name], services / "monit"
        self.words = {"service": str(self.service), "services": str(services)}
        self.service.mkdir(parents=True)
        values = {"control": vm.control, "base": vm.base, "out": vm.out, "python": sys.executable, "here": Path.cwd()}
        (self.service / "run").write_text(RUN.format(**values))
        (self.service / "run").chmod(0o755)
        (self.service / "down").touch()
        if name == "systemd":
            UNIT.write_text(UNIT_TEXT.format(**self.words))
        argv = ["sh", "-c", self.manager.run.format(**self.words)]
        self.process = process.spawn(argv, env=dict(os.environ), stdout=vm.out, stderr=vm.out)

    async def ask(self, command: str) -> int:
        """Run one of the service manager's commands. Return its exit code."""
        asked = await asyncio.create_subprocess_shell(command.format(**self.words))
        return await asked.wait()

    async def daemon(self) -> int:
        """Wait until a daemon answers. Return its pid."""

        async def answering() -> int:
            number = self.number()
            return number if number and await self.vm.document() is not None and number == self.number() else 0

        return await until(answering)

    def number(self) -> int:
        """Return the pid in the pidfile, or 0 if there is no pidfile or no pid in it."""
        with suppress(OSError, ValueError):
            return int((self.vm.base / "monit.pid").read_text())
        return 0

    async def another_than(self, former: int) -> int:
        async def found() -> int:
            number = await self.daemon()
            return number if number != former else 0

        return await until(found)


def params() -> list[object]:
    """Return the service managers as test parameters. Those that cannot be tested here are skipped."""
    programs = {"runit": "runsvdir", "s6": "s6-svscan"}
    here = [
        pytest.param(name, marks=pytest.mark.skipif(not shutil.which(program), reason=f"needs the package {name}"))
        for name, program in programs.items()
    ]
    return [*here, pytest.param("systemd", marks=(pytest.mark.vm, IS_IN_GUEST))]


@pytest.fixture(params=params())
async def place(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[MonitService]:
    vm = MonitTree(tmp_path / "vcap", *free_ports())
    made = MonitService(vm, request.param, tmp_path / "services")
    yield made
    await made.ask(made.manager.down)
    made.process.send(signal.SIGHUP if request.param == "runit" else signal.SIGTERM)
    await made.process.wait()
    vm.world.end()


async def test_monit_daemon_keeps_processes_running_under_a_service_manager(place: MonitService) -> None:
    vm, manager = place.vm, place.manager

    async def is_known() -> bool:
        return await place.ask(manager.is_known) == 0

    has_manager: bool = await until(is_known)
    assert has_manager
    assert place.number() == 0  # the daemon must not run before the agent starts the service
    assert await place.ask(manager.up) == 0
    daemon = await place.daemon()
    assert await vm.states() == {}
    assert await place.ask(manager.is_up) == 0

    vm.add("web", "db")
    await place.ask(manager.kill)  # this is how the Go agent reloads monit
    await vm.until(web="running", db="running")
    daemon = await place.another_than(daemon)
    pids = vm.pid("web"), vm.pid("db")
    for how in ("restart", "quit", "death"):
        match how:
            case "restart":
                assert await place.ask(manager.restart) == 0
            case "quit":
                assert (await asyncio.to_thread(vm.command, "quit")).returncode == 0
            case _:
                os.kill(daemon, signal.SIGKILL)
        daemon = await place.another_than(daemon)
        await vm.until(web="running", db="running")
        assert (vm.pid("web"), vm.pid("db")) == pids, how

    await vm.act("web", "stop")
    await vm.until(web="unknown", db="running")
    assert await place.ask(manager.down) == 0
    assert place.number() == 0
    assert not Path(f"/proc/{daemon}").exists()
    os.kill(pids[1], 0)

    assert await place.ask(manager.up) == 0
    await place.daemon()
    await vm.until(web="unknown", db="running")
    assert (vm.pid("db"), vm.starts()) == (pids[1], 2)


@pytest.mark.vm
@IS_IN_GUEST
async def test_monit_release_replaces_monit_under_systemd_and_restores_it() -> None:
    """This checkout's daemon without ``--http`` stands in for monit."""
    vm = MonitTree(Path("/var/vcap"), *free_ports())

    async def ask(command: str) -> None:
        asked = await asyncio.create_subprocess_shell(command)
        assert await asked.wait() == 0, command

    async def until_both_run(*, is_ours: bool) -> None:
        """Wait until both jobs run under the release's daemon. If ``is_ours`` is False, wait for the stand-in for monit
        instead.
        """

        async def found() -> bool:
            with suppress(OSError, ValueError):
                words = Path(f"/proc/{int((vm.base / 'monit.pid').read_text())}/cmdline").read_text().split("\0")
                return ("--http" in words) == is_ours and await vm.states() == {"web": "running", "db": "running"}
            return False

        are_there: bool = await until(found)
        assert are_there

    def pids() -> tuple[int, int]:
        return vm.pid("web"), vm.pid("db")

    def write(name: str, text: str) -> Path:
        place = vm.base / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(0o755)
        return place

    write("bosh/etc/monitrc", vm.control.read_text())
    monit = f"{sys.executable} -m agent_shim.cli monit -I -c {vm.control}"
    write("bosh/bin/run", f"#!/bin/sh\ncd {CODE} && exec {monit}\n")
    write("packages/agent_shim_monit/python/bin/python3", PYTHON)
    for name in ("pre-start", "run"):
        write(f"jobs/agent_shim_monit/bin/{name}", (TEMPLATES / name).read_text())
    write("jobs/agent_shim_monit/config/http", "off")
    UNIT.write_text(UNIT_TEXT.format(service=vm.base / "bosh/bin"))
    vm.add("web", "db")
    await ask("systemctl daemon-reload; systemctl start monit")
    await until_both_run(is_ours=False)
    before = pids()

    for _ in range(2):
        await ask("/var/vcap/jobs/agent_shim_monit/bin/pre-start")
        await until_both_run(is_ours=True)
        assert (pids(), vm.starts()) == (before, 2)

    await ask("systemctl kill monit; systemctl start monit")
    await until_both_run(is_ours=True)
    assert not set(pids()) & set(before)

    shutil.rmtree(vm.base / "jobs/agent_shim_monit")
    await ask("systemctl kill --kill-whom=main monit; systemctl start monit")
    before = pids()
    await until_both_run(is_ours=False)
    assert pids() == before
    await ask("systemctl stop monit")
    vm.world.end()
