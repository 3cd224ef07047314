"""This agent accepts and rejects the same documents as the Go agent.

The Go agent's verdicts on thousands of mutated documents are recorded in a table.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_shim.actions.dispatch import ACTIONS
from agent_shim.core import settings, wire
from agent_shim.core.errors import BadArgumentsError, SettingsError
from tests.support import verdicts

NEEDED = "cannot use the settings in the file: $.agent_id is "
"""We reject an agent id that is empty or not valid in a NATS subject. The Go agent accepts such an id, but subscribes
to a subject to which no Director publishes.
"""


@pytest.mark.parametrize("name", verdicts.TABLE["settings"])
def test_settings_that_the_go_agent_accepts_are_accepted(name: str) -> None:
    parse = settings.parse if name == "settings" else settings.parse_update
    differing, of_go = [], 0

    for words, document, verdict in verdicts.cases("settings", name):
        of_go += verdict in ("ok", "panic")
        try:
            parse(json.dumps(document).encode(), origin="the file")
        except SettingsError as exc:  # any other exception is our equivalent of a panic, and fails the test
            if verdict in ("ok", "panic") and NEEDED not in str(exc):
                differing.append(f"{words}: {exc}")

    assert differing == []
    assert of_go > 90


@pytest.mark.parametrize("name", verdicts.TABLE["requests"])
def test_requests_are_dropped_rejected_or_accepted_as_in_the_go_agent(name: str) -> None:
    differing = [
        f"{words}: {answer} and not {verdict}"
        for words, document, verdict in verdicts.cases("requests", name)
        if (answer := _answer(json.dumps(document).encode())) != verdict
    ]

    assert differing == []


@pytest.mark.parametrize(("text", "verdict"), verdicts.TABLE["bytes"])
def test_unusual_json_is_accepted_or_dropped_as_in_the_go_agent(text: str, verdict: str) -> None:
    assert _answer(text.encode("latin-1")) == verdict


def test_invalid_utf_8_is_replaced_as_in_the_go_agent() -> None:
    request = wire.decode_request(b'{"method":"get_task","arguments":["a\xe2\x82b","\\ud800\\\\ud800\\ud83d\\ude00"]}')

    assert request.arguments == ["a\ufffd\ufffdb", "\ufffd\\ud800\U0001f600"]


def _answer(raw: bytes) -> Any:
    try:
        request = wire.decode_request(raw)
    except wire.RequestError:
        return "dropped"
    action = ACTIONS.get(request.method)
    if action is None:
        return "unknown"
    try:
        action.bind(request.arguments)
    except BadArgumentsError:
        return "refused"
    return "ok"
