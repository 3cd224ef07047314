"""Tests jobs modelled on real releases (bosh-dns, haproxy and nginx), run with the real programs at each isolation
level.

These jobs rely on more than their bpm.yml. They list the names of all jobs, and their drain scripts kill daemons by
pid. The actual program must be a child of the process in the pidfile, and daemons that fork must remain descendants of
that process.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.root.conftest import Inside
from tests.root.test_bpm import run

pytestmark = pytest.mark.root

AGENT = """
import msgspec, socket, textwrap
from agent_shim.edges import control_server
from agent_shim.services.bundles import install_bpm_wrapper
from agent_shim.supervisor import bpm_api
install_bpm_wrapper(paths)
for name in ("web", "other"):
    shutil.rmtree(paths.jobs / name)
tool = "/var/vcap/jobs/bpm/bin/bpm"
outcome = {}

async def answer(request, _line, _peer):
    return msgspec.json.encode(await bpm_api.answer(supervisor.bpm, request))

def deploy(job, files):
    # As after a deployment, the files belong to root, vcap can read them, and the job's path is a link.
    there = paths.data / "jobs" / job / "sha"
    for name, text in {".bosh/links.json": "[]", **files}.items():
        path = there / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        path.chmod(0o750 if name.startswith("bin/") else 0o640)
    for path in (there, *there.rglob("*")):
        shutil.chown(path, "root", "vcap")
    (paths.jobs / job).unlink(missing_ok=True)
    (paths.jobs / job).symlink_to(there)

def monit_of(job, *processes):
    return JobFile(job, "", "".join(f'''check process {name} with pidfile {paths.sys}/run/bpm/{job}/{name}.pid
  start program "{tool} start {job} -p {name}"
  stop program "{tool} stop {job} -p {name}"
  group vcap
''' for name in processes))

async def call(*argv):
    # Wait without blocking the event loop, because the program may send requests to the control socket.
    output = paths.data / "output"
    running = process.spawn(list(argv), env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, stdout=output, stderr=output)
    status = await running.wait()
    said = output.read_text()
    output.unlink()
    return [status, said]

def says(job, name, stream="stdout"):
    path = paths.sys / f"log/{job}/{name}.{stream}.log"
    return path.read_text() if path.exists() else ""

async def answers(port):
    async with asyncio.timeout(120):
        while True:
            try:
                reading, writing = await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:
                await asyncio.sleep(0.05)
        writing.write(b"GET / HTTP/1.0\\r\\n\\r\\n")
        text = await reading.read()
        writing.close()
        return text.decode()

def children(pid):
    lines = [proc.command_line(each).split() for each in proc.children(proc.table()).get(pid, [])]
    return sorted(line[0] for line in lines if line)  # an exiting process has no command line

async with control_server.listening(paths.control_socket, answer):
    BODY
return outcome
"""


def deployed(inside: Inside, level: int, body: str) -> Any:
    """Run ``body`` with an agent that provides ``bpm``. Return the ``outcome`` that ``body`` has recorded."""
    lines = body.strip().splitlines()
    text = AGENT.replace("    BODY", "\n".join(f"    {line}" for line in lines))
    found = run(inside, level, text)
    assert isinstance(found, dict), found
    return found


BOSH_DNS = r"""
server = '''\
    import json, os, socket, sys
    config = json.load(open(sys.argv[sys.argv.index("--config") + 1]))
    groups = {}
    for job in sorted(os.listdir(config["jobs_dir"])):
        if os.path.isdir(f"{config['jobs_dir']}/{job}"):
            try:
                groups[job] = json.load(open(f"{config['jobs_dir']}/{job}/.bosh/links.json"))
            except FileNotFoundError:
                pass
    with open("/var/vcap/instance/health.json") as health:
        groups[json.load(health)["state"]] = []
    listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listening.bind((config["address"], config["port"]))
    for above in ("/", "/var", "/var/vcap", "/var/vcap/data", "/var/vcap/sys"):
        os.listdir(above)
    print(json.dumps([sorted(groups), os.getcwd(), os.environ.get("PWD", os.getcwd())]), flush=True)
    question, asker = listening.recvfrom(512)
    listening.sendto(b"answer to " + question, asker)
    sys.stdin.read()
    import signal
    signal.pause()
'''
(paths.packages / "bosh-dns/bin").mkdir(parents=True)
program = paths.packages / "bosh-dns/bin/bosh-dns"
program.write_text(f"#!{os.path.realpath(sys.executable)} -IS\n" + textwrap.dedent(server))
program.chmod(0o755)
deploy("bosh-dns", {
    "config/bpm.yml": f'''\
        processes:
        - name: bosh-dns
          executable: /var/vcap/packages/bosh-dns/bin/bosh-dns
          args:
          - --config
          - /var/vcap/jobs/bosh-dns/config/config.json
          capabilities:
          - NET_BIND_SERVICE
          limits:
            open_files: 4096
          unsafe: {{unrestricted_volumes: [{{path: {sys.base_prefix}, allow_executions: true}}]}}
        ''',
    "config/config.json": '{"address": "127.0.0.1", "port": 853, "jobs_dir": "/var/vcap/jobs"}',
    # As in the release, pre-start starts the server, so it runs before any job.
    "bin/pre-start": f'''\
        #!/bin/bash -exu
        {tool} start bosh-dns
        ''',
})
deploy("other", {"config/secret": "secret"})
paths.instance.mkdir(exist_ok=True)
(paths.instance / "health.json").write_text('{"state": "running"}')
outcome["pre-start"] = await call(paths.jobs / "bosh-dns/bin/pre-start")
await supervisor.configure([monit_of("bosh-dns", "bosh-dns")])
await supervisor.start()
await until(lambda: "[" in says("bosh-dns", "bosh-dns") or says("bosh-dns", "bosh-dns", "stderr"))
outcome["errors"] = says("bosh-dns", "bosh-dns", "stderr")
outcome["said"] = says("bosh-dns", "bosh-dns")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
    asking.settimeout(5)
    asking.sendto(b"question", ("127.0.0.1", 853))
    try:
        outcome["answer"] = (await asyncio.to_thread(asking.recv, 512)).decode()
    except TimeoutError:
        outcome["answer"] = "none"
await supervisor.stop(wait=True)
"""


@pytest.mark.parametrize("level", [1, 2, 3])
def test_bosh_dns_runs_under_bpm(inside: Inside, level: int) -> None:
    found = deployed(inside, level, BOSH_DNS)

    assert found["errors"] == ""
    assert found["pre-start"][0] == 0
    jobs, directory, said = json.loads(found["said"])
    assert jobs == (["bosh-dns", "running"] if level == 1 else ["bosh-dns", "other", "running"])
    assert said == "/var/vcap/jobs/bosh-dns"
    if level == 1:
        assert directory == said
    assert found["answer"] == "answer to question"


HAPROXY = r"""
deploy("haproxy", {
    "config/bpm.yml": '''\
        processes:
        - name: haproxy
          executable: /var/vcap/jobs/haproxy/bin/haproxy_wrapper
          additional_volumes:
          - path: /var/vcap/jobs/haproxy/config/ssl
            writable: true
          - path: /var/vcap/sys/run/haproxy
            writable: true
          unsafe:
            unrestricted_volumes: []
          limits:
            open_files: 4096
          capabilities:
          - NET_BIND_SERVICE
        ''',
    "config/haproxy.config": '''\
        global
          daemon
          maxconn 100
          stats socket /var/vcap/sys/run/haproxy/stats.sock mode 600 expose-fd listeners level admin
        defaults
          mode http
          timeout client 5s
          timeout server 5s
          timeout connect 5s
        frontend web
          bind 127.0.0.1:880
          http-request return status 200 content-type text/plain string served
        ''',
    "bin/haproxy_wrapper": '''\
        #!/bin/bash
        set -e
        PID_FILE=/var/vcap/sys/run/haproxy/haproxy.pid
        DRAIN_LOCK=/var/vcap/sys/run/haproxy/drain.lock
        echo made >/var/vcap/jobs/haproxy/config/ssl/crt-list
        rm -f /var/vcap/sys/run/haproxy/*
        shutdown() {
          pkill -F ${PID_FILE} || true
          exit 0
        }
        trap shutdown QUIT INT TERM EXIT
        haproxy -f /var/vcap/jobs/haproxy/config/haproxy.config -W -p ${PID_FILE} -D
        until [ -s ${PID_FILE} ]; do sleep 0.1; done  # haproxy may write the file late on a busy machine
        while [ -f ${DRAIN_LOCK} ] || kill -0 $(cat ${PID_FILE}) 2>/dev/null; do sleep 0.2 || true; done
        ''',
    "bin/reload": '''\
        #!/bin/bash
        set -e
        pid="$(cat /var/vcap/sys/run/bpm/haproxy/haproxy.pid)"
        wrapper=$(pgrep -P "$pid" haproxy_wrapper)
        master=$(pgrep -P "$pid" -x haproxy)
        pgrep -P "$master" -x haproxy >/dev/null
        kill -0 -"$wrapper"
        ''',
    "bin/drain": '''\
        #!/bin/bash
        set -e
        pidfile=/var/vcap/sys/run/bpm/haproxy/haproxy.pid
        lockfile=/var/vcap/sys/run/haproxy/drain.lock
        pid="$(cat ${pidfile})"
        ps -p ${pid} >/dev/null
        haproxy_wrapper_pid=$(pgrep -P "$pid" haproxy_wrapper)
        haproxy_master_pid=$(pgrep -P "$pid" -x haproxy)
        touch ${lockfile}
        kill -USR1 "${haproxy_master_pid}"
        while kill -0 "${haproxy_master_pid}" 2>/dev/null; do sleep 0.1; done
        echo 0
        ''',
})
(paths.data / "jobs/haproxy/sha/config/ssl").mkdir()
await supervisor.configure([monit_of("haproxy", "haproxy")])
await supervisor.start()
outcome["served"] = (await answers(880)).splitlines()[-1]
init = int((paths.sys / "run/bpm/haproxy/haproxy.pid").read_text())
await until(lambda: len(children(init)) == 2)
outcome["below the init"] = children(init)
outcome["reload"] = await call(paths.jobs / "haproxy/bin/reload")
outcome["drain"] = await call(paths.jobs / "haproxy/bin/drain")
await supervisor.stop(wait=True)
outcome["left"] = (await call("/usr/bin/pgrep", "-x", "haproxy"))[1]
outcome["errors"] = [line for line in says("haproxy", "haproxy", "stderr").splitlines() if "agent-shim" in line]
"""


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.skipif(not shutil.which("haproxy"), reason="needs the package haproxy")
def test_haproxy_reloads_and_drains_under_bpm(inside: Inside, level: int) -> None:
    """The reload and drain scripts must find the wrapper and the daemon as children of the process in the pidfile."""
    found = deployed(inside, level, HAPROXY)

    assert found["served"] == "served"
    assert found["below the init"] == ["/bin/bash", "haproxy"]
    assert found["reload"] == [0, ""]
    assert found["drain"] == [0, "0\n"]
    assert (found["left"], found["errors"]) == ("", [])


NGINX = r"""
deploy("nginx", {
    "config/bpm.yml": '''\
        processes:
        - name: nginx
          executable: /usr/sbin/nginx
          args: [-c, /var/vcap/jobs/nginx/etc/nginx.conf, -e, stderr]
          ephemeral_disk: true
          capabilities: [NET_BIND_SERVICE]
          UNSAFE
        ''',
    "etc/nginx.conf": '''\
        daemon off;
        worker_processes 2;
        pid /var/vcap/sys/run/nginx/nginx.pid;
        error_log stderr;
        events { worker_connections 64; }
        http {
          access_log off;
          client_body_temp_path /var/vcap/data/nginx/body;
          proxy_temp_path /tmp/proxy;
          fastcgi_temp_path /var/vcap/data/nginx/tmp/fastcgi;
          uwsgi_temp_path /var/vcap/data/nginx/tmp/uwsgi;
          scgi_temp_path /var/vcap/data/nginx/tmp/scgi;
          server { listen 127.0.0.1:881; location / { return 200 "served\\n"; } }
        }
        ''',
})
await supervisor.configure([monit_of("nginx", "nginx")])
await supervisor.start()
outcome["served"] = (await answers(881)).splitlines()[-1]
init = int((paths.sys / "run/bpm/nginx/nginx.pid").read_text())
outcome["below the init"] = children(init)
master = proc.children(proc.table())[init][0]
await until(lambda: len(proc.children(proc.table()).get(master, [])) == 2)
outcome["shell"] = await call("/bin/sh", "-c", f"echo 'cat /var/vcap/sys/run/nginx/nginx.pid' | {tool} shell nginx")
outcome["master"] = master
await supervisor.stop(wait=True)
outcome["left"] = (await call("/usr/bin/pgrep", "-x", "nginx"))[1]
outcome["errors"] = [line for line in says("nginx", "nginx", "stderr").splitlines() if "agent-shim" in line]
"""


@pytest.mark.parametrize("unsafe", ["", "unsafe: {host_pid_namespace: true}"], ids=["", "host_pid_namespace"])
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.skipif(not shutil.which("nginx"), reason="needs the package nginx")
def test_nginx_runs_and_stops_under_bpm(inside: Inside, level: int, unsafe: str) -> None:
    port = str(880 + 2 * level + bool(unsafe))  # machines share the network, and tests run in parallel
    found = deployed(inside, level, NGINX.replace("UNSAFE", unsafe).replace("881", port))

    assert found["served"] == "served"
    assert found["below the init"] == ["nginx:"]
    assert found["shell"][0] == 0
    if level > 1 or unsafe:
        assert found["shell"][1] == f"{found['master']}\n"
    assert (found["left"], found["errors"]) == ("", [])
