"""Tests drain scripts' arguments and environment, and how errand output is truncated."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent_shim.core.spec import AppliedPackage, ApplySpec, Archive, InstanceGroup, Template
from agent_shim.services import scripts
from agent_shim.services.scripts import drain_arguments, drain_environment


def packages(**digests: str) -> dict[str, AppliedPackage]:
    return {name: AppliedPackage(name=name, sha1=digest) for name, digest in digests.items()}


NOW = ApplySpec(
    job=InstanceGroup(name="web", templates=[Template("web")]),
    configuration_hash="aaa",
    packages=packages(ruby="sha1", nginx="sha1;sha256:x", old="1"),
    persistent_disk=1024,
    rendered_templates_archive=Archive(),
)
FRESH = ApplySpec()


@pytest.mark.parametrize(
    ("current", "new", "expected"),
    [
        (NOW, NOW, ["job_changed", "hash_unchanged"]),
        (NOW, replace(NOW, configuration_hash="bbb"), ["job_changed", "hash_changed"]),
        (NOW, replace(NOW, configuration_hash=""), ["job_changed", "hash_changed"]),
        (FRESH, NOW, ["job_new", "hash_new", "nginx", "old", "ruby"]),
        (FRESH, FRESH, ["job_new", "hash_new"]),
        (
            NOW,
            replace(NOW, packages=packages(zlib="1", ruby="2", old="1")),
            ["job_changed", "hash_unchanged", "ruby", "zlib"],
        ),
        (replace(NOW, job=InstanceGroup()), NOW, ["job_new", "hash_unchanged"]),
    ],
)
def test_drain_arguments_for_an_update_list_changed_packages(
    current: ApplySpec, new: ApplySpec, expected: list[str]
) -> None:
    assert drain_arguments("update", current, new) == expected


@pytest.mark.parametrize("new", [None, replace(NOW, configuration_hash="bbb")])
def test_drain_arguments_for_a_shutdown_list_no_changes(new: ApplySpec | None) -> None:
    """A new spec makes no difference, because a shutdown changes neither jobs nor packages."""
    assert drain_arguments("shutdown", NOW, new) == ["job_shutdown", "hash_unchanged"]


def test_drain_environment_has_the_current_and_next_state_with_disk_sizes() -> None:
    assert drain_environment(NOW, FRESH) == {
        "BOSH_JOB_STATE": '{"persistent_disk":1024}',
        "BOSH_JOB_NEXT_STATE": '{"persistent_disk":0}',
    }
    assert drain_environment(NOW, None) == {"BOSH_JOB_STATE": '{"persistent_disk":1024}'}


def test_long_errand_output_is_truncated_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"begin" + b"x" * 100_000 + b"end")

    text, is_cut = scripts.shown(path, 1000)

    assert is_cut
    assert text.startswith("begin")
    assert text.endswith("end")
    assert f"bytes left out; the whole output is in {path}" in text
    assert 900 <= len(text) <= 1000


@given(st.binary(max_size=3000), st.integers(200, 3000))
def test_truncated_errand_output_fits_the_limit(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, limit: int
) -> None:
    """The limit applies to the output as JSON, where one byte may become six. Output that fits is never truncated."""
    path = tmp_path_factory.getbasetemp() / "o"
    path.write_bytes(content)

    text, is_cut = scripts.shown(path, limit)

    assert len(msgspec.json.encode(text)) <= limit or len(text) < 200
    assert is_cut or text == content.decode(errors="replace")
    assert not is_cut or len(msgspec.json.encode(content.decode(errors="replace"))) > limit
