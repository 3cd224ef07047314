"""Tests which services the plan derives from monit files."""

from __future__ import annotations

import pytest

from agent_shim.supervisor.monit import control_file, parser
from agent_shim.supervisor.monit.ast import Action, JobFile, MonitProgram
from agent_shim.supervisor.plan import ProcessSpec, RestartLimit, plan

WEB = """
check process web
  with pidfile /var/vcap/sys/run/web/web.pid
  start program "/var/vcap/jobs/web/bin/ctl start" as uid vcap and gid vcap with timeout 60 seconds
  stop program "/var/vcap/jobs/web/bin/ctl stop"
  group vcap
"""


def check(name: str, *statements: str) -> str:
    return f"check process {name} with pidfile /run/{name}.pid\n" + "\n".join(statements) + "\n"


def names(*files: JobFile) -> list[str]:
    return [spec.name for spec in plan(files)]


def errors(*files: JobFile) -> dict[str, str]:
    return {spec.name: spec.error for spec in plan(files) if spec.error}


def test_plan_reads_programs_pidfile_and_group_for_a_process() -> None:
    (spec,) = plan([JobFile("web", "", WEB)])

    assert spec == ProcessSpec(
        name="web",
        job="web",
        pidfile="/var/vcap/sys/run/web/web.pid",
        start=MonitProgram(("/var/vcap/jobs/web/bin/ctl", "start"), "vcap", "vcap", 60),
        stop=MonitProgram(("/var/vcap/jobs/web/bin/ctl", "stop")),
    )
    assert spec.is_vcap
    assert spec.is_restartable


def test_plan_keeps_the_order_of_files_and_checks() -> None:
    files = [
        JobFile("b", "", check("b1") + check("b2")),
        JobFile("none", "", "\n\n"),
        JobFile("a", "", check("a1")),
        JobFile("a", "more", check("a2")),
    ]

    assert names(*files) == ["b1", "b2", "a1", "a2"]
    assert [spec.job for spec in plan(files)] == ["b", "b", "a", "a"]


def test_plan_compiles_the_pattern_for_a_process_without_a_pidfile() -> None:
    (spec,) = plan([JobFile("j", "", 'check process s matching "[[:alpha:]]+ --serve"\n')])

    assert spec.pidfile is None
    assert spec.pattern is not None
    assert spec.pattern.search("server --serve")
    assert not spec.pattern.search("7 --serve")


@pytest.mark.parametrize(
    ("statement", "member", "value"),
    [
        ("if does not exist then alert", "absence", Action("alert")),
        ('if not exist then exec "/bin/tell me"', "absence", Action("exec", MonitProgram(("/bin/tell", "me")))),
        ("if does not exist for 3 cycles then restart", "absence_cycles", 3),
        ("if changed pid then restart", "change", Action("restart")),
        ("if 3 restarts within 5 cycles then unmonitor", "limits", (RestartLimit(3, 5, Action("unmonitor")),)),
        ("mode manual", "mode", "manual"),
        ("every 3 cycles", "every", 3),
        ("group VCAP group other", "groups", frozenset({"vcap", "other"})),
    ],
)
def test_rules_that_change_the_state_become_fields_in_the_process_spec(
    statement: str, member: str, value: object
) -> None:
    (spec,) = plan([JobFile("j", "", check("s", statement))])

    assert getattr(spec, member) == value


def test_plan_leaves_connection_rules_to_the_rule_engine() -> None:
    (spec,) = plan([JobFile("j", "", check("s", "if failed port 80 then restart", "if changed pid then alert"))])

    assert len(spec.rules) == 1


def test_plan_lists_ignored_statements_but_not_their_secrets() -> None:
    text = f"""
set httpd port 2812 and allow admin:hidden
{check("one", "alert someone@example.com")}
check file two with path /tmp
  if not match /secret then alert
  ignore match /secret
"""
    one, two = plan([JobFile("j", "", text)])

    assert one.unsupported == ("set httpd", "alert someone@example.com")
    assert two.unsupported == ("if not match", "ignore match")


def test_monit_daemon_plan_does_not_list_supported_statements_as_ignored() -> None:
    """When the agent runs in place of monit, it acts on most statements outside of checks."""
    text = "set daemon 10\ninclude /etc/x\nset init\n" + check("one", "alert a@example.com")

    (one,) = plan([JobFile("monitrc", "", text)], acted_on=control_file.ACTED_ON)

    assert one.unsupported == ("set init", "alert a@example.com")


BOTH = ('start program "/bin/a"', 'stop program "/bin/b"')


@pytest.mark.parametrize(
    ("statements", "is_restartable"),
    [
        (BOTH, True),
        (BOTH[:1], False),
        (BOTH[1:], False),
        ((*BOTH, "mode passive"), False),
        ((*BOTH, "mode manual"), True),
        ((*BOTH, "if not exist then alert"), False),
        ((BOTH[0], "if not exist then start"), True),
    ],
)
def test_plan_determines_which_services_are_restartable(statements: tuple[str, ...], is_restartable: bool) -> None:
    """As in monit, a service is not restarted if it is in passive mode, if its rule for a missing process only alerts,
    or if it lacks a program that the restart needs.
    """
    (spec,) = plan([JobFile("j", "", check("s", *statements))])

    assert spec.is_restartable is is_restartable


def test_invalid_monit_file_becomes_one_failing_service_in_the_plan() -> None:
    files = [
        JobFile("good", "", check("good")),
        JobFile("bad", "", check("bad1") + check("bad2")),
        JobFile("bad", "more", "check process\n"),
        JobFile("fine", "", check("fine")),
    ]

    assert names(*files) == ["good", "bad", "fine"]
    assert list(errors(*files)) == ["bad"]
    assert errors(*files)["bad"].startswith("cannot read bad/more.monit: line ")


def test_monit_file_above_its_size_limit_fails_its_job() -> None:
    good = check("web").ljust(parser.MAX_BYTES)

    assert names(JobFile("web", "", good)) == ["web"]
    for text in (good + " ", good[:-1] + "\u00e9"):  # the limit is in bytes
        assert errors(JobFile("web", "more", text), JobFile("other", "", check("other"))) == {
            "web": "cannot read web/more.monit: it has more than 256 KiB"
        }


def test_duplicate_service_name_fails_the_later_job() -> None:
    """Names that differ only in case count as duplicates. monit would load neither job."""
    files = [JobFile("one", "", check("web")), JobFile("two", "", check("WEB") + check("own"))]

    assert names(*files) == ["web", "two"]
    assert "two/monit: line 1" in errors(*files)["two"]
    assert "'WEB' is defined already in one/monit" in errors(*files)["two"]


def test_missing_dependency_fails_its_job() -> None:
    files = [JobFile("one", "", check("a", "depends on nosuch")), JobFile("two", "", check("b"))]

    assert names(*files) == ["one", "b"]
    assert "'a' depends on 'nosuch', which is not defined" in errors(*files)["one"]


def test_dependency_on_a_job_with_an_invalid_file_fails_only_that_job() -> None:
    """The missing service may be defined in the invalid file, so the job that depends on it is still accepted."""
    files = [JobFile("bad", "", "check nonsense and more"), JobFile("two", "", check("b", "depends on nonsense"))]

    assert list(errors(*files)) == ["bad"]
    assert names(*files) == ["bad", "b"]


def test_dependency_cycle_fails_one_job() -> None:
    within = [JobFile("one", "", check("a", "depends on b") + check("b", "depends on a")), JobFile("t", "", check("c"))]
    across = [JobFile("one", "", check("a", "depends on b")), JobFile("two", "", check("b", "depends on a"))]

    assert names(*within) == ["one", "c"]
    assert "depends on itself: a -> b -> a" in errors(*within)["one"]
    assert names(*across) == ["one", "b"]


def test_failing_service_is_renamed_if_its_name_is_in_use() -> None:
    assert names(JobFile("one", "", check("two")), JobFile("two", "", "nonsense")) == ["two", "two-monit"]


@pytest.mark.parametrize(
    ("pidfile", "label"),
    [
        ("/var/vcap/sys/run/bpm/web/worker.pid", "bpm/web/worker"),
        ("/var/vcap/sys/run/web/worker.pid", "monit-name"),
        ("/run/bpm.pid", "monit-name"),
        (None, "monit-name"),
    ],
)
def test_plan_derives_a_bpm_process_label_from_the_pidfile(pidfile: str | None, label: str) -> None:
    """The start program may be a script that calls bpm, so the pidfile shows which bpm process it is."""
    labels = ProcessSpec("monit-name", "web", pidfile=pidfile or None).labels

    assert set(labels) == {"monit-name", label}


def test_empty_plan_has_no_services() -> None:
    assert plan([]) == ()
