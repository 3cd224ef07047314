"""Replays a real Director's requests against our agent, and compares its replies with those of the Go agent.

Specs and rendered templates are replayed as recorded. Package blobs are not part of the recordings, so they are
generated and the digests are adapted. Certificates are replaced as well.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from agent_shim.demo.director import Director, RpcRemoteError
from agent_shim.demo.release import archive

LEFT_OUT = frozenset({"get_task", "cancel_task"})
"""Methods of recorded requests that are not replayed, because the scripted Director polls tasks itself."""

VOLUMES = Path("/var/vcap/volumes")
"""Directory in which a container sees its disks. In the recordings, the disks were attached below ``/dev``."""

_SERVER = """
import http.server, socket, socketserver, sys

class Server(socketserver.ThreadingTCPServer):
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()

Server(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""

_LIBRARY = """
hello() { echo "hello from libhello"; }
"""

PACKAGES = {
    "hello": archive({"bin/server.py": _SERVER}),
    "libhello": archive({"bin/lib.sh": _LIBRARY}),
}

SOURCES = {
    "hello": archive(
        {
            "packaging": """
set -e
. /var/vcap/packages/libhello/bin/lib.sh
[ "$(ls /var/vcap/packages | tr '\\n' ' ')" = "hello libhello " ]
mkdir ${BOSH_INSTALL_TARGET}/bin
cp server.py ${BOSH_INSTALL_TARGET}/bin/
""",
            "server.py": _SERVER,
        }
    ),
    "libhello": archive(
        {
            "packaging": "set -e; mkdir ${BOSH_INSTALL_TARGET}/bin; cp lib.sh ${BOSH_INSTALL_TARGET}/bin/",
            "lib.sh": _LIBRARY,
        }
    ),
}


@dataclass(frozen=True)
class RecordedRequest:
    """A recorded request. ``reply`` is None if the Director received none."""

    agent_id: str
    method: str
    arguments: list[Any]
    reply: dict[str, Any] | None
    recording: str = ""


def steps(*recordings: Path) -> Iterator[RecordedRequest]:
    """Yield the recorded requests in order. The reply to a request that started a task is the task's result.

    The poll that returned a result may be in the next recording. If no poll returned it, the result of the previous
    task with the same method is used.
    """
    lines = [
        json.loads(line) | {"recording": recording.stem}
        for recording in recordings
        for line in recording.read_text().splitlines()
    ]
    lines.sort(key=itemgetter("t"))
    results: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["method"] == "get_task" and line["reply"] and not _is_running(line["reply"]):
            results[line["arguments"][0]] = line["reply"]
    latest: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["method"] in LEFT_OUT:
            continue
        reply = line["reply"]
        if reply and _is_running(reply):
            reply = results.get(reply["value"]["agent_task_id"]) or latest[line["method"]]
            latest[line["method"]] = reply
        yield RecordedRequest(line["agent"], line["method"], line["arguments"], reply, line["recording"])


def _is_running(reply: dict[str, Any]) -> bool:
    value = reply.get("value")
    return isinstance(value, dict) and value.get("state") == "running" and "agent_task_id" in value


@dataclass
class Replay:
    """Sends recorded requests to an agent. ``blobs`` is the directory of the agent's local blobstore."""

    director: Director
    blobs: Path
    mbus: dict[str, Any] | None = None
    """Replacement for the certificates that were removed from recorded ``update_settings`` requests."""
    final_spec: dict[str, Any] = field(default_factory=dict)

    async def play(self, step: RecordedRequest) -> tuple[list[Any], Any]:
        """Send one recorded request and compare the reply with the recorded one.

        Return the arguments that were sent and the value that was received.
        """
        arguments = self._fit(step)
        if step.reply is None:
            await self.director.send(step.agent_id, step.method, *arguments)
            return arguments, None
        if "exception" in step.reply:
            try:
                await self.director.run(step.agent_id, step.method, *arguments)
            except RpcRemoteError:
                return arguments, None
            raise AssertionError(f"{step.method} should have failed: {step.reply}")
        expected = step.reply["value"]
        if step.method == "get_state":
            return arguments, await self._compare_state(step, arguments, expected)
        value = await self.director.run(step.agent_id, step.method, *arguments)
        assert shape(value) == shape(expected), f"{step.method}: {value!r} is not shaped as {expected!r}"
        if isinstance(expected, str) and step.method != "remove_file":
            assert value == arguments[0]["blob_id"] if step.method == "upload_blob" else value == expected
        if step.method == "list_disk":
            assert value == expected
        if step.method == "run_errand":
            assert value["exit_code"] == expected["exit_code"]
        return arguments, value

    async def _compare_state(
        self, step: RecordedRequest, arguments: list[Any], expected: dict[str, Any]
    ) -> dict[str, Any]:
        """Compare ``get_state`` replies.

        The fields that the Director compares must be equal, and all other fields must have the same JSON types. The
        request is repeated for up to 30 s until ``job_state`` has the recorded value.
        """
        deadline = time.monotonic() + 30
        while True:
            value: dict[str, Any] = await self.director.run(step.agent_id, step.method, *arguments)
            if value["job_state"] == expected["job_state"]:
                break
            assert time.monotonic() < deadline, f"job state {value['job_state']}, recorded {expected['job_state']}"
        for name in ("networks", "job", "deployment", "name", "index", "id", "az", "persistent_disk", "agent_id"):
            assert value[name] == expected[name], f"{name}: {value[name]!r}, recorded {expected[name]!r}"
        assert value["configuration_hash"] == expected["configuration_hash"]
        assert _named_states(value) == _named_states(expected)
        assert shape(_settled(value)) == shape(_settled(expected))
        return value

    def _fit(self, step: RecordedRequest) -> list[Any]:
        """Return the request's arguments, with digests and credentials that are valid here."""
        arguments: list[Any] = json.loads(json.dumps(step.arguments))
        if step.method == "update_settings" and "mbus" in arguments[0]:
            assert self.mbus is not None
            arguments[0]["mbus"] = self.mbus
        if step.method == "add_persistent_disk":
            arguments[1]["path"] = arguments[1]["path"].replace("/dev", str(VOLUMES))
        if step.method in ("prepare", "apply", "drain"):
            spec = arguments[-1]
            self._keep_packages(spec.get("packages", {}))
            if step.method == "apply" and spec.get("configuration_hash"):
                self.final_spec = spec
        if step.method == "compile_package":
            blob_id, _, name, _, dependencies = arguments
            (self.blobs / blob_id).write_bytes(SOURCES[name])
            arguments[1] = "sha256:" + hashlib.sha256(SOURCES[name]).hexdigest()
            self._keep_packages(dependencies)
        if step.method == "sync_dns":
            blob_id, _, version = arguments
            records = json.dumps({"version": version, "records": [["10.245.0.10", "web.rb.bosh"]]}).encode()
            (self.blobs / blob_id).write_bytes(records)
            arguments[1] = "sha256:" + hashlib.sha256(records).hexdigest()
        return arguments

    def _keep_packages(self, packages: dict[str, Any]) -> None:
        """Store the packages that a request refers to in the blobstore, and update their digests in the request."""
        for name, package in packages.items():
            (self.blobs / package["blobstore_id"]).write_bytes(PACKAGES[name])
            package["sha1"] = hashlib.sha1(PACKAGES[name]).hexdigest()


def _named_states(state: dict[str, Any]) -> list[tuple[str, str]]:
    return [(process["name"], process["state"]) for process in state.get("processes", [])]


def _settled(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without the values that depend on the time or the machine: process figures and mounted disks."""
    state = json.loads(json.dumps(state))
    for process in state.get("processes", []):
        process["uptime"], process["mem"] = {}, {"percent": 0.0}
        process["mem"]["percent"] = process["cpu"]["total"] = 0.0
    if "vitals" in state:
        state["vitals"]["disk"] = {"system": state["vitals"]["disk"]["system"]}
        state["vitals"]["uptime"].setdefault("secs", 0)  # Both agents omit the seconds if they are 0.
    return state


def shape(value: Any) -> Any:
    """Return the structure of a value, with JSON types instead of values.

    Integers and fractions are the same type, as in JSON.
    """
    if isinstance(value, dict):
        return {name: shape(member) for name, member in value.items()}
    if isinstance(value, list):
        shapes = [shape(member) for member in value]
        return [one for position, one in enumerate(shapes) if one not in shapes[:position]]
    if isinstance(value, bool) or value is None:
        return type(value).__name__
    return "number" if isinstance(value, int | float) else "string"
