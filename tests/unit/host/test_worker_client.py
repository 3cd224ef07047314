"""Counts and reports about workers; ``integration/test_worker_client.py`` runs them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest

from agent_shim.core.errors import ActionError
from agent_shim.core.settings import Blobstore
from agent_shim.host import worker_client
from agent_shim.host.worker_client import BlobRef, CopyTree, Done, Get, Put, Transfers

STORE = Blobstore()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    made = Transfers()
    monkeypatch.setattr(worker_client, "transfers", made)
    return made


@pytest.mark.parametrize(("error", "outcome", "size"), [("", "done", 5), ("no such blob", "failed", 0)])
async def test_blobs_are_counted_by_their_outcome(
    counted: Transfers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str, outcome: str, size: int
) -> None:
    """Bytes are those of blobs that arrived."""
    path = tmp_path / "blob"
    path.write_bytes(b"12345")

    async def run_worker(*_: object, **__: object) -> bytes:
        return msgspec.json.encode(Done(error=error))

    monkeypatch.setattr(worker_client, "run_worker", run_worker)
    for request in (Get("", STORE, BlobRef("id"), str(path)), Put("", STORE, str(path))):
        with pytest.raises(ActionError, match=error) if error else contextlib.nullcontext():
            await worker_client.work(request)

    assert dict(counted.counts) == {("get", outcome): 1, ("put", outcome): 1}
    assert dict(counted.sizes) == {"get": size, "put": size}


@pytest.mark.parametrize(
    ("status", "errors", "told"),
    [
        (137, b"", "was killed by SIGKILL"),
        (129, b"x", "was killed by SIGHUP"),
        (128, b"", "ended with code 128"),
        (1, b"", "ended with code 1"),
        (None, b"", "ended with code None"),
        (
            1,
            b'Traceback\n  File "a.py", line 1, in a\n    x\n  File "b.py", line 2, in b\nKeyError: secret\n',
            'ended with code 1: KeyError in File "b.py", line 2, in b',
        ),
        (1, b"secret", "ended with code 1"),
    ],
)
def test_the_end_of_a_worker_is_told_without_its_texts(status: int | None, errors: bytes, told: str) -> None:
    assert worker_client._end(status, errors) == told


async def test_the_error_of_a_worker_is_that_of_the_work(counted: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that moves no blob is not counted."""

    async def run_worker(*_: object, **__: object) -> bytes:
        return msgspec.json.encode(Done(error="no room"))

    monkeypatch.setattr(worker_client, "run_worker", run_worker)
    with pytest.raises(ActionError, match="^no room$"):
        await worker_client.work(CopyTree("a", "b", [], "c"))

    assert counted.counts == {}
