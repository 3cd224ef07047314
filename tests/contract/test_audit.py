"""Tests the audit log, which records the caller, method, outcome and duration of each request (docs/logs.md)."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from agent_shim.actions import dispatch
from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import ACTIONS, Mode
from tests.support.world import LocalAgent

SECRET = "c4n4ry"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Collect the members of each audit line in order."""
    found: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.members)  # type: ignore[attr-defined]

    caplog.set_level(logging.INFO, logger="agent_shim.audit")
    handler = Keep()
    dispatch.audit.addHandler(handler)
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def no_handlers_left() -> Any:
    yield
    dispatch.audit.handlers.clear()


def without_seconds(line: dict[str, Any]) -> dict[str, Any]:
    assert line["seconds"] >= 0
    return {name: value for name, value in line.items() if name != "seconds"}


async def test_audit_logs_a_request_that_is_answered_immediately(
    world: LocalAgent, lines: list[dict[str, Any]]
) -> None:
    await world.call("ping")

    assert [without_seconds(line) for line in lines] == [
        {"method": "ping", "result": "done", "reply_to": "director.x.y.z"}
    ]


async def test_audit_logs_a_task_when_accepted_and_when_finished(
    world: LocalAgent, lines: list[dict[str, Any]]
) -> None:
    """Both lines contain the task id so that they can be correlated."""
    reply = await world.call("run_errand", "nope")
    task_id = reply["value"]["agent_task_id"]
    await world.run("get_task", task_id)

    asked = {"reply_to": "director.x.y.z"}
    missing = "Could not find errand nope"
    assert [without_seconds(line) for line in lines] == [
        {"method": "run_errand", "result": "accepted", "task": task_id, **asked},
        {"method": "run_errand", "result": "failed", "task": task_id, "error": missing, **asked},
        {"method": "get_task", "result": "failed", "error": f"Task {task_id} result: {missing}", **asked},
    ]


async def test_audit_logs_unknown_methods_and_unreadable_requests(
    world: LocalAgent, lines: list[dict[str, Any]]
) -> None:
    await world.call("x" * 5000)
    await world.dispatcher.handle(b"{")

    assert (lines[0]["method"], lines[0]["result"]) == ("x" * 100, "failed")
    assert len(lines[0]["error"]) <= 300
    assert (lines[1]["method"], lines[1]["result"]) == ("", "dropped")


async def test_audit_duration_excludes_the_time_in_the_queue(
    world: LocalAgent, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(agent: Any, seconds: float) -> None:
        await asyncio.sleep(seconds)

    action = dispatch.RegisteredAction("work", Mode.TASK, work, (("seconds", float),), 1, {"agent": Agent}, 0, False)
    monkeypatch.setitem(ACTIONS, "work", action)
    await world.call("work", 0.3)
    await world.run("work", 0)

    seconds = [line["seconds"] for line in lines if line["method"] == "work"]
    assert [value >= 0.3 for value in seconds] == [False, False, True, False]


async def test_audit_logs_the_reason_for_an_interrupted_task(
    world: LocalAgent, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(agent: Any) -> None:
        raise asyncio.CancelledError

    action = dispatch.RegisteredAction("work", Mode.TASK, work, (), 0, {"agent": Agent}, 0, False)
    monkeypatch.setitem(ACTIONS, "work", action)
    await world.run("work")

    ends = [line for line in lines if line["method"] == "work" and line["result"] != "accepted"]
    assert [(line["result"], line.get("error")) for line in ends] == [("failed", "CancelledError")]


@pytest.mark.attack("a reader finds arguments, values or signed URLs in an audit record or an error")
async def test_audit_contains_no_arguments_results_or_exception_messages(
    world: LocalAgent, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any value in a request, even in a disk hint, may be a secret."""
    caplog.set_level(logging.DEBUG)

    async def broken(agent: Any, secret: str) -> None:
        raise ValueError(secret)

    action = dispatch.RegisteredAction("broken", Mode.NOW, broken, (("secret", str),), 1, {"agent": Agent}, 0, False)
    monkeypatch.setitem(ACTIONS, "broken", action)
    await world.call("broken", SECRET)
    await world.run("add_persistent_disk", "d", {"path": "/dev/null", "password": SECRET})
    await world.run("upload_blob", {"blob_id": "b", "checksum": "0" * 40, "payload": SECRET})
    await world.run("update_settings", {"mbus": {"urls": [SECRET], "cert": {"private_key": SECRET}}})

    assert lines[0]["error"] == "ValueError"
    assert len(lines) > 6
    assert SECRET not in json.dumps(lines) + "\n".join(record.getMessage() for record in caplog.records)
