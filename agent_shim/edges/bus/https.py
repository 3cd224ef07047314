"""The HTTPS server for ``bosh create-env``. It answers requests at ``/agent``, and stores and serves blobs below
``/blobs/``.

Paths, statuses and bodies match the Go agent (``mbus/https_handler.go``, ``mbus/https_dispatcher.go``). Only callers
with the user and password in the bus address are served. All other callers get short answers and short timeouts, and
their connections are the first to be closed to make room for new ones. The server never sends unsolicited messages. All
times are in seconds.

This module imports aiohttp, which an agent on NATS never loads.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import os
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, NoReturn
from urllib.parse import unquote, urlsplit

import msgspec

from agent_shim.bulk.protocol import checked_blob_id
from agent_shim.bulk.workers import transfers
from agent_shim.core import lean_imports
from agent_shim.core.bus_stats import Stats
from agent_shim.core.errors import ActionError, BlobError, BusError
from agent_shim.core.settings import Mbus
from agent_shim.edges import accepting
from agent_shim.edges.bus import Handle, tls
from agent_shim.host import files

with lean_imports.without_authorities():  # no default context is needed, because each server creates its own
    from aiohttp import web

logger = logging.getLogger(__name__)

TEXT: Final = {"Content-Type": "text/plain; charset=utf-8"}


class CallerLimits(msgspec.Struct, frozen=True):
    """Limits for callers. Tests set smaller ones."""

    request: int = 16 * 1024 * 1024
    """Maximum size of a request to ``/agent``."""
    requests: int = 64 * 1024 * 1024
    """Maximum total size of all requests in progress. Further requests get 503."""
    blob: int = 16 * 1024**3
    """Maximum size of a blob."""
    connections: int = 128
    """Maximum number of connections. To make room for a new connection, the agent closes the oldest unauthenticated one
    from the address that has the most of them. If all connections are authenticated, the new one is closed.
    """
    handshake: float = 10.0
    idle: float = 30.0
    """Time after which a connection without a complete request head is closed. This does not affect the CLI, which
    sends a request every second.
    """
    stall: float = 30.0
    """Time without progress in a request or response body before the connection is closed."""
    retry: float = 2.0
    """Interval between attempts to bind the port while it is in use."""
    goodbye: float = 1.0
    """How long sending the last answers may delay the exit."""


class _Caller(NamedTuple):
    """A connection, with its TLS handshake task and its source address."""

    handshake: asyncio.Task[None]
    address: str


class HttpsBus:
    """HTTPS server at the bus address in the settings. ``run`` is its root task.

    ``handle`` answers requests, ``blobs`` is the blob directory, and ``on_connected`` is called each time the port is
    bound.
    """

    def __init__(
        self,
        mbus: Mbus,
        handle: Handle,
        blobs: Path,
        *,
        on_connected: Callable[[], None] = lambda: None,
        bounds: CallerLimits | None = None,
    ) -> None:
        self.stats = Stats()
        self.mbus = mbus
        """The address and certificate in use."""
        self._handle = handle
        self._blobs = blobs
        self._on_connected = on_connected
        self._bounds = bounds or CallerLimits()
        self._web = web.Server(
            self._serve,
            handler_cancellation=True,  # do not wait for clients that have disconnected
            keepalive_timeout=self._bounds.idle,
            auto_decompress=False,  # like Go, do not decompress bodies
            access_log=None,
            logger=logger,
        )
        self._server: asyncio.Server | None = None
        self._changing = asyncio.Lock()
        """Held while the listening socket is opened or replaced, by ``run`` or by ``rotate``."""
        self._callers: dict[web.RequestHandler, _Caller] = {}
        """Connections in order of arrival."""
        self._authenticated: set[web.RequestHandler] = set()
        """Connections on which a request has contained the password. They are not closed to make room for others."""
        self._silent: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        """Connections that have not sent a request yet, with the timers that close them. The timers are needed because
        aiohttp before 3.14.4 keeps such connections forever.
        """
        self._answering: set[asyncio.Task[tuple[str, bytes] | None]] = set()
        self._kept_bytes = 0
        """Total size of the request bodies that are in memory now."""

    @property
    def is_connected(self) -> bool:
        """True while the port is bound."""
        return self._server is not None

    @property
    def port(self) -> int:
        """Port of the server, or 0 while it is not listening."""
        return self._server.sockets[0].getsockname()[1] if self._server is not None else 0

    async def drain(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds until all pending requests have been answered."""
        if self._answering:
            await asyncio.wait(set(self._answering), timeout=timeout_s)

    async def publish(self, subject: str, data: bytes) -> None:
        """Do nothing, because there is no Health Monitor on this bus (``Send`` in mbus/https_handler.go)."""

    async def run(self) -> NoReturn:
        """Serve until cancelled. If the port is in use, keep trying to bind it. On cancellation, keep sending the last
        answers for up to ``goodbye`` seconds.
        """
        try:
            while True:
                async with self._changing:
                    if self._server is None:
                        await self._try_to_listen()
                await asyncio.sleep(self._bounds.retry)
        finally:
            self._stop_listening()
            for caller in self._callers.values():
                caller.handshake.cancel()
            for timer in self._silent.values():
                timer.cancel()
            self._web.pre_shutdown()
            await self._web.shutdown(self._bounds.goodbye)
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)

    async def rotate(self, mbus: Mbus) -> None:
        """Switch to another certificate or address without closing connections. If the certificate or address is
        invalid, raise ``ActionError`` and change nothing.
        """
        async with self._changing:
            before, self.mbus = self.mbus, mbus
            try:
                await self._listen()
            except BusError as exc:
                self.mbus = before
                if self._server is None:  # the old port is already closed, but the new one cannot be bound
                    await self._try_to_listen()
                raise ActionError(f"cannot use the new bus credentials: {exc}") from exc

    # --- the port -----------------------------------------------------------------------------------------------------

    async def _try_to_listen(self) -> None:
        """Start listening. If that fails, log the error, unless it is the same as the last one."""
        try:
            await self._listen()
        except BusError as exc:
            if self.stats.last_error != str(exc):
                logger.error("%s", exc)
            self.stats.last_error = str(exc)

    async def _listen(self) -> None:
        """Listen at the address in the settings, after closing the previous listening socket. Raises ``BusError``."""
        self.stats.attempts += 1
        context = tls.server_context(self.mbus)
        host, port = _host_port(self.mbus)
        self._stop_listening()
        try:
            self._server = await accepting.listen(lambda: _Arrival(partial(self._admit, context)), host, port)
        except OSError as exc:
            raise BusError(f"cannot listen at {host or '*'}:{port}: {exc.strerror or exc}") from exc
        self.stats.connects += 1
        self.stats.last_error = ""
        if not _credentials(self.mbus):
            self.stats.last_error = "cannot authenticate callers: the bus address in the settings has no password"
            logger.error("%s", self.stats.last_error)
        logger.info("listening at %s:%d", host or "*", self.port)
        self._on_connected()

    def _stop_listening(self) -> None:
        """Close the listening socket, if there is one. Existing connections stay open."""
        if self._server is not None:
            self._server.close()
        self._server = None

    def _admit(self, context: ssl.SSLContext, caller: socket.socket) -> None:
        """Start TLS with a caller. If there are already too many connections, first close an unauthenticated one, or
        close the new one if all are authenticated.
        """
        # Forget closed connections, but keep those in the TLS handshake, which aiohttp does not list yet.
        connections = self._web.connections
        self._authenticated.intersection_update(connections)
        callers = self._callers.items()
        self._callers = {key: known for key, known in callers if not known.handshake.done() or key in connections}
        if len(self._callers) >= self._bounds.connections:
            callers = self._callers.items()
            unauthenticated = ((key, known.address) for key, known in callers if key not in self._authenticated)
            to_close = accepting.connection_to_close(unauthenticated)
            if to_close is None:
                caller.close()
                return
            self._callers.pop(to_close).handshake.cancel()
            if to_close.transport is not None:
                to_close.transport.abort()
        handler = self._web()
        handshake = asyncio.create_task(self._do_handshake(context, caller, handler), name="TLS handshake")
        # If the task is cancelled before its first step, its own clean-up does not run, so close the socket here.
        handshake.add_done_callback(lambda ended: caller.close() if ended.cancelled() else None)
        self._callers[handler] = _Caller(handshake, accepting.address_of(caller))
        timer = asyncio.get_running_loop().call_later(self._bounds.idle, self._close_silent, handler, handshake)
        self._silent[handler] = timer

    async def _do_handshake(self, context: ssl.SSLContext, caller: socket.socket, handler: web.RequestHandler) -> None:
        """Do the TLS handshake with a caller, then let ``handler`` read requests."""
        try:
            accept = partial(asyncio.get_running_loop().connect_accepted_socket, lambda: handler, caller, ssl=context)
            bounds = self._bounds
            await accept(ssl_handshake_timeout=bounds.handshake, ssl_shutdown_timeout=bounds.goodbye)
        except OSError as exc:
            logger.debug("TLS handshake failed: %s", exc)

    def _close_silent(self, handler: web.RequestHandler, handshake: asyncio.Task[None]) -> None:
        """Close a connection that has not sent a request in time."""
        del self._silent[handler]
        handshake.cancel()
        if handler.transport is not None:
            handler.transport.abort()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle one request and write the whole response. If the client does not read it in time, close the
        connection.
        """
        if timer := self._silent.pop(request.protocol, None):
            timer.cancel()
        try:
            response = await self._answer(request)
            async with asyncio.timeout(self._bounds.stall):
                await response.prepare(request)
                await response.write_eof()
            return response
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client does not read its answer") from None

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the response to a request, with the same statuses and bodies as the Go agent."""
        path = request.path
        if path == "/blobs":  # Go's http.ServeMux redirects this path
            return web.Response(status=307, headers={"Location": "/blobs/"})
        if path != "/agent" and not path.startswith("/blobs/"):
            return web.Response(status=404, body=b"404 page not found\n", headers=TEXT)
        if not self._is_authorized(request):
            self.stats.denied += 1
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm=""'})
        match request.method, path == "/agent":
            case "POST", True:
                return await self._ask(request)
            case "PUT", False:
                return await self._receive_blob(request, path.rpartition("/")[2])
            case "GET", False:
                return await self._send_blob(request, path.rpartition("/")[2])
        return web.Response(status=404)

    def _is_authorized(self, request: web.BaseRequest) -> bool:
        """Return True if the request contains the password, and mark its connection as authenticated. The comparison
        takes constant time, so its duration reveals nothing about the password.
        """
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        expected = _credentials(self.mbus)
        if not expected or not hmac.compare_digest(given, expected):
            return False
        self._authenticated.add(request.protocol)
        return True

    async def _ask(self, request: web.BaseRequest) -> web.Response:
        """Handle a request to ``/agent``. Answer with status 503 if the requests in progress already take up too much
        memory.
        """
        chunks, size = list[bytes](), 0
        try:
            async for chunk in self._body(request, self._bounds.request):
                if self._kept_bytes + len(chunk) > self._bounds.requests:
                    self.stats.flooded += 1
                    return web.Response(status=503, headers={"Connection": "close"})
                self._kept_bytes += len(chunk)
                chunks.append(chunk)
                size += len(chunk)
            body = b"".join(chunks)
            chunks.clear()  # free the memory, because the action may take a long time
            self.stats.received += 1
            self.stats.received_bytes += len(body)
            answering = asyncio.ensure_future(self._handle(body))
            self._answering.add(answering)
            answering.add_done_callback(self._answering.discard)
            answer = await asyncio.shield(answering)  # the action continues even if the caller disconnects
            if answer is None:
                self.stats.rejected += 1
                return web.Response(status=500)
            self.stats.sent += 1
            self.stats.sent_bytes += len(answer[1])  # answer[0] is the reply subject, which is used only on NATS
            return web.Response(body=answer[1], headers=TEXT)
        except _TooLargeError:
            return web.Response(status=413)
        except (web.RequestPayloadError, TimeoutError):
            return web.Response(status=400)
        finally:
            self._kept_bytes -= size

    async def _receive_blob(self, request: web.BaseRequest, blob_id: str) -> web.Response:
        """Store an uploaded blob. If the upload fails, nothing is stored."""
        size, outcome = 0, "failed"
        try:
            path = self._blobs / checked_blob_id(blob_id)
            size = await self._write_blob(path, self._body(request, self._bounds.blob))
            outcome = "done"
        except _TooLargeError:
            return web.Response(status=413)
        except (BlobError, OSError, web.RequestPayloadError, TimeoutError) as exc:
            why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
            text = f"cannot store the blob: {why or 'timeout'}"
            logger.warning("%s", text)
            return web.Response(status=500, body=text.encode(errors="replace"), headers=TEXT)
        finally:
            transfers.add("upload", outcome, size)
        logger.info("stored blob %s", blob_id)
        return web.Response(status=201)

    async def _write_blob(self, path: Path, body: AsyncIterator[bytes]) -> int:
        """Write the whole ``body`` and return its size."""
        size = 0
        with ExitStack() as stack:
            file = stack.enter_context(files.replacing(path, mode=0o640))
            async for chunk in body:
                size += await asyncio.to_thread(file.write, chunk)
            await asyncio.to_thread(stack.pop_all().close)  # closing the file syncs and renames it
        return size

    async def _send_blob(self, request: web.BaseRequest, blob_id: str) -> web.StreamResponse:
        """Send a blob to the caller."""
        try:
            file = await asyncio.to_thread(_open, self._blobs / checked_blob_id(blob_id))
        except FileNotFoundError:
            return web.Response(status=404)
        except (BlobError, OSError) as exc:
            logger.warning("cannot send a blob: %s", exc)
            return web.Response(status=500)
        size, sent = os.fstat(file.fileno()).st_size, 0
        try:
            with file:
                response = web.StreamResponse()
                response.content_type = "application/octet-stream"
                response.content_length = size
                await response.prepare(request)
                # Count each chunk before writing it, and stop at ``size`` without reading on to the end of the file. A
                # client that has received everything may disconnect before the last write returns.
                while sent < size and (chunk := await asyncio.to_thread(file.read, files.CHUNK_BYTES)):
                    sent += len(chunk)
                    async with asyncio.timeout(self._bounds.stall):
                        await response.write(chunk)
        finally:
            is_complete = sent == size
            transfers.add("download", "done" if is_complete else "failed", size if is_complete else 0)
        return response

    async def _body(self, request: web.BaseRequest, most: int) -> AsyncIterator[bytes]:
        """Yield the body in chunks. Raises ``TimeoutError`` if no data arrives in time, and ``_TooLargeError`` if the
        body has more than ``most`` bytes.
        """
        if (request.content_length or 0) > most:
            raise _TooLargeError
        # Unlike an aiohttp application, a ``web.Server`` does not handle the Expect header. As aiohttp does, reset the
        # size, so that the interim response does not count as the beginning of the response.
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        while True:
            async with asyncio.timeout(self._bounds.stall):
                chunk = await request.content.readany()
            if not chunk:
                return
            most -= len(chunk)
            if most < 0:
                raise _TooLargeError
            yield chunk


class _Arrival(asyncio.Protocol):
    """Passes each accepted socket on before anything is read from it.

    This way, connections count against the limit from the start of their TLS handshake. An asyncio server with TLS
    would report a connection only after its handshake.
    """

    def __init__(self, hand_over: Callable[[socket.socket], None]) -> None:
        self._hand_over = hand_over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hand over a duplicate of the socket and abort asyncio's transport. The duplicate keeps the connection
        open.
        """
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        duplicate = transport.get_extra_info("socket").dup()
        transport.abort()
        self._hand_over(duplicate)


class _TooLargeError(Exception):
    """A body exceeds the maximum size."""


def _host_port(mbus: Mbus) -> tuple[str | None, int]:
    """Return the host (None for all) and the port of the address. Raises ``BusError``."""
    try:
        address = urlsplit(mbus.urls[0])
        return address.hostname, 443 if address.port is None else address.port
    except ValueError:
        # Leave out the cause, because its message may contain part of the password.
        raise BusError("cannot listen for the bosh CLI: the bus address has no valid host or port") from None


def _credentials(mbus: Mbus) -> bytes:
    """Return the Authorization header that callers must send, or an empty value if there is no password."""
    user, _, password = urlsplit(mbus.urls[0]).netloc.rpartition("@")[0].partition(":")
    if not password:
        return b""
    return b"Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode())


def _open(path: Path) -> BinaryIO:
    """Open a blob. Raises ``OSError`` for links and other non-regular files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")
