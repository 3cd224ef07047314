"""Tests parsing the apply spec, and which parts of the spec are stored."""

from __future__ import annotations

import pytest

from agent_shim.core import spec
from agent_shim.core.errors import ActionError


def test_spec_without_rendered_templates_has_no_jobs() -> None:
    job = {"templates": [{"name": "a", "version": "1"}, {"name": "b", "version": "2"}]}

    assert spec.parse({"job": job}).job_names == []
    assert spec.parse({"job": job, "rendered_templates_archive": {"sha1": "x", "blobstore_id": "y"}}).job_names == [
        "a",
        "b",
    ]


def test_spec_error_names_a_member_with_the_wrong_type() -> None:
    with pytest.raises(ActionError, match=r"cannot read the apply spec: .*persistent_disk"):
        spec.parse({"persistent_disk": "10"})


@pytest.mark.parametrize("raw", [b"", b"{", b'{"name": \xff}', b"[]", b'{"index": "x"}'])
def test_invalid_spec_file_raises_an_action_error(raw: bytes) -> None:
    with pytest.raises(ActionError, match=r"^cannot read the apply spec: "):
        spec.decode(raw)


def test_stored_package_without_digest_is_read() -> None:
    """An earlier apply of a spec without a configuration hash may have stored a package without a digest."""
    assert spec.decode(b'{"packages": {"p": {"name": "p", "sha1": ""}}}').packages["p"].sha1 == ""
