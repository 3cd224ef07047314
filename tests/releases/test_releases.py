"""Each test runs a job that imitates something unusual in a public release, and checks the effects.

The ``release`` mark names the release and the file that the job imitates.
"""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from tests.releases.conftest import Phases

pytestmark = [pytest.mark.root, pytest.mark.releases]

RUN: Final = "/var/vcap/sys/run/web"
PROGRAM: Final = "/var/vcap/packages/web/bin"


def check(name: str = "web", rules: str = "", program: str = "ctl") -> str:
    """Return a monit process check with a ctl script and the additional lines ``rules``."""
    ctl = f"/var/vcap/jobs/web/bin/{program}"
    return (
        f"check process {name} with pidfile {RUN}/{name}.pid\n"
        f'  start program "{ctl} start"\n  stop program "{ctl} stop"\n  group vcap\n{rules}\n'
    )


def ctl(name: str = "web", before: str = "", program: str = "serve", keeps: str = "") -> str:
    """Return a ctl script that starts a program in the background, writes the pidfile, and can stop the program."""
    return f"""#!/bin/bash
set -e
pidfile={RUN}/{name}.pid
case $1 in
start)
    {keeps}
    {before}
    {PROGRAM}/{program} >/dev/null 2>&1 &
    echo $! >$pidfile ;;
stop)
    kill $(cat $pidfile) || true
    rm -f $pidfile ;;
esac
"""


def bpm(*processes: str) -> str:
    """Return a bpm.yml with the processes named ``processes``."""
    return json.dumps({"processes": [{"name": one, "executable": f"{PROGRAM}/{one}"} for one in processes]})


def checked_by_bpm(name: str, process: str) -> str:
    command = f"/var/vcap/jobs/bpm/bin/bpm {{}} web -p {process}"
    return (
        f"check process {name} with pidfile /var/vcap/sys/run/bpm/web/{process}.pid\n"
        f'  start program "{command.format("start")}"\n  stop program "{command.format("stop")}"\n  group vcap\n'
    )


def starts(phase: dict[str, Any], program: str = "serve") -> int:
    """Return how many times a program was started in a phase."""
    return sum(event == "lives" and name == program for _, event, name in phase["events"])


def first_starts(life: Phases, program: str = "serve") -> int:
    """Return how many times a program was started in all phases up to and including ``rest``."""
    names = list(life)
    return sum(starts(life[name], program) for name in names[: names.index("rest") + 1])


def runs(phase: dict[str, Any]) -> bool:
    return bool(phase["job_states"][-1] == "running" and all(phase["services"].values()))


IS_ALIVE: Final = "if [ -e $pidfile ] && kill -0 $(cat $pidfile); then exit 0; fi"


@pytest.mark.release(
    "bosh-dns-release jobs/bosh-dns/templates/pre-start.erb",
    files={
        "monit": check(),
        "bin/ctl": ctl(keeps=IS_ALIVE),
        "bin/pre-start": "#!/bin/sh\nchown -R vcap:vcap /var/vcap/sys/run/web\n/var/vcap/jobs/web/bin/ctl start\n",
    },
)
def test_process_started_by_pre_start_belongs_to_the_job(life: Phases) -> None:
    assert runs(life["start"])
    assert first_starts(life) == 1
    assert not any("Execution failed" in alert for alert in life["start"]["alerts"])
    assert life["stop"]["texts"]["processes"] == ""


@pytest.mark.release(
    "cf-rabbitmq-release jobs/rabbitmq-server/templates/post-start.bash",
    files={"monit": check(), "bin/ctl": ctl(before="pkill -x serve || true")},
    acts=(("unhealthy", f"echo 0 >{RUN}/web.pid"),),
)
def test_service_is_restarted_when_its_post_start_writes_0_to_the_pidfile(life: Phases) -> None:
    assert starts(life["unhealthy"]) == 1
    assert runs(life["unhealthy"])
    assert "web - Does not exist - restart" in life["unhealthy"]["alerts"]


@pytest.mark.release(
    "cf-rabbitmq-release jobs/rabbitmq-server/templates/post-start.bash",
    files={"monit": check(), "bin/ctl": ctl(before="pkill -x serve || true")},
    acts=(("unhealthy", f"rm {RUN}/web.pid"),),
)
def test_service_without_its_pidfile_is_restarted(life: Phases) -> None:
    assert starts(life["unhealthy"]) == 1
    assert runs(life["unhealthy"])


DAEMON: Final = f"""#!/bin/bash
case $1 in
start)
    echo $$ >{RUN}/web.pid
    (while kill -0 $$; do sleep 0.05; done; echo $BASHPID >{RUN}/web.pid; exec {PROGRAM}/serve) >/dev/null 2>&1 &
    sleep 1.2 ;;
stop) kill $(cat {RUN}/web.pid); rm {RUN}/web.pid ;;
esac
"""


@pytest.mark.release("shield-boshrelease jobs/core/templates/bin/nginx", files={"monit": check(), "bin/ctl": DAEMON})
def test_start_program_that_first_writes_its_own_pid_causes_no_restart(life: Phases) -> None:
    assert runs(life["rest"])
    assert first_starts(life) == 1
    assert "web - Does not exist - restart" not in life["rest"]["alerts"]


HEALTH: Final = (
    "check host web-health with address localhost\n"
    "  if failed host localhost port 8080 protocol http {}\n  group vcap\n"
)


@pytest.mark.release(
    "haproxy-boshrelease jobs/haproxy/monit",
    files={"monit": check() + HEALTH.format('and request "/health" then alert'), "bin/ctl": ctl()},
    trials=("port closed",),
)
def test_instance_is_failing_while_the_port_in_a_host_check_is_closed(life: Phases) -> None:
    assert runs(life["rest"])
    assert life["port closed"]["job_states"][-1] == "failing"
    assert life["port closed"]["states"]["web-health"][-1] == "failing"
    assert "web-health - Connection failed - alert" in life["port closed"]["alerts"]
    assert starts(life["port closed"]) == 0
    assert runs(life["port open again"])


@pytest.mark.release(
    "prometheus-boshrelease jobs/nginx/monit",
    files={
        "monit": check() + "check file hosts with path /etc/hosts\n"
        f"  if changed timestamp then exec \"/bin/sh -c 'kill -HUP $(cat {RUN}/web.pid)'\"\n",
        "bin/ctl": ctl(),
    },
    acts=(("names change", "echo 10.0.0.9 other >>/etc/hosts"),),
)
def test_changed_file_triggers_the_command_in_its_check(life: Phases) -> None:
    assert not [event for event in life["rest"]["events"] if event[1] == "SIGHUP"]
    assert [event for event in life["names change"]["events"] if event[1] == "SIGHUP"]
    assert starts(life["names change"]) == 0
    assert runs(life["names change"])


@pytest.mark.release(
    "logsearch-boshrelease jobs/queue/monit",
    files={
        "monit": check() + f"check file dump with path {RUN}/dump\n"
        f"  if size > 1 MB then exec \"/bin/sh -c 'kill -HUP $(cat {RUN}/web.pid)'\"\n  group vcap\n",
        "bin/ctl": ctl(before=f"touch {RUN}/dump"),
    },
    acts=(("file grows", f"truncate -s 2M {RUN}/dump"),),
)
def test_file_check_runs_a_command_and_is_failing_while_the_file_is_too_large(life: Phases) -> None:
    assert life["rest"]["job_states"][-1] == "running"
    assert [event for event in life["file grows"]["events"] if event[1] == "SIGHUP"]
    assert life["file grows"]["states"]["dump"][-1] == "failing"


@pytest.mark.release(
    "docker-boshrelease jobs/swarm_manager/monit",
    files={
        "monit": check(rules="  if failed url http://127.0.0.1:8080/info for 2 cycles then restart"),
        "bin/ctl": ctl(),
    },
    trials=("port closed",),
)
def test_failed_url_check_restarts_the_process(life: Phases) -> None:
    assert runs(life["rest"])
    assert starts(life["port closed"]) >= 1
    assert [event for event in life["port closed"]["events"] if event[1] == "SIGTERM"]
    assert runs(life["port open again"])


@pytest.mark.release(
    "cf-networking-release jobs/bosh-dns-adapter/monit",
    files={
        "monit": check(rules="  if failed host 127.0.0.1 port 8080 for 3 cycles then restart"),
        "bin/ctl": ctl(),
    },
    trials=("port closed",),
)
def test_closed_port_restarts_the_process_after_the_configured_cycles(life: Phases) -> None:
    """Checks are two seconds apart, so three of them take more than four seconds. Only the first restart is compared,
    because monit does not reset its count after a restart.
    """
    begun = [at for at, event, name in life["port closed"]["events"] if (event, name) == ("lives", "serve")]

    assert begun
    assert begun[0] > 4
    assert runs(life["port open again"])


@pytest.mark.release(
    "nats-release jobs/nats-tls/monit",
    files={
        "monit": check() + check("health", program="health"),
        "bin/ctl": ctl(),
        "bin/health": ctl("health", before=f"[ -e {RUN}/up ] || {{ touch {RUN}/up; exit 1; }}", program="health"),
    },
)
def test_process_whose_first_start_fails_runs_after_the_second_attempt(life: Phases) -> None:
    assert runs(life["rest"])
    assert first_starts(life, "health") == 1


@pytest.mark.release(
    "nats-release jobs/nats-tls/templates/bpm.yml.erb",
    files={
        "monit": checked_by_bpm("serve", "serve") + checked_by_bpm("health", "health"),
        "config/bpm.yml": bpm("serve", "health"),
    },
    trials=("death", "agent restarted"),
)
def test_bpm_processes_are_restarted_and_survive_the_agent(life: Phases) -> None:
    assert runs(life["rest"])
    assert starts(life["death"]) == starts(life["death"], "health") == 1
    assert runs(life["death"])
    assert life["agent restarted"]["same"] == {"serve": True, "health": True}
    assert life["stop"]["texts"]["processes"] == ""


@pytest.mark.release(
    "bosh jobs/blobstore/monit (nginx forks and writes its pidfile)",
    files={
        "monit": check(),
        "bin/ctl": f"#!/bin/sh\ncase $1 in start) {PROGRAM}/serve --pid-path={RUN}/web.pid ;; "
        f"stop) kill $(cat {RUN}/web.pid); rm {RUN}/web.pid ;; esac\n",
    },
    trials=("death", "agent restarted"),
)
def test_forking_program_with_a_pidfile_is_supervised(life: Phases) -> None:
    assert runs(life["rest"])
    assert starts(life["death"]) == 1
    assert runs(life["death"])
    assert life["agent restarted"]["same"] == {"web": True}
    assert life["stop"]["texts"]["processes"] == ""


@pytest.mark.release(
    "garden-runc-release jobs/containerd/templates/bin/containerd_ctl",
    files={
        "monit": check(),
        "bin/ctl": f"#!/bin/sh\ncase $1 in start) echo $$ >{RUN}/web.pid; exec chpst -u vcap:vcap {PROGRAM}/serve ;; "
        f"stop) kill $(cat {RUN}/web.pid) ;; esac\n",
    },
    trials=("death",),
)
def test_ctl_script_that_execs_its_program_is_supervised(life: Phases) -> None:
    assert runs(life["rest"])
    assert first_starts(life) == 1
    assert starts(life["death"]) == 1
    assert life["stop"]["texts"]["processes"] == ""


@pytest.mark.release(
    "uaa-release jobs/uaa/monit (a start of many seconds)",
    files={"monit": check().replace(' start"', ' start" with timeout 60 seconds'), "bin/ctl": ctl(before="sleep 4")},
)
def test_slow_start_program_is_neither_rerun_nor_reported_as_failed(life: Phases) -> None:
    assert runs(life["rest"])
    assert first_starts(life) == 1
    assert not any("Execution failed" in alert for phase in life.values() for alert in phase["alerts"])


@pytest.mark.release(
    "cf-mysql-release jobs/proxy/monit (one process needs another)",
    files={
        "monit": check() + check("agent", rules="  depends on web", program="agent"),
        "bin/ctl": ctl(),
        "bin/agent": ctl("agent", program="agent"),
    },
    acts=(("one dies", f"kill -9 $(cat {RUN}/web.pid)"),),
)
def test_dependents_of_a_crashed_process_are_restarted(life: Phases) -> None:
    assert starts(life["one dies"]) == 1
    assert starts(life["one dies"], "agent") == 1
    assert runs(life["one dies"])


@pytest.mark.release(
    "garden-runc-release jobs/garden/monit (a socket)",
    files={"monit": check(rules=f"  if failed unixsocket {RUN}/web.sock for 2 cycles then restart"), "bin/ctl": ctl()},
    trials=("port closed",),
)
def test_closed_unix_socket_restarts_the_process(life: Phases) -> None:
    assert runs(life["rest"])
    assert starts(life["port closed"]) >= 1
    assert runs(life["port open again"])


@pytest.mark.release(
    "os-conf-release jobs/iptables/monit",
    files={
        "monit": f'check file web with path {RUN}/web.check\n  start program "/var/vcap/jobs/web/bin/ctl start"\n'
        '  stop program "/var/vcap/jobs/web/bin/ctl stop"\n  group vcap\n',
        "bin/ctl": f"#!/bin/sh\ncase $1 in start) echo once >>/var/vcap/data/web/starts; touch {RUN}/web.check ;; "
        f"stop) rm -f {RUN}/web.check ;; esac\n",
    },
    acts=(
        ("before", "wc -l </var/vcap/data/web/starts"),
        ("file goes", f"rm {RUN}/web.check"),
        ("after", "wc -l </var/vcap/data/web/starts"),
    ),
)
def test_missing_file_is_recreated_by_its_start_program(life: Phases) -> None:
    assert runs(life["rest"])
    assert runs(life["file goes"])
    before, after = (int(life[name]["value"].split()[1]) for name in ("before", "after"))
    assert after == before + 1
    assert not [file for file in life["stop"]["files"] if "web.check" in file]


@pytest.mark.release(
    "os-conf-release jobs/pre-start-script/monit (no process)",
    files={"monit": "", "bin/pre-start": "#!/bin/sh\necho done >/var/vcap/data/web/done\n"},
)
def test_job_without_a_process_is_reported_as_running(life: Phases) -> None:
    assert life["pre-start"]["value"] == "{}"
    assert runs(life["start"])
    assert life["stop"]["value"] == "stopped"


@pytest.mark.release(
    "postgres-release jobs/postgres/templates/pre-start.sh.erb (a script that fails)",
    files={"monit": check(), "bin/ctl": ctl(), "bin/pre-start": "#!/bin/sh\necho no space >&2\nexit 3\n"},
)
def test_failed_pre_start_is_reported_and_prevents_the_start(life: Phases) -> None:
    assert "1 of 1 pre-start scripts failed. Failed Jobs: web" in life["pre-start"]["value"]
    assert life["pre-start"]["texts"]["log"] == "no space"
    assert "start" not in life


TOOLS: Final = """#!/bin/bash
set -eu
data=/var/vcap/data/web
cd $data
install -d -o vcap -g vcap -m 700 db
printf '1.9\n1.10\n' >versions
cp --remove-destination -p versions db/versions
cp -au db copy
mkdir -p extra/deep -m 0700
chown -R vcap:vcap copy
ln -nfs $data/db link
chown -h vcap:vcap link
timeout 20 tail -f --pid $(sh -c 'echo $$') /dev/null
{
    stat --format='%U:%G %a' db copy/versions
    stat --format='%U %F' link
    readlink -nf link
    echo
    sort -Vr versions | head -1
    du -b versions | cut -f1
    df --output=avail $data | head -1 | tr -d ' '
    date -u -d @0 -Ins
    date -u --date='1970-01-01 30 seconds' +%s
    seq 1 3 | paste -sd ,
    tail -n +2 versions | fold -w 2 | wc -l
    sudo -u vcap sh -c 'id -un; touch db/own'
    sudo -u vcap -g vcap id -gn
    su vcap -c 'id -un'
    chpst -u vcap:vcap id -un
} >facts
"""
"""A pre-start script with the coreutils, sudo and su options that are most common in the scripts of 199 public
releases.
"""

FACTS: Final = """vcap:vcap 700
vcap:vcap 644
vcap symbolic link
/var/vcap/data/web/db
1.10
9
Avail
1970-01-01T00:00:00,000000000+00:00
30
1,2,3
2
vcap
vcap
vcap
vcap
"""


@pytest.mark.release(
    "ap-pipeline-release jobs/postgres/templates/bin/pre-start.sh.erb (runs programs as vcap)",
    files={"monit": check(), "bin/ctl": ctl(), "bin/pre-start": TOOLS},
    acts=(("facts", "cat /var/vcap/data/web/facts"),),
)
def test_pre_start_can_use_the_base_images_tools(life: Phases) -> None:
    assert life["pre-start"]["texts"]["log"] == ""
    assert life["facts"]["value"] == f"0\n{FACTS}"
    assert runs(life["rest"])


@pytest.mark.release(
    "routing-release jobs/gorouter/templates/drain.erb (asks again)",
    files={
        "monit": check(),
        "bin/ctl": ctl(),
        "bin/drain": f"#!/bin/sh\nif [ -e {RUN}/asked ]; then echo 0; else touch {RUN}/asked; echo -1; fi\n",
    },
)
def test_drain_script_with_a_negative_result_is_called_again(life: Phases) -> None:
    assert life["drain"]["value"] == "0"
    assert [file for file in life["stop"]["files"] if file.startswith("data/sys/run/web/asked")]
    assert life["stop"]["texts"]["processes"] == ""


@pytest.mark.release(
    "cf-mysql-release jobs/mysql/monit (gives up)",
    files={
        "monit": check(rules="  if 2 restarts within 5 cycles then unmonitor"),
        "bin/ctl": ctl(before=f"[ ! -e {RUN}/broken ] || exit 1"),
    },
    acts=(("broken", f"touch {RUN}/broken; kill -9 $(cat {RUN}/web.pid)"),),
)
def test_service_is_unmonitored_when_it_reaches_its_restart_limit(life: Phases) -> None:
    assert runs(life["rest"])
    assert life["broken"]["job_states"][-1] == "failing"
    assert starts(life["broken"]) == 0
