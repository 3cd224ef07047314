"""Tests the message envelope's format and error messages.

Codes such as ``t5`` and ``e11`` in test names are explained in tests/support/protocol_facts.py.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import tracemalloc
import uuid
from pathlib import Path
from typing import Any

import pytest

from agent_shim.actions import dispatch
from agent_shim.actions.agent import Agent
from agent_shim.actions.dispatch import ACTIONS, Mode
from agent_shim.core import wire
from tests.support import jobs, protocol
from tests.support.waiting import until
from tests.support.world import LocalAgent, is_running

UUID = re.compile(r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")


@pytest.mark.attack("a request is malformed, or has a value of the wrong type")
@pytest.mark.parametrize(
    "request_bytes",
    [
        b"{",
        b'{"method":"ping","protocol":"3"}',
        b'{"method":"ping","reply_to":5}',
        b'{"method":"ping","reply_to":"r","arguments":[' + b"[" * 900 + b"]" * 900 + b"]}",
    ],
    ids=["cut", "protocol", "reply_to", "deep"],
)
async def test_t5_undecodable_message_is_dropped_without_stopping_the_agent(
    world: LocalAgent, request_bytes: bytes
) -> None:
    assert await world.dispatcher.handle(request_bytes) is None
    assert await world.call("ping") == {"value": "pong"}


async def test_t5_json_that_go_tolerates_is_answered(world: LocalAgent) -> None:
    deep = b'{"method":"ping","reply_to":"r","ignored":' + b"[" * 300 + b"]" * 300 + b"}"
    for request, told in (
        (deep, b"pong"),
        (b'{"method":"get_task","arguments":["\xff"],"reply_to":"r"}', "Task with id \ufffd could".encode()),
        (b'{"method":"get_task","arguments":["\\udc00"],"reply_to":"r"}', "Task with id \ufffd could".encode()),
    ):
        answer = await world.dispatcher.handle(request)
        assert answer is not None
        assert told in answer[1]


async def test_t6_long_exception_is_truncated_in_the_middle(world: LocalAgent) -> None:
    answer = await world.dispatcher.handle(json.dumps({"method": "get_task", "arguments": ["<é" * 400_000]}).encode())
    assert answer is not None

    assert len(answer[1]) <= wire.MAX_REPLY_BYTES
    message = json.loads(answer[1])["exception"]["message"]
    assert message.startswith("Action Failed get_task: Task with id <é")
    assert wire.TRUNCATED in message
    assert message.endswith("could not be found")


async def test_t6_oversized_value_is_replaced_with_an_exception(world: LocalAgent) -> None:
    """The spec fits into a request, but not into the reply to ``get_state``, which contains additional members."""
    await world.value("apply", {"az": "x" * (wire.MAX_REPLY_BYTES - 300)})

    assert await world.call("get_state") == {"exception": {"message": "Response exceeded maximum allowed length"}}


async def test_t8_concurrent_tasks_get_unique_ids_and_all_finish(world: LocalAgent) -> None:
    replies = await asyncio.gather(*(world.call("run_script", "nothing", {}) for _ in range(10)))

    ids = [reply["value"]["agent_task_id"] for reply in replies]
    assert len(set(ids)) == 10
    assert await world.call("ping") == {"value": "pong"}
    for task_id in ids:
        assert await world.run("get_task", task_id) == {"value": {}}


@pytest.mark.parametrize("method", ["explode", "", "PING", "ping "])
async def test_e1_unknown_method_returns_an_exception(world: LocalAgent, method: str) -> None:
    assert await world.call(method) == {"exception": {"message": f"unknown message {method}"}}


OLD = "release_apply_spec configure_networks prepare_configure_networks prepare_network_change noop associate_disks"


@pytest.mark.parametrize("method", OLD.split())
async def test_a28_obsolete_actions_are_unknown(world: LocalAgent, method: str) -> None:
    assert await world.call(method, {}) == {"exception": {"message": f"unknown message {method}"}}


async def test_e1_missing_method_returns_an_exception(world: LocalAgent) -> None:
    assert await world.raw({}) == {"exception": {"message": "unknown message "}}


async def test_e2_failed_immediate_action_returns_an_exception(world: LocalAgent) -> None:
    reply = await world.call("ssh", "explode", {})

    assert reply == {"exception": {"message": "Action Failed ssh: Unknown command for SSH method"}}


async def test_e3_get_task_returns_an_exception_for_a_failed_task(world: LocalAgent) -> None:
    task_id = (await world.call("run_errand", "nope"))["value"]["agent_task_id"]

    assert await world.run("get_task", task_id) == {
        "exception": {"message": f"Action Failed get_task: Task {task_id} result: Could not find errand nope"}
    }


@pytest.mark.parametrize("method", ["get_task", "cancel_task"])
async def test_e4_unknown_task_returns_an_exception(world: LocalAgent, method: str) -> None:
    assert await world.error(method, "nope") == f"Action Failed {method}: Task with id nope could not be found"


async def test_e5_immediate_action_with_too_few_arguments_returns_an_exception(world: LocalAgent) -> None:
    assert await world.error("get_task") == (
        "Action Failed get_task: Extracting method arguments from payload: Not enough arguments, expected 1, got 0"
    )


async def test_e5_get_task_reports_that_a_task_got_too_few_arguments(world: LocalAgent) -> None:
    reply = await world.call("run_script", "pre-start")

    assert is_running(reply)
    task_id = reply["value"]["agent_task_id"]
    assert await world.error("get_task", task_id) == (
        f"Action Failed get_task: Task {task_id} result: "
        "Extracting method arguments from payload: Not enough arguments, expected 2, got 1"
    )


async def test_e6_surplus_arguments_are_ignored(world: LocalAgent) -> None:
    assert await world.call("ping", 1, {"a": "b"}, None) == {"value": "pong"}


async def test_e7_member_names_are_case_insensitive_and_unknown_members_are_ignored(world: LocalAgent) -> None:
    request = protocol.message("request")
    spellings = [
        request,
        {name.upper(): value for name, value in request.items()} | {"REPLY_TO": "director.4.5.6"},
        request | {"more": [1], "protocol": None, "reply_to": "director.7.8.9"},
    ]

    ids = [(await world.raw(spelled))["value"]["agent_task_id"] for spelled in spellings]
    assert len(set(ids)) == 3
    assert [await world.run("get_task", task_id) for task_id in ids] == [{"value": {}}] * 3


async def test_e7_null_or_missing_argument_list_counts_as_empty(world: LocalAgent) -> None:
    assert await world.raw({"method": "ping", "arguments": None}) == {"value": "pong"}
    assert (
        "Not enough arguments, expected 1, got 0" in (await world.raw({"method": "get_task"}))["exception"]["message"]
    )


async def test_e7_null_argument_is_treated_as_the_zero_value(world: LocalAgent) -> None:
    assert await world.value("get_state", None) == await world.value("get_state")
    assert "Task with id  could not be found" in await world.error("get_task", None)


@pytest.mark.parametrize(
    ("method", "arguments", "named"),
    [
        ("get_task", [5], "Expected `str`, got `int`"),
        ("sync_dns", ["blob", "sha1:x", 5.5], "Expected `int`"),
        ("sync_dns", ["blob", "sha1:x", -1], ">= 0"),
        ("sync_dns", ["blob", "sha1:x", "5"], "Expected `int`"),
        ("delete_arp_entries", [["10.0.0.1"]], "Expected `object`"),
    ],
)
async def test_e8_error_for_an_argument_of_the_wrong_type_says_what_was_expected(
    world: LocalAgent, method: str, arguments: list[Any], named: str
) -> None:
    text = await world.error(method, *arguments)

    assert text.startswith(
        f"Action Failed {method}: Extracting method arguments from payload: Unmarshalling action argument: "
    )
    assert named in text


async def test_e8_arguments_that_are_not_a_list_are_rejected(world: LocalAgent) -> None:
    reply = await world.raw({"method": "get_task", "arguments": "x"})

    assert reply["exception"]["message"].startswith("Action Failed get_task: Extracting json arguments: ")


async def test_e8_non_string_value_in_a_string_map_is_rejected(world: LocalAgent) -> None:
    assert "Expected `str`, got `int`" in await world.error("run_script", "pre-start", {"env": {"A": 1}})


async def test_e9_task_ids_are_lower_case_uuids_and_results_can_be_polled_again(world: LocalAgent) -> None:
    reply = await world.call("run_script", "nothing", {})
    task_id = reply["value"]["agent_task_id"]

    assert set(reply["value"]) == {"agent_task_id", "state"}
    assert UUID.match(task_id)
    assert [await world.run("get_task", task_id) for _ in range(3)] == [{"value": {}}] * 3


async def test_e9_every_poll_of_a_failed_task_returns_its_result(world: LocalAgent) -> None:
    task_id = (await world.call("run_errand", "nope"))["value"]["agent_task_id"]
    first = await world.run("get_task", task_id)

    assert [await world.call("get_task", task_id) for _ in range(11)] == [first] * 11


async def test_e10_only_drains_errands_and_compilations_are_cancellable() -> None:
    cancellable = {name for name, action in ACTIONS.items() if asyncio.Event in action.injected.values()}

    assert cancellable == {"drain", "run_errand", "compile_package", "compile_package_with_signed_url"}


async def test_e10_uncancellable_task_rejects_cancellation_until_it_has_finished(world: LocalAgent) -> None:
    gate = world.paths.base / "gate"
    store = Path(world.agent.settings.current.blobstore.options["blobstore_path"])
    script = f"#!/bin/sh\nwhile [ ! -e {gate} ]; do sleep 0.02; done\n"
    await world.value("apply", jobs.spec(store, {"web": {"monit": "", "bin/wait": script}}))
    running, waiting = [(await world.call("run_script", "wait", {}))["value"]["agent_task_id"] for _ in range(2)]

    for task_id in (running, waiting):
        assert await world.error("cancel_task", task_id) == "Action Failed cancel_task: not supported"
    gate.touch()
    for task_id in (running, waiting):
        assert await world.run("get_task", task_id) == {"value": {}}
        assert await world.call("cancel_task", task_id) == {"value": "canceled"}


async def test_e11_only_update_settings_tasks_are_stored(world: LocalAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for name, action in ACTIONS.items() if action.persistent} == {"update_settings"}
    seen: list[dict[str, Any]] = []
    update = world.agent.settings.save_update

    async def looking(news: Any) -> Any:
        seen.append(json.loads(world.paths.tasks.read_bytes()))
        return await update(news)

    monkeypatch.setattr(world.agent.settings, "save_update", looking)
    reply = await world.call("update_settings", {"trusted_certs": "", "disk_associations": []})
    task_id = reply["value"]["agent_task_id"]

    assert await world.run("get_task", task_id) == {"value": "ok"}
    assert list(seen[0]) == [task_id]
    assert seen[0][task_id]["Method"] == "update_settings"
    assert not world.paths.tasks.exists()


async def test_internal_error_in_an_action_is_reported_and_the_agent_continues(
    world: LocalAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(agent: Any) -> None:
        raise ZeroDivisionError("secret detail")

    action = dispatch.RegisteredAction("broken", Mode.NOW, broken, (), 0, {"agent": Agent}, 0, False)
    monkeypatch.setitem(ACTIONS, "broken", action)

    text = await world.error("broken")
    assert text.startswith("Action Failed broken: internal error in broken: ZeroDivisionError")
    assert "secret detail" not in text
    assert await world.call("ping") == {"value": "pong"}


def test_agent_has_no_action_that_the_go_agent_lacks() -> None:
    """The names are those in the Go agent's agent/action/concrete_factory.go."""
    known = set(
        "ping info get_task cancel_task ssh bundle_logs fetch_logs fetch_logs_with_signed_url update_settings shutdown "
        "remove_file prepare apply start stop drain get_state run_errand run_script compile_package "
        "compile_package_with_signed_url upload_blob list_disk migrate_disk mount_disk unmount_disk "
        "add_persistent_disk remove_persistent_disk add_dynamic_disk remove_dynamic_disk delete_arp_entries sync_dns "
        "sync_dns_with_signed_url".split()
    )

    assert set(ACTIONS) <= known


async def test_action_modes_match_the_go_agent(world: LocalAgent, tmp_path: Path) -> None:
    now = {name for name, action in ACTIONS.items() if action.mode is Mode.NOW or action.task_from_protocol > 3}

    assert now <= set(
        "ping info get_task cancel_task ssh bundle_logs shutdown remove_file start get_state remove_dynamic_disk "
        "delete_arp_entries sync_dns sync_dns_with_signed_url".split()
    )
    assert ACTIONS["list_disk"].task_from_protocol == 3


async def test_finished_task_uses_less_than_two_kilobytes_of_memory(world: LocalAgent) -> None:
    """The agent remembers a thousand finished tasks, so a finished task must not keep its asyncio task alive."""
    request = {"method": "list_disk", "arguments": [], "protocol": 3}
    await world.run("list_disk")
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(100):
            reply = await world.raw(request | {"reply_to": f"director.d.a.{uuid.uuid4()}"})
            while is_running(reply):
                reply = await world.call("get_task", reply["value"]["agent_task_id"])
        gc.collect()
        # Count only the memory that the agent and asyncio use, because other tests' threads may still be running in
        # this process.
        ours = [tracemalloc.Filter(True, f"*/{name}/*") for name in ("agent_shim", "asyncio")]
        largest = tracemalloc.take_snapshot().filter_traces(ours).statistics("lineno")
        assert sum(each.size for each in largest) < 200 * 1000, largest[:5]
    finally:
        tracemalloc.stop()


async def test_changes_made_by_an_action_are_backed_up_before_its_reply(world: LocalAgent) -> None:
    """If the container is stopped right after the reply, the agent in the next container must know about the change."""
    await world.value("add_persistent_disk", "cid", "/dev/sdx")

    copy = world.paths.mirror / "persistent_disk_hints.json"
    assert "cid" in copy.read_text()
    assert copy.read_bytes() == world.paths.disk_hints.read_bytes()


async def test_changes_made_by_an_action_are_backed_up_without_another_request(world: LocalAgent) -> None:
    await world.call("add_persistent_disk", "cid", "/dev/sdx")

    copy = world.paths.mirror / "persistent_disk_hints.json"
    await until(copy.exists)


async def test_stored_task_is_rerun_from_its_request_after_an_agent_restart(world: LocalAgent) -> None:
    request = {"method": "update_settings", "arguments": [{"trusted_certs": ""}], "reply_to": "x", "protocol": 3}
    stored = world.dispatcher.resumed()

    assert stored.keys() == {"update_settings"}
    assert await stored["update_settings"](json.dumps(request).encode())() == "ok"


async def test_persistent_task_is_backed_up_before_its_id_is_reported(world: LocalAgent) -> None:
    blocked = asyncio.Event()
    world.agent.tasks.submit("blocker", blocked.wait)
    reply = await world.call("update_settings", {"trusted_certs": ""})

    assert reply["value"]["agent_task_id"] in (world.paths.mirror / "tasks.json").read_text()
    blocked.set()


async def test_actions_are_counted_by_outcome(world: LocalAgent) -> None:
    seen = []
    dispatcher = dispatch.Dispatcher(world.agent, world.agent.tasks, on_done=lambda *one: seen.append(one))
    for method in ("ping", "get_task"):
        await dispatcher.handle(json.dumps({"method": method, "reply_to": "x"}).encode())

    assert [(method, outcome) for method, outcome, _ in seen] == [("ping", "done"), ("get_task", "failed")]
