"""Every request leaves a line that says who asked for what, how it ended, how long it took. Docs/logs.md says so."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from agent_shim.actions import dispatch
from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import ACTIONS, Mode
from tests.support.world import World

SECRET = "c4n4ry"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the contents of the lines in their order."""
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


async def test_a_request_that_is_answered_at_once(world: World, lines: list[dict[str, Any]]) -> None:
    await world.call("ping")

    assert [without_seconds(line) for line in lines] == [
        {"method": "ping", "result": "done", "reply_to": "director.x.y.z"}
    ]


async def test_a_task_when_it_is_taken_and_when_it_ends(world: World, lines: list[dict[str, Any]]) -> None:
    """Both with its id, and the poll that asked for it."""
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


async def test_unknown_methods_and_unreadable_requests_are_audited(world: World, lines: list[dict[str, Any]]) -> None:
    """Cut to a bearable length, whatever was sent."""
    await world.call("x" * 5000)
    await world.dispatcher.handle(b"{")

    assert (lines[0]["method"], lines[0]["result"]) == ("x" * 100, "failed")
    assert len(lines[0]["error"]) <= 300
    assert (lines[1]["method"], lines[1]["result"]) == ("", "dropped")


async def test_the_duration_is_the_time_of_the_work(
    world: World, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of waiting for those before it, and not that of handing it out."""

    async def work(agent: Any, seconds: float) -> None:
        await asyncio.sleep(seconds)

    action = dispatch.Action("work", Mode.TASK, work, (("seconds", float),), 1, {"agent": Agent}, 0, False)
    monkeypatch.setitem(ACTIONS, "work", action)
    await world.call("work", 0.3)
    await world.run("work", 0)

    seconds = [line["seconds"] for line in lines if line["method"] == "work"]
    assert [value >= 0.3 for value in seconds] == [False, False, True, False]


async def test_a_task_that_is_cut_short_has_its_reason(
    world: World, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(agent: Any) -> None:
        raise asyncio.CancelledError

    action = dispatch.Action("work", Mode.TASK, work, (), 0, {"agent": Agent}, 0, False)
    monkeypatch.setitem(ACTIONS, "work", action)
    await world.run("work")

    ends = [line for line in lines if line["method"] == "work" and line["result"] != "accepted"]
    assert [(line["result"], line.get("error")) for line in ends] == [("failed", "CancelledError")]


@pytest.mark.attack("a reader finds arguments, values or signed addresses in the audit line or an error")
async def test_no_argument_no_value_and_no_bug_is_reported(
    world: World, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any value may be a secret, also in the hint of a disk: neither the audit line nor the rest of the log has one.

    The log has the place of a bug (``test_traceback_shows_the_code_location_but_no_foreign_text``).
    """
    caplog.set_level(logging.DEBUG)

    async def broken(agent: Any, secret: str) -> None:
        raise ValueError(secret)

    action = dispatch.Action("broken", Mode.NOW, broken, (("secret", str),), 1, {"agent": Agent}, 0, False)
    monkeypatch.setitem(ACTIONS, "broken", action)
    await world.call("broken", SECRET)
    await world.run("add_persistent_disk", "d", {"path": "/dev/null", "password": SECRET})
    await world.run("upload_blob", {"blob_id": "b", "checksum": "0" * 40, "payload": SECRET})
    await world.run("update_settings", {"mbus": {"urls": [SECRET], "cert": {"private_key": SECRET}}})

    assert lines[0]["error"] == "ValueError"
    assert len(lines) > 6
    assert SECRET not in json.dumps(lines) + "\n".join(record.getMessage() for record in caplog.records)
