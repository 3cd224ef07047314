"""Tests the PodDisruptionBudgets for instance groups."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cpi.calls import DYNAMIC, ENV, STEMCELL, CpiCalls, CpiFailedError
from tests.cpi.fake_api import FakeApiServer, FakeCluster, waiting


def available(cluster: FakeCluster) -> list[int]:
    """Return the `minAvailable` of each budget, that is, how many VMs must stay available."""
    return [one["spec"]["minAvailable"] for one in cluster.of("poddisruptionbudgets").values()]


def test_disruption_budget_follows_the_group_size(cpi: CpiCalls, cluster: FakeCluster) -> None:
    vms = [cpi.create_vm("agent-1")]
    assert available(cluster) == [], "a single VM may be evicted"
    vms.append(cpi.create_vm("agent-2"))
    assert available(cluster) == [1]
    vms.append(cpi.create_vm("agent-3"))
    assert available(cluster) == [2]
    (budget,) = cluster.of("poddisruptionbudgets").values()
    labels = cluster.of("pods")[vms[0]]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()

    cpi("delete_vm", vms[0])
    assert available(cluster) == [1]
    cpi("delete_vm", vms[1])
    cpi("delete_vm", vms[2])
    assert cluster.snapshot() == {}


@pytest.mark.parametrize("is_object_there", [True, False])
def test_disruption_budget_is_unchanged_after_an_eviction(
    cpi: CpiCalls, cluster: FakeCluster, is_object_there: bool
) -> None:
    """If the budget shrank, the next node could be drained before the Health Monitor has recreated the evicted VM."""
    lost, *_ = (cpi.create_vm(agent) for agent in ("agent-1", "agent-2", "agent-3"))
    if is_object_there:
        cluster.patch(("pods", "bosh", lost), {"status": {"phase": "Failed", "reason": "Evicted"}})
    else:
        cluster.delete(("pods", "bosh", lost), {"gracePeriodSeconds": 0})

    cpi("delete_vm", lost)
    assert available(cluster) == [2]
    cpi.create_vm("agent-4")
    assert available(cluster) == [2]


def test_each_group_has_its_own_disruption_budget_unless_disabled(cpi: CpiCalls, cluster: FakeCluster) -> None:
    def make(agents: range, group: str, **properties: Any) -> None:
        env = {"bosh": {**ENV["bosh"], "groups": ["director", "dep", group]}}
        for number in agents:
            cpi("create_vm", f"agent-{number}", STEMCELL, properties, DYNAMIC, [], env)

    make(range(2), "zookeeper")
    make(range(2, 5), "other")
    make(range(5, 7), "evictable", disruption_budget=False)

    assert sorted(available(cluster)) == [1, 2]


@pytest.mark.parametrize("status", [403, 404])
def test_disruption_budget_is_skipped_if_unsupported_or_forbidden(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    """Kubernetes before 1.21 does not have the ``policy/v1`` API, and the Roles of earlier CPI versions do not allow
    access to it.
    """
    server.fail("GET poddisruptionbudgets", times=99, status=status, message="no budgets")
    if status == 404:
        server.fail("POST poddisruptionbudgets", times=99, status=status, message="no budgets")

    first = cpi.create_vm("agent-1")
    cpi("delete_vm", cpi.create_vm("agent-2"))

    assert "no PodDisruptionBudget: " in capsys.readouterr().err
    assert list(cluster.of("pods")) == [first]


def test_disruption_budget_is_recalculated_if_a_vm_is_created_concurrently(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    for agent in ("agent-1", "agent-2"):
        cpi.create_vm(agent)
    server.fail("PATCH poddisruptionbudgets", on=lambda: cpi.create_vm("agent-4"))

    cpi.create_vm("agent-3")

    assert available(cluster) == [3]


def test_disruption_budget_of_a_single_vm_is_deleted_even_if_it_changes_concurrently(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    vm, _ = (cpi.create_vm(agent) for agent in ("agent-1", "agent-2"))
    (name,) = cluster.of("poddisruptionbudgets")
    change = {"metadata": {"annotations": {"changed": "by another call"}}}
    server.fail("DELETE poddisruptionbudgets", on=lambda: cluster.patch(("poddisruptionbudgets", "bosh", name), change))

    cpi("delete_vm", vm)

    assert available(cluster) == []


@pytest.mark.parametrize("why", ["the image is gone", "the budget is another's"])
def test_failed_create_vm_does_not_change_the_disruption_budget(cpi: CpiCalls, cluster: FakeCluster, why: str) -> None:
    for agent in ("agent-1", "agent-2"):
        cpi.create_vm(agent)
    (name,) = cluster.of("poddisruptionbudgets")
    if why == "the image is gone":
        cluster.pod_status = lambda _: waiting("ErrImagePull", "not found")
        words = "not found"
    else:
        labels = {"cpi.bosh.io/director": "another"}
        cluster.patch(("poddisruptionbudgets", "bosh", name), {"metadata": {"labels": labels}})
        words = "lacks the labels of a budget of this Director"

    with pytest.raises(CpiFailedError, match=words):
        cpi.create_vm("agent-3")

    assert available(cluster) == [1]
