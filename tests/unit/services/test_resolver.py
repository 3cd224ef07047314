"""Name servers of the settings in a resolv.conf."""

from __future__ import annotations

import pytest

from agent_shim.services.resolver import FIRST, resolv_conf
from tests.structure.source import ROOT

KUBELET = "search a.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n"


@pytest.mark.parametrize("before", ["", "nameserver 10.88.0.1\n", "# of the machine that built the image\n"])
def test_servers_of_the_settings_take_the_place_of_all_others(before: str) -> None:
    after = resolv_conf(before, ["192.0.2.1", "192.0.2.2"])

    servers = [line for line in after.splitlines() if line.startswith("nameserver")]
    assert servers == ["nameserver 192.0.2.1", "nameserver 192.0.2.2"]


def test_search_domains_and_options_of_the_runtime_stay() -> None:
    after = resolv_conf(KUBELET, ["192.0.2.1"])

    assert after == "nameserver 192.0.2.1\nsearch a.svc.cluster.local svc.cluster.local\noptions ndots:5\n"


def test_a_server_that_bosh_dns_has_put_first_stays_first() -> None:
    after = resolv_conf(f"nameserver 169.254.0.2 {FIRST}\n{KUBELET}", ["192.0.2.1"])

    assert after.splitlines()[:2] == [f"nameserver 169.254.0.2 {FIRST}", "nameserver 192.0.2.1"]


def test_what_names_all_of_them_is_left_as_it_is() -> None:
    """A job may have put a server before them that is not marked."""
    before = "nameserver 169.254.0.2\nnameserver 192.0.2.1 \nsearch x\n"

    assert resolv_conf(before, ["192.0.2.1"]) == before


def test_the_stand_in_for_resolvectl_marks_its_lines_with_the_same_words() -> None:
    stand_in = ROOT / "stemcell_overlay/rootfs/opt/agent_shim/stand-ins/resolvectl"

    assert f"mark='{FIRST}'" in stand_in.read_text()
