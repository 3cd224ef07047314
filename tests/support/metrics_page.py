"""Generates the table of metrics for docs/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import Metric
from prometheus_client.process_collector import ProcessCollector

from agent_shim.edges.metrics import INSTANCE, Metrics, Readings

LABELS: Final = {
    "agent_shim_build": ("version", "revision", "python"),
    "agent_shim_stemcell": ("os", "version"),
    "agent_shim_instance": INSTANCE,
    "agent_shim_process": ("process", "bosh_job"),
    "agent_shim_actions": ("method", "outcome"),
    "agent_shim_action_duration_seconds": ("method",),
}
"""Labels of the metric families that do not declare them."""


def table() -> str:
    """Render all metric families as a Markdown table."""
    rows = ["| metric | type, labels | meaning |", "|---|---|---|"]
    standard = [_series(family) for family in ProcessCollector(registry=None).collect()]
    for family in Metrics(Readings).registry().collect():
        if _series(family) in standard:
            continue
        names: Sequence[str] = LABELS.get(family.name) or getattr(family, "_labelnames", None) or ()
        kind = ", ".join([family.type, *(f"`{label}`" for label in names)])
        rows.append(f"| `{_series(family)}` | {kind} | {family.documentation} |")
    listed = ", ".join(f"`{name}`" for name in standard)
    return "\n".join(
        [
            *rows,
            "",
            f"The agent also exports the standard process metrics of Prometheus client libraries: {listed}.",
            "",
        ]
    )


def _series(family: Metric) -> str:
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
