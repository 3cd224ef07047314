"""The tables of figures in docs/performance.md and README.md. They are made from the results of ``./dev bench``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

PAGE: Final = Path(__file__).parents[2] / "docs/performance.md"
README: Final = PAGE.parents[1] / "README.md"
BEGIN: Final = "<!-- figures -->\n"
END: Final = "<!-- /figures -->"


class Budget(NamedTuple):
    """The limit and the target for a figure, in the figure's unit or as multiples of its floor."""

    must: float
    aim: float
    more_is_better: bool = False
    of_floor: bool = False

    def verdict(self, figure: dict[str, Any]) -> str:
        """Return "limit missed" or "target missed" if the figure misses its limit or its target, otherwise "".

        A budget in multiples of a floor is always met if the floor was not measured.
        """
        sign = -1 if self.more_is_better else 1
        value = (figure.get("ratio", self.aim) if self.of_floor else figure["median"]) * sign
        return "" if value <= self.aim * sign else "target missed" if value <= self.must * sign else "limit missed"

    def worded(self, unit: str) -> str:
        """Return the limit and the target with their unit, as ``LIMIT / TARGET``."""
        if self.of_floor:
            return f"{digits(self.must)} / {digits(self.aim)} times the floor"
        return _pair(self.must, self.aim, unit, " / ")


BUDGETS: Final = {
    "exec_to_first_pong": Budget(0.25, 0.15),
    "exec_to_first_pong_as_root": Budget(3, 2.5, of_floor=True),
    # The Go agent and monit together use about 22 MB. The limit is 1.2 times and the target 1.1 times that.
    "pss_with_5_processes_scraped": Budget(26, 24),
    "pss_after_apply_and_fetch_logs": Budget(36, 30),
    "ping": Budget(1.2, 1.1, of_floor=True),
    "pipelined_pings_per_second": Budget(0.7, 0.8, more_is_better=True, of_floor=True),
    "get_state_full": Budget(0.004, 0.0015),
    "apply_6_packages_of_20_MB": Budget(1.0, 0.5),
    "apply_1_small_package": Budget(0.1, 0.03),
    "start_answered": Budget(0.02, 0.01),
    "start_until_5_running": Budget(0.3, 0.05),
    "restart_of_a_killed_process": Budget(0.1, 0.01),
    "200_processes_killed_first_back": Budget(0.1, 0.1),
    "200_processes_killed_last_back": Budget(2.0, 0.6),
    "stop_of_5": Budget(0.5, 0.2),
    "fetch_logs_of_400_MB": Budget(300, 500, more_is_better=True),
    "fetch_logs_of_20000_small_files": Budget(100, 150, more_is_better=True),
    "idle_cpu_with_5_processes": Budget(0.08, 0.04),
    "200_processes_idle_cpu": Budget(0.08, 0.08),
    "200_processes_memory_added": Budget(4.0, 1.5),
    "ping_under_work_p99.9": Budget(0.05, 0.025),
    "ping_under_work_max": Budget(0.25, 0.05),
    "deploy_of_one_instance_as_the_director_polls": Budget(4.0, 2.5),
}


TABLES: Final = {
    "step of a deploy": {"time": r"deploy_step_(.+)", "`get_task` requests": r"deploy_queries_of_(.+)"},
    "number of processes": {
        "started": r"(\d+)_processes_started",
        "CPU time when idle": r"(\d+)_processes_idle_cpu",
        "memory added": r"(\d+)_processes_memory_added",
        "slowest ping": r"(\d+)_processes_slowest_ping",
    },
}
"""The small tables, keyed by the heading of their first column. Each table maps the labels of its rows to patterns.

A row shows all figures whose names match its pattern. The text that the pattern's group matches is the heading of the
figure's column; for ``200_processes_started``, for example, it is 200.

Figures with a budget are also rows of the large table.
"""

IN_SHORT: Final = {
    "start until 5 running": "start five jobs, until all are running",
    "restart of a killed process": "restart a killed process",
    "stop of 5": "stop five jobs",
    "apply 6 packages of 20 MB": "`apply` with six 20 MB packages",
    "deploy of one instance as the director polls": "deploy one instance, including polling",
    "ping": "answer a `ping`",
    "memory (PSS) with 5 processes scraped": "memory with five jobs (PSS)",
    "idle cpu with 5 processes": "CPU usage when idle, with five jobs",
}
"""Rows of the large table that are repeated in README.md, each with the description that README.md uses instead of the
row's name.
"""


NOT_ALIKE: Final = frozenset(
    {
        "exec_to_first_pong",
        "exec_to_first_pong_with_5_jobs",
        "from_exec_until_5_jobs_are_adopted",
        "exec_to_first_pong_as_root",
        "interpreter_with_asyncio_and_ssl",
        "pss_of_an_interpreter_with_asyncio_and_ssl",
    }
)
"""Figures that are not comparable with the Go agent's: its ``dummy`` platform skips some boot steps, and the floors are
those of a Python program.
"""


def merged(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the results of runs that measured different parts of one agent. Return one document for each agent."""
    found: dict[str, dict[str, Any]] = {}
    for one in documents:
        joined = found.setdefault(one["agent"], {**one, "figures": {}, "missing": {}, "runs": 0})
        joined["figures"] |= one["figures"]
        joined["missing"] |= one["missing"]
        joined["runs"] += 1
        joined["from"], joined["to"] = min(joined["from"], one["from"]), max(joined["to"], one["to"])
        load = max(joined["machine"]["load_before"], one["machine"]["load_before"])
        joined["machine"] = {**joined["machine"], "load_before": load}
    return list(found.values())


def write(document: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Write the tables into the pages, between their markers."""
    _fill(PAGE, render(document, others))
    if others:
        _fill(README, in_short(PAGE.read_text()))


def _fill(page: Path, content: str) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + content + END + after)


def in_short(page: str) -> str:
    """Return the table for README.md, made from rows of the large table in ``page``. The large table's last column must
    be the Go agent's.
    """
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    cells = [[cell.strip() for cell in line.removeprefix("| ").removesuffix(" |").split(" | ")] for line in lines]
    rows = {row[0]: row for row in cells if row[0] in IN_SHORT}
    lines = ["| measurement | agent_shim | Go agent and monit |", "|---|---|---|"]
    lines += [
        f"| {words} | {rows[name][1].partition(' (')[0]} | {rows[name][-1].partition(' (')[0]} |"
        for name, words in IN_SHORT.items()
    ]
    return "\n".join([*lines, ""])


def render(document: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Return the text between the ``figures`` markers in docs/performance.md: conditions, tables, floors, and the
    reasons for missing figures.
    """
    floors = _Floors()
    columns = ["figure", "median (range)", "floor", "limit / target"]
    columns += [f"{other['agent']} (times ours)" for other in others]
    rows = [columns, ["---"] * len(columns)]
    for name, figure in document["figures"].items():
        if "median" in figure and (name in BUDGETS or not _is_in_small_table(name)):
            rows.append([*_row(name, figure, floors), *(_other_agents_cell(name, figure, other) for other in others)])
    lines = [_measured(document, others), "", *(f"| {' | '.join(row)} |" for row in rows), "", floors.said(), ""]
    lines += _small_tables(document, others)
    for name, figure in document["figures"].items():
        if steps := figure.get("steps_ms"):
            shown = ", ".join(f"{step} {worded(took / 1000, 's')}" for step, took in steps.items())
            lines += [f"Steps of *{_title(name)}* that took a millisecond or more: {shown}.", ""]
    for one in (document, *others):
        for part, why in one["missing"].items():
            error = why.replace("|", "/").replace("`", "'")
            lines += [f"Some {one['agent']} figures are missing because the `{part}` part failed: `{error}`", ""]
    return "\n".join(lines)


def _title(name: str) -> str:
    """Return the name of a figure as it is shown in the tables."""
    return re.sub("^pss ", "memory (PSS) ", name.replace("_", " "))


def _is_in_small_table(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for rows in TABLES.values() for pattern in rows.values())


def _small_tables(document: dict[str, Any], others: list[dict[str, Any]]) -> list[str]:
    """Return the tables in ``TABLES``, with a row for each kind of figure and agent."""
    lines = []
    for first, kinds in TABLES.items():
        rows: dict[str, dict[str, str]] = {}
        for kind, pattern in kinds.items():
            for one in (document, *others):
                found = ((re.fullmatch(pattern, name), figure) for name, figure in one["figures"].items())
                cells = {
                    match[1].replace("_", " "): worded(figure["median"], figure["unit"]).removesuffix(" queries")
                    for match, figure in found
                    if match
                }
                if cells:
                    rows[f"{kind}, {one['agent']}"] = cells
        columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
        if rows:
            lines += [f"| {' | '.join([first, *columns])} |", f"|{'---|' * (1 + len(columns))}"]
            lines += [
                f"| {' | '.join([row, *(cells.get(column, '') for column in columns)])} |"
                for row, cells in rows.items()
            ]
            lines.append("")
    return lines


class _Floors:
    """Assigns numbers to floor descriptions. Equal descriptions get the same number."""

    def __init__(self) -> None:
        self._known: list[str] = []

    def number(self, floor_is: str) -> int:
        if floor_is not in self._known:
            self._known.append(floor_is)
        return self._known.index(floor_is) + 1

    def said(self) -> str:
        return "Floors: " + "; ".join(f"({self.number(each)}) {each}" for each in self._known) + "."


def _measured(document: dict[str, Any], others: list[dict[str, Any]]) -> str:
    machine = document["machine"]
    on = f"{machine['cores']} cores (Linux {machine['kernel']}, Python {machine['python']})"
    is_whole = document.get("runs", 1) == 1
    each = "each agent in one run of `./dev bench`" if is_whole else "each part in its own run"
    said = [f"Measured on {document['date']} on a machine with {on}, {each}: {_run(document)}"]
    for other in others:
        is_same = all(machine[fact] == other["machine"][fact] for fact in ("cores", "kernel"))
        day = "" if other["date"] == document["date"] else f" on {other['date']}"
        said.append(f"on {'the same' if is_same else 'another'} machine{day}, {_run(other)}")
    return "; ".join(said) + ". Times are in UTC. The load is the average over the minute before the run."


def _run(document: dict[str, Any]) -> str:
    scale = "" if document["scale"] == 1 else f", at a scale of {document['scale']:g}"
    load = document["machine"]["load_before"]
    least = "" if document.get("runs", 1) == 1 else "at most "
    return f"{document['agent']} from {document['from']} to {document['to']} (load {least}{load}{scale})"


def _row(name: str, figure: dict[str, Any], floors: _Floors) -> list[str]:
    unit, budget = figure["unit"], BUDGETS.get(name)
    has_floor = "floor" in figure
    words = [
        _title(name),
        worded(figure["median"], unit),
        f"{worded(figure['floor'], unit)} ({floors.number(figure['floor_is'])})" if has_floor else "",
        "",
    ]
    if figure["samples"] > 1:
        words[1] += f" ({_pair(figure['min'], figure['max'], unit, ' to ')})"
    if "ratio" in figure:
        words[2] += f" ×{digits(figure['ratio'])}"
    if budget:
        words[-1] = budget.worded(unit)
        if verdict := budget.verdict(figure):
            words[-1] += f", **{verdict}**"
    return words


def _other_agents_cell(name: str, figure: dict[str, Any], other: dict[str, Any]) -> str:
    if name in NOT_ALIKE:
        return "not comparable"
    found = other["figures"].get(name)
    if found is None:
        return "not measured" if figure["part"] in other["missing"] else ""
    words = worded(found["median"], found["unit"])
    return f"{words} (×{digits(found['median'] / figure['median'], 2)})" if figure["median"] > 0 else words


def _pair(first: float, second: float, unit: str, between: str) -> str:
    """Return two values with their units. If both have the same unit, it is written only once."""
    words = worded(first, unit), worded(second, unit)
    numbers, units = zip(*(word.rpartition(" ")[::2] for word in words), strict=True)
    return f"{numbers[0]}{between}{words[1]}" if units[0] == units[1] else between.join(words)


def worded(value: float, unit: str) -> str:
    """Return a value with three digits and its unit. Seconds below 1 become milliseconds or microseconds."""
    if unit == "s" and 0 < abs(value) < 1:
        return f"{digits(value * 1000)} ms" if abs(value) >= 0.001 else f"{digits(value * 1e6)} µs"
    return f"{digits(value)} {unit.removeprefix('1')}"


def digits(value: float, count: int = 3) -> str:
    """Return a value rounded to ``count`` significant digits, with spaces between thousands."""
    rounded = float(f"{value:.{count}g}")
    return f"{rounded:,.0f}".replace(",", " ") if abs(rounded) >= 100 else f"{rounded:g}"
