"""Many CPI processes run at the same time, because a Director has up to 32 worker threads."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from tests.cpi.calls import DYNAMIC, ENV, STEMCELL, CpiCalls, checked
from tests.cpi.fake_api import FakeCluster
from tests.support.source import ROOT

CALLS = 6
MAX_RSS_MIB = 40
MEASURED = """
import sys
from kubernetes_cpi import __main__
__main__.main()
sys.stderr.write(open("/proc/self/status").read())
"""


def test_many_concurrent_create_vm_calls_succeed_with_little_memory(cpi: CpiCalls, cluster: FakeCluster) -> None:
    cpi.write({**cpi.server.config(), "timeouts": {"create_vm": 60}})
    command = [sys.executable, "-c", MEASURED, "--config", str(cpi.file)]
    services = {"services": [{"name": "zk", "ports": [{"port": 2181}]}]}
    started = []
    for number in range(CALLS):
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
        )
        assert process.stdin is not None
        process.stdin.write(cpi.request("create_vm", [f"agent-{number}", STEMCELL, services, DYNAMIC, [], ENV]))
        process.stdin.close()
        started.append(process)
    vms, sizes = set(), []
    for process in started:
        process.stdin = None
        out, said = process.communicate()
        response = checked(out)
        assert response["error"] is None, json.dumps(response)
        vms.add(response["result"][0])
        sizes.append(int(re.findall(rb"VmHWM:\s+(\d+) kB", said)[0]) / 1024)

    assert vms == set(cluster.of("pods"))
    assert len(vms) == CALLS
    assert max(sizes) <= MAX_RSS_MIB
