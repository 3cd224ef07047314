"""Deductions from the texts of a job, and verdicts on two lives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from comparison import judge, plan
from comparison.releases import Checkout, Job

PAGE = Path(__file__).parents[2] / "docs/monit-deviations.md"
MONIT = """check process web
  with pidfile /var/vcap/sys/run/web/web.pid
  start program "/bin/sh -c '/var/vcap/jobs/web/bin/ctl start'"
  if failed host 127.0.0.1 port 8080 for 4 cycles then restart
check host web-health address localhost
  if failed port 9090 type udp then alert
"""
CTL = """#!/bin/bash
PACKAGE=/var/vcap/packages/web
DIRECTORY=${PACKAGE}/bin
source /var/vcap/packages/helpers/pids.sh
export PATH=/var/vcap/packages/tools/bin:$PATH
ulimit -n 999999999
render-config
$DIRECTORY/server &
"""


def job(**files: str) -> Job:
    texts = {"monit": MONIT, "bin/ctl": CTL} | files
    return Job("web-release", "web", texts, {"jobs/web/monit": MONIT, "jobs/web/templates/ctl": CTL}, ("web",))


def planned(tmp_path: Path, one: Job) -> plan.Plan:
    (tmp_path / "src/helpers").mkdir(parents=True)
    (tmp_path / "src/helpers/pids.sh").write_text("wait_pid() { :; }\n")
    return plan.plan(Checkout(tmp_path), one)


def test_programs_of_packages_are_found_behind_variables_and_on_the_path(tmp_path: Path) -> None:
    made = planned(tmp_path, job())

    assert made.files["web"]["bin/server"] == plan.STAND_IN
    assert made.files["tools"]["bin/render-config"] == plan.STAND_IN
    assert made.files["helpers"]["pids.sh"] == "wait_pid() { :; }\n"


def test_ports_pidfiles_and_rates_come_from_the_monit_file(tmp_path: Path) -> None:
    made = planned(tmp_path, job())

    assert [(one.name, one.kind, one.pidfile, one.start) for one in made.services] == [
        ("web", "process", "/var/vcap/sys/run/web/web.pid", "/var/vcap/jobs/web/bin/ctl"),
        ("web-health", "host", "", ""),
    ]
    assert made.ports == [{"port": 8080}, {"port": 9090, "udp": True}]
    assert made.cycles == 4


def test_a_script_asks_for_no_more_than_the_hard_limit(tmp_path: Path) -> None:
    assert "999999999" not in planned(tmp_path, job()).job.files["bin/ctl"]


def test_missing_files_of_scripts_are_made_for_the_next_life(tmp_path: Path) -> None:
    made = planned(tmp_path, job())
    said = (
        "ctl: line 3: /var/vcap/packages/web/lib/run: No such file or directory\nctl: line 4: confd: command not found"
    )

    assert plan.learn(made, said, [])
    assert made.files["web"]["lib/run"] == plan.STAND_IN
    assert made.system == {"confd"}


def test_the_last_tool_of_a_start_program_lives_in_the_next_life(tmp_path: Path) -> None:
    made = planned(tmp_path, job())

    assert plan.learn(made, "", ["render", "server"])
    assert made.expectation["lives"] == ["server"]


def test_scripts_are_lenient_where_nothing_else_is_left_to_try(tmp_path: Path) -> None:
    made = planned(tmp_path, job(**{"bin/pre-start": "#!/bin/bash -e\nset -eu\nfalse\nexit 3\n", "etc/x": "exit 1"}))

    assert plan.learn(made, "", [])
    assert made.job.files["bin/pre-start"] == "#!/bin/bash\nset +e\nfalse\ntrue\n\nexit 0\n"
    assert made.job.files["etc/x"] == "exit 1"
    assert not plan.learn(made, "", [])


def test_dependencies_on_services_of_other_jobs_are_dropped(tmp_path: Path) -> None:
    made = planned(tmp_path, job(monit=MONIT + "  depends on web\n  depends on nginx\n"))

    assert "depends on web" in made.job.monit
    assert "nginx" not in made.job.monit


def test_a_process_of_bpm_asks_for_no_right_that_the_machine_lacks(tmp_path: Path) -> None:
    bpm = "processes: [{name: web, executable: /web, capabilities: [NET_BIND_SERVICE, SYS_RESOURCE]}]"
    asked = plan.processes(planned(tmp_path, job(**{"config/bpm.yml": bpm})).job)[0]["capabilities"]

    bounds = int(re.findall(r"CapBnd:\s*(\w+)", Path("/proc/self/status").read_text())[0], 16)
    assert asked == ["NET_BIND_SERVICE"] + ["SYS_RESOURCE"] * (bounds >> plan.CAP_SYS_RESOURCE & 1)


def phase(name: str, **members: Any) -> dict[str, Any]:
    """A phase of a life in which the job runs."""
    empty = {"value": "", "running_after": 1.0, "job_states": ["running"], "states": {"web": ["running"]}, "events": []}
    rest = {"alerts": [], "heartbeats": [], "services": {"web": True}, "same": {"web": True}, "texts": {}, "files": []}
    return {"name": name, **empty, **rest, **members}


def judged(tmp_path: Path, go: dict[str, Any], shim: dict[str, Any], one: Job | None = None) -> judge.Verdict:
    worlds = [{"error": "", "phases": [phase("start"), seen]} for seen in (go, shim)]
    return judge.judge(planned(tmp_path, one or job()), *worlds)


def test_two_lives_alike_are_equal(tmp_path: Path) -> None:
    assert judged(tmp_path, phase("rest"), phase("rest")).kind == "equal"


def test_a_difference_names_the_line_of_the_release(tmp_path: Path) -> None:
    failing = phase("port closed", job_states=["running", "failing"], states={"web": ["running", "failing"]})
    verdict = judged(tmp_path, failing, phase("port closed"))

    assert verdict.kind == "difference"
    assert {one.what for one in verdict.differences} == {"job state", "state of web", "is failing meanwhile"}
    assert {one.line for one in verdict.differences} == {"jobs/web/monit:4"}


def test_a_second_start_and_a_signal_are_differences(tmp_path: Path) -> None:
    go = phase("death", events=[[0.1, "lives", "server"], [5.0, "lives", "server"], [5.1, "SIGHUP", "server"]])
    verdict = judged(tmp_path, go, phase("death", events=[[0.1, "lives", "server"]]))

    assert {(one.what, one.go, one.shim) for one in verdict.differences} == {
        ("server lives", "2", "1"),
        ("server SIGHUP", "yes", ""),
    }


def test_a_listed_deviation_is_no_difference(tmp_path: Path) -> None:
    bpm = job(monit=MONIT.replace("/sys/run/web/", "/sys/run/bpm/web/"))
    verdict = judged(tmp_path, phase("empty pidfile", job_states=["failing"]), phase("empty pidfile"), bpm)

    assert verdict.kind == "listed"
    assert judged(tmp_path / "ctl", phase("empty pidfile", job_states=["failing"]), phase("empty pidfile")).differences


def test_a_pidfile_of_bpm_that_a_stop_of_the_dead_leaves_is_listed(tmp_path: Path) -> None:
    bpm = job(monit=MONIT.replace("/sys/run/web/", "/sys/run/bpm/web/"))
    left, gone = phase("stop", files=["data/sys/run/bpm/web/web.pid 644"]), phase("stop")

    assert judged(tmp_path, left, gone, bpm).kind == "listed"
    assert judged(tmp_path / "here", gone, left, bpm).kind == "difference"


def test_a_process_that_a_restart_leaves_beside_the_next_one_is_listed(tmp_path: Path) -> None:
    """The stop program of rabbitmq-server-boshrelease takes its pidfile away. Here the stop's timeout is an alert."""
    begun, ended = [2.0, "lives", "server"], [0.5, "SIGTERM", "server"]
    alert = ["web - Execution failed - alert"]
    go, shim = phase("monit restart", events=[begun]), phase("monit restart", events=[ended, begun], alerts=alert)

    assert judged(tmp_path, go, shim).kind == "listed"
    assert judged(tmp_path / "both", go | {"events": [ended, begun]}, shim).kind == "difference"


def test_a_port_that_restarts_its_process_in_each_cycle_may_end_its_phase_at_any_point(tmp_path: Path) -> None:
    """redis of rackapp-boshrelease; without the rule's alert a dead process is a difference."""
    restarted = {"alerts": ["web - Connection failed - restart"]}
    dead, alive = phase("port closed", services={"web": False}), phase("port closed", **restarted)

    assert judged(tmp_path, dead | restarted, alive).kind == "listed"
    assert judged(tmp_path / "silent", dead, phase("port closed")).kind == "difference"


def test_a_tool_may_run_past_its_phase(tmp_path: Path) -> None:
    """grafana's post-start of prometheus-boshrelease asks on for minutes."""
    tool, plan = [[8.0, "tool", "cli"]], planned(tmp_path, job())

    def verdict(shim: list[dict[str, Any]]) -> judge.Verdict:
        go = [phase("death", events=tool), phase("empty pidfile")]
        return judge.judge(plan, *({"error": "", "phases": phases} for phases in (go, shim)))

    assert verdict([phase("death"), phase("empty pidfile", events=tool)]).kind == "equal"
    assert verdict([phase("death"), phase("empty pidfile")]).kind == "difference"


def test_a_job_that_runs_in_neither_world_is_not_equal(tmp_path: Path) -> None:
    dead = {"error": "", "phases": [phase("start", running_after=-1.0, job_states=["failing"])]}
    verdict = judge.judge(planned(tmp_path, job()), dead, dead)

    assert verdict.kind == "needs more than a stand-in"
    assert "runs in neither world" in verdict.not_played


def test_a_job_that_stays_up_in_neither_world_is_not_equal(tmp_path: Path) -> None:
    verdict = judged(tmp_path, phase("rest", job_states=["running", "failing"]), phase("rest", job_states=["failing"]))

    assert "stays up in neither world" in verdict.not_played


def test_texts_of_monit_are_compared_without_their_figures(tmp_path: Path) -> None:
    text = "0\nThe Monit daemon 5.2.5 uptime: {}m \n\nProcess 'web'\n  status          {}\n  children        {}\n"
    go = phase("rest", texts={"monit status": text.format(1, "running", 2), "monit stop none": "1\nno such service\n"})
    same = phase(
        "rest", texts={"monit status": text.format(3, "running", 1), "monit stop none": "1\nno such service\n"}
    )
    other = phase("rest", texts={"monit status": text.format(1, "failed", 2), "monit stop none": "0\n"})

    assert judged(tmp_path / "a", go, same).kind == "equal"
    assert {one.what for one in judged(tmp_path / "b", go, other).differences} == {
        "monit status Process web: status",
        "code of monit stop none",
        "monit stop none: no such service",
    }


def test_the_jobs_of_each_release_are_counted(tmp_path: Path) -> None:
    assert "web-release 1." in judge.counts([judged(tmp_path, phase("rest"), phase("rest"))])


def test_a_job_that_runs_in_one_world_only_is_a_difference(tmp_path: Path) -> None:
    dead = {"error": "", "phases": [phase("start", running_after=-1.0, job_states=["failing"])]}
    verdict = judge.judge(planned(tmp_path, job()), {"error": "", "phases": [phase("start")]}, dead)

    assert verdict.kind == "difference"


def test_each_allowed_difference_is_a_row_of_the_page() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)

    for title, _ in judge.ALLOWED:
        assert any(row.startswith(title) for row in rows), title
