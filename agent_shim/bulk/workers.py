"""The agent's worker processes. Each executes one request at a time, and stays idle for half a minute before it exits.

Bulk work uses a lot of memory and would block the agent's interpreter, so it is done in separate processes, whose
memory is returned when they exit. Workers stay idle for a while, because starting a new one for a small request would
take a tenth of a second.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Self

import msgspec

from agent_shim.bulk.protocol import Done, Get, Install, Pack, Progress, Put, Report, Request, ignore, scratch
from agent_shim.core.errors import ActionError, HostError
from agent_shim.core.paths import Paths
from agent_shim.host import files, process

GRACE_S: Final = 5.0
"""How long a worker may take to remove its temporary files after it has been cancelled."""
STAY_S: Final = 30.0
"""How long an idle worker waits for another request before it exits."""
CHUNK_BYTES: Final = 64 * 1024


class Workers:
    """An agent's workers, used as a context manager. When the block is left, idle workers are terminated."""

    def __init__(self) -> None:
        self._idle: dict[int, _Worker] = {}
        """Idle workers by niceness, at most one per niceness."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._idle:
            await self._idle.popitem()[1].end()

    async def execute(self, request: Request, *, nice: int = 0, report: Report = ignore) -> Done:
        """Execute ``request``. Raises ``ActionError`` with the worker's error.

        ``nice`` is the worker's niceness relative to the agent. ``report`` is called with each progress report. On
        cancellation, the worker and its process group are terminated.
        """
        try:
            worker = self._idle.pop(nice, None)
            if worker is None or not worker.wake():
                worker = _Worker(nice)
            try:
                done = await worker.execute(request, report)
            except BaseException:
                await worker.end()
                await asyncio.to_thread(_tidy, request, worker.process.pid)
                raise
            if nice in self._idle:  # another worker became idle in the meantime
                await worker.end()
            else:
                self._idle[nice] = worker
                worker.rest(lambda: self._idle.pop(nice))
            if done.error:
                raise ActionError(done.error)
        except BaseException:
            _count(request, "failed")
            raise
        _count(request, "failed" if done.put_error else "done")
        return done


async def execute(request: Request, *, nice: int = 0, report: Report = ignore) -> Done:
    """Execute ``request`` as ``Workers.execute`` does, with a worker that exits afterwards."""
    async with Workers() as workers:
        return await workers.execute(request, nice=nice, report=report)


class _Worker:
    """One worker process. The constructor starts it, or raises ``ActionError``."""

    def __init__(self, nice: int) -> None:
        self._exit_timer: asyncio.TimerHandle | None = None
        command = [sys.executable, "-P", "-X", "utf8", "-m", "agent_shim.bulk.worker", str(os.getpid())]
        if nice:
            command = ["/usr/bin/nice", "-n", str(nice), *command]
        with ExitStack() as opened:
            try:
                self._errors = os.memfd_create("errors")
                opened.callback(os.close, self._errors)
                self._socket, worker_end = socket.socketpair()
                opened.enter_context(self._socket)
                with worker_end:
                    fd = worker_end.fileno()
                    self.process = process.spawn(command, env=os.environ, stdin=fd, stdout=fd, stderr=self._errors)
            except HostError as exc:
                raise ActionError(str(exc)) from exc
            except OSError as exc:
                raise ActionError(f"cannot run a worker: {exc.strerror}") from exc
            opened.pop_all()  # keep the descriptors open
        self._socket.setblocking(False)

    async def execute(self, request: Request, report: Report) -> Done:
        """Return the answer to ``request``. Raises ``ActionError`` if the worker dies."""
        loop = asyncio.get_running_loop()
        received = b""
        with suppress(ConnectionError):  # the worker has exited, and its exit status explains more than this error
            await loop.sock_sendall(self._socket, msgspec.json.encode(request) + b"\n")
            while piece := await loop.sock_recv(self._socket, CHUNK_BYTES):
                *lines, received = (received + piece).split(b"\n")
                for line in lines:
                    message = msgspec.json.decode(line, type=Progress | Done)
                    if isinstance(message, Done):
                        return message
                    report(message)
        status = await self.process.wait()
        errors = os.pread(self._errors, os.fstat(self._errors).st_size, 0)
        raise ActionError(f"cannot finish the work: the worker {_ending(status, errors)}")

    def rest(self, on_exit: Callable[[], object]) -> None:
        """Keep the idle worker for ``STAY_S`` seconds. Unless it has been woken by then, call ``on_exit`` and let it
        exit.
        """

        def leave() -> None:
            on_exit()
            self._close()  # the worker then reads end-of-file

        self._exit_timer = asyncio.get_running_loop().call_later(STAY_S, leave)

    def wake(self) -> bool:
        """Prepare the idle worker for another request. Return False if the worker has died in the meantime."""
        assert self._exit_timer is not None
        self._exit_timer.cancel()
        is_alive = self.process.is_alive  # read this only once, because the process may exit at any time
        if not is_alive:
            self._close()
        return is_alive

    async def end(self) -> None:
        """Terminate the worker and its process group, and wait until they are gone."""
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        try:
            await self.process.terminate(GRACE_S)
        finally:
            self._close()

    def _close(self) -> None:
        self._socket.close()
        os.close(self._errors)


def _ending(status: int | None, errors: bytes) -> str:
    """Describe how a worker exited. From a traceback, only the location and the exception type are used, because the
    message may contain a secret.
    """
    if status is not None and status > 128:
        return f"was killed by {signal.Signals(status - 128).name}"
    lines = errors.decode(errors="replace").splitlines() or [""]
    kind = re.match(r"[\w.]+", lines[-1])
    frames = [line.strip() for line in lines if line.startswith('  File "')]
    return f"ended with code {status}" + (f": {kind[0]} in {frames[-1]}" if kind and frames else "")


def _tidy(request: Request, pid: int) -> None:
    """Remove the temporary files that a killed worker has left behind.

    Unfinished bundles are removed by the module that requested them.
    """
    with suppress(HostError):
        if isinstance(request, Get | Pack):
            files.remove_leftovers(Path(request.path))
        if isinstance(request, Get | Install):
            files.remove_leftovers(scratch(Paths(Path(request.base)), pid))


class Transfers:
    """Counters for blob transfers since the process started: the number of transfers by direction and outcome (done,
    failed), and the bytes of the successful ones.

    The directions are get and put for the blobstore, and upload and download for clients over HTTPS.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.sizes: Counter[str] = Counter()

    def add(self, direction: str, outcome: str, size: int = 0) -> None:
        """Count one transfer."""
        self.counts[direction, outcome] += 1
        self.sizes[direction] += size


transfers: Final = Transfers()


def _count(request: Request, outcome: str) -> None:
    """Count the transfer of a single blob, if ``request`` contains one."""
    transfer = request.put if isinstance(request, Pack) else request
    if isinstance(transfer, Get | Put):
        size = 0
        with suppress(OSError):
            size = os.stat(transfer.path).st_size if outcome == "done" else 0  # noqa: PTH116 - the path is a string
        transfers.add("get" if isinstance(transfer, Get) else "put", outcome, size)
