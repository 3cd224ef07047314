"""Fetches and stores blobs. Decides which sources are tried, in which order, and how often.

The order of the sources, the number of attempts and the error messages are those of the Go agent
(agent/httpblobprovider/blobstore_delegator/blobstore_delegator.go,
agent/blobstore/cascading_blobstore.go, bosh-utils blobstore/retryable_blobstore.go).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Self, TypeVar

from agent_shim.bulk.protocol import BlobRef, checked_blob_id
from agent_shim.bulk.providers import environment, opened, provider, trusted_ca
from agent_shim.bulk.routes import TransferTiming
from agent_shim.core.digest import Hasher, MultipleDigest
from agent_shim.core.errors import BlobError, DigestError, LastingError, ShimError
from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore

if TYPE_CHECKING:
    from agent_shim.bulk.transfer import Transfer

T = TypeVar("T")

TRIES: Final = 3


class Blobs:
    """Fetches and stores one agent's blobs. As a context manager, it closes the HTTP client if one was used."""

    def __init__(self, store: Blobstore, paths: Paths, timing: TransferTiming = TransferTiming()) -> None:  # noqa: B008 - the struct is frozen
        self._store = store
        self._paths = paths
        self._timing = timing
        self._client: Transfer | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.__aexit__()

    @asynccontextmanager
    async def fetched(self, ref: BlobRef) -> AsyncIterator[BinaryIO]:
        """Yield the blob as an open file with a verified digest. Raises ``BlobError`` or ``DigestError``.

        The file either has no name or is itself a file in a local blob directory, so no temporary file remains, however
        the process ends.
        """
        digest = MultipleDigest.parse(ref.digest)
        with await self._fetch(ref, digest) as file:
            yield file

    async def put(self, path: Path, signed_url: str, headers: Mapping[str, str]) -> str:
        """Store a file as a new blob and return the blob's id. If a signed URL is given, upload the file there and
        return "", because only the sender of the URL knows the id. As in the Go agent, that upload is not retried.
        """
        if signed_url:
            with path.open("rb") as source:
                await self._transfer().upload(signed_url, source, headers)
            return ""
        blob_id = str(uuid.uuid4())
        store = provider(self._store, self._paths, self._transfer)
        await _with_retries("Creating blob in inner blobstore", lambda: store.put(blob_id, path))
        return blob_id

    async def _fetch(self, ref: BlobRef, digest: MultipleDigest) -> BinaryIO:
        """Get the blob from its signed URL if there is one. Otherwise, use the first of the local blob directories that
        contains the blob, or else the blobstore. As in the Go agent, only the attempts with a signed URL have pauses
        between them.
        """
        if ref.signed_url:
            checking = "Checking downloaded blob digest"
            return await _with_retries(
                "Failed to download blob",
                lambda: _checked(partial(self._transfer().download, ref.signed_url, ref.headers), digest, checking),
                self._timing.pause,
            )
        if not ref.blob_id:
            raise BlobError("Both signedURL and blobID are blank which is invalid")
        blob_id = checked_blob_id(ref.blob_id)
        for directory in (self._paths.sensitive_blobs, self._paths.blobs):
            if (directory / blob_id).is_file():
                return await _checked(partial(opened, directory / blob_id), digest, f"Checking blob '{blob_id}'")
        store = provider(self._store, self._paths, self._transfer)
        get, checking = partial(store.get, blob_id), f"Checking downloaded blob '{blob_id}'"
        return await _with_retries("Getting blob from inner blobstore", lambda: _checked(get, digest, checking))

    def _transfer(self) -> Transfer:
        """Return the HTTP client, which is created by the first call."""
        if self._client is None:
            # Not every request needs this module, and importing it takes a tenth of a second.
            from agent_shim.bulk.transfer import Transfer

            self._client = Transfer(trusted_ca(self._store), self._timing, self._paths.tmp, environment(self._store))
        return self._client


async def _checked(get: Callable[[Hasher], Awaitable[BinaryIO]], digest: MultipleDigest, what: str) -> BinaryIO:
    """Return the file that ``get`` fetches, positioned at its start. If the digest is wrong, raise a ``BlobError`` that
    begins with ``what``.
    """
    file = None
    try:
        hasher = digest.hasher()
        file = await get(hasher)
        digest.check(hasher)
        file.seek(0)
    except BaseException as exc:
        if file is not None:
            file.close()
        if isinstance(exc, DigestError):
            raise BlobError(f"{what}: {exc}") from exc
        raise
    return file


async def _with_retries(what: str, attempt: Callable[[], Awaitable[T]], pause: float = 0) -> T:
    """Call ``attempt`` up to ``TRIES`` times, waiting ``pause`` seconds after each failure. Return the first result, or
    raise a ``BlobError`` that begins with ``what`` and contains the last error. A ``LastingError`` is not retried.
    """
    for left in reversed(range(TRIES)):
        try:
            return await attempt()
        except (ShimError, OSError) as exc:
            if not left or isinstance(exc, LastingError):
                raise BlobError(f"{what}: {exc}") from exc
            await asyncio.sleep(pause)
    raise AssertionError("the last attempt returns or raises")
