"""Tests the queue of long actions and the journal that lets tasks survive an agent restart."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_shim.actions.tasks import (
    MAX_HELD,
    MAX_JOURNAL_BYTES,
    TaskLimits,
    Tasks,
)
from agent_shim.core import wire
from agent_shim.core.errors import ActionError, TaskNotFoundError
from agent_shim.host import files


def failure(method: str, exc: BaseException) -> str:
    return f"{method}: {exc}"


@pytest.fixture
async def tasks(tmp_path: Path) -> AsyncIterator[Tasks]:
    lane = Tasks(tmp_path / "tasks.json", hold=0.05)
    running = asyncio.ensure_future(lane.run(failure))
    yield lane
    running.cancel()


async def ended(tasks: Tasks, task_id: str) -> Any:
    async with asyncio.timeout(60):
        await tasks.find(task_id).ended.wait()
    return tasks.find(task_id)


async def test_tasks_run_one_at_a_time_in_arrival_order(tasks: Tasks) -> None:
    seen: list[str] = []

    async def work(name: str) -> str:
        seen.append(f"+{name}")
        await asyncio.sleep(0.001)
        seen.append(f"-{name}")
        return name

    made = [tasks.submit("m", lambda name=name: work(name)) for name in "abc"]  # type: ignore[misc]
    assert tasks.waiting == 3
    assert (await ended(tasks, made[-1].id)).outcome == "c"

    assert seen == ["+a", "-a", "+b", "-b", "+c", "-c"]


async def test_waiting_poll_returns_as_soon_as_the_task_finishes(tmp_path: Path) -> None:
    lane = Tasks(tmp_path / "tasks.json", hold=3600)
    running = asyncio.ensure_future(lane.run(failure))
    release = asyncio.Event()
    task = lane.submit("m", release.wait)
    poll = asyncio.ensure_future(lane.poll(task.id))
    await asyncio.sleep(0)

    release.set()

    async with asyncio.timeout(60):
        assert (await poll).state == "done"
    running.cancel()


async def test_poll_returns_running_after_its_timeout_or_when_polls_are_released(tmp_path: Path) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    short = Tasks(tmp_path / "a", hold=0.01)
    assert (await short.poll(short.submit("m", never).id)).state == "running"

    long = Tasks(tmp_path / "b", hold=3600)
    task = long.submit("m", never)
    poll = asyncio.ensure_future(long.poll(task.id))
    await asyncio.sleep(0)
    long.release_polls()
    async with asyncio.timeout(60):
        assert (await poll).state == "running"
        assert (await long.poll(task.id)).state == "running"


async def test_number_of_held_task_polls_is_limited(tmp_path: Path) -> None:
    """Further polls are answered immediately, because thousands of held polls would use too much memory."""
    lane = Tasks(tmp_path / "tasks.json", hold=3600)
    task = lane.submit("m", asyncio.Event().wait)
    polls = [asyncio.ensure_future(lane.poll(task.id)) for _ in range(MAX_HELD + 20)]
    async with asyncio.timeout(60):
        await asyncio.gather(*polls[MAX_HELD:])
    assert not any(poll.done() for poll in polls[:MAX_HELD])

    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    again = asyncio.ensure_future(lane.poll(task.id))
    await asyncio.sleep(0.01)
    assert not again.done()
    lane.release_polls()
    async with asyncio.timeout(60):
        await again


async def test_task_arguments_are_released_when_the_task_finishes(tasks: Tasks) -> None:
    """The arguments may contain secrets or take up a megabyte."""

    class Arguments:
        async def work(self) -> str:
            return "ok"

    arguments = Arguments()
    gone = weakref.ref(arguments)
    task = tasks.submit("upload_blob", arguments.work)
    del arguments
    await ended(tasks, task.id)
    await asyncio.sleep(0)

    assert gone() is None


async def test_task_whose_result_or_error_cannot_be_encoded_fails(tasks: Tasks) -> None:
    async def odd() -> object:
        return object()

    async def surrogate() -> None:
        raise ActionError("\udcff")

    first, second = tasks.submit("odd", odd), tasks.submit("odd", surrogate)
    await ended(tasks, second.id)

    assert first.state == "failed"
    assert second.outcome == "odd: ?"


async def test_progress_is_recorded_for_the_running_task(tasks: Tasks) -> None:
    tasks.report("nothing runs")
    gate = asyncio.Event()
    task = tasks.submit("compile_package", gate.wait)
    await asyncio.sleep(0)

    tasks.report("halfway")

    assert task.progress == "halfway"
    gate.set()


def is_known(lane: Tasks, task_id: str) -> bool:
    try:
        return lane.find(task_id).id == task_id
    except TaskNotFoundError:
        return False


async def test_finished_tasks_are_limited_in_number_size_and_age(tmp_path: Path) -> None:
    async def work() -> str:
        return "x" * 98

    async def made(bounds: TaskLimits) -> list[str]:
        lane = Tasks(tmp_path / "t", bounds=bounds)
        running = asyncio.ensure_future(lane.run(failure))
        tasks = [lane.submit("m", work) for _ in range(5)]
        async with asyncio.timeout(60):
            await tasks[-1].ended.wait()
        await asyncio.sleep(0)
        running.cancel()
        return [task.id for task in tasks if is_known(lane, task.id)]

    assert len(await made(TaskLimits(number=2))) == 2
    assert len(await made(TaskLimits(age=-1))) == 0
    assert len(await made(TaskLimits(size=350))) == 3
    assert len(await made(TaskLimits(size=10))) == 1
    assert len(await made(TaskLimits())) == 5


async def test_persistent_task_resumes_under_its_id_after_a_restart(tmp_path: Path) -> None:
    journal = tmp_path / "tasks.json"

    async def never() -> None:
        await asyncio.Event().wait()

    old = await Tasks(journal).submit_persistent("update_settings", never, b"the request")
    seen: list[bytes] = []

    def resumed(request: bytes) -> Any:
        async def work() -> str:
            seen.append(request)
            return "ok"

        return work

    lane = Tasks(journal)
    await lane.resume({"update_settings": resumed})
    running = asyncio.ensure_future(lane.run(failure))

    assert ((await ended(lane, old.id)).outcome, seen) == ("ok", [b"the request"])
    assert not journal.exists()
    running.cancel()


@pytest.mark.attack("a request contains certificates or keys that the agent cannot use")
async def test_task_that_repeatedly_kills_its_agent_fails(tmp_path: Path) -> None:
    """A task fails after the agent that accepted it and the next agent have both exited while running it."""
    journal = tmp_path / "tasks.json"
    begun: list[bytes] = []

    def fatal(request: bytes) -> Any:
        async def work() -> None:
            begun.append(request)
            await asyncio.Event().wait()

        return work

    first, second = [
        await lane.submit_persistent("update_settings", fatal(request), request)
        for lane in [Tasks(journal)]
        for request in (b"first", b"second")
    ]
    for number in (1, 2):
        lane = Tasks(journal)
        await lane.resume({"update_settings": fatal})
        running = asyncio.ensure_future(lane.run(failure))
        async with asyncio.timeout(60):
            while len(begun) < number:
                await asyncio.sleep(0)
        if number == 1:
            running.cancel()

    assert begun == [b"first", b"second"]
    assert (await ended(lane, first.id)).outcome.startswith("update_settings: two agents have exited while running it")
    assert lane.find(second.id).state == "running"
    running.cancel()


async def test_failing_task_stays_marked_if_the_agent_exits_before_it_runs(tmp_path: Path) -> None:
    journal = tmp_path / "tasks.json"
    entry = {"TaskID": "a", "Method": "update_settings", "Payload": "", "Begun": "again"}
    journal.write_text(json.dumps({"a": entry}))
    begun: list[bytes] = []

    def fatal(request: bytes) -> Any:
        async def work() -> None:
            begun.append(request)

        return work

    lane = Tasks(journal)
    await lane.resume({"update_settings": fatal})
    await lane.submit_persistent("update_settings", fatal(b"x"), b"x")  # this writes the journal
    lane = Tasks(journal)
    await lane.resume({"update_settings": fatal})
    running = asyncio.ensure_future(lane.run(failure))

    assert (await ended(lane, "a")).state == "failed"
    assert b"" not in begun
    running.cancel()


async def test_task_journal_writes_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a slow write overwrote a later one, the journal might not contain a task id that the Director knows."""
    journal = tmp_path / "tasks.json"
    write, is_slow = files.write_atomic, threading.Event()
    calls = iter(range(100))

    def delayed(*arguments: Any, **options: Any) -> None:
        if next(calls) == 0:
            is_slow.wait(0.3)
        write(*arguments, **options)

    monkeypatch.setattr(files, "write_atomic", delayed)
    lane = Tasks(journal)
    made = await asyncio.gather(
        *(lane.submit_persistent("update_settings", asyncio.Event().wait, b"x") for _ in range(3))
    )

    assert json.loads(journal.read_bytes()).keys() == {task.id for task in made}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"a":{"TaskID":"a"}}', '{"a":{"TaskID":"a","Method":"x","Payload":"!"}}']
)
async def test_unreadable_task_journal_is_treated_as_empty(tmp_path: Path, content: str) -> None:
    journal = tmp_path / "tasks.json"
    journal.write_text(content)
    lane = Tasks(journal)

    await lane.resume({})

    assert lane.waiting == 0


async def test_task_that_cancels_itself_fails_and_the_queue_continues(tasks: Tasks) -> None:
    async def inner() -> None:
        raise asyncio.CancelledError

    async def fine() -> int:
        return 1

    first, second = tasks.submit("m", inner), tasks.submit("m", fine)

    assert (await ended(tasks, first.id)).state == "failed"
    assert (await ended(tasks, second.id)).state == "done"


async def test_stored_task_with_an_unreadable_request_is_dropped(tmp_path: Path) -> None:
    journal = tmp_path / "tasks.json"
    payload = base64.b64encode(b"no request").decode()
    journal.write_text(json.dumps({"a": {"TaskID": "a", "Method": "update_settings", "Payload": payload}}))

    def resumed(request: bytes) -> Any:
        raise wire.RequestError("no request")

    lane = Tasks(journal)
    await lane.resume({"update_settings": resumed})

    assert lane.waiting == 0


async def test_full_task_queue_rejects_requests(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_shim.actions.tasks.MAX_WAITING", 2)
    gate = asyncio.Event()
    tasks.submit("run_errand", gate.wait)
    while tasks.running is None:
        await asyncio.sleep(0)
    for _ in range(2):
        tasks.require_room("prepare")
        tasks.submit("prepare", gate.wait)
    with pytest.raises(ActionError, match="cannot queue prepare: 2 tasks are already queued; try again later"):
        tasks.require_room("prepare")
    with pytest.raises(ActionError, match="cannot queue update_settings: 2 tasks are already queued"):
        await tasks.submit_persistent("update_settings", gate.wait, b"{}")
    last = tasks.submit("start the jobs again", gate.wait)

    gate.set()
    await ended(tasks, last.id)

    tasks.require_room("prepare")


async def test_task_journal_size_is_limited(tasks: Tasks) -> None:
    gate = asyncio.Event()
    request = b" " * (MAX_JOURNAL_BYTES // 4)
    for _ in range(3):
        await tasks.submit_persistent("update_settings", gate.wait, request)

    with pytest.raises(ActionError, match="cannot queue update_settings: 3 stored tasks are already queued"):
        await tasks.submit_persistent("update_settings", gate.wait, request)
