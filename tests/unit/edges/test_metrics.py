"""Tests the text of the metrics page, and how addresses for the HTTP server are parsed. No socket is opened."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import zlib
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from agent_shim.core.bus_stats import Stats
from agent_shim.core.errors import ConfigError
from agent_shim.edges import http_server, metrics
from agent_shim.edges.metrics import BusReading, DiskReading, Metrics, Readings
from agent_shim.host import proc
from agent_shim.host.host_stats import CpuTimes, Memory
from agent_shim.services.vitals import Figures
from agent_shim.supervisor.process_stats import ProcessInfo, ServiceInfo
from tests.support import metrics_page


def service(name: str, state: str = "running", pid: int = 12, mem_kb: int = 0, **members: Any) -> ServiceInfo:
    """Return information about a service whose kind is ``process``."""
    some: dict[str, Any] = {
        "job": "",
        "kind": "process",
        "groups": (),
        "state": state,
        "restarts": 0,
        "last_exit": "",
        "reason": "",
    }
    return ServiceInfo(process=ProcessInfo(name, state, mem_kb=mem_kb), pid=pid, **some | members)


DISK = os.statvfs_result((4096, 4096, 1000, 600, 500, 200, 150, 150, 0, 255))

FULL = Readings(
    bus=BusReading(True, 12.5, Stats(4, 3, 30, 4000, 25, 9000, rejected=1, flooded=6)),
    figures=Figures(
        memory={"host": Memory(1 << 34, 1 << 33, 1 << 20, 0), "container": Memory(1 << 30, 1 << 20, 0, 0)},
        cpu={"host": CpuTimes(100.0, 50.0, 7.0, 1000.0), "container": CpuTimes(3.0, 2.0, 0.0, 0.0)},
        processors={"host": 4.0, "container": 0.5},
        load={"1": 0.5, "5": 0.25, "15": 0.125},
        disks={"persistent": DISK},
        oom_kills=1,
    ),
    stemcell=("ubuntu-noble", "1.204"),
    instance={"deployment": "shop", "group": "web", "index": "0", "id": "a-b", "az": "z1"},
    processes=[
        service(
            "web",
            mem_kb=4096,
            job="frontend",
            restarts=3,
            exits={"error": 2, "signal": 1},
            oom_kills=1,
            started_at=1.8e9,
            cpu_seconds=0.5,
            threads=4,
        ),
        service("worker", "failing", 0),
    ],
    tasks_running=1,
    tasks_waiting=2,
    certificates={"client": 2e9},
    disk=DiskReading(True, True, 0.25),
    blobs={("get", "done"): 5},
    blob_bytes={"get": 1000},
    alerts={"sent": 3, "collapsed": 8},
)


class Clock:
    """A clock that advances only when a test sets it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def samples(page: bytes) -> dict[str, float]:
    """Return all samples in a text page, as ``name{label="value"}``."""
    found = {}
    for family in parse_text(page.decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found
            found[key] = sample.value
    return found


def test_documented_metric_labels_match_the_metrics_page() -> None:
    rows = re.findall(r"^\| `(agent_shim_\w+)` \| \w+([^|]*)\|", metrics_page.table(), re.MULTILINE)
    labels = {name: set(re.findall(r"`(\w+)`", cell)) for name, cell in rows}
    page = asyncio.run(Metrics(lambda: FULL).render()).decode()
    shown = [sample for family in parse_text(page) for sample in family.samples if sample.name in labels]

    assert len(shown) > 50
    assert [sample for sample in shown if set(sample.labels) != labels[sample.name]] == []


def test_metrics_page_has_a_sample_for_each_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "open_files", {12: 7}.get)
    found = samples(asyncio.run(Metrics(lambda: FULL).render()))

    assert found["agent_shim_bus_connected"] == 1
    assert found["agent_shim_bus_reconnects_total"] == 2
    assert found['agent_shim_bus_messages_total{direction="in"}'] == 30
    assert found['agent_shim_bus_bytes_total{direction="out"}'] == 9000
    assert found["agent_shim_bus_rejected_total"] == 1
    assert found["agent_shim_bus_attempts_total"] == 4
    assert found['agent_shim_bus_unserved_total{reason="flood"}'] == 6
    assert found['agent_shim_bus_unserved_total{reason="denied"}'] == 0
    assert found['agent_shim_alerts_total{outcome="sent"}'] == 3
    assert found['agent_shim_alerts_total{outcome="collapsed"}'] == 8
    assert found['agent_shim_alerts_total{outcome="dropped"}'] == 0
    assert found["agent_shim_heartbeat_age_seconds"] == 12.5
    assert found['agent_shim_stemcell_info{os="ubuntu-noble",version="1.204"}'] == 1
    assert found['agent_shim_memory_used_bytes{scope="container"}'] == 1 << 20
    assert found['agent_shim_memory_size_bytes{scope="host"}'] == 1 << 34
    assert found['agent_shim_swap_size_bytes{scope="host"}'] == 1 << 20
    assert found['agent_shim_cpu_seconds_total{mode="user",scope="container"}'] == 3
    assert found['agent_shim_cpu_seconds_total{mode="wait",scope="host"}'] == 7
    assert 'agent_shim_cpu_seconds_total{mode="wait",scope="container"}' not in found
    assert found['agent_shim_cpus{scope="container"}'] == 0.5
    assert found["agent_shim_oom_kills_total"] == 1
    assert found['agent_shim_load_average{minutes="15"}'] == 0.125
    assert found['agent_shim_disk_size_bytes{disk="persistent"}'] == 4096000
    assert found['agent_shim_disk_used_bytes{disk="persistent"}'] == 400 * 4096
    assert found['agent_shim_disk_inodes_used{disk="persistent"}'] == 50
    assert found["agent_shim_persistent_disk_mounted"] == 1
    assert found["agent_shim_disk_migration_running"] == 1
    assert found["agent_shim_disk_migration_ratio"] == 0.25
    assert found['agent_shim_blob_transfers_total{direction="get",outcome="done"}'] == 5
    assert found['agent_shim_blob_transfers_total{direction="put",outcome="failed"}'] == 0
    assert found['agent_shim_blob_bytes_total{direction="get"}'] == 1000
    assert found['agent_shim_instance_info{az="z1",deployment="shop",group="web",id="a-b",index="0"}'] == 1
    assert found['agent_shim_process_info{bosh_job="frontend",process="web"}'] == 1
    assert found['agent_shim_process_up{process="web"}'] == 1
    assert found['agent_shim_process_up{process="worker"}'] == 0
    assert found['agent_shim_process_state{process="worker",state="failing"}'] == 1
    assert found['agent_shim_process_restarts_total{process="web"}'] == 3
    assert found['agent_shim_process_state{process="worker",state="running"}'] == 0
    assert found['agent_shim_process_exits_total{process="web",reason="error"}'] == 2
    assert found['agent_shim_process_exits_total{process="worker",reason="error"}'] == 0
    assert found['agent_shim_process_oom_kills_total{process="web"}'] == 1
    assert found['agent_shim_process_start_time_seconds{process="web"}'] == 1.8e9
    assert found['agent_shim_process_cpu_seconds_total{process="web"}'] == 0.5
    assert found['agent_shim_process_open_files{process="web"}'] == 7
    assert found['agent_shim_process_threads{process="web"}'] == 4
    assert found['agent_shim_process_memory_bytes{process="web"}'] == 1 << 22
    assert found["agent_shim_tasks_running"] == 1
    assert found["agent_shim_tasks_waiting"] == 2
    assert found['agent_shim_bus_certificate_expiry_timestamp_seconds{certificate="client"}'] == 2e9


def test_agent_exports_the_standard_process_metrics() -> None:
    found = samples(asyncio.run(Metrics(lambda: FULL).render()))

    assert found["process_resident_memory_bytes"] > 1 << 20
    assert found["process_open_fds"] > 2
    assert found["process_start_time_seconds"] > 1e9


def test_metrics_page_omits_unknown_readings() -> None:
    """A figure that could not be read must not be shown as zero."""
    readings = Readings(bus=BusReading(None), processes=[service("web")])
    found = samples(asyncio.run(Metrics(lambda: readings).render()))

    assert 'agent_shim_process_up{process="web"}' in found
    assert not {
        name
        for name in found
        if name.startswith(
            (
                "agent_shim_instance",
                "agent_shim_bus_connected",
                "agent_shim_stemcell",
                "agent_shim_memory",
                "agent_shim_heartbeat",
                "agent_shim_cpu",
                "agent_shim_oom",
            )
        )
    }


def test_openmetrics_and_text_format_have_the_same_number_of_samples() -> None:
    made = Metrics(lambda: FULL, ["ping"])
    made.action_done("ping", "done", 0.001)

    families = list(parse_openmetrics(asyncio.run(made.render(True)).decode()))  # type: ignore[no-untyped-call]

    assert sum(len(family.samples) for family in families) == len(samples(asyncio.run(made.render())))


def test_actions_are_counted_by_outcome_and_timed_by_method() -> None:
    made = Metrics(Readings, ["ping", "apply"])
    made.action_done("ping", "done", 0.001)
    made.action_done("ping", "failed", 0.005)
    made.action_done("apply", "done", 3.0)
    found = samples(asyncio.run(made.render()))

    assert found['agent_shim_actions_total{method="ping",outcome="done"}'] == 1
    assert found['agent_shim_actions_total{method="ping",outcome="failed"}'] == 1
    assert found['agent_shim_action_duration_seconds_bucket{le="0.005",method="ping"}'] == 2
    assert found['agent_shim_action_duration_seconds_bucket{le="2.0",method="apply"}'] == 0
    assert found['agent_shim_action_duration_seconds_bucket{le="10.0",method="apply"}'] == 1
    assert found['agent_shim_action_duration_seconds_count{method="apply"}'] == 1
    assert found['agent_shim_action_duration_seconds_sum{method="apply"}'] == 3.0


def test_unknown_methods_share_a_single_metric_series() -> None:
    """Otherwise, clients could create unlimited series by inventing methods."""
    made = Metrics(Readings, ["ping"])
    for number in range(1000):
        made.action_done(f"invented_{number}", f"odd_{number}", 0.001)
    page = asyncio.run(made.render())
    found = {name: value for name, value in samples(page).items() if name.startswith("agent_shim_actions")}

    assert found == {'agent_shim_actions_total{method="other",outcome="other"}': 1000}


@pytest.mark.attack("text from a job creates series or forges lines on the metrics page")
@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\udcffb", "ä"])
def test_process_name_cannot_corrupt_the_metrics_page(name: str) -> None:
    page = asyncio.run(Metrics(lambda: Readings(processes=[service(name)])).render())

    assert len([key for key in samples(page) if key.startswith("agent_shim_process_up{")]) == 1


def test_metrics_page_is_cached_for_a_second() -> None:
    clock, taken = Clock(), []

    def read() -> Readings:
        taken.append(clock.now)
        return Readings()

    made = Metrics(read, clock=clock)
    for _ in range(10):
        asyncio.run(made.render())
    clock.now += 1.0
    asyncio.run(made.render())

    assert taken == [100.0, 101.0]


def test_number_of_metric_series_is_limited() -> None:
    many = Readings(
        bus=FULL.bus,
        figures=FULL.figures,
        processes=[service(f"job-{n}") for n in range(200)],
    )
    made = Metrics(lambda: many, [f"method_{n}" for n in range(40)])
    for number in range(40):
        made.action_done(f"method_{number}", "done", 1.0)

    assert len(samples(asyncio.run(made.render()))) <= 4000


def test_process_metric_series_do_not_depend_on_the_process_state() -> None:
    """If a label depended on the process's state, each state change would create new series."""
    quiet = Metrics(lambda: Readings(processes=[service("web", "starting", 0)]))
    lively = Metrics(
        lambda: Readings(
            processes=[service("web", "failing", restarts=3, exits={"signal": 1, "error": 2}, oom_kills=1, threads=4)],
        )
    )

    assert samples(asyncio.run(quiet.render())).keys() == samples(asyncio.run(lively.render())).keys()


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("0.0.0.0:9190", ("0.0.0.0", 9190)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:9190", ("::1", 9190)),
        ("localhost:80", ("localhost", 80)),
        ("off", None),
    ],
)
def test_http_address_is_parsed(text: str, where: tuple[str, int] | None) -> None:
    assert http_server.parse_address(text) == where


@pytest.mark.parametrize("text", ["", "9190", ":9190", "host:", "host:x", "host:65536", "host:-1", "host:١"])
def test_invalid_http_address_error_contains_the_expected_format(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*: the address must be ADDR:PORT or off"):
        http_server.parse_address(text)


async def test_open_files_are_counted_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.2, counting a million open files takes most of a second, which must not block the event loop."""
    threads = []

    def open_files(_pid: int) -> int:
        threads.append(threading.current_thread())
        return 7

    monkeypatch.setattr(proc, "open_files", open_files)

    found = samples(await Metrics(lambda: Readings(processes=[service("web"), service("worker", pid=0)])).render())

    assert found['agent_shim_process_open_files{process="web"}'] == 7
    assert found['agent_shim_process_open_files{process="worker"}'] == 0
    assert len(threads) == 1
    assert threads != [threading.current_thread()]


async def test_compressed_metrics_page_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []

    def compress(page: bytes, *_: int) -> bytes:
        packed.append(page)
        return b"packed"

    monkeypatch.setattr(zlib, "compress", compress)
    made = Metrics(Readings, clock=Clock())

    pages = {await made.render(is_openmetrics, True) for is_openmetrics in (False, True, False, True)}

    assert pages == {b"packed"}
    assert len(packed) == 2


async def test_metrics_page_is_rendered_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering the page for 500 processes takes 30 ms, which must not block the event loop."""
    threads = []

    def generate(registry: object) -> bytes:
        threads.append(threading.current_thread())
        return b"page"

    monkeypatch.setattr(metrics, "generate_latest", generate)

    assert await Metrics(Readings).render() == b"page"
    assert threads != [threading.current_thread()]
