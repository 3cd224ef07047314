"""Tests that nginx can listen on its port again after its master process has been killed.

The old workers would keep the port open, so they must be killed too. The test uses Debian's nginx.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import urllib.request

import pytest

from agent_shim.host import proc, process
from tests.support.ports import free_port
from tests.support.programs import is_alive
from tests.support.programs.jobs import JobTree, in_state
from tests.support.waiting import until

pytestmark = pytest.mark.root

CONFIG = """
user nobody nogroup;
worker_processes 2;
pid {pidfile};
error_log {base}/nginx.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {base}/body; proxy_temp_path {base}/proxy; fastcgi_temp_path {base}/fastcgi;
    uwsgi_temp_path {base}/uwsgi; scgi_temp_path {base}/scgi;
    server {{ listen 127.0.0.1:{port}; location / {{ return 200 "here"; }} }}
}}
"""


async def test_workers_of_a_killed_nginx_master_do_not_keep_its_port(world: JobTree) -> None:
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert nginx, "Debian's package nginx is needed"
    port = free_port()
    config = world.base / "nginx.conf"
    config.write_text(CONFIG.format(pidfile=world.pidfile("web"), base=world.base, port=port))
    job = world.job("web", f"echo start >>$log; exec {nginx} -c {config}")
    async with world.supervising(job) as supervisor:
        master = (await in_state(supervisor, "web", "running")).pid
        workers = await until(lambda: children(master))
        found = proc.stat(master)
        assert found is not None
        process.send(found.identity, signal.SIGKILL)
        await until(lambda: supervisor.services()[0].pid not in (0, master))
        await in_state(supervisor, "web", "running")

        assert world.lines() == ["start", "start"]
        assert not any(map(is_alive, workers))
        assert await asyncio.to_thread(fetch, port) == b"here"
        await supervisor.stop(wait=True)


def fetch(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
        body: bytes = answer.read()
        return body


def children(pid: int) -> list[int]:
    return proc.children(proc.table()).get(pid, [])
