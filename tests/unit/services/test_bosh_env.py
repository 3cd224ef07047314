"""Tests that every ``env.bosh`` key that the Go agent reads is either implemented or rejected, and is listed in
docs/configuration.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent_shim.core.paths import Paths
from agent_shim.core.settings import Blobstore, BoshEnv, Cert, parse
from agent_shim.services.bosh_env import KEYS, refused, remove_listed
from tests.support.source import ROOT

OF_THE_GO_AGENT = (
    "agent.settings.tmpfs authorized_keys blobstores ipv6.enable job_dir.tmpfs job_dir.tmpfs_size keep_root_password "
    "mbus.cert mbus.urls ntp parallel password remove_dev_tools remove_static_libraries run_dir.tmpfs_size swap_size"
).split()
"""Members of ``BoshEnv`` (settings/settings.go, August 2026). Members of certificates and blobstores are left out."""


def leaves(of: type, before: str = "") -> Iterator[str]:
    """Return the dotted names of a struct's members, including those of nested structs."""
    for field in msgspec.structs.fields(of):
        kind = field.type
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in (Cert, Blobstore):
            yield from leaves(kind, f"{before}{field.encode_name}.")
        else:
            yield f"{before}{field.encode_name}"


def bosh(**members: object) -> BoshEnv:
    return parse(json.dumps({"agent_id": "a", "env": {"bosh": members}}).encode(), origin="x").env.bosh


def test_every_env_bosh_key_that_the_go_agent_reads_is_handled() -> None:
    assert [key.name for key in KEYS] == OF_THE_GO_AGENT
    assert set(leaves(BoshEnv)) - set(OF_THE_GO_AGENT) == {"run_dir.tmpfs", "agent.settings.settling_time"}
    assert set(OF_THE_GO_AGENT) <= set(leaves(BoshEnv))


def test_documented_table_of_env_bosh_keys_is_generated() -> None:
    text = (ROOT / "docs/configuration.md").read_text()

    rows = [f"| `{key.name}` | {'' if key.is_done else 'not supported, because '}{key.outcome} |" for key in KEYS]
    assert "\n".join(["| key | meaning |", "|---|---|", *rows, ""]) in text


@pytest.mark.parametrize("name", [key.name for key in KEYS if not key.is_done])
def test_unsupported_env_bosh_key_is_rejected_by_name(name: str) -> None:
    given = {"ipv6.enable": bosh(ipv6={"enable": True}), "swap_size": bosh(swap_size=512)}

    assert (refused(given[name]) or "").startswith(f"env.bosh.{name}: ")
    assert refused(bosh(ipv6={"enable": False}, swap_size=0)) is None


async def test_dev_tools_and_static_libraries_are_removed_if_env_bosh_requests_it(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    paths.bosh_etc.mkdir(parents=True)
    compiler, kept, link, library = (tmp_path / name for name in ("cc", "kept", "link", "lib.a"))
    for path in (compiler, kept, library):
        path.touch()
    link.symlink_to(kept)
    names = [compiler, link, tmp_path / "gone", tmp_path / "cc/below", paths.bosh_etc, "", "kept"]
    paths.dev_tools_list.write_text("".join(f"{name}\n" for name in names))

    assert await remove_listed(paths.dev_tools_list, is_wanted=False) == "not requested"
    assert compiler.exists()
    missing = await remove_listed(paths.static_libraries_list, is_wanted=True)
    assert missing == f"the image has no {paths.static_libraries_list}"
    for _ in range(2):
        assert await remove_listed(paths.dev_tools_list, is_wanted=True) is None
    assert (compiler.exists(), link.is_symlink(), kept.exists(), library.exists()) == (False, False, True, True)
