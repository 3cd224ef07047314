"""Call the CPI as a Director does, in this process or in separate processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kubernetes_cpi import endpoint
from tests.cpi.fake_api import FakeApiServer, FakeCluster, Object
from tests.support.source import ROOT

DIRECTOR = "2e5cdd12-0f5e-4b0e-9a55-6b0f0e2a6d1c"
STEMCELL = "registry.example/agent-shim:1.2@sha256:" + "a" * 64
DYNAMIC = {"default": {"type": "dynamic", "default": ["dns", "gateway"], "cloud_properties": {}}}
ENV = {
    "bosh": {
        "mbus": {"cert": {"ca": "CA-CERT", "certificate": "CLIENT-CERT", "private_key": "PRIVATE-KEY"}},
        "group": "d-dep-zookeeper",
        "groups": ["director", "dep", "zookeeper", "director-dep", "dep-zookeeper", "director-dep-zookeeper"],
        "tags": {},
    }
}


class CpiFailedError(AssertionError):
    """The CPI responded with an error."""

    def __init__(self, error: Object, log: str) -> None:
        super().__init__(f"{error['type']}: {error['message']}")
        self.type = error["type"].removeprefix("Bosh::Clouds::")
        self.message, self.ok_to_retry, self.log = error["message"], error["ok_to_retry"], log


class CpiCalls:
    """Calls a CPI that has its own configuration file. Each request gets a new ``request_id``."""

    def __init__(self, server: FakeApiServer, directory: Path, **config: Any) -> None:
        self.server = server
        self.cluster: FakeCluster = server.cluster
        self.file = directory / "cpi.json"
        self.write(server.config(**config))
        self._requests = 0

    def write(self, config: Object) -> None:
        """Replace the CPI's configuration."""
        self.file.write_text(json.dumps(config))

    def request(self, method: str, arguments: Sequence[Any], *, request_id: str = "") -> bytes:
        """Return a request as the bytes that a Director would write."""
        self._requests += 1
        context = {
            "director_uuid": DIRECTOR,
            "request_id": request_id or f"cpi-{100000 + self._requests}",
            "vm": {"stemcell": {"api_version": 3}},
        }
        return json.dumps({"method": method, "arguments": arguments, "context": context, "api_version": 3}).encode()

    def answer(self, request: bytes) -> Object:
        """Run the CPI in this process and return the response."""
        return checked(endpoint.answer(request, ["--config", str(self.file)]))

    def run(self, request: bytes) -> tuple[Object, str]:
        """Run the CPI in a process with a minimal environment. Return the response and the log."""
        done = start(request, "--config", str(self.file))
        return checked(done.stdout), done.stderr.decode()

    def __call__(self, method: str, *arguments: Any, request_id: str = "") -> Any:
        """Call a method and return its result. Raises ``CpiFailedError`` if the response is an error."""
        response = self.answer(self.request(method, arguments, request_id=request_id))
        if response["error"]:
            raise CpiFailedError(response["error"], response["log"])
        return response["result"]

    def create_vm(self, agent_id: str = "agent-1", disks: Sequence[str] = (), **properties: Any) -> str:
        """Create a VM and return its cid."""
        vm, _ = self("create_vm", agent_id, STEMCELL, properties, DYNAMIC, list(disks), ENV)
        assert isinstance(vm, str)
        return vm

    def attached_disk(self, vm: str) -> str:
        """Create a disk, attach it to a VM and return its cid."""
        disk = self("create_disk", 64, {}, vm)
        self("attach_disk", vm, disk)
        assert isinstance(disk, str)
        return disk

    def refused(self, kind: str, method: str, *arguments: Any, match: str | None = None) -> None:
        """Check that a call fails with an error of type ``kind`` whose message matches ``match``."""
        with pytest.raises(CpiFailedError, match=match) as failed:
            self(method, *arguments)
        assert failed.value.type == kind


def start(request: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run the CPI as a new process with a minimal environment, as a Director does."""
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": "/tmp", "HOME": "/"}
    command = [sys.executable, "-m", "kubernetes_cpi", *arguments]
    return subprocess.run(command, input=request, capture_output=True, env=env, cwd=ROOT)


def checked(raw: bytes) -> Object:
    """Parse a response, check its format as the Director does (external_cpi.rb), and return it."""
    response: Object = json.loads(raw)
    assert set(response) == {"result", "error", "log"}, response
    assert isinstance(response["log"], str)
    if response["error"] is not None:
        assert set(response["error"]) == {"type", "message", "ok_to_retry"}, response
        assert isinstance(response["error"]["type"], str)
        assert isinstance(response["error"]["message"], str)
        assert isinstance(response["error"]["ok_to_retry"], bool)
        assert response["result"] is None
    return response


class Killed(BaseException):
    """Raised to simulate a kill. The CPI does not handle this exception, so it neither cleans up nor responds."""


@contextmanager
def killed_after(count: int) -> Iterator[list[str]]:
    """Simulate a kill of the CPI right after its ``count``-th request has been processed. Watches are not counted.

    Yield the list of counted requests, which grows as they are made.
    """
    made: list[str] = []
    asked = ""
    request, getresponse = HTTPConnection.request, HTTPConnection.getresponse

    def dying_request(self: HTTPConnection, method: str, path: str, *more: Any) -> None:
        nonlocal asked
        if len(made) >= count:
            raise Killed
        asked = f"{method} {path}"
        request(self, method, path, *more)

    def dying_getresponse(self: HTTPConnection) -> HTTPResponse:
        answer = getresponse(self)
        if "watch=1" not in asked:
            made.append(asked)
            if len(made) >= count:
                raise Killed
        return answer

    with (
        mock.patch.object(HTTPConnection, "request", dying_request),
        mock.patch.object(HTTPConnection, "getresponse", dying_getresponse),
    ):
        yield made
