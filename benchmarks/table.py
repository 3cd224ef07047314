"""The table of docs/performance.md, drawn from what ``./dev bench`` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

PAGE: Final = Path(__file__).parents[1] / "docs/performance.md"
BEGIN: Final = "<!-- figures -->\n"
END: Final = "<!-- /figures -->"


class Budget(NamedTuple):
    """What must be reached and what is aimed at, in the unit of the figure."""

    must: float
    aim: float
    more_is_better: bool = False

    def verdict(self, value: float) -> str:
        """Which of the two is missed."""
        if self.more_is_better:
            return "" if value >= self.aim else "aim missed" if value >= self.must else "limit missed"
        return "" if value <= self.aim else "aim missed" if value <= self.must else "limit missed"


BUDGETS: Final = {
    "exec_to_first_pong": Budget(0.25, 0.15),
    "pss_5_processes_scraped": Budget(32, 28),
    "pss_after_apply_and_fetch_logs": Budget(36, 30),
    "ping": Budget(0.0005, 0.0003),
    "pipelined_pings_per_second": Budget(12_000, 20_000, more_is_better=True),
    "get_state_full": Budget(0.004, 0.0015),
    "apply_6_packages_of_20_MB": Budget(1.0, 0.5),
    "start_answered": Budget(0.1, 0.02),
    "start_until_5_running": Budget(0.3, 0.05),
    "killed_until_successor_lives": Budget(0.1, 0.01),
    "200_processes_killed_last_back": Budget(2.0, 0.6),
    "stop_of_5": Budget(0.5, 0.2),
    "fetch_logs_of_400_MB": Budget(300, 500, more_is_better=True),
    "idle_cpu_5_processes": Budget(0.2, 0.05),
    "200_processes_idle_cpu": Budget(0.5, 0.1),
    "200_processes_memory_added": Budget(4.0, 2.0),
    "ping_under_work_p99.9": Budget(0.05, 0.025),
    "ping_under_work_max": Budget(0.25, 0.05),
    "deploy_of_one_instance_as_the_director_polls": Budget(4.0, 2.5),
}


def write(document: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Put the table where the page has a place for it."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + render(document, others) + END + after)


def render(document: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """What was measured on what, and a line for each figure."""
    machine = document["machine"]
    said = [
        f"Measured on {document['date']} on a machine with {machine['cores']} cores (Linux {machine['kernel']}, "
        f"Python {machine['python']}), load average {machine.get('load_before', '?')} before; one run of `./dev bench`"
        + ("" if document.get("scale", 1) == 1 else f" at a scale of {document['scale']:g}")
        + ".",
        "",
    ]
    columns = ["figure", "median", "least to greatest", "floor", "ratio", "must / aim", ""]
    columns += [other["agent_command"] for other in others]
    rows = [columns, ["---"] * len(columns)]
    for name, figure in document["figures"].items():
        if isinstance(figure, dict) and "median" in figure:
            rows.append([*_row(name, figure), *(_beside(name, other) for other in others)])
    return "\n".join([*said, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _row(name: str, figure: dict[str, Any]) -> list[str]:
    unit, budget = figure["unit"], BUDGETS.get(name)
    is_one = figure["samples"] == 1
    return [
        f"`{name}`",
        worded(figure["median"], unit),
        "one sample" if is_one else f"{worded(figure['min'], unit)} to {worded(figure['max'], unit)}",
        f"{worded(figure['floor'], unit)} ({figure['floor_is']})" if "floor" in figure else "",
        f"{figure['ratio']:g}" if "ratio" in figure else "",
        f"{worded(budget.must, unit)} / {worded(budget.aim, unit)}" if budget else "",
        budget.verdict(figure["median"]) if budget else "",
    ]


def _beside(name: str, other: dict[str, Any]) -> str:
    found = other["figures"].get(name)
    return worded(found["median"], found["unit"]) if found else ""


def worded(value: float, unit: str) -> str:
    """For people: three digits, and milliseconds where seconds would begin with zeros."""
    if unit == "s" and abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:,.0f} {unit}".replace(",", " ") if abs(value) >= 1000 else f"{value:.3g} {unit}"
