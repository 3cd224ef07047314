"""Tests blob ids and progress reports."""

from __future__ import annotations

import re

import pytest

from agent_shim.bulk.protocol import Progress, checked_blob_id
from agent_shim.core.errors import BlobError


@pytest.mark.parametrize("blob_id", ["3fa85f64-5717-4562-b3fc-2c963f66afa6", "a", "A_b.c-d", "ü" * 127])
def test_plain_file_names_are_accepted_as_blob_ids(blob_id: str) -> None:
    assert checked_blob_id(blob_id) == blob_id


@pytest.mark.attack("a request passes a path or an option as the name of a blob, a blobstore provider or an agent")
@pytest.mark.parametrize(
    "blob_id", ["", ".", "..", ".a", "a/b", "/a", "a..b", "-a", "a\0", "a\n", "a" * 256, "ü" * 128]
)
def test_paths_and_options_are_rejected_as_blob_ids(blob_id: str) -> None:
    with pytest.raises(BlobError, match=re.escape("it is not a plain name")):
        checked_blob_id(blob_id)


def test_progress_reports_bytes_and_fraction_once_the_total_is_known() -> None:
    counting, copying = Progress("counting"), Progress("copying", 250, 1000)
    assert (str(counting), counting.share) == ("counting", 0.0)
    assert (str(copying), copying.share) == ("copying: 250/1000 bytes", 0.25)
