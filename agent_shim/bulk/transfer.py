"""Transfers blobs over HTTP, with signed URLs and DAV. Only worker processes import this module and thus aiohttp.

Errors name the host and the status, but never a path, a query string, a user or a password, because signed URLs are
secrets. The wording before the host name is the same as the Go agent's (agent/httpblobprovider/http_blob_provider.go).
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from agent_shim.bulk.routes import TransferTiming, proxy_for, trusting
from agent_shim.core import lean_imports
from agent_shim.core.digest import Hasher
from agent_shim.core.errors import BlobError, LastingError
from agent_shim.host.files import CHUNK_BYTES

with lean_imports.without_authorities():  # no default context is needed, because each client creates its own
    import aiohttp
from yarl import URL

MAX_REDIRECTS: Final = 10
RESERVE_BYTES: Final = 64 << 20
"""Free space that downloads leave for other programs. On a small volume, ``RESERVED_PART`` of its size is left instead.
"""
RESERVED_PART: Final = 0.05
SPACE_CHECK_BYTES: Final = 4 << 20
"""Number of bytes that a download receives between two free-space checks."""


class Transfer:
    """One worker's HTTP client, used as a context manager. It trusts the CA in the blobstore settings."""

    def __init__(
        self, ca: str, timing: TransferTiming, scratch: Path, environment: Mapping[str, str] = os.environ
    ) -> None:
        """Store the options. ``ca`` is PEM, or "" for the system's CAs. Temporary files are created in ``scratch``.

        ``environment`` contains the proxies as ``http_proxy`` and related variables.
        """
        self._environment = environment
        self._timing = timing
        self._scratch = scratch
        self._session = aiohttp.ClientSession(
            # Do not reuse connections. If the server had closed an idle one, an upload over it would fail and would not
            # be retried. Do not limit their number either, because a transfer that waited for another one would count
            # as stalled. ``Install.parallel`` already limits it.
            connector=aiohttp.TCPConnector(ssl=trusting(ca), limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timing.connect),
            request_class=_request_class(timing.hesitate),
            auto_decompress=False,  # the digest is that of the body as it is sent
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def download(self, url: str, headers: Mapping[str, str], hasher: Hasher) -> BinaryIO:
        """Download ``url`` into an unnamed open file and feed it to ``hasher``. Raises ``BlobError``."""
        with self._keeping():
            file = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115 - the caller closes it
        try:
            await self._download(url, file, _merged({"Accept-Encoding": "identity"}, headers), hasher)
        except BaseException:
            with suppress(OSError):  # closing flushes the buffer, which may fail too
                file.close()
            raise
        return file

    async def _download(self, url: str, target: BinaryIO, headers: Mapping[str, str], hasher: Hasher) -> None:
        """Download ``url`` to ``target``. Periodically check that enough disk space is free."""
        with _explained("Excuting GET request", url):  # the Go agent's wording, including the typo
            async with (
                _guarded(self._timing) as guard,
                self._request("GET", url, headers, max_redirects=MAX_REDIRECTS) as response,
            ):
                _require_success(response)
                unchecked_bytes = SPACE_CHECK_BYTES  # check before the first write
                async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                    guard.moved(len(chunk))
                    hasher.update(chunk)
                    unchecked_bytes += len(chunk)
                    with self._keeping():
                        if unchecked_bytes >= SPACE_CHECK_BYTES:
                            self._check_room()
                            unchecked_bytes = 0
                        target.write(chunk)
                with self._keeping():
                    target.flush()

    def _check_room(self) -> None:
        """Raise ``OSError`` if the free disk space has fallen below the reserve. A download calls this repeatedly,
        because its length is not known in advance.
        """
        usage = shutil.disk_usage(self._scratch)
        if usage.free < min(RESERVE_BYTES, usage.total * RESERVED_PART):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Convert local disk errors to ``LastingError``, so that the transfer is not retried and the remote host is not
        blamed.
        """
        try:
            yield
        except OSError as exc:
            free = shutil.disk_usage(self._scratch).free if self._scratch.exists() else 0
            why = f"{exc.strerror}, {free // (1 << 20)} MiB are free"
            raise LastingError(f"cannot keep the blob in {self._scratch}: {why}") from exc

    async def upload(self, url: str, source: BinaryIO, headers: Mapping[str, str] = {}) -> None:
        """Send the whole file ``source`` in one attempt. Raises ``BlobError``."""
        size = os.fstat(source.fileno()).st_size
        # Send the length in advance, because many stores do not accept a chunked body.
        wanted = _merged({"Content-Length": str(size), "Expect": "100-continue"}, headers)
        with _explained("Executing PUT request", url):
            async with _guarded(self._timing) as guard:

                async def body() -> AsyncIterator[bytes]:
                    while chunk := source.read(CHUNK_BYTES):
                        yield chunk
                        guard.moved(len(chunk))
                    guard.allow(self._timing.answer)  # the server may need time to store the blob

                # A redirect is an error, because ``body`` cannot be sent a second time.
                async with self._request("PUT", url, wanted, data=body(), allow_redirects=False) as response:
                    _require_success(response)

    @asynccontextmanager
    async def _request(
        self, method: str, url: str, headers: Mapping[str, str], **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        parsed = URL(url, encoded=True)  # not normalized, because the signature covers the exact spelling
        proxy = proxy_for(parsed.scheme, parsed.host or "", parsed.port, self._environment)
        async with self._session.request(method, parsed, headers=headers, proxy=proxy, **options) as response:
            yield response


def _merged(own: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Merge headers, with lower-case names. ``given`` takes precedence."""
    return {name.lower(): value for name, value in [*own.items(), *given.items()]}


def _request_class(hesitate: float) -> type[aiohttp.ClientRequest]:
    class Hesitating(aiohttp.ClientRequest):
        """A request that, as in Go, sends its body after ``hesitate`` seconds even if no "100 Continue" arrives."""

        def update_expect_continue(self, expect: bool = False) -> None:
            super().update_expect_continue(expect)
            if (waiter := self._continue) is not None:
                self.loop.call_later(hesitate, _stop_waiting, waiter)

    return Hesitating


def _stop_waiting(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(True)


class _Guard:
    """Aborts an attempt that stalls. Whenever enough bytes have been transferred, the deadline is postponed."""

    def __init__(self, timer: asyncio.Timeout, timing: TransferTiming) -> None:
        self._timer = timer
        self._timing = timing
        self._moved = 0

    def moved(self, count: int) -> None:
        """Count transferred bytes."""
        self._moved += count
        if self._moved >= self._timing.least:
            self._moved = 0
            self.allow(self._timing.stall)

    def allow(self, seconds: float) -> None:
        """Postpone the attempt's deadline to ``seconds`` from now."""
        self._timer.reschedule(asyncio.get_running_loop().time() + seconds)


@asynccontextmanager
async def _guarded(timing: TransferTiming) -> AsyncIterator[_Guard]:
    """Raise ``TimeoutError`` if the transfer in the block stalls."""
    async with asyncio.timeout(timing.stall) as timer:
        yield _Guard(timer, timing)


# --- errors -----------------------------------------------------------------------------------------------------------


_UNUSABLE: Final = (ValueError, aiohttp.NonHttpUrlClientError)
"""Errors caused by an invalid URL or header."""


@contextmanager
def _explained(what: str, url: str) -> Iterator[None]:
    """Convert every transfer error to a ``BlobError`` that begins with ``what`` and contains no secrets. If the URL
    cannot be used at all, the error is a ``LastingError``, which is not retried.
    """
    try:
        yield
    except TimeoutError as exc:
        raise BlobError(f"{what}: {_host_of(url)}: it stalled") from exc
    except (aiohttp.ClientError, OSError, ValueError) as exc:
        kind = LastingError if isinstance(exc, _UNUSABLE) else BlobError
        raise kind(f"{what}: {_host_of(url)}: {_why(exc)}") from exc


def _require_success(response: aiohttp.ClientResponse) -> None:
    if not 200 <= response.status < 300:
        where = _host(response.url)
        raise BlobError(f"Error executing {response.method}, response was {response.status} from {where}")


def _host_of(url: str) -> str:
    """Return the host and the port in ``url``, for use in an error."""
    try:
        return _host(URL(url, encoded=True))
    except ValueError:
        return "the host"


def _host(url: URL) -> str:
    return f"{url.host}:{url.port}"


def _why(exc: BaseException) -> str:
    """Return the reason for a failure without any part of a URL. For an unknown error, return only its type."""
    match exc:
        case aiohttp.ClientConnectorCertificateError():
            return f"its certificate is not trusted: {getattr(exc.certificate_error, 'verify_message', 'unknown')}"
        case aiohttp.ClientProxyConnectionError():
            return f"its proxy {exc.host}:{exc.port} cannot be reached: {_why(exc.os_error)}"
        case aiohttp.ClientHttpProxyError():
            return f"its proxy answers {exc.status}"
        case aiohttp.ClientConnectorSSLError():
            return f"it does not speak TLS as it should: {getattr(exc.os_error, 'reason', None) or 'unknown'}"
        case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError() | ValueError():
            return "the URL or a header cannot be used"
        case aiohttp.TooManyRedirects():
            return "it redirects again and again"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError(errno=None):
            return "it closed the connection"
        case aiohttp.ClientPayloadError():
            return "the body ended too early"
        case OSError(errno=int(code), strerror=str(text)):
            # Derive the message from the error code, because asyncio's messages contain addresses. Resolver errors,
            # whose codes are negative, keep their message.
            return os.strerror(code) if code > 0 else text
    return type(exc).__name__
