"""Calls a CPI as the Director does: each operation runs the program twice, with only three environment variables.

The first run calls ``info``, the second the operation itself. The request is one JSON document on stdin, the response
is all of stdout, and the exit code is ignored. Source: src/bosh-director/lib/clouds/external_cpi.rb and
cloud_factory.rb.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH that the Director sets for a CPI (external_cpi.rb)."""
START: Final = "from kubernetes_cpi.__main__ import run; run()"
"""The argument of ``-c`` in tools/cpi_release/jobs/kubernetes_cpi/templates/cpi.erb."""
LIMIT_S: Final = 180.0
"""Time limit for a call in seconds. The Director has no limit."""


class CpiCallError(Exception):
    """An error response. ``kind`` is the error's type without ``Bosh::Clouds::``."""

    def __init__(self, kind: str, message: str, *, ok_to_retry: bool) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind.removeprefix("Bosh::Clouds::")
        self.message = message
        self.ok_to_retry = ok_to_retry


@dataclass(frozen=True)
class Call:
    """A CPI call: its method, its duration in seconds without the preceding ``info`` call, and what it wrote to
    stderr.
    """

    method: str
    seconds: float
    said: str


@dataclass
class Cpi:
    """The CPI program with its configuration. ``home`` is the home directory of the user that runs Director workers."""

    command: Sequence[str]
    home: Path
    director: str = "director-uuid"
    properties: Mapping[str, Any] = field(default_factory=dict)
    """The properties of a cpi-config entry, which the Director puts into the context."""
    calls: list[Call] = field(default_factory=list)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call an operation and return its result. Raises ``CpiCallError`` if the CPI responds with an error."""
        info, _, _ = await self._run("info", [])
        assert _result(info)["api_version"] == 3
        response, seconds, said = await self._run(method, list(arguments))
        self.calls.append(Call(method, seconds, said))
        return _result(response)

    async def _run(self, method: str, arguments: list[Any]) -> tuple[Any, float, str]:
        context = {
            "director_uuid": self.director,
            "request_id": f"cpi-{len(self.calls):06}",
            "vm": {"stemcell": {"api_version": 3}},
            **self.properties,
        }
        request = {"method": method, "arguments": arguments, "context": context, "api_version": 3}
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": PATH, "TMPDIR": str(self.home), "HOME": str(self.home)},
            cwd=self.home,
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                out, err = await process.communicate(json.dumps(request).encode())
        except TimeoutError:
            process.kill()
            raise AssertionError(f"{method} does not end within {LIMIT_S:g} s") from None
        said = err.decode(errors="replace")
        print(f"cpi: {method} {time.monotonic() - began:.2f} s\n{said}", end="")
        return json.loads(out), time.monotonic() - began, said


def of_this_tree(config: Path, home: Path, **members: Any) -> Cpi:
    """Return the CPI in this source tree, started the way the CPI release's job starts it."""
    return Cpi([sys.executable, "-c", START, "--config", str(config)], home, **members)


def _result(response: Any) -> Any:
    """Validate and return a response as the Director does (external_cpi.rb, ``RESPONSE_SCHEMA``)."""
    assert response.keys() == {"result", "error", "log"}, response
    assert isinstance(response["log"], str)
    error = response["error"]
    if error is None:
        return response["result"]
    assert error.keys() == {"type", "message", "ok_to_retry"}, error
    raise CpiCallError(error["type"], error["message"], ok_to_retry=error["ok_to_retry"])
