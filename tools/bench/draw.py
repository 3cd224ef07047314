"""Pictures of the documentation from real output: that of a terminal, and the dashboard over a real Prometheus.

``script -qc 'agent-shim status' | python -m tools.bench.draw terminal '$ agent-shim status'
>docs/pictures/status.svg``,
``python -m tools.bench.draw dashboard http://127.0.0.1:9090 MINUTES >docs/pictures/dashboard.svg``.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

BOARD: Final = Path(__file__).parents[2] / "deploy/grafana/agent-shim.json"
COLOURS: Final = {"32": "#3fb950", "33": "#d29922", "31": "#f85149", "2": "#8b949e"}
LINES: Final = ("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0", "#508642")
FAINT: Final = "#8e8e9e"
NAMED: Final = {
    "green": "#56a64b",
    "red": "#d44a3a",
    "orange": "#ff9830",
    "yellow": "#f2cc0c",
    "text": "#8e8e9e",
    "blue": "#3274d9",
}
_SGR: Final = re.compile(r"\x1b\[([0-9;]*)m")
_OTHER: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")


# --- a terminal -------------------------------------------------------------------------------------------------------


def terminal(text: str, command: str) -> str:
    """Draw the coloured output of a command as a window."""
    lines = [f"\x1b[1m{command}\x1b[0m", *_OTHER.sub("", text).replace("\r", "").rstrip().split("\n")]
    width = 8.43 * max(len(_SGR.sub("", line)) for line in lines) + 40
    height = 19 * len(lines) + 58
    rows = []
    for number, line in enumerate(lines):
        spans = "".join(_spans(line))
        rows.append(f'<text x="20" y="{56 + 19 * number}" xml:space="preserve">{spans}</text>')
    dots = "".join(
        f'<circle cx="{20 + 18 * place}" cy="18" r="5.5" fill="{colour}"/>'
        for place, colour in enumerate(("#f85149", "#d29922", "#3fb950"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14" fill="#e6edf3">\n'
        f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="8" fill="#0d1117" stroke="#30363d"/>'
        f"{dots}\n" + "\n".join(rows) + "\n</svg>\n"
    )


def _spans(line: str) -> Iterator[str]:
    style = ""
    for number, part in enumerate(_SGR.split(line)):
        if number % 2:
            codes = [code for code in part.split(";") if code not in ("", "0")]
            colour = next((COLOURS[code] for code in codes if code in COLOURS), "")
            style = (f' fill="{colour}"' if colour else "") + (' font-weight="bold"' if "1" in codes else "")
        elif part:
            yield f"<tspan{style}>{escape(part)}</tspan>"


# --- the headline figures ---------------------------------------------------------------------------------------------

UNITS: Final = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
BARS: Final = """\
<style>
  .ours { fill: #2f81f7 } .theirs { fill: #848d97 } text { fill: #24292f } .grid { stroke: #8884 }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }
</style>
"""


def figures(page: str) -> str:
    """Draw the durations in the table of figures of README.md as bars over a logarithmic scale."""
    table = page.partition("<!-- figures -->")[2].partition("<!-- /figures -->")[0]
    head, _, *rows = [[cell.strip(" `") for cell in line.strip("| ").split("|")] for line in table.split("\n") if line]
    timed = [(name.replace("`", ""), cells) for name, *cells in rows if all(_seconds(cell) for cell in cells)]
    left, width, decades = 330.0, 640.0, range(-4, 3)
    bottom = 46 * len(timed) + 40

    def at(seconds: float) -> float:
        return left + (math.log10(seconds) - decades[0]) / len(decades) * width

    drawn = []
    for power in decades:
        label = _shown(10.0**power, "s")
        drawn.append(f'<path class="grid" d="M{at(10.0**power):.0f} 34V{bottom - 6}"/>')
        drawn.append(_text(at(10.0**power), bottom + 10, label, text_anchor="middle", font_size=11))
    for number, (name, cells) in enumerate(timed):
        y = 46 * number + 40
        drawn.append(_text(left - 12, y + 20, name, text_anchor="end"))
        for place, (kind, cell) in enumerate(zip(("ours", "theirs"), cells, strict=True)):
            length = at(_seconds(cell)) - left
            drawn.append(
                f'<rect class="{kind}" x="{left:g}" y="{y + 17 * place}" width="{length:.0f}" height="15" rx="2"/>'
            )
            drawn.append(_text(left + length + 6, y + 17 * place + 12, cell, font_size=12))
    drawn.append(_text(left + width, 19, "logarithmic scale", text_anchor="end", font_size=11))
    for place, (kind, name) in enumerate(zip(("ours", "theirs"), head[1:], strict=True)):
        drawn.append(f'<rect class="{kind}" x="{left + 160 * place:g}" y="8" width="12" height="12" rx="2"/>')
        drawn.append(_text(left + 160 * place + 18, 19, name))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1040 {bottom + 20}" width="1040" '
        f'font-family="system-ui, Helvetica, sans-serif" font-size="14">\n' + BARS + "\n".join(drawn) + "\n</svg>\n"
    )


def _seconds(cell: str) -> float:
    """Return a duration such as ``56.5 ms``. 0 for another figure."""
    number, _, unit = cell.partition(" ")
    return float(number) * UNITS[unit] if unit in UNITS else 0.0


# --- a dashboard ------------------------------------------------------------------------------------------------------


def dashboard(url: str, minutes: float) -> str:
    """The panels of the dashboard over the last ``minutes``, about as Grafana draws them."""
    board = json.loads(BOARD.read_text())
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    drawn = [_panel(url, panel, minutes) for panel in board["panels"]]
    return _picture(1440, rows * 30 + 8, drawn)


def _panel(url: str, panel: dict[str, Any], minutes: float) -> str:
    place = panel["gridPos"]
    x, y, width, height = (place[key] * scale for key, scale in (("x", 60), ("y", 30), ("w", 60), ("h", 30)))
    x, y, width, height = x + 4, y + 4, width - 8, height - 8
    draw = _stat if panel["type"] == "stat" else _series
    box = (x, y, width, height)
    return _frame(panel["title"], box) + draw(url, panel, minutes, box)


Box = tuple[float, float, float, float]


def _text(x: float, y: float, text: str, **attributes: object) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


def _stat(url: str, panel: dict[str, Any], _: float, box: Box) -> str:
    x, y, width, height = box
    found = _ask(url, "query", query=_plain(panel["targets"][0]["expr"]))
    value = float(found[0]["value"][1]) if found else None
    defaults = panel["fieldConfig"]["defaults"]
    colour = "#3d434c"
    for step in defaults["thresholds"]["steps"] if value is not None else ():
        if step["value"] is None or (value is not None and value >= step["value"]):
            colour = NAMED[step["color"]]
    text = "no data" if value is None else _shown(value, defaults["unit"])
    frame = f'<rect x="{x + 8}" y="{y + 28}" width="{width - 16}" height="{height - 36}" rx="3" fill="{colour}"/>'
    return frame + _text(x + width / 2, y + height / 2 + 24, text, font_size=30, text_anchor="middle", fill="#fff")


Line = tuple[str, list[tuple[float, float]]]
"""A name and its points: moments and values."""

Band = tuple[float, float]
"""From when to when."""


def charts(panels: Sequence[tuple[str, str, Sequence[Line]]], begin: float, end: float, bands: Sequence[Band]) -> str:
    """Charts below each other: title, unit and lines of each. ``bands`` are shaded in all of them."""
    width, height = 1100.0, 210.0
    drawn = []
    for number, (title, unit, lines) in enumerate(panels):
        x, y = 4.0, number * (height + 8) + 4
        most = max((value for _, points in lines for _, value in points), default=0.0)
        scale = Scale(100.0 if unit == "percent" else most * 1.15 or 1.0, unit)
        area = Area((x + 62, y + 32, x + width - 14, y + height - 46), begin, end, scale)
        colours = [LINES[place % len(LINES)] for place in range(len(lines))]
        drawn.append(_frame(title, (x, y, width, height)))
        drawn += [area.band(*band) for band in bands]
        drawn.append(area.axes())
        drawn += [area.line(points, colour, 0) for (_, points), colour in zip(lines, colours, strict=True) if points]
        drawn.append(_legend([name for name, _ in lines], colours, (x, y, width, height)))
    return _picture(width + 8, len(panels) * (height + 8) + 8, drawn)


def _picture(width: float, height: float, drawn: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'font-family="DejaVu Sans, Helvetica, sans-serif" font-size="11" fill="#ccccdc">\n'
        f'<rect width="100%" height="100%" fill="#111217"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _frame(title: str, box: Box) -> str:
    x, y, width, height = box
    frame = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="#181b1f" stroke="#2b2f36"/>'
    return frame + _text(x + 10, y + 18, title, font_size=13, fill="#e6e6f0")


def _lines(url: str, panel: dict[str, Any], begin: float, end: float) -> list[Line]:
    lines: list[Line] = []
    step = max(1.0, (end - begin) / 240)
    for target in panel["targets"]:
        for one in _ask(url, "query_range", query=_plain(target["expr"]), start=begin, end=end, step=step):
            name = target["legendFormat"]
            for label, value in one["metric"].items():
                name = name.replace("{{" + label + "}}", value)
            points = [(float(at), float(value)) for at, value in one["values"] if value not in ("NaN", "+Inf")]
            if points:
                lines.append((name.strip() or "value", points))
    return lines


def _series(url: str, panel: dict[str, Any], minutes: float, box: Box) -> str:
    x, y, width, height = box
    end = time.time()
    begin = end - minutes * 60
    lines = _lines(url, panel, begin, end)
    defaults = panel["fieldConfig"]["defaults"]
    if not lines:
        return _text(x + width / 2, y + height / 2, "nothing to show", text_anchor="middle", fill=FAINT)
    custom = defaults.get("custom", {})
    if custom.get("stacking"):
        lines = _stacked(lines)
    most = max(value for _, points in lines for _, value in points)
    ceiling = defaults.get("max", most * 1.15 or 1.0)
    scale = Scale(ceiling, defaults["unit"], is_whole=defaults.get("decimals") == 0)
    area = Area((x + 62, y + 32, x + width - 14, y + height - 46), begin, end, scale)
    drawn = [area.axes()]
    chosen = {one["matcher"]["options"]: one["properties"] for one in panel["fieldConfig"]["overrides"]}
    named = {name: NAMED[properties[0]["value"]["fixedColor"]] for name, properties in chosen.items()}
    colours = [named.get(name, LINES[number % len(LINES)]) for number, (name, _) in enumerate(lines)]
    drawn += [
        area.line(points, colour, custom.get("fillOpacity", 0) / 160)
        for (_, points), colour in reversed(list(zip(lines, colours, strict=True)))
    ]
    return "".join([*drawn, _legend([name for name, _ in lines], colours, box)])


class Scale:
    """The values of an axis: three to six ticks at 1, 2 or 5 times a power of ten, in the unit that is shown."""

    def __init__(self, most: float, unit: str, *, is_whole: bool = False) -> None:
        self._unit, self._one = unit, float(1 << 20) if unit == "bytes" else 1.0
        least = most / self._one / 5
        power = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
        self.step = (max(1.0, step) if is_whole else step) * self._one
        self.ceiling = math.ceil(most / self.step - 1e-9) * self.step

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Values with their labels."""
        for number in range(round(self.ceiling / self.step) + 1):
            yield number * self.step, _shown(number * self.step, self._unit)


class Area:
    """Area of the lines: left, top, right, bottom, the period, and the scale."""

    def __init__(self, box: Box, begin: float, end: float, scale: Scale) -> None:
        self._left, self._top, self._right, self._bottom = box
        self._begin, self._end, self._scale = begin, end, scale

    def axes(self) -> str:
        """Levels with their values, and three moments."""
        parts = []
        for value, label in self._scale.ticks():
            height = self._bottom - value / self._scale.ceiling * (self._bottom - self._top)
            parts.append(f'<path d="M{self._left} {height}H{self._right}" stroke="#2b2f36"/>')
            parts.append(_text(self._left - 6, height + 4, label, text_anchor="end", fill=FAINT))
        for share in (0.0, 0.5, 1.0):
            moment = self._begin + share * (self._end - self._begin)
            stamp = f"{moment:.0f} s" if self._end < 600 else time.strftime("%H:%M", time.gmtime(moment))
            across = self._left + share * (self._right - self._left)
            parts.append(_text(across, self._bottom + 15, stamp, text_anchor="middle", fill=FAINT))
        return "".join(parts)

    def line(self, points: Sequence[tuple[float, float]], colour: str, opacity: float) -> str:
        """A line, filled below where it is not quite transparent."""
        path = " ".join(self._at(moment, value) for moment, value in points)
        drawn = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        if not opacity:
            return drawn
        ends = self._at(points[0][0], 0), self._at(points[-1][0], 0)
        return f'<polygon points="{ends[0]} {path} {ends[1]}" fill="{colour}" fill-opacity="{opacity}"/>{drawn}'

    def band(self, begin: float, end: float) -> str:
        """A period to mark."""
        left, right = (float(self._at(moment, 0).partition(",")[0]) for moment in (begin, end))
        height = self._bottom - self._top
        return (
            f'<rect x="{left}" y="{self._top}" width="{max(1.0, right - left):.1f}" height="{height}" fill="#3d2b2b"/>'
        )

    def _at(self, moment: float, value: float) -> str:
        across = self._left + (moment - self._begin) / (self._end - self._begin) * (self._right - self._left)
        return f"{across:.1f},{self._bottom - min(1.0, value / self._scale.ceiling) * (self._bottom - self._top):.1f}"


def _legend(names: Sequence[str], colours: Sequence[str], box: Box) -> str:
    x, y, width, height = box
    across, below, parts = x + 12.0, y + height - 11, []
    for number, name in enumerate(names):
        room = 6.6 * len(name) + 26
        if across + room > x + width - 60:
            parts.append(_text(across, below, f"and {len(names) - number} more", fill=FAINT))
            break
        parts.append(f'<rect x="{across:.1f}" y="{below - 8}" width="10" height="4" fill="{colours[number]}"/>')
        parts.append(_text(across + 14, below, name))
        across += room
    return "".join(parts)


def _stacked(lines: Sequence[Line]) -> list[Line]:
    below: dict[float, float] = {}
    found = []
    for name, points in lines:
        for moment, value in points:
            below[moment] = below.get(moment, 0.0) + value
        found.append((name, [(moment, below[moment]) for moment, _ in points]))
    return found


def _plain(expression: str) -> str:
    """As Grafana asks when all instances are chosen."""
    return expression.replace("$instance", ".*").replace("$__rate_interval", "5m")


def _ask(url: str, what: str, **arguments: object) -> list[Any]:
    with urllib.request.urlopen(f"{url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}", timeout=30) as answer:
        found: list[Any] = json.load(answer)["data"]["result"]
        return found


def _shown(value: float, unit: str) -> str:
    """A value in the unit of a panel."""
    match unit:
        case "percentunit":
            return f"{value * 100:.0f} %"
        case "percent":
            return f"{value:.0f} %"
        case "bytes":
            return f"{value / (1 << 20):.0f} MiB"
        case "s":
            if value >= 86400:
                return f"{value / 86400:.0f} days"
            return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"
        case "reqps":
            return f"{value:.2g}/s"
    return f"{value:.0f}" if value == int(value) else f"{value:.2g}"


def main() -> None:
    """The picture, on standard output."""
    match sys.argv[1:]:
        case ["terminal", command]:
            sys.stdout.write(terminal(sys.stdin.read(), command))
        case ["dashboard", url, *rest]:
            sys.stdout.write(dashboard(url, float(rest[0]) if rest else 30))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
