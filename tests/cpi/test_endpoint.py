"""The CPI writes exactly one response for each request, whatever the request contains and whatever the program
prints.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kubernetes_cpi import endpoint, methods, names
from tests.cpi.calls import DYNAMIC, ENV, STEMCELL, CpiCalls, checked, start
from tests.cpi.fake_api import FakeApiServer
from tests.support.source import ROOT

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from([*methods.METHODS, "info", "ping", "configure_networks", ""]) | st.text(max_size=12)
REQUESTS = st.fixed_dictionaries(
    {"method": NAMES},
    optional={
        "arguments": st.lists(JSON | st.sampled_from(["vm-bosh-0", "disk-bosh-0", 64, {}]), max_size=6) | JSON,
        "context": st.dictionaries(st.sampled_from(["director_uuid", "request_id", "vm", "namespace"]), JSON) | JSON,
        "api_version": JSON,
    },
)


@given(raw=st.binary(max_size=200))
@example(raw=b"")
@example(raw=b"null")
@example(raw=b'{"method":"info"')
@example(raw=b'{"method":"info"}{"method":"info"}')
@example(raw=b"\xff\xfe")
@example(raw=b"[" * 100_000)
@example(raw=b'{"method":"info","arguments":' + b"[" * 100_000)
def test_cpi_answers_arbitrary_bytes_with_one_response(raw: bytes) -> None:
    checked(endpoint.answer(raw, []))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=REQUESTS)
def test_cpi_answers_every_request_with_one_response(cpi: CpiCalls, request: Any) -> None:
    cpi.server.cluster.objects.clear()
    checked(endpoint.answer(json.dumps(request).encode(), ["--config", str(cpi.file)]))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=st.binary(max_size=40) | REQUESTS.map(lambda request: json.dumps(request).encode()))
@example(request=b"")
@example(request=b"null")
@example(request=b'{"method":"info","arguments":[],"context":{}}')
@example(request=b'{"method":"has_vm","arguments":["a"]}')
def test_cpi_process_prints_one_response_whatever_stdin_contains(cpi: CpiCalls, request: bytes) -> None:
    done = start(request, "--config", str(cpi.file))

    checked(done.stdout)
    assert done.returncode == 0


def test_cpi_logs_the_duration_of_each_api_request(cpi: CpiCalls, server: FakeApiServer) -> None:
    server.fail("POST pods", status=503)

    response, said = cpi.run(cpi.request("create_vm", ["agent-1", STEMCELL, {}, DYNAMIC, [], ENV]))

    lines = [re.fullmatch(r"(\S+ \S+): .+ \(\d+ ms\)", line) for line in said.splitlines()]
    assert len(lines) == len(server.requests)
    assert all(line and line[1].startswith(made.rstrip("/")) for line, made in zip(lines, server.requests, strict=True))
    assert re.fullmatch(r"create_vm: \d+\.\d\d s \(\d+ calls to the cluster, \d+\.\d\d s\)\n", response["log"])


@pytest.mark.parametrize("redirection", ["0<&-", "2>&-", "0<&- 2>&-", "2>/dev/full"])
def test_cpi_responds_even_if_stdin_or_stderr_is_closed(cpi: CpiCalls, redirection: str) -> None:
    request = b'{"method":"has_vm","arguments":["a"]}'
    command = f'exec "$0" -m kubernetes_cpi --config "$1" {redirection}'
    done = subprocess.run(["sh", "-c", command, sys.executable, cpi.file], input=request, capture_output=True, cwd=ROOT)

    response = checked(done.stdout)
    assert (response["result"] is False) is (redirection[0] == "2")


PRINTING = """
import os, sys
from kubernetes_cpi import __main__, endpoint
answer = endpoint.answer
def printing(*arguments):
    print("a library prints")
    os.write(1, b"so does C\\n")
    os.system("echo a child prints")
    return answer(*arguments)
endpoint.answer = printing
__main__.main()
"""


def test_printed_text_does_not_reach_the_cpis_stdout() -> None:
    request = b'{"method":"info","arguments":[],"context":{"director_uuid":"d"}}'
    done = subprocess.run([sys.executable, "-c", PRINTING], input=request, capture_output=True, cwd=ROOT)

    assert checked(done.stdout)["result"]["api_version"] == 3
    for words in (b"a library prints", b"so does C", b"a child prints"):
        assert words in done.stderr


@pytest.mark.parametrize("kind", [KeyError, OSError, MemoryError, RecursionError, UnicodeError])
def test_internal_cpi_error_becomes_a_response(
    cpi: CpiCalls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    def broken(*_: object) -> None:
        raise kind("a bug")

    monkeypatch.setattr(methods, "call", broken)
    error = cpi.answer(cpi.request("has_vm", ["vm-bosh-0"]))["error"]

    assert (error["type"], error["ok_to_retry"]) == ("Bosh::Clouds::CloudError", False)
    assert error["message"].startswith(f"cannot has_vm: {kind.__name__} in broken, a bug in this CPI")
    assert 'raise kind("a bug")' in capsys.readouterr().err


def test_cpi_result_that_cannot_be_encoded_becomes_an_error(cpi: CpiCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "call", lambda *_: object())

    assert "cannot write the result" in cpi.answer(cpi.request("has_vm", ["vm-bosh-0"]))["error"]["message"]


HEAVY = {"ssl", "http.client", "socket", "yaml", "kubernetes_cpi.client", "kubernetes_cpi.methods", "asyncio"}
RARE = {"asyncio", "copy", "difflib", "hashlib", "subprocess", "traceback", "yaml"}
"""Modules that has_vm and attach_disk must not import, because only other methods, error handling or kubeconfigs need
them.
"""


def loaded_by(request: bytes, file: Path) -> tuple[Any, set[str]]:
    """Run a request in a new interpreter. Return the result and the names of all imported modules."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from kubernetes_cpi import endpoint; "
        f"raw = endpoint.answer({request!r}, ['--config', {str(file)!r}]); print(raw.decode()); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, check=True)
    response, loaded = done.stdout.splitlines()
    return checked(response)["result"], set(loaded.decode().split())


def test_cpi_info_needs_no_configuration_and_imports_no_api_client() -> None:
    result, loaded = loaded_by(b'{"method":"info","arguments":[],"context":{}}', Path("/missing"))

    assert result["api_version"] == 3
    assert not HEAVY & loaded


def test_read_only_cpi_calls_import_few_modules_and_send_few_requests(cpi: CpiCalls, server: FakeApiServer) -> None:
    cpi.write(server.config(disks={"attach": "live"}))
    vm = cpi.create_vm()
    disk = cpi("create_disk", 64, {}, vm)
    hint = cpi("attach_disk", vm, disk)
    before = len(server.requests)

    exists, by_has_vm = loaded_by(cpi.request("has_vm", [vm]), cpi.file)
    again, by_attach_disk = loaded_by(cpi.request("attach_disk", [vm, disk]), cpi.file)

    assert (exists, again) == (True, hint)
    assert not RARE & (by_has_vm | by_attach_disk)
    assert server.requests[before:] == [f"GET pods/{vm}"] * 2 + [
        f"GET pods/{names.attachment(vm, disk)}",
        f"GET persistentvolumeclaims/{disk}",
    ]


@pytest.mark.parametrize("arguments", [["--config"], ["--help"], ["--config", "a", "b"], ["x"]])
def test_invalid_cpi_command_line_is_reported(arguments: list[str]) -> None:
    assert "usage" in checked(endpoint.answer(b'{"method":"info"}', arguments))["error"]["message"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{", "cannot read the configuration"),
        ("[]", "cannot read the configuration"),
        ('{"namespce": "x"}', "unknown key `namespce` at `$`; the nearest known one is `namespace`"),
        ('{"disks": {"atach": "live"}}', "unknown key `atach` at `$.disks`; the nearest known one is `attach`"),
        ('{"disks": {"attach": "alive"}}', "Invalid enum value 'alive'"),
        ('{"namespace": "Not a name"}', "not a DNS label"),
        ("{}", "names no credentials"),
    ],
)
def test_invalid_cpi_configuration_is_reported(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "cpi.json"
    if text is not None:
        file.write_text(text)
    raw = b'{"method":"has_vm","arguments":["vm-bosh-0"],"context":{}}'

    error = checked(endpoint.answer(raw, ["--config", str(file)]))["error"]

    assert error["type"] == "Bosh::Clouds::CpiError"
    assert words in error["message"]
