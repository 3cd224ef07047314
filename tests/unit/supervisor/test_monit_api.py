"""Tests requests from the ``monit`` command. ``integration/test_monit_command.py`` runs the command itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from agent_shim.supervisor import monit_api
from agent_shim.supervisor.process_stats import ProcessInfo, ServiceInfo

ALL = ["Web", "db", "own"]


class RecordingSupervisor:
    """Records requests. A service's state is ``done`` if the request waited for the service, otherwise ``busy``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        for request in ("start", "stop", "restart", "monitor", "unmonitor"):
            setattr(self, f"{request}_one", partial(self._take, request))

    async def _take(self, request: str, name: str) -> None:
        self.calls.append(f"{request} {name}")

    async def saved(self) -> None:
        pass

    def services(self) -> list[ServiceInfo]:
        return [described(name, "busy") for name in ALL]

    async def finished(self, name: str) -> ServiceInfo:
        return described(name, "done")


def described(name: str, state: str) -> ServiceInfo:
    groups = ("own",) if name == "own" else ("vcap",)
    return ServiceInfo(ProcessInfo(name, "running"), "job", "process", groups, state, 0, 0, "", "")


async def send_request(obstacle: str = "", **request: Any) -> tuple[list[str], Any]:
    """Send a request to the API. Return the calls to the supervisor, and the answer: the name and state of each
    service, or an error.
    """
    supervisor: Any = RecordingSupervisor()
    answer = await monit_api.answer(supervisor, request, obstacle=obstacle)
    if "exception" in answer:
        return supervisor.calls, answer["exception"]["message"]
    return supervisor.calls, [f"{each['name']} {each['phase']}" for each in answer["services"]]


@pytest.mark.parametrize(
    ("request_", "calls", "services"),
    [
        ({"action": "show"}, [], ["Web busy", "db busy", "own busy"]),
        ({"action": "quit"}, ["unmonitor Web", "unmonitor db", "unmonitor own"], []),
        ({"action": "stop", "names": ["WEB"]}, ["stop Web"], ["Web busy"]),
        (
            {"action": "stop", "names": ["db", "web", "db"], "wait": True},
            ["stop db", "stop Web"],
            ["db done", "Web done"],
        ),
        ({"action": "restart", "names": ["all"], "group": "OWN"}, ["restart own"], ["own busy"]),
        (
            {"action": "monitor", "names": ["all"]},
            [f"monitor {name}" for name in ALL],
            ["Web busy", "db busy", "own busy"],
        ),
        ({"action": "start", "names": ["db"], "group": "own"}, [], []),
        ({"action": "start", "names": ["none", "db"]}, [], "There is no service by that name"),
        ({"action": "start", "names": "db"}, [], "cannot read the request: names must be a list"),
        ({"action": "boast", "names": ["db"]}, [], "cannot boast: unknown action"),
    ],
)
async def test_monit_api_applies_actions_to_selected_services_and_rejects_invalid_requests(
    request_: dict[str, Any], calls: list[str], services: list[str] | str
) -> None:
    assert await send_request(**request_) == (calls, services)


@pytest.mark.parametrize(
    ("action", "is_refused"),
    [("start", True), ("restart", True), ("monitor", True), ("stop", False), ("unmonitor", False)],
)
async def test_monit_api_rejects_starts_while_an_obstacle_prevents_them(action: str, is_refused: bool) -> None:
    calls, answer = await send_request("the container ends", action=action, names=["db"])

    assert calls == ([] if is_refused else [f"{action} db"])
    assert answer == (f"cannot {action} anything: the container ends" if is_refused else ["db busy"])
