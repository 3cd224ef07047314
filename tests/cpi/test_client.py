"""The CPI's API client retries requests and restarts watches that were interrupted."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kubernetes_cpi import manifests
from tests.cpi.calls import CpiCalls, CpiFailedError
from tests.cpi.fake_api import FakeApiServer, FakeCluster

VM = "vm-bosh-" + "0" * 16


@pytest.mark.parametrize(
    "fault", [*({"status": status} for status in (429, 500, 502, 503, 504)), {"cut": "before"}], ids=str
)
def test_temporary_api_error_is_retried(cpi: CpiCalls, server: FakeApiServer, fault: dict[str, Any]) -> None:
    server.fail("GET pods", times=2, **fault)

    assert cpi("has_vm", VM) is False
    assert len(server.requests) == 3


def test_retry_after_header_is_honoured(cpi: CpiCalls, server: FakeApiServer) -> None:
    server.fail("GET pods", status=429, retry_after="1")
    began = time.monotonic()

    cpi("has_vm", VM)

    assert time.monotonic() - began >= 1


@pytest.mark.parametrize(
    ("fault", "words", "is_retryable"),
    [
        ({"status": 429, "retry_after": "3600", "message": "too many requests"}, "429: too many requests", True),
        ({"status": 403, "message": "pods is forbidden"}, "pods is forbidden", False),
        ({"status": 200, "raw": "<html>Log in"}, "response is not a JSON object", False),
        ({"status": 407, "raw": "<html>Proxy Authentication Required"}, "407: <html>Proxy Authentication", False),
    ],
    ids=["wait too long", "no permission", "proxy login page", "proxy error"],
)
def test_permanent_api_error_is_reported_and_not_retried(
    cpi: CpiCalls, server: FakeApiServer, fault: dict[str, Any], words: str, is_retryable: bool
) -> None:
    server.fail("GET pods", times=9, **fault)

    with pytest.raises(CpiFailedError, match=words) as failed:
        cpi("has_vm", VM)

    assert (failed.value.ok_to_retry, len(server.requests)) == (is_retryable, 1)


@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("plural", ["persistentvolumeclaims", "secrets", "pods"])
def test_create_vm_survives_a_dropped_connection(
    cpi: CpiCalls, server: FakeApiServer, cluster: FakeCluster, plural: str, cut: str
) -> None:
    """If only the response is lost, the retry must find the object that the first request created."""
    server.fail(f"POST {plural}", cut=cut)

    vm = cpi.create_vm()

    assert list(cluster.of("pods")) == [vm]
    assert list(cluster.of("secrets")) == [vm]


def test_create_vm_replacing_a_vm_survives_a_dropped_connection(
    cpi: CpiCalls, server: FakeApiServer, cluster: FakeCluster
) -> None:
    vm, disk = cpi.create_vm(memory=64), cpi("create_disk", 64, {}, None)
    server.fail("POST secrets", cut="after", times=2)
    assert cpi.create_vm(memory=128) == vm
    server.fail("POST pods", cut="after", times=2)
    assert cpi.create_vm("agent-1", [disk], memory=128) == vm

    assert disk in manifests.disks_of(cluster.of("pods")[vm])


def test_create_disk_with_a_repeated_request_id_survives_a_dropped_connection(
    cpi: CpiCalls, server: FakeApiServer
) -> None:
    vm = cpi.create_vm()
    first = cpi("create_disk", 64, {}, vm, request_id="cpi-111111")
    cpi("attach_disk", vm, first)
    server.fail("POST persistentvolumeclaims", cut="after", times=2)

    assert cpi("create_disk", 64, {}, vm, request_id="cpi-111111") != first


def test_reboot_vm_survives_a_dropped_connection(cpi: CpiCalls, server: FakeApiServer) -> None:
    """If only the response is lost, the retry must use the helper pod that the first request created."""
    cpi.write(server.config(disks={"attach": "live"}))
    vm = cpi.create_vm(tier="privileged")
    server.fail("POST pods", cut="after")

    cpi("reboot_vm", vm)


def test_delete_vm_succeeds_even_if_responses_are_lost(
    cpi: CpiCalls, server: FakeApiServer, cluster: FakeCluster
) -> None:
    vm = cpi.create_vm()
    server.fail("DELETE", times=3, cut="after")

    cpi("delete_vm", vm)

    assert cluster.snapshot() == {}


def test_unreachable_api_server_causes_a_retryable_error(cpi: CpiCalls, server: FakeApiServer) -> None:
    server.close()

    with pytest.raises(CpiFailedError, match="does not answer") as failed:
        cpi("has_vm", VM)

    assert failed.value.ok_to_retry is True


def test_slow_api_server_is_retried_until_the_timeout(cpi: CpiCalls, server: FakeApiServer) -> None:
    config = {**server.config(), "timeouts": {"request": 0.3, "retry": 3}}
    cpi.write(config)
    server.fail("GET pods", delay_s=1)

    assert cpi("has_vm", VM) is False
    cpi.write({**config, "timeouts": {"request": 0.2, "retry": 0.5}})
    server.fail("GET pods", delay_s=0.5, times=9)
    with pytest.raises(CpiFailedError, match="does not answer.*timed out"):
        cpi("has_vm", VM)


def test_conflicting_patch_is_retried_with_the_new_object_version(
    cpi: CpiCalls, server: FakeApiServer, cluster: FakeCluster
) -> None:
    vm = cpi.create_vm()
    disk = cpi("create_disk", 64, {}, vm)
    key = ("persistentvolumeclaims", "bosh", disk)

    def change() -> None:
        cluster.patch(key, {"metadata": {"annotations": {"seen": str(cluster.version)}}})

    server.fail(f"PATCH persistentvolumeclaims/{disk}", times=3, on=change)

    assert cpi("attach_disk", vm, disk)
    assert cpi("get_disks", vm) == [disk]


def test_quota_conflict_is_retried(cpi: CpiCalls, server: FakeApiServer) -> None:
    """The API server reports a conflict if two objects are counted against a quota at the same time. The CPI must not
    mistake this conflict for one with an existing object of the same name.
    """
    server.fail("POST pods", times=2, status=409, message="Operation cannot be fulfilled on resourcequotas")

    assert cpi.create_vm()


def test_unresponsive_webhook_causes_a_retryable_error(
    cpi: CpiCalls, server: FakeApiServer, cluster: FakeCluster
) -> None:
    server.fail("POST pods", times=99, status=500, message='failed calling webhook "policy.example": timeout')

    with pytest.raises(CpiFailedError, match="failed calling webhook") as failed:
        cpi.create_vm()

    assert (failed.value.type, failed.value.ok_to_retry) == ("VMCreationFailed", True)
    assert cluster.snapshot() == {}


def test_objects_left_by_a_failed_create_vm_are_deleted_later(
    cpi: CpiCalls, server: FakeApiServer, cluster: FakeCluster
) -> None:
    cpi.write({**server.config(), "timeouts": {"retry": 0.5}})
    fault = server.fail("(POST pods|DELETE|GET)", times=999, cut="before")
    with pytest.raises(CpiFailedError, match="does not answer") as failed:
        cpi.create_vm()
    assert failed.value.ok_to_retry is True
    fault.times = 0
    assert len(cluster.of("secrets")) == 1

    (vm,) = cluster.of("secrets")
    cpi("delete_vm", vm)

    assert cluster.snapshot() == {}


def test_token_file_is_read_again_after_the_token_is_rejected(cpi: CpiCalls, server: FakeApiServer) -> None:
    file = cpi.file.with_name("token")
    file.write_text("old")
    config = server.config()
    config["cluster"] = {"server": server.url, "token_file": str(file)}
    cpi.write(config)
    server.fail("GET pods", status=401, on=lambda: file.write_text(server.token))

    assert cpi("has_vm", VM) is False
    assert len(server.requests) == 2


def test_interrupted_or_expired_watch_is_restarted(cpi: CpiCalls, server: FakeApiServer, cluster: FakeCluster) -> None:
    server.fail("WATCH pods", times=2, cut="after")
    vm = cpi.create_vm()
    cluster.memory = 0

    cpi("delete_vm", vm)

    assert cluster.snapshot() == {}


def test_watch_on_an_unchanged_object_does_not_keep_expiring_in_a_busy_cluster(
    cpi: CpiCalls, server: FakeApiServer, cluster: FakeCluster
) -> None:
    """A watch must not start from the watched object's version. In a busy cluster, the server soon forgets this version
    and then rejects each such watch with 410.
    """
    cluster.memory = 30
    cluster.start_after_s = 1.5
    busy = threading.Event()

    def change() -> None:
        cluster.create(("services", "bosh", "other"), {"metadata": {"name": "other"}, "spec": {}})
        while not busy.wait(0.01):
            cluster.patch(("services", "bosh", "other"), {"spec": {"n": time.monotonic()}})

    others = threading.Thread(target=change)
    others.start()
    try:
        cpi.create_vm()
    finally:
        busy.set()
        others.join()

    assert server.expired <= 1
