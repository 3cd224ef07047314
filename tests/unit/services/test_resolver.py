"""Tests how name servers from the settings are written to resolv.conf."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_shim.host import command
from agent_shim.services import resolver
from agent_shim.services.resolver import FIRST, resolv_conf
from tests.support.source import ROOT

KUBELET = "search a.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n"


@pytest.mark.parametrize("before", ["", "nameserver 10.88.0.1\n", "# of the machine that built the image\n"])
def test_configured_name_servers_replace_existing_ones(before: str) -> None:
    after = resolv_conf(before, ["192.0.2.1", "192.0.2.2"])

    servers = [line for line in after.splitlines() if line.startswith("nameserver")]
    assert servers == ["nameserver 192.0.2.1", "nameserver 192.0.2.2"]


def test_resolv_conf_keeps_search_domains_and_options() -> None:
    after = resolv_conf(KUBELET, ["192.0.2.1"])

    assert after == "nameserver 192.0.2.1\nsearch a.svc.cluster.local svc.cluster.local\noptions ndots:5\n"


def test_bosh_dns_name_server_stays_first() -> None:
    after = resolv_conf(f"nameserver 169.254.0.2 {FIRST}\n{KUBELET}", ["192.0.2.1"])

    assert after.splitlines()[:2] == [f"nameserver 169.254.0.2 {FIRST}", "nameserver 192.0.2.1"]


def test_resolv_conf_that_already_lists_the_configured_name_servers_is_unchanged() -> None:
    """A job may have put its own name server first without adding a marker to the line."""
    before = "nameserver 169.254.0.2\nnameserver 192.0.2.1 \nsearch x\n"

    assert resolv_conf(before, ["192.0.2.1"]) == before


def test_resolvectl_replacement_marks_the_bosh_dns_name_server_like_the_agent() -> None:
    stand_in = ROOT / "stemcell_overlay/rootfs/opt/agent_shim/stand-ins/resolvectl"

    assert f"mark='{FIRST}'" in stand_in.read_text()


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect the resolver's files to an empty directory, and pretend that systemd is not installed."""
    monkeypatch.setattr(resolver, "RESOLV_CONF", tmp_path / "resolv.conf")
    monkeypatch.setattr(resolver, "RESOLVED_DROP_IN", tmp_path / "resolved.conf.d/10-bosh.conf")
    monkeypatch.setattr(resolver, "SYSTEMD", tmp_path / "systemd")
    return tmp_path


async def test_resolver_boot_step_writes_only_valid_addresses_and_only_once(etc: Path) -> None:
    (etc / "resolv.conf").write_text(KUBELET)

    assert await resolver.write_servers(["192.0.2.1", "no address"]) is None
    assert "nameserver 192.0.2.1\n" in (etc / "resolv.conf").read_text()
    assert "no address" not in (etc / "resolv.conf").read_text()
    assert await resolver.write_servers(["192.0.2.1"]) == "they are already configured"
    assert await resolver.write_servers(["no address"]) == "no servers in the settings"


async def test_systemd_resolved_gets_a_drop_in_and_is_restarted_once(
    etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    async def run(*words: str) -> str:
        ran.append(words)
        return ""

    monkeypatch.setattr(command, "run", run)
    (etc / "systemd").mkdir()
    (etc / "resolv.conf").symlink_to("/run/systemd/resolve/stub-resolv.conf")

    assert await resolver.write_servers(["192.0.2.1"]) is None
    assert (etc / "resolved.conf.d/10-bosh.conf").read_text() == "[Resolve]\nDNS=192.0.2.1\n"
    assert await resolver.write_servers(["192.0.2.1"]) == "they are already configured"
    assert ran == [("systemctl", "restart", "systemd-resolved")]
