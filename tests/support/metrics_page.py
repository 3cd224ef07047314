"""The table of metrics for docs/metrics.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client.process_collector import ProcessCollector

from agent_shim.edges.metrics import INSTANCE, Metrics, Readings

OF_INFO: Final = {
    "agent_shim_build": ("version", "python"),
    "agent_shim_stemcell": ("os", "version"),
    "agent_shim_instance": INSTANCE,
    "agent_shim_process": ("process", "job"),
}
"""Labels of info metrics, whose value is in their labels."""


def table() -> str:
    """Render all families as a Markdown table."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in [*Metrics(Readings).take().collect(), *ProcessCollector(registry=None).collect()]:
        ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
        names: Sequence[str] = OF_INFO.get(family.name) or getattr(family, "_labelnames", None) or ()
        labels = ", ".join(f"`{label}`" for label in names)
        rows.append(f"| `{family.name}{ending}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join([*rows, ""])
