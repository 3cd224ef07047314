"""How an end is described and recorded; the rest of presence is in test_supervisor."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent_shim.host import proc
from agent_shim.supervisor import posix_regex
from agent_shim.supervisor.ownership import Tie
from agent_shim.supervisor.plan import ProcessSpec
from agent_shim.supervisor.process_finder import KINDS, ProcessFinder, Timing, describe, kind_of
from agent_shim.supervisor.process_record import ProcessRecord


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "exit 0"), (1, "exit 1"), (128, "exit 128"), (137, "SIGKILL"), (255, "exit 255"), (None, "unknown")],
)
def test_how_it_ended(status: int | None, text: str) -> None:
    """For people."""
    assert describe(status) == text


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("exit 0", "success"),
        ("exit 1", "error"),
        ("SIGKILL", "signal"),
        ("unknown", "unknown"),
        ("/a is missing", "error"),
    ],
)
def test_kinds_of_ends_are_few(how: str, kind: str) -> None:
    """They are labels of a metric."""
    assert kind_of(how) == kind
    assert kind in KINDS


@pytest.mark.parametrize(("is_alive", "ended"), [(True, set()), (False, {77})])
async def test_the_end_of_the_start_program_is_recorded(tmp_path: Path, is_alive: bool, ended: set[int]) -> None:
    """Descendants in its session stay the service's, and the number is never taken for a new session."""
    finder = ProcessFinder(cast("Any", None), Timing(), lambda: None)
    finder.program = cast("Any", SimpleNamespace(is_alive=is_alive, identity=(77, 5), pid=77, seen_ticks=9))
    recorded: list[tuple[Any, ...]] = []
    traces = cast("Any", SimpleNamespace(ended=lambda *told: recorded.append(told)))

    assert not await finder.look(ProcessSpec(name="web", job="web", pidfile=tmp_path / "pid"), traces)

    assert recorded == ([((77, 5), 77, 9)] if ended else [])


@pytest.mark.parametrize("leads", [True, False])
async def test_only_a_process_with_the_services_session_widens_the_record(
    monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    """Otherwise the session of an operator's shell would be ended with the job."""
    own = proc.stat(os.getpid())
    assert own is not None
    finder = ProcessFinder(cast("Any", SimpleNamespace(leads_session=lambda *_: leads)), Timing(), lambda: None)

    async def found(*_: object) -> tuple[proc.Stat, Tie]:
        return own, Tie.OWNED

    monkeypatch.setattr(finder, "_find", found)
    monkeypatch.setattr(finder, "_take_up", lambda _: True)
    traces = ProcessRecord()

    assert await finder.look(ProcessSpec(name="web", job="web", pattern=posix_regex.compiled("x")), traces)

    assert traces.numbers() == ({own.session} - {0} if leads else set())
