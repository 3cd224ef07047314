"""Tests parsing bpm.yml: all keys and their defaults, scalars as Go interprets them, and errors with their position."""

from __future__ import annotations

import contextlib
import re
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_shim.core.errors import ConfigError
from agent_shim.supervisor.bpm import config
from agent_shim.supervisor.bpm.config import BpmFile, Limits, ProcessConfig, Unsafe, Volume

WHOLE = """
other: [ignored, {a: 1, a: 2}]
processes:
- name: server
  executable: /var/vcap/packages/server/bin/server
  args: [--port, 2424, --on=yes]
  env:
    LEVEL: info
    COUNT: 5
  workdir: /var/vcap/packages/server
  hooks:
    pre_start: /var/vcap/jobs/server/bin/setup
  capabilities: [NET_BIND_SERVICE, cap_sys_time]
  limits:
    memory: 1.5G
    open_files: 100_000
    processes: 10
    core_file_size: 0x400
  ephemeral_disk: true
  persistent_disk: yes
  additional_volumes:
  - path: /var/vcap/data/sockets
    writable: true
  - {path: /var/vcap/data/jna, allow_executions: true, mount_only: true, shared: true}
  unsafe:
    privileged: true
    host_pid_namespace: true
    unrestricted_volumes:
    - path: /etc/*
  shutdown_signal: INT
  unknown: {x: 1}
- name: worker
  executable: work
"""


def parse(text: str) -> BpmFile:
    return config.parse(text, origin="server/bpm.yml", job="server")


def parse_process(text: str) -> ProcessConfig:
    """Parse a bpm.yml that has one process with the keys in ``text``, and return this process."""
    lines = "".join(f"  {line}\n" for line in text.splitlines())
    (process,) = parse(f"processes:\n- name: p\n  executable: x\n{lines}").processes
    return process


def refusal(text: str) -> str:
    """Return the error for ``text`` without the file name."""
    with pytest.raises(ConfigError) as refused:
        parse(text)
    prefix, _, rest = str(refused.value).partition(": ")
    assert prefix == "cannot read server/bpm.yml"
    return rest


@pytest.mark.parametrize(("written", "limit"), [(1, 1), (0, None), (-1, None)])
def test_bpm_process_limit_below_one_means_no_limit(written: int, limit: int | None) -> None:
    """runc treats values below one in the same way, and the kernel would reject -1."""
    assert parse_process(f"limits: {{processes: {written}}}").limits.processes == limit


def test_every_bpm_key_is_parsed() -> None:
    file = parse(WHOLE)

    assert file.processes[0] == ProcessConfig(
        name="server",
        executable="/var/vcap/packages/server/bin/server",
        args=("--port", "2424", "--on=yes"),
        env={"LEVEL": "info", "COUNT": "5"},
        workdir="/var/vcap/packages/server",
        pre_start="/var/vcap/jobs/server/bin/setup",
        capabilities=("NET_BIND_SERVICE", "SYS_TIME"),
        limits=Limits(memory=1536 * 2**20, open_files=100_000, processes=10, core_file_size=1024),
        ephemeral_disk=True,
        persistent_disk=True,
        additional_volumes=(
            Volume("/var/vcap/data/sockets", writable=True),
            Volume("/var/vcap/data/jna", allow_executions=True, mount_only=True, shared=True),
        ),
        unsafe=Unsafe(privileged=True, unrestricted_volumes=(Volume("/etc/*"),), host_pid_namespace=True),
        shutdown_signal="INT",
    )
    assert file.processes[1] == ProcessConfig(name="worker", executable="work")


def test_bpm_process_is_found_by_its_name() -> None:
    file = parse(WHOLE)

    assert file.process("worker") is file.processes[1]
    assert file.process("Worker") is None


@pytest.mark.parametrize(
    "text",
    ["", "# nothing\n", "---\n", "~", "{}", "processes:", "processes: []", "processes: ~", "executable: /x\nargs: []"],
)
def test_bpm_config_may_have_no_processes(text: str) -> None:
    assert parse(text) == BpmFile()


def test_bpm_config_uses_the_first_yaml_document() -> None:
    assert parse("processes: []\n---\n{ what is this") == BpmFile()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            "[yes, True, 0x1f, 1.10, 010, 1_000, .5, 2001-01-01, 1:30]",
            "yes True 0x1f 1.10 010 1_000 .5 2001-01-01 1:30",
        ),
        ("[a, ~, null, b]", "a b"),
        ("['~', \"null\"]", "~ null"),
        ("[!!str 5, !!binary aGk=, !own x]", "5 hi x"),
        ("~", ""),
    ],
)
def test_bpm_config_does_not_convert_text_values(written: str, expected: str) -> None:
    """Words such as ``yes`` or ``0x1f``, which most YAML parsers would convert, are kept. Null items are left out."""
    assert " ".join(parse_process(f"args: {written}").args) == expected


def test_bpm_env_values_are_text() -> None:
    assert parse_process("env: {A: true, 5: 0x1f, yes: ~, ~: x, <<: {A: 1, B: 2}}").env == {
        "A": "true",
        "5": "0x1f",
        "yes": "",
        "B": "2",
    }


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("true", True),
        ("True", True),
        ("yes", True),
        ("on", True),
        ("On", True),
        ("y", True),
        ("false", False),
        ("no", False),
        ("OFF", False),
        ("~", False),
        ("", False),
        ("'yes'", True),
        ("'true'", True),
        ("'0'", False),
        ("! '11'", True),
    ],
)
def test_bpm_booleans_are_parsed(written: str, expected: bool) -> None:
    assert parse_process(f"ephemeral_disk: {written}").ephemeral_disk is expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0", 0),
        ("5", 5),
        ("+5", 5),
        ("0x1F", 31),
        ("010", 8),
        ("08", 8),
        ("0o17", 15),
        ("0b11", 3),
        ("1_000", 1000),
        ("1e3", 1000),
        ("1.9", 1),
        ("'65536'", 65536),
        ("18446744073709551615", 2**64 - 1),
        ("~", None),
    ],
)
def test_bpm_numbers_are_parsed(written: str, expected: int | None) -> None:
    assert parse_process(f"limits: {{open_files: {written}}}").limits.open_files == expected
    assert parse_process(f"limits: {{core_file_size: {written}}}").limits.core_file_size == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("1G", 2**30),
        ("1gb", 2**30),
        ("256M", 2**28),
        ("' 1.5 KiB'", None),
        ("1.5KiB", 1536),
        ("7b", 7),
        ("2T", 2**41),
        ("~", None),
    ],
)
def test_bpm_memory_sizes_are_parsed(written: str, expected: int | None) -> None:
    if expected is None and written != "~":
        assert "expected a number and a unit" in refusal(
            f"processes:\n- {{name: a, executable: b, limits: {{memory: {written}}}}}"
        )
    else:
        assert parse_process(f"limits: {{memory: {written}}}").limits.memory == expected


@pytest.mark.parametrize(
    "key",
    ["args", "env", "hooks", "capabilities", "limits", "additional_volumes", "unsafe", "shutdown_signal", "workdir"],
)
def test_null_value_in_a_bpm_config_means_the_default(key: str) -> None:
    assert parse_process(f"{key}: ~") == parse_process("")


def test_bpm_config_resolves_anchors_and_merges() -> None:
    file = parse(
        """
base: &base {executable: /base, workdir: /base, env: &env {A: b}}
more: &more {<<: *base, executable: /more, args: [x]}
processes:
- {<<: *base, name: a, workdir: /own}
- {<<: [{name: b}, *more, {name: c, workdir: /c}], env: *env}
"""
    )

    assert file.processes == (
        ProcessConfig("a", "/base", workdir="/own", env={"A": "b"}),
        ProcessConfig("b", "/more", workdir="/base", args=("x",), env={"A": "b"}),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", "line 1: found a list, expected a mapping"),
        ("\n\nhello", "line 3: found 'hello', expected a mapping"),
        ("processes: {}", "line 1: processes: found a mapping, expected a list"),
        ("processes:\n- ~", "line 2: processes[0]: found null, expected a mapping"),
        ("processes:\n- x", "line 2: processes[0]: found 'x', expected a mapping"),
        ("processes:\n- name: a", "line 2: processes[0].executable: found nothing, expected a text"),
        ("processes:\n- executable: a\n  name: ''", "line 3: processes[0].name: found '', expected a text"),
        ("a: 1\n\na: 2", "line 3: a: found 'a', expected each key once"),
        ("[a]: b", "line 1: found a list, expected a key"),
        ("<<: x", "line 1: found 'x', expected a mapping"),
        ("a: 'b\nc: d", "line 2 column 5: found unexpected end of stream"),
        ("a: *b", "line 1 column 4: found undefined alias"),
        ("a: \x07", "line 1: control characters are not allowed"),
        ("a:\n b: \udcff", "line 2: found bytes that are not text"),
        ("a: " + "[" * 101, "line 1: found more than 100 levels, expected a bpm.yml"),
        ("a: [" + "[[]]," * 50 + "[" * 100, "line 1: found more than 100 levels, expected a bpm.yml"),
    ],
)
def test_invalid_bpm_config_is_rejected(text: str, expected: str) -> None:
    assert refusal(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("args: x", "args: found 'x', expected a list"),
        ("args: [a, [b]]", "args[1]: found a list, expected a text"),
        ("args: ['a\0b']".replace("\0", "\\0").replace("'", '"'), "args[0]: found a NUL, expected a text"),
        ("args: [!!binary '*']", "args[0]: found something else, expected base64"),
        ("workdir: !!binary '*'", "workdir: found something else, expected base64"),
        ("limits: {memory: !!binary '*'}", "limits.memory: found something else, expected base64"),
        ("additional_volumes: [{path: !!binary '*'}]", "path: found something else, expected base64"),
        ("env: [A]", "env: found a list, expected a mapping"),
        ("env: {A: {}}", "env.A: found a mapping, expected a text"),
        ("env: {A: 1, A: 1}", "env.A: found 'A', expected each key once"),
        ("hooks: x", "hooks: found 'x', expected a mapping"),
        ("ephemeral_disk: maybe", "ephemeral_disk: found 'maybe', expected true or false"),
        ("ephemeral_disk: 1", "ephemeral_disk: found '1', expected true or false"),
        (
            "limits: {open_files: many}",
            "limits.open_files: found 'many', expected a whole number from 0 to 18446744073709551615",
        ),
        (
            "limits: {open_files: -1}",
            "limits.open_files: found '-1', expected a whole number from 0 to 18446744073709551615",
        ),
        (
            "limits: {processes: 1e400}",
            "limits.processes: found '1e400', expected a whole number from 0 to 9223372036854775807",
        ),
        ("limits: {memory: 512}", "limits.memory: found '512', expected a number and a unit, like 256M or 1G"),
        ("shutdown_signal: KILL", "shutdown_signal: found 'KILL', expected TERM or INT"),
        ("additional_volumes: [{}]", "additional_volumes[0].path: found nothing, expected the shortest form, '.'"),
        ("additional_volumes: [{path: /var/vcap/a/../b}]", "expected the shortest form, '/var/vcap/b'"),
        ("additional_volumes: [{path: //var/vcap/a}]", "expected the shortest form, '/var/vcap/a'"),
        ("additional_volumes: [{path: /var/vcap/a/}]", "expected the shortest form, '/var/vcap/a'"),
        (
            "additional_volumes: [{path: /var/vcap}]",
            "expected a path inside /var/vcap (others are unrestricted_volumes)",
        ),
        ("additional_volumes: [{path: /var/vcapital}]", "expected a path inside /var/vcap"),
        ("additional_volumes: [{path: /var/vcap/data/server}]", "expected another directory"),
        (
            "additional_volumes: [{path: /var/vcap/store/server}]",
            "expected another directory (ephemeral_disk and persistent_disk",
        ),
        ("additional_volumes: [{path: /var/vcap/a, writable: maybe}]", "additional_volumes[0].writable: found 'maybe'"),
    ],
)
def test_invalid_bpm_process_is_rejected(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_process(text)

    assert str(refused.value).startswith("cannot read server/bpm.yml: line ")
    assert expected in str(refused.value)


@pytest.mark.attack("a reader finds arguments, values or signed URLs in an audit record or an error")
def test_bpm_env_values_are_not_shown_in_errors() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_process('env: {A: "secret\\0"}')

    assert "secret" not in str(refused.value)


def test_bpm_root_directory_is_configurable() -> None:
    text = "processes:\n- {name: a, executable: b, additional_volumes: [{path: /scratch/data/x}]}"

    assert (
        config.parse(text, origin="x", root=PurePosixPath("/scratch")).processes[0].additional_volumes[0].path
        == "/scratch/data/x"
    )
    with pytest.raises(ConfigError, match="a path inside /var/vcap"):
        config.parse(text, origin="x")


def test_bpm_config_above_its_size_limit_is_rejected() -> None:
    longest = WHOLE + "#".ljust(config.MAX_BYTES - len(WHOLE.encode()), "a")

    assert config.parse(longest, origin="bpm.yml") == config.parse(WHOLE, origin="bpm.yml")
    with pytest.raises(ConfigError, match="^cannot read bpm.yml: it has more than 256 KiB$"):
        config.parse(longest + "a", origin="bpm.yml")


def test_bpm_config_with_a_hundred_levels_is_parsed() -> None:
    assert parse("a: " + "[" * 99 + "]" * 99) == BpmFile()


def test_bpm_config_with_too_deeply_nested_merges_is_rejected() -> None:
    """Merges are resolved recursively, so too many levels would exceed Python's recursion limit."""
    levels = "".join(f"l{number + 1}: &l{number + 1} {{<<: *l{number}}}\n" for number in range(300))

    with pytest.raises(ConfigError, match="expected a mapping"):
        parse(f"l0: &l0 {{name: a, executable: b}}\n{levels}processes: [*l300]")


def test_bpm_config_reads_nested_merges_once() -> None:
    """Each of 60 levels merges the previous one twice, so reading every merge again would take 2**60 steps."""
    levels = "".join(f"l{number + 1}: &l{number + 1} {{<<: [*l{number}, *l{number}]}}\n" for number in range(60))

    (process,) = parse(f"l0: &l0 {{name: a, executable: b}}\n{levels}processes: [*l60]").processes
    assert process == ProcessConfig("a", "b")


@given(st.text("abc:-[]{}&*!|>'\"\n #,~<?%@` 1\t", max_size=40))
def test_parsing_any_text_as_a_bpm_config_succeeds_or_raises_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse(f"processes:\n{text}")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/var/vcap/data/web/", "volume path must be canonical, expected /var/vcap/data/web"),
        ("/var/vcap/data/web", "cannot conflict with default job data or store directories"),
        ("/var/vcap/store/web", "cannot conflict with default job data or store directories"),
        ("/etc", "must be within /var/vcap"),
        ("/var/vcap", "must be within /var/vcap"),
        ("/var/vcap/data/other", None),
        ("/var/vcap/store/web/below", None),
    ],
)
def test_bpm_run_volume_must_be_below_var_vcap_but_not_a_job_directory(path: str, why: str | None) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)) if why else contextlib.nullcontext():
        config.check_volume(path, job="web")
