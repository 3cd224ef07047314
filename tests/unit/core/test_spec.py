"""The apply spec: its stored parts and their exact form."""

from __future__ import annotations

import msgspec
import pytest

from agent_shim.core import spec
from agent_shim.core.errors import ActionError
from tests.support.specs import FRESH_SPEC


def test_fresh_spec_is_that_of_the_go_agent() -> None:
    assert spec.ApplySpec().members() == FRESH_SPEC


def test_nulls_count_as_absent() -> None:
    nulls = {"job": None, "packages": None, "az": None, "index": None, "networks": None}

    assert spec.parse(nulls).members() == FRESH_SPEC


def test_networks_are_kept_exactly() -> None:
    networks = {
        "default": {
            "type": "manual",
            "ip": "10.0.0.5",
            "prefix": "32",
            "default": ["gateway", "dns"],
            "cloud_properties": {"Name": None, "n": 1, "f": 1.5, "l": [3, 1, 2], "big": 2**60},
            "nic_group": None,
        }
    }
    stored = spec.decode(msgspec.json.encode(spec.parse({"networks": networks}).members()))

    assert stored.networks == networks
    assert list(stored.networks["default"] or {}) == list(networks["default"])


def test_what_nobody_reads_is_dropped() -> None:
    found = spec.parse(
        {
            "dns_domain_name": "bosh",
            "template_hashes": {"a": "b"},
            "job": {"name": "g", "templates": [{"name": "a", "version": "1", "sha1": "x", "logs": []}]},
            "packages": {"p": {"name": "p", "version": "1.1", "sha1": "x", "blobstore_id": "b"}},
        }
    ).members()

    assert set(found) == set(FRESH_SPEC)
    assert found["job"]["templates"] == [{"name": "a", "version": "1"}]
    assert found["packages"]["p"] == {
        "name": "p",
        "version": "1.1",
        "sha1": "x",
        "blobstore_id": "b",
        "signed_url": "",
        "blobstore_headers": None,
    }


def test_jobs_count_only_with_rendered_templates() -> None:
    job = {"templates": [{"name": "a", "version": "1"}, {"name": "b", "version": "2"}]}

    assert spec.parse({"job": job}).job_names == []
    assert spec.parse({"job": job, "rendered_templates_archive": {"sha1": "x", "blobstore_id": "y"}}).job_names == [
        "a",
        "b",
    ]


def test_wrong_type_is_named() -> None:
    with pytest.raises(ActionError, match=r"cannot read the apply spec: .*persistent_disk"):
        spec.parse({"persistent_disk": "10"})


@pytest.mark.parametrize("raw", [b"", b"{", b'{"name": \xff}', b"[]", b'{"index": "x"}'])
def test_a_file_that_is_no_spec_is_one_kind_of_error(raw: bytes) -> None:
    with pytest.raises(ActionError, match=r"^cannot read the apply spec: "):
        spec.decode(raw)


def test_a_stored_package_without_digest_is_read() -> None:
    """A spec without configuration hash may have been stored with one."""
    assert spec.decode(b'{"packages": {"p": {"name": "p", "sha1": ""}}}').packages["p"].sha1 == ""
