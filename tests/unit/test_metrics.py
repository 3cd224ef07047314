"""The pages of /metrics, without a socket."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from agent_shim import metrics, responder
from agent_shim.errors import ConfigError
from agent_shim.metrics import BusReading, Metrics, ProcessReading, Readings

FULL = Readings(
    bus=BusReading(True, 2, 30, 4000, 25, 9000, 1, 12.5),
    machine=metrics.machine_reading(
        {
            "cpu": {"user": "25.0", "sys": "5.0", "wait": "0.0"},
            "mem": {"kb": "1024", "percent": "12"},
            "swap": {"kb": "0", "percent": "0"},
            "load": ["0.50", "0.25", "0.125"],
            "disk": {"system": {"percent": "40", "inode_percent": "4"}, "persistent": {"percent": "10"}},
            "uptime": {"secs": 3},
        }
    ),
    processes=[
        ProcessReading("web", "running", True, 12.0, 3, 1 << 22, 0.5),
        ProcessReading("worker", "failing", False),
    ],
    tasks_running=1,
    tasks_waiting=2,
    certificates={"client": 2e9},
)


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def samples(page: bytes) -> dict[str, float]:
    """All samples of a text page, as ``name{label="value"}``."""
    found = {}
    for family in parse_text(page.decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found
            found[key] = sample.value
    return found


def test_what_is_read_is_shown() -> None:
    """Each reading has its sample, in base units."""
    found = samples(Metrics(lambda: FULL).render())

    assert found["agent_shim_bus_connected"] == 1
    assert found["agent_shim_bus_reconnects_total"] == 2
    assert found['agent_shim_bus_messages_total{direction="in"}'] == 30
    assert found['agent_shim_bus_bytes_total{direction="out"}'] == 9000
    assert found["agent_shim_bus_rejected_total"] == 1
    assert found["agent_shim_heartbeat_age_seconds"] == 12.5
    assert found['agent_shim_memory_used_bytes{kind="memory"}'] == 1 << 20
    assert found['agent_shim_memory_used_ratio{kind="memory"}'] == 0.12
    assert found['agent_shim_memory_used_ratio{kind="swap"}'] == 0
    assert found['agent_shim_cpu_ratio{mode="user"}'] == 0.25
    assert found['agent_shim_load_average{minutes="15"}'] == 0.125
    assert found['agent_shim_disk_used_ratio{disk="persistent"}'] == 0.1
    assert [name for name in found if "inodes" in name] == ['agent_shim_disk_inodes_used_ratio{disk="system"}']
    assert found['agent_shim_process_up{process="web"}'] == 1
    assert found['agent_shim_process_up{process="worker"}'] == 0
    assert found['agent_shim_process_state{process="worker",state="failing"}'] == 1
    assert found['agent_shim_process_restarts_total{process="web"}'] == 3
    assert found['agent_shim_process_cpu_ratio{process="web"}'] == 0.5
    assert found["agent_shim_tasks_running"] == 1
    assert found["agent_shim_tasks_waiting"] == 2
    assert found['agent_shim_bus_certificate_expiry_timestamp_seconds{certificate="client"}'] == 2e9


def test_what_is_unknown_is_left_out() -> None:
    """A reading that could not be taken has no sample; zero would be a lie."""
    found = samples(Metrics(lambda: Readings(processes=[ProcessReading("web", "running", True)])).render())

    assert 'agent_shim_process_up{process="web"}' in found
    assert not {
        name
        for name in found
        if name.startswith(("agent_shim_process_memory", "agent_shim_memory", "agent_shim_heartbeat", "agent_shim_cpu"))
    }


def test_both_formats_hold_the_same() -> None:
    """OpenMetrics is accepted by its strict parser and has as many samples."""
    made = Metrics(lambda: FULL, ["ping"])
    made.action_done("ping", "done", 0.001)

    families = list(parse_openmetrics(made.render(True).decode()))  # type: ignore[no-untyped-call]

    assert sum(len(family.samples) for family in families) == len(samples(made.render()))


def test_actions_are_counted() -> None:
    """Number by outcome and time by method, in buckets that hold all shorter ones."""
    made = Metrics(Readings, ["ping", "apply"])
    made.action_done("ping", "done", 0.001)
    made.action_done("ping", "failed", 0.005)
    made.action_done("apply", "done", 3.0)
    found = samples(made.render())

    assert found['agent_shim_actions_total{method="ping",outcome="done"}'] == 1
    assert found['agent_shim_actions_total{method="ping",outcome="failed"}'] == 1
    assert found['agent_shim_action_duration_seconds_bucket{le="0.005",method="ping"}'] == 2
    assert found['agent_shim_action_duration_seconds_bucket{le="2.0",method="apply"}'] == 0
    assert found['agent_shim_action_duration_seconds_bucket{le="10.0",method="apply"}'] == 1
    assert found['agent_shim_action_duration_seconds_count{method="apply"}'] == 1
    assert found['agent_shim_action_duration_seconds_sum{method="apply"}'] == 3.0


def test_callers_cannot_make_series() -> None:
    """Invented methods and outcomes share one label, however many come."""
    made = Metrics(Readings, ["ping"])
    for number in range(1000):
        made.action_done(f"invented_{number}", f"odd_{number}", 0.001)
    found = {name: value for name, value in samples(made.render()).items() if name.startswith("agent_shim_actions")}

    assert found == {'agent_shim_actions_total{method="other",outcome="other"}': 1000}


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\udcffb", "ä"])
def test_any_process_name_leaves_the_page_whole(name: str) -> None:
    """A name is data: quotes, line ends and broken bytes change no other line."""
    page = Metrics(lambda: Readings(processes=[ProcessReading(name, "running", True)])).render()

    assert len([key for key in samples(page) if key.startswith("agent_shim_process_up{")]) == 1


def test_page_is_kept_for_a_second() -> None:
    """Ten scrapers at once cost one reading; a second later it is taken again."""
    clock, taken = Clock(), []

    def read() -> Readings:
        taken.append(clock.now)
        return Readings()

    made = Metrics(read, clock=clock)
    for _ in range(10):
        made.render()
    clock.now += 1.0
    made.render()

    assert taken == [100.0, 101.0]


def test_series_stay_few() -> None:
    """Two hundred jobs and every action make at most two thousand samples."""
    many = Readings(
        bus=FULL.bus,
        machine=FULL.machine,
        processes=[ProcessReading(f"job-{n}", "running", True, 1.0, 0, 1, 0.0) for n in range(200)],
    )
    made = Metrics(lambda: many, [f"method_{n}" for n in range(40)])
    for number in range(40):
        made.action_done(f"method_{number}", "done", 1.0)

    assert len(samples(made.render())) <= 2000


def test_import_brings_no_server() -> None:
    """The registry comes without the HTTP server, the client and the mail parser behind them."""
    script = "import sys; before = set(sys.modules); import agent_shim.metrics; print(*(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())

    assert "prometheus_client.exposition" in loaded
    assert not loaded & {
        "gzip",
        "http",
        "http.client",
        "http.server",
        "email",
        "socketserver",
        "urllib.request",
        "wsgiref",
        "prometheus_client.metrics",
        "prometheus_client.process_collector",
    }


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
def test_addresses(text: str, where: tuple[str, int] | None) -> None:
    """ADDR:PORT, with brackets around an IPv6 address, or off."""
    assert responder.parse_address(text) == where


@pytest.mark.parametrize("text", ["", "9190", ":9190", "host:", "host:x", "host:65536", "host:-1", "host:١"])
def test_wrong_address_is_named(text: str) -> None:
    """A wrong address says itself and what would be right."""
    with pytest.raises(ConfigError, match=r"cannot listen on .*: an address is ADDR:PORT or off"):
        responder.parse_address(text)
