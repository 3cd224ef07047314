"""Tests that user namespaces are detected from the kernel's user id map."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_shim.host import user_namespace


@pytest.mark.parametrize(
    ("uid_map", "expected"),
    [("         0          0 4294967295\n", False), ("0 100000 65536\n", True), ("", True)],
)
def test_identity_mapping_of_all_ids_is_not_a_user_namespace(tmp_path: Path, uid_map: str, expected: bool) -> None:
    (tmp_path / "uid_map").write_text(uid_map)

    assert user_namespace.is_inside(str(tmp_path / "uid_map")) is expected


def test_overflow_user_is_read_from_the_kernel() -> None:
    assert user_namespace.overflow_user() > 0


def test_process_is_in_no_user_namespace_if_the_kernel_does_not_support_them(tmp_path: Path) -> None:
    assert not user_namespace.is_inside(str(tmp_path / "uid_map"))
