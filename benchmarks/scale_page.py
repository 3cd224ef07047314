"""The tables and the picture of docs/scale.md, drawn from the results of ``benchmarks.scale``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.draw import Line, charts

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs/scale.md"
PICTURE: Final = ROOT / "docs/pictures/scale.svg"
MEASURED: Final = (
    "agents|server MB|server CPU %|heartbeats/s|bytes/s of them|all asked, last answer|back: first|half|last"
    "|attempts of each|most attempts/s|deaf"
)
BEYOND: Final = (
    "agents|server memory|server CPU at rest|heartbeats/s|pings/s both ways"
    "|after an outage of 60 s: half back|the last back|attempts of each"
)
NAMES: Final = {
    "server_mb": "memory of the server, MB",
    "server_cpu_percent": "processor of the server at rest, %",
    "messages_per_second": "heartbeats a second",
    "back_median": "half of them back after, s",
    "back_last": "the last back after, s",
    "attempts": "attempts of each",
}


def write(found: dict[str, Any]) -> None:
    """Write the tables into the page, and the picture."""
    text = PAGE.read_text()
    for name, draw in PLACES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = before + begin + draw(found) + end + after
    PAGE.write_text(text)
    PICTURE.write_text(picture(found["measured"]))


def measured(found: dict[str, Any]) -> str:
    """Return the table of measurements."""
    rows = [MEASURED.split("|")]
    rows += [
        [
            f"{each['agents']}",
            f"{each['server_mb']:.1f}",
            f"{each['server_cpu_percent']:.2f}",
            f"{each['messages_per_second']:.1f}",
            f"{each['payload_bytes_per_second']:.0f}",
            f"{each['asked_all_after']:.2f} s",
            *(f"{each[name]:.1f} s" for name in ("back_first", "back_median", "back_last")),
            f"{each['attempts']:.1f}",
            f"{each['most_attempts_per_second']:.0f}",
            f"{each['deaf']}",
        ]
        for each in found["measured"]
    ]
    return _table(rows)


def checked(found: dict[str, Any]) -> str:
    """Return the table of the model beside the largest point, which it was not fitted to."""
    told = found["modelled"]
    rows = [[f"at {found['measured'][-1]['agents']} agents", "modelled from the smaller ones", "measured"]]
    rows += [
        [NAMES[name], f"{check['modelled']:g}", f"{check['measured']:g}"] for name, check in told["checks"].items()
    ]
    costs = f"{told['handshake_cpu'] * 1000:.1f} ms of the server and {told['agent_cpu'] * 1000:.1f} ms of the agent"
    return _table(rows) + f"\nComing back costs {costs}.\n"


def beyond(found: dict[str, Any]) -> str:
    """Return the table of the model's predictions."""
    rows = [BEYOND.split("|")]
    rows += [
        [
            f"{each['agents']:,}".replace(",", " "),
            f"{each['server_mb']:,.0f} MB".replace(",", " "),
            f"{each['server_cpu_percent']:.0f} %",
            f"{each['heartbeats_per_second']:.0f}",
            f"{each['pings_per_second']:.0f}",
            f"{each['storm_back_median']:.0f} s",
            f"{each['storm_back_last']:.0f} s",
            f"{each['storm_attempts']:.0f}",
        ]
        for each in found["modelled"]["beyond"]
    ]
    return _table(rows)


PLACES: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    "measured": measured,
    "checked": checked,
    "beyond": beyond,
}


def _table(rows: Sequence[Sequence[str]]) -> str:
    first, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [first, ["---"] * len(first), *rest]) + "\n"


def picture(points: Sequence[dict[str, Any]]) -> str:
    """Draw the reconnections over the time since the server's return."""
    lines: list[Line] = [
        (
            f"{point['agents']} agent{'s' if point['agents'] > 1 else ''}",
            [(at, 100 * connected / point["agents"]) for at, connected, _ in point["curve"]],
        )
        for point in points
    ]
    end = max(at for point in points for at, _, _ in point["curve"])
    return charts([("agents that are back", "percent", lines)], 0.0, end, ())
