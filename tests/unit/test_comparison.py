"""Tests the comparison of this agent with the Go agent and monit on released jobs.

The comparison derives a plan from a job's files, and a verdict from the recorded runs under both agents.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tools.comparison import breaks, judge, life, plan
from tools.comparison.releases import Checkout, Job

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
    (tmp_path / "src/helpers").mkdir(parents=True, exist_ok=True)
    (tmp_path / "src/helpers/pids.sh").write_text("wait_pid() { :; }\n")
    return plan.plan(Checkout(tmp_path), one)


def test_comparison_finds_package_programs_in_variables_and_the_path(tmp_path: Path) -> None:
    made = planned(tmp_path, job())

    assert made.files["web"]["bin/server"] == plan.STAND_IN
    assert made.files["tools"]["bin/render-config"] == plan.STAND_IN
    assert made.files["helpers"]["pids.sh"] == "wait_pid() { :; }\n"


def test_comparison_reads_ports_pidfiles_and_rates_from_the_monit_file(tmp_path: Path) -> None:
    made = planned(tmp_path, job())

    assert [(one.name, one.kind, one.pidfile, one.start) for one in made.services] == [
        ("web", "process", "/var/vcap/sys/run/web/web.pid", "/var/vcap/jobs/web/bin/ctl"),
        ("web-health", "host", "", ""),
    ]
    assert made.ports == [{"port": 8080}, {"port": 9090, "udp": True}]
    assert made.cycles == 4


def test_comparison_lowers_ulimits_in_scripts_to_the_hard_limit(tmp_path: Path) -> None:
    assert "999999999" not in planned(tmp_path, job()).job.files["bin/ctl"]


def test_comparison_creates_missing_files_and_programs_before_the_next_run(tmp_path: Path) -> None:
    made = planned(tmp_path, job())
    said = (
        "ctl: line 3: /var/vcap/packages/web/lib/run: No such file or directory\nctl: line 4: confd: command not found"
    )

    assert plan.learn(made, said, [])
    assert made.files["web"]["lib/run"] == plan.STAND_IN
    assert made.system == {"confd"}


def test_comparison_does_not_mistake_a_directory_for_a_missing_program(tmp_path: Path) -> None:
    """If a shell's ``.`` command cannot find a file, the error message contains ``.``, but ``.`` is not a missing
    program. The system-metrics-server job in bosh-system-metrics-server-release prints such messages.
    """
    made = planned(tmp_path, job())
    plan.learn(made, "ctl: 3: .: render: not found\nctl: 4: ..: not found\nctl: 5: .: not found\n", [])

    assert {"render"} == made.system & {"render", ".", ".."}


def test_comparison_treats_the_last_command_of_a_start_program_as_the_daemon(tmp_path: Path) -> None:
    made = planned(tmp_path, job())

    assert plan.learn(made, "", ["render", "server"])
    assert made.expectation["lives"] == ["server"]


def test_comparison_makes_scripts_ignore_errors_as_a_last_resort(tmp_path: Path) -> None:
    made = planned(tmp_path, job(**{"bin/pre-start": "#!/bin/bash -e\nset -eu\nfalse\nexit 3\n", "etc/x": "exit 1"}))

    assert plan.learn(made, "", [])
    told = f'{plan.TOLD} "$0" "$@" </dev/null >/dev/null 2>&1 || true\n'
    assert made.job.files["bin/pre-start"] == f"#!/bin/bash\n{told}set +e\nfalse\ntrue\n\nexit 0\n"
    assert made.job.files["etc/x"] == "exit 1"
    assert not plan.learn(made, "", [])


def test_comparison_drops_dependencies_on_other_jobs(tmp_path: Path) -> None:
    made = planned(tmp_path, job(monit=MONIT + "  depends on web\n  depends on nginx\n"))

    assert "depends on web" in made.job.monit
    assert "nginx" not in made.job.monit


def test_comparison_drops_the_poll_interval_that_a_job_sets(tmp_path: Path) -> None:
    made = planned(tmp_path, job(monit=f"set daemon 60\n{MONIT}"))

    assert made.job.files["monit"].split() == MONIT.split()


def test_comparison_drops_bpm_privileges_that_the_machine_lacks(tmp_path: Path) -> None:
    bpm = "processes: [{name: web, executable: /web, capabilities: [NET_BIND_SERVICE, SYS_RESOURCE]}]"
    asked = plan.processes(planned(tmp_path, job(**{"config/bpm.yml": bpm})).job)[0]["capabilities"]

    bounds = int(re.findall(r"CapBnd:\s*(\w+)", Path("/proc/self/status").read_text())[0], 16)
    assert asked == ["NET_BIND_SERVICE"] + ["SYS_RESOURCE"] * (bounds >> plan.CAP_SYS_RESOURCE & 1)


def phase(name: str, **members: Any) -> dict[str, Any]:
    """Return the record of a phase in which the ``web`` service is running."""
    empty = {"value": "", "running_after": 1.0, "job_states": ["running"], "states": {"web": ["running"]}, "events": []}
    rest = {"alerts": [], "heartbeats": [], "services": {"web": True}, "same": {"web": True}, "texts": {}, "files": []}
    return {"name": name, **empty, **rest, **members}


def judged(tmp_path: Path, go: dict[str, Any], shim: dict[str, Any], one: Job | None = None) -> judge.Verdict:
    worlds = [{"error": "", "phases": [phase("start"), seen]} for seen in (go, shim)]
    return judge.judge(planned(tmp_path, one or job()), *worlds)


def test_comparison_reports_identical_runs_as_equal(tmp_path: Path) -> None:
    assert judged(tmp_path, phase("rest"), phase("rest")).kind == "equal"


def test_comparison_ignores_how_early_a_removed_process_disappears_during_apply(tmp_path: Path) -> None:
    without = {"state": {"job_state": "stopped"}}
    early, late = phase("apply", values=without), phase("apply", values=without, states={})
    listed = {"state": {"processes[web].name": "web"}}

    assert judged(tmp_path, early, late).kind == "equal"
    assert judged(tmp_path / "other", phase("apply", values=listed), late).kind == "difference"


def test_missing_monit_alert_for_a_dependent_with_an_empty_pidfile_is_a_known_deviation(
    tmp_path: Path,
) -> None:
    """monit may restart the dependent together with its prerequisite before it has reported the empty pidfile. For
    example, this happens with cf-redis-broker in shared-redis-release.
    """
    alert = "web - Does not exist - restart"
    monit = MONIT.replace("  if failed host 127", "  depends on web-health\n  if failed host 127")
    silent, told = phase("empty pidfile"), phase("empty pidfile", alerts=[alert])

    assert judged(tmp_path, silent, told, job(monit=monit)).kind == "listed"
    assert judged(tmp_path / "alone", silent, told).kind == "difference"


@pytest.mark.parametrize(("begun", "kind"), [(1, "equal"), (2, "difference")])
def test_comparison_accepts_a_process_that_reports_its_start_in_the_next_phase(
    tmp_path: Path, begun: int, kind: str
) -> None:
    """For example, coredns in paas-observability-release reports its start late on a busy machine. A second process
    counts as a difference.
    """
    lives = [1.0, "lives", "server"]
    worlds = [
        {"error": "", "phases": [phase("start"), phase("start after stop", events=first), phase("drain", events=then)]}
        for first, then in (([lives], []), ([], [lives] * begun))
    ]

    assert judge.judge(planned(tmp_path, job()), *worlds).kind == kind


@pytest.mark.parametrize(("is_same", "kind"), [(True, "equal"), (False, "difference")])
def test_comparison_accepts_a_delayed_start_in_any_phase_if_the_process_is_the_same(
    tmp_path: Path, is_same: bool, kind: str
) -> None:
    """For example, emitter's start program in metrics-demo waits 15 seconds before it runs the process."""
    lives = [1.0, "lives", "server"]
    worlds = [
        {
            "error": "",
            "phases": [
                phase("start"),
                phase("agent restarted", events=first, same={"web": is_same}),
                phase("errand", events=then, same={"web": is_same}),
            ],
        }
        for first, then in (([lives], []), ([], [lives]))
    ]

    assert judge.judge(planned(tmp_path, job()), *worlds).kind == kind


def test_comparison_reports_a_missing_alert_after_a_slow_start(tmp_path: Path) -> None:
    """monit may run a slow start program a second time, so an additional process is a known deviation. An alert that
    only monit sends is an unexpected difference.
    """
    alert = ["web - Execution failed - alert"]
    lives = [1.0, "lives", "server"]
    monit = phase("slow start", alerts=alert, events=[lives, lives])

    assert judged(tmp_path, monit, phase("slow start", alerts=alert, events=[lives])).kind == "listed"
    assert judged(tmp_path / "silent", monit, phase("slow start", events=[lives])).kind == "difference"


def test_service_still_failing_under_monit_after_a_slow_start_is_a_known_deviation(
    tmp_path: Path,
) -> None:
    failed = {"job_states": ["failing"], "states": {"web": ["failing"]}}
    alert, up = {"alerts": ["web - Execution failed - alert"]}, {"states": {"web": ["running"]}}

    assert judged(tmp_path, phase("slow start", **failed, **alert), phase("slow start", **up, **alert)).kind == "listed"
    assert judged(tmp_path / "other", phase("slow start", **failed), phase("slow start", **up)).kind == "difference"


def test_comparison_allows_a_slow_stop_program_to_kill_the_next_process_under_monit(tmp_path: Path) -> None:
    """For example, proxy in docker-registry-boshrelease gets an additional SIGTERM under monit. The signal counts as a
    difference if both stops took equally long.
    """
    lives = [1.0, "lives", "server"]
    killed = {"alerts": ["web - Does not exist - restart"], "events": [lives, [2.0, "SIGTERM", "server"], lives]}

    def verdict(seconds: float) -> str:
        go = [phase("operator: stop", seconds=1.5), phase("start after stop", **killed)]
        shim = [phase("operator: stop", seconds=seconds), phase("start after stop", events=[lives])]
        place = tmp_path / str(seconds)
        place.mkdir()
        return judge.judge(planned(place, job()), *({"error": "", "phases": phases} for phases in (go, shim))).kind

    assert verdict(6.5) == "listed"
    assert verdict(1.5) == "difference"


def test_comparison_difference_includes_the_monit_file_line(tmp_path: Path) -> None:
    failing = phase("port closed", job_states=["running", "failing"], states={"web": ["running", "failing"]})
    verdict = judged(tmp_path, failing, phase("port closed"))

    assert verdict.kind == "difference"
    assert {one.what for one in verdict.differences} == {"job state", "state of web", "is failing meanwhile"}
    assert {one.line for one in verdict.differences} == {"jobs/web/monit:4"}


def test_comparison_reports_an_extra_start_and_an_extra_signal(tmp_path: Path) -> None:
    go = phase("death", events=[[0.1, "lives", "server"], [5.0, "lives", "server"], [5.1, "SIGHUP", "server"]])
    verdict = judged(tmp_path, go, phase("death", events=[[0.1, "lives", "server"]]))

    assert {(one.what, one.go, one.shim) for one in verdict.differences} == {
        ("server lives", "2", "1"),
        ("server SIGHUP", "yes", ""),
    }


def test_comparison_classifies_known_deviations_as_listed(tmp_path: Path) -> None:
    bpm = job(monit=MONIT.replace("/sys/run/web/", "/sys/run/bpm/web/"))
    verdict = judged(tmp_path, phase("empty pidfile", job_states=["failing"]), phase("empty pidfile"), bpm)

    assert verdict.kind == "listed"
    assert judged(tmp_path / "ctl", phase("empty pidfile", job_states=["failing"]), phase("empty pidfile")).differences


def test_comparison_allows_bpm_to_leave_the_pidfile_of_a_dead_process_on_stop(tmp_path: Path) -> None:
    bpm = job(monit=MONIT.replace("/sys/run/web/", "/sys/run/bpm/web/"))
    left, gone = phase("stop", files=["data/sys/run/bpm/web/web.pid 644"]), phase("stop")

    assert judged(tmp_path, left, gone, bpm).kind == "listed"
    assert judged(tmp_path / "here", gone, left, bpm).kind == "difference"


def test_comparison_allows_monit_to_leave_a_process_running_on_restart(tmp_path: Path) -> None:
    """The stop program in rabbitmq-server-boshrelease removes its pidfile, so monit leaves the process running. Under
    this agent, the stop times out, which causes an alert.
    """
    begun, ended = [2.0, "lives", "server"], [0.5, "SIGTERM", "server"]
    alert = ["web - Execution failed - alert"]
    go, shim = phase("monit restart", events=[begun]), phase("monit restart", events=[ended, begun], alerts=alert)

    assert judged(tmp_path, go, shim).kind == "listed"
    assert judged(tmp_path / "both", go | {"events": [ended, begun]}, shim).kind == "difference"


CONTEXT = {
    "environment": {"PATH": "/bin", "MONIT_SERVICE": "web", "MONIT_DATE": "Monday"},
    "umask": "022",
    "user": "0:0 [0]",
    "limits": {"nofile": [1024, 20000]},
    "directory": "/etc/sv/monit",
}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"environment": {"PATH": "/bin", "MONIT_DATE": "Tuesday"}}, "ctl start script: environment MONIT_SERVICE"),
        ({"umask": "077"}, "ctl start script: umask"),
        ({"user": "1000:1000 [1000]"}, "ctl start script: user"),
        ({"limits": {"nofile": [20000, 20000]}}, "ctl start script: limit nofile"),
        ({"directory": "/tmp"}, "ctl start script: directory"),
    ],
)
def test_comparison_reports_differences_in_how_a_program_is_run(
    tmp_path: Path, changed: dict[str, Any], what: str
) -> None:
    go = phase("start", contexts={"ctl start script": [CONTEXT]})
    shim = phase("start", contexts={"ctl start script": [CONTEXT | changed]})

    assert [one.what for one in judged(tmp_path, go, shim).differences] == [what]


def test_comparison_allows_the_agent_to_start_scripts_in_an_empty_directory(tmp_path: Path) -> None:
    go = phase("start", contexts={"ctl start script": [CONTEXT]})
    shim = phase("start", contexts={"ctl start script": [CONTEXT | {"directory": "/var/vcap/empty"}]})

    assert judged(tmp_path, go, shim).kind == "listed"


def test_comparison_reports_an_alert_that_is_sent_twice(tmp_path: Path) -> None:
    alert = ["web - Does not exist - restart"]

    assert judged(tmp_path, phase("death", alerts=alert), phase("death", alerts=alert * 2)).kind == "difference"


def test_comparison_reports_scripts_that_did_not_run_or_got_different_arguments(tmp_path: Path) -> None:
    def drained(*scripts: str) -> dict[str, Any]:
        return phase("update: drain", scripts=[f"/var/vcap/jobs/web/bin/{script}" for script in scripts])

    go = drained("drain job_changed hash_changed")
    assert judged(tmp_path / "left-out", go, drained()).kind == "difference"
    assert judged(tmp_path / "other", go, drained("drain job_shutdown hash_unchanged")).kind == "difference"
    assert judged(tmp_path / "same", go, drained("drain job_changed hash_changed")).kind == "equal"


@pytest.mark.parametrize(
    ("path", "shim", "is_alike"),
    [
        ("vm.name", "vm-2", False),
        ("index", 1, False),
        ("vitals.mem.percent", "45", True),
        ("vitals.mem.percent", "95", False),
        ("vitals.uptime.secs", -5, False),
        ("processes[web].mem.kb", 9000, True),
        ("processes[web].mem.kb", 900000, False),
    ],
)
def test_comparison_tolerates_small_differences_in_vitals_but_not_in_other_values(
    tmp_path: Path, path: str, shim: Any, *, is_alike: bool
) -> None:
    values = {
        "vm.name": "vm-1",
        "index": 0,
        "vitals.mem.percent": "40",
        "vitals.uptime.secs": 100,
        "processes[web].mem.kb": 8000,
    }
    go, other = phase("rest", values={"state": values}), phase("rest", values={"state": values | {path: shim}})

    assert [one.what for one in judged(tmp_path, go, other).differences] == [f"value in state {path}"] * (not is_alike)


def test_comparison_ignores_the_memory_of_a_process_that_has_just_started(tmp_path: Path) -> None:
    new, loaded = ({"state": {"processes[web].mem.kb": size}} for size in (4128, 17448))

    assert judged(tmp_path, phase("update: start", values=new), phase("update: start", values=loaded)).kind == "equal"
    assert judged(tmp_path / "rest", phase("rest", values=new), phase("rest", values=loaded)).kind == "difference"


def test_comparison_verdict_is_busy_if_a_job_times_out_on_a_busy_machine(tmp_path: Path) -> None:
    dead = {"error": "TimeoutError: ", "waited": 40.0, "phases": []}

    assert judge.judge(planned(tmp_path, job()), dead, dead).kind == "busy"
    assert judge.judge(planned(tmp_path / "quiet", job()), dead | {"waited": 0.5}, dead | {"waited": 0.5}).kind == (
        "needs more than a stand-in"
    )


def test_comparison_ignores_an_unanswered_request_on_a_busy_machine(tmp_path: Path) -> None:
    late = phase("errand", value="error: Timed out sending 'run_errand' to agent 'instance' after 45 seconds")
    lives = [{"error": "", "waited": 40.0, "phases": [phase("start"), one]} for one in (phase("errand"), late)]

    assert judge.judge(planned(tmp_path, job()), *lives).kind == "busy"
    # Only the second agent failed to answer. Its run hardly had to wait for a CPU, so the machine was not too busy.
    for waits in ((0.5, 0.5), (40.0, 0.5)):
        quiet = [life | {"waited": wait} for life, wait in zip(lives, waits, strict=True)]
        assert judge.judge(planned(tmp_path, job()), *quiet).kind == "difference"


@pytest.mark.parametrize(
    ("services", "is_lacking"), [({"web": True, "job": True}, False), ({"web": True, "job": False}, True)]
)
def test_comparison_looks_for_missing_files_if_one_service_has_no_process(
    services: dict[str, bool], is_lacking: bool
) -> None:
    lives = [{"phases": [phase("rest", services=seen)]} for seen in ({"web": True}, services)]

    assert judge.lacks_a_process(lives) == is_lacking


def test_comparison_instruments_scripts_and_adds_missing_lifecycle_hooks(tmp_path: Path) -> None:
    files = planned(tmp_path, job()).job.files

    assert files["bin/ctl"].splitlines()[1].startswith(plan.TOLD)
    assert all(plan.TOLD in files[f"bin/{name}"] for name in plan.HOOKS)


def test_comparison_shortens_the_start_timeout_in_the_second_deploy(tmp_path: Path) -> None:
    monit = MONIT.replace("ctl start'\"", "ctl start'\" with timeout 90 seconds")
    made = planned(tmp_path, job(monit=monit))

    assert f"ctl start'\" with timeout {plan.SLOW_TIMEOUT_S} seconds\n" in made.second["monit"]
    assert "90 seconds" in made.job.files["monit"]
    assert made.slow == ["/var/vcap/jobs/web/bin/ctl start"]


def test_comparison_lowers_memory_and_cpu_limits_so_that_test_programs_can_exceed_them(tmp_path: Path) -> None:
    rules = (
        "  if totalmem > 4 GB for 15 cycles then alert\n  if cpu usage > 95% then alert\n  if mem > 80% then alert\n"
    )
    monit = planned(tmp_path, job(monit=MONIT + rules)).job.monit

    assert re.findall(r"(?:mem|cpu usage) > ([\d.]+ ?\w*%?)", monit) == ["60 MB", "2%", "60 MB"]


@pytest.mark.parametrize("name", breaks.BREAKS)
def test_each_defect_injected_into_the_comparison_applies_and_compiles(tmp_path: Path, name: str) -> None:
    broken = breaks.BREAKS[name]
    broken.copy(tmp_path)
    compile((tmp_path / "agent_shim" / broken.path).read_text(), broken.path, "exec")


def test_comparison_accepts_any_final_state_of_a_restart_loop(tmp_path: Path) -> None:
    """For example, a rule keeps restarting redis in rackapp-boshrelease. A process that is down counts as a difference
    if the rule has caused no alert.
    """
    restarted = {"alerts": ["web - Connection failed - restart"]}
    dead, alive = phase("port closed", services={"web": False}), phase("port closed", **restarted)

    assert judged(tmp_path, dead | restarted, alive).kind == "listed"
    assert judged(tmp_path / "silent", dead, phase("port closed")).kind == "difference"


def test_comparison_allows_a_memory_rule_to_restart_a_service_more_often(tmp_path: Path) -> None:
    alert, lives = "web - Resource limit matched - restart", [1.0, "lives", "server"]
    go = phase("usage", alerts=[alert], events=[lives], job_states=["failing"])
    shim = phase("usage", alerts=[alert] * 3, events=[lives] * 3, job_states=["failing", "starting"])

    assert judged(tmp_path, go, shim).kind == "listed"
    assert judged(tmp_path / "silent", phase("usage"), shim).kind == "difference"
    assert judged(tmp_path / "here", go, phase("usage", job_states=["failing"])).kind == "difference"


def test_comparison_accepts_a_tool_that_runs_one_phase_later(tmp_path: Path) -> None:
    tool, plan = [[8.0, "tool", "cli"]], planned(tmp_path, job())

    def verdict(shim: list[dict[str, Any]]) -> judge.Verdict:
        go = [phase("death", events=tool), phase("empty pidfile")]
        return judge.judge(plan, *({"error": "", "phases": phases} for phases in (go, shim)))

    assert verdict([phase("death"), phase("empty pidfile", events=tool)]).kind == "equal"
    assert verdict([phase("death"), phase("empty pidfile")]).kind == "difference"


def test_comparison_accepts_a_stop_program_that_continues_until_the_next_start(tmp_path: Path) -> None:
    """The stop program for loggr-system-metrics-agent in system-metrics-release runs killall four more times after the
    process has ended, and monit does not wait for that.
    """
    tool, plan = [[1.0, "tool", "killall"]], planned(tmp_path, job())
    names = ("update: stop", "update: post-stop", "update: apply")

    def verdict(go: str, shim: str) -> judge.Verdict:
        lives = [[phase(name, events=tool if name in used else []) for name in names] for used in ([go, shim], shim)]
        return judge.judge(plan, *({"error": "", "phases": phases} for phases in lives))

    assert verdict("update: apply", "update: stop").kind == "equal"
    assert verdict("update: apply", "").kind == "difference"


async def test_comparison_records_a_drain_until_no_service_is_monitored() -> None:
    """For a job with many services, such as ossec-agent in ossec-boshrelease, the Go agent reports the end of a drain
    before monit has unmonitored every service.
    """
    states = ["running", "running", "unknown", "unknown"]

    async def value(*_: Any, **__: Any) -> dict[str, Any]:
        return {"job_state": "failing", "processes": [{"name": "web", "state": states.pop(0)}]}

    recorder = life.Life(Mock(cycle=60), {"services": []}, Mock(value=value), Mock(notices=[]))
    async with recorder.phase("drain") as recorded:
        await recorder.until(lambda: bool(recorded.states), 60)
        await recorder.unmonitored()

    assert recorded.states == {"web": ["running", "unknown"]}


def test_comparison_gives_no_verdict_if_a_job_starts_under_neither_agent(tmp_path: Path) -> None:
    dead = {"error": "", "phases": [phase("start", running_after=-1.0, job_states=["failing"])]}
    verdict = judge.judge(planned(tmp_path, job()), dead, dead)

    assert verdict.kind == "needs more than a stand-in"
    assert "does not run in either environment" in verdict.not_played


def test_comparison_gives_no_verdict_if_a_job_keeps_failing_under_both_agents(tmp_path: Path) -> None:
    verdict = judged(tmp_path, phase("rest", job_states=["running", "failing"]), phase("rest", job_states=["failing"]))

    assert "does not stay up in either environment" in verdict.not_played


def test_comparison_gives_no_verdict_if_no_process_runs_under_either_agent(tmp_path: Path) -> None:
    """The job state alone is not enough. For example, ossec_client in cg-ossec-boshrelease counts as running because it
    has no service in the vcap group.
    """
    dead = phase("rest", services={"web": False})

    assert "does not stay up in either environment" in judged(tmp_path, dead, dead).not_played
    assert judged(tmp_path / "one", phase("rest"), dead).kind == "difference"


def test_comparison_allows_monit_to_refuse_a_request_during_a_stop(tmp_path: Path) -> None:
    words = "1\nmonit: action failed -- {}"
    refused = phase("unmonitor", value=words.format("Other action already in progress -- please try again later"))

    assert judged(tmp_path, refused, phase("unmonitor", value="0", services={"web": False})).kind == "listed"
    other = phase("unmonitor", value=words.format("There is no service by that name"))
    assert judged(tmp_path / "other", other, phase("unmonitor", value="0")).kind == "difference"


@pytest.mark.parametrize(
    ("states", "rest", "kind"),
    [
        ({}, {"web": True, "job": True}, "listed"),
        ({"web": ["running"]}, {"web": True, "job": True}, "difference"),
        ({}, {"web": True, "job": False}, "difference"),
    ],
)
def test_comparison_allows_monit_to_start_services_outside_the_vcap_group_later(
    tmp_path: Path, states: dict[str, list[str]], rest: dict[str, bool], kind: str
) -> None:
    """The Director waits only for services in the vcap group. ossec_client in cg-ossec-boshrelease has services outside
    this group.
    """
    lives = [
        {
            "error": "",
            "phases": [
                phase("start", states=states, services=started, same=dict.fromkeys(started, False)),
                phase("rest", services=rest, same=dict.fromkeys(rest, True)),
            ],
        }
        for started in ({"web": True, "job": False}, {"web": True, "job": True})
    ]

    assert judge.judge(planned(tmp_path, job()), *lives).kind == kind


def test_comparison_ignores_numbers_in_monit_output(tmp_path: Path) -> None:
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


def test_comparison_counts_jobs_per_release(tmp_path: Path) -> None:
    assert "web-release 1." in judge.counts([judged(tmp_path, phase("rest"), phase("rest"))])


def test_comparison_reports_a_job_that_runs_under_only_one_agent(tmp_path: Path) -> None:
    dead = {"error": "", "phases": [phase("start", running_after=-1.0, job_states=["failing"])]}
    verdict = judge.judge(planned(tmp_path, job()), {"error": "", "phases": [phase("start")]}, dead)

    assert verdict.kind == "difference"


def test_each_allowed_difference_is_listed_in_monit_deviations_md() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)

    for title, _ in judge.ALLOWED:
        assert any(row.startswith(title) for row in rows), title
