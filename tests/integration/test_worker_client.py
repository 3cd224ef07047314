"""Refusals of the client half of the worker, and its errors for a worker that cannot run."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from agent_shim.core.errors import ActionError, BlobError
from agent_shim.host import worker_client


@pytest.mark.parametrize("blob_id", ["3fa85f64-5717-4562-b3fc-2c963f66afa6", "a", "A_b.c-d", "ü" * 127])
def test_a_plain_name_is_a_blob_id(blob_id: str) -> None:
    """The Director may give blobs any id."""
    assert worker_client.checked_blob_id(blob_id) == blob_id


@pytest.mark.parametrize(
    "blob_id", ["", ".", "..", ".a", "a/b", "/a", "a..b", "-a", "a\0", "a\n", "a" * 256, "ü" * 128]
)
def test_anything_that_could_be_more_is_refused(blob_id: str) -> None:
    """A path, an option, a hidden file."""
    with pytest.raises(BlobError, match=re.escape("it is not a plain name")):
        worker_client.checked_blob_id(blob_id)


async def test_a_worker_that_cannot_be_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a failed action, which the Director understands."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ActionError, match="^cannot run /nowhere/python: No such file or directory$"):
        await worker_client.run_worker(b"{}")


async def test_a_worker_that_is_given_up_may_leave_something(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is killed if it does not end, and the caller removes its files."""
    stubborn, tidied = tmp_path / "python", list[int]()
    stubborn.write_text("#!/bin/sh\nexec sleep 600\n")
    stubborn.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stubborn))
    working = asyncio.create_task(worker_client.run_worker(b"{}", tidy=tidied.append))
    await asyncio.sleep(0)

    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert len(tidied) == 1


def test_a_worker_whose_parent_is_gone_ends() -> None:
    """It was killed before it could be watched."""
    with pytest.raises(SystemExit) as caught:
        worker_client.become_worker(1)

    assert caught.value.code == 143
