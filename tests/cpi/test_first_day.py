"""Configuration errors that first-time users make are rejected before a pod is created, or are reported with their
cause within seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kubernetes_cpi import names
from tests.cpi.calls import DIRECTOR, DYNAMIC, ENV, STEMCELL, CpiCalls, CpiFailedError
from tests.cpi.fake_api import FakeApiServer, FakeCluster, Object, unscheduled, waiting

VM = names.cid("vm", "bosh", DIRECTOR, "agent-1")
SHORT = {"retry": 2, "create_vm": 6, "volume": 1, "unready": 1, "crashing": 1, "room": 1, "unschedulable": 1, "bus": 1}


def event(cluster: FakeCluster, about: str, reason: str, message: str) -> None:
    body: Object = {"metadata": {"name": f"{about}.{len(cluster.events)}"}, "involvedObject": {"name": about}}
    cluster.create(("events", "bosh", body["metadata"]["name"]), body | {"reason": reason, "message": message})


def running(ready: str = "False") -> Object:
    statuses = [{"restartCount": 0, "state": {"running": {}}}]
    return {"phase": "Running", "containerStatuses": statuses, "conditions": [{"type": "Ready", "status": ready}]}


# --- the bus ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mbus", ["", "10.0.0.6:4222", "nats://", "http://10.0.0.6", "nats://u:CANARY@10.0.0.6:port"])
def test_create_vm_rejects_an_unusable_bus_address(cpi: CpiCalls, server: FakeApiServer, mbus: str) -> None:
    cpi.write(server.config() | {"agent": {"mbus": mbus}})

    with pytest.raises(CpiFailedError, match="`agent.mbus` of the CPI.*IP:4222") as failed:
        cpi.create_vm()

    assert server.requests == []
    assert "CANARY" not in failed.value.message


def test_create_vm_request_may_supply_the_bus_address(cpi: CpiCalls, server: FakeApiServer) -> None:
    cpi.write(server.config() | {"agent": {}})
    env = {"bosh": {**ENV["bosh"], "mbus": {"urls": ["nats://10.0.0.6:4222"]}}}

    assert cpi("create_vm", "agent-1", STEMCELL, {}, DYNAMIC, [], env)


def test_unreachable_bus_is_reported_with_the_agents_message(cpi: CpiCalls, cluster: FakeCluster) -> None:
    """If create_vm succeeded, the Director would wait ten minutes for the agent to answer its ping."""
    line = '{"level": "warning", "message": "cannot connect to the bus at 10.0.0.7:4222: Connection refused"}'
    cluster.logs = lambda _: f"{line}\nother\n"

    with pytest.raises(CpiFailedError, match=r"bus at 10\.0\.0\.7:4222: Connection refused.*agent\.mbus") as failed:
        cpi.create_vm()

    assert (failed.value.type, failed.value.ok_to_retry) == ("VMCreationFailed", True)
    assert cluster.snapshot() == {}


@pytest.mark.parametrize(
    "last",
    [
        "connected to the bus at 10.0.0.6:4222",
        "cannot connect to the bus at 10.0.0.6:4222: the server does not know us (Authorization Violation)",
        "cannot connect to the bus at 10.0.0.6:4222: the server refuses our certificate (TLSV1_ALERT)",
    ],
)
def test_create_vm_succeeds_even_if_the_bus_has_not_admitted_the_agent(
    cpi: CpiCalls, cluster: FakeCluster, last: str
) -> None:
    first = "cannot connect to the bus at 10.0.0.6:4222: Connection refused"
    cluster.logs = lambda _: f'{{"level": "warning", "message": "{first}"}}\n{{"level": "info", "message": "{last}"}}\n'

    assert cpi.create_vm() == VM


def test_create_vm_returns_as_soon_as_the_agent_has_reached_the_bus(cpi: CpiCalls, cluster: FakeCluster) -> None:
    cluster.pod_status = lambda _: running(ready="False")

    assert cpi.create_vm() == VM


@pytest.mark.parametrize("is_read", [False, True])
def test_create_vm_succeeds_if_the_agents_log_does_not_mention_the_bus(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, is_read: bool
) -> None:
    cluster.logs = lambda _: "started\n"
    if not is_read:
        server.fail(f"GET pods/{VM}", times=9, status=403, message="pods/log is forbidden")

    assert cpi.create_vm() == VM


def test_create_vm_does_not_check_the_bus_for_an_https_agent(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    cpi.write(server.config() | {"agent": {"mbus": "https://u:password@0.0.0.0:6868"}})
    cluster.logs = lambda _: pytest.fail("the log is read")

    assert cpi.create_vm() == VM


# --- claims -----------------------------------------------------------------------------------------------------------


CLASS = {"storage_class": "slow"}


@pytest.mark.parametrize(
    "call",
    [
        lambda cpi: cpi("create_disk", 64, CLASS, None),
        lambda cpi: cpi.create_vm(persistent_disk={"size": 64, **CLASS}),
        lambda cpi: cpi.create_vm(ephemeral_disk=CLASS),
    ],
)
def test_unknown_storage_class_is_rejected_before_objects_are_created(
    cpi: CpiCalls, cluster: FakeCluster, call: Callable[[CpiCalls], Any]
) -> None:
    with pytest.raises(CpiFailedError, match="no StorageClass is named 'slow'"):
        call(cpi)

    assert cluster.snapshot() == {}
    assert not any(key[0] == "pods" for _, _, key, _ in cluster.events)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (unscheduled("pod has unbound immediate PersistentVolumeClaims"), 'storageclass.storage.k8s.io "x" not found'),
        ({"phase": "Pending"}, "no persistent volumes available for this claim and no storage class is set"),
    ],
)
def test_claim_that_cannot_be_bound_is_reported_quickly(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, status: Object, message: str
) -> None:
    """The reason comes from the claim's events, because the CPI's account cannot always read StorageClasses."""
    cluster.forbidden.add("storageclasses")
    cluster.pod_status = lambda _: status
    # These timeouts exceed the test's time limit, so only the claim's events can end the wait.
    cpi.write(server.config() | {"timeouts": {"retry": 2, "unschedulable": 600, "volume": 600}})
    event(cluster, f"data-{VM}", "ProvisioningFailed", message)

    with pytest.raises(CpiFailedError) as failed:
        cpi.create_vm(ephemeral_disk={"storage_class": "x"})

    assert f"data-{VM}: ProvisioningFailed: {message}" in failed.value.message
    assert list(cluster.of("pods")) == []


def test_missing_volume_provisioner_is_reported_after_the_volume_timeout(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer
) -> None:
    cpi.write(server.config() | {"timeouts": SHORT})
    cluster.pod_status = lambda _: {"phase": "Pending"}
    event(cluster, f"data-{VM}", "ExternalProvisioning", "Waiting for a volume by the external provisioner 'none'")

    with pytest.raises(CpiFailedError, match="cannot start: .*the external provisioner 'none'"):
        cpi.create_vm()


# --- pods -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words", "is_retryable"),
    [
        (running(), "the last words", False),
        (unscheduled("0/3 nodes are available: 3 Insufficient cpu."), "Insufficient cpu", True),
        (unscheduled("0/3 nodes are available: 3 didn't match Pod's node affinity."), "node affinity", False),
        ({"phase": "Failed", "reason": "SysctlForbidden", "message": "not allowed"}, "SysctlForbidden", False),
        ({"phase": "Failed", "reason": "OutOfcpu", "message": "no"}, "OutOfcpu", True),
        (waiting("ImageInspectError", "no"), "ImageInspectError", False),
        (waiting("ErrImagePull", 'pull of "x": not found'), "cannot start: ErrImagePull.*not found", False),
        (waiting("ErrImagePull", "dial tcp 192.0.2.1:443: i/o timeout"), "i/o timeout", True),
        (waiting("CreateContainerError", "context deadline exceeded"), "CreateContainerError: context", True),
    ],
)
def test_create_vm_reports_a_pod_that_does_not_become_ready(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, status: Object, words: str, is_retryable: bool
) -> None:
    cpi.write(server.config() | {"timeouts": SHORT})
    cluster.pod_status = lambda _: status
    cluster.logs = lambda _: '{"level": "error", "message": "the last words"}\n{"level": "info", "message": "no"}\n'

    with pytest.raises(CpiFailedError, match=words) as failed:
        cpi.create_vm()

    assert (failed.value.type, failed.value.ok_to_retry) == ("VMCreationFailed", is_retryable)
    assert cluster.snapshot() == {}


@pytest.mark.parametrize(
    ("memory", "node", "words"),
    [
        (2048, "2097151Ki", "requests 2048Mi memory, and the largest node has 2097151Ki; choose a smaller VM type"),
        (2048, "2Gi", ""),
        (2048, None, ""),
    ],
    ids=["too large", "fits", "nodes are hidden"],
)
def test_vm_too_large_for_every_node_causes_a_permanent_error(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, memory: int, node: str | None, words: str
) -> None:
    """If the error were retryable, the Director would try five times to create the VM."""
    cpi.write(server.config() | {"timeouts": SHORT})
    cluster.pod_status = lambda _: unscheduled("0/2 nodes are available: 2 Insufficient memory.")
    for name, size in (("small", "1Gi"), ("large", node or "1Gi")):
        cluster.create(("nodes", "", name), {"metadata": {"name": name}})
        cluster.objects["nodes", "", name]["status"] = {"allocatable": {"memory": size, "cpu": "500m"}}
    if node is None:
        cluster.forbidden.add("nodes")

    with pytest.raises(CpiFailedError, match=words or "Insufficient memory") as failed:
        cpi.create_vm(memory=memory)

    assert failed.value.ok_to_retry == (not words)


@pytest.mark.parametrize(("code", "is_retryable"), [(78, False), (70, True)])
def test_agent_exit_causes_a_retryable_error_unless_the_configuration_is_wrong(
    cpi: CpiCalls, cluster: FakeCluster, code: int, is_retryable: bool
) -> None:
    """Exit code 78 means that the configuration is wrong, so a retry cannot help."""
    ended = {"terminated": {"exitCode": code, "message": "agent-shim: cannot read settings"}}
    status = {"restartCount": 1, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
    cluster.pod_status = lambda _: {"phase": "Running", "containerStatuses": [status]}

    with pytest.raises(CpiFailedError, match=f"exit code {code}: agent-shim: cannot read settings") as failed:
        cpi.create_vm()

    assert failed.value.ok_to_retry is is_retryable
    assert cluster.snapshot() == {}


def test_slow_pod_start_is_reported_with_the_pods_events(
    cpi: CpiCalls, cluster: FakeCluster, server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    cpi.write(server.config() | {"timeouts": SHORT})
    cluster.pod_status = lambda _: waiting("ContainerCreating", "")
    event(cluster, VM, "FailedMount", "MountVolume.SetUp failed: not there")

    with pytest.raises(CpiFailedError, match=f"not ready after 6 s: .*{VM}: FailedMount: MountVolume"):
        cpi.create_vm()

    assert f"pod {VM}: ContainerCreating; {VM}: FailedMount" in capsys.readouterr().err


# --- values -----------------------------------------------------------------------------------------------------------

INVALID_VALUES: list[Callable[[CpiCalls], Any]] = [
    lambda cpi: cpi.create_vm(grace=-5),
    lambda cpi: cpi.create_vm(memory="much"),
    lambda cpi: cpi.create_vm(memory=-1),
    lambda cpi: cpi.create_vm(cpu="two"),
    lambda cpi: cpi.create_vm(cpu=-0.5),
    lambda cpi: cpi.create_vm(ephemeral_disk={"size": "10 GB"}),
    lambda cpi: cpi.create_vm(ports=[{"port": 70000}]),
]


@pytest.mark.parametrize("call", INVALID_VALUES)
def test_cloud_property_that_kubernetes_would_reject_is_reported_immediately(
    cpi: CpiCalls, server: FakeApiServer, call: Callable[[CpiCalls], Any]
) -> None:
    with pytest.raises(CpiFailedError, match="cannot use the cloud properties of the VM"):
        call(cpi)

    assert server.requests == []


@pytest.mark.parametrize("size", [0, 512, "512Mi", "1.5G", "1000k", "2Gi"])
def test_kubernetes_quantities_are_accepted_as_sizes(cpi: CpiCalls, size: Any) -> None:
    assert cpi.create_vm(memory=size) == VM
