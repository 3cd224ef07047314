"""SVG pictures for README.md: terminal output in a window, and a bar chart of the most important figures.

``script -qc 'agent-shim doctor' | python -m tools.bench.draw terminal '$ agent-shim doctor' >docs/pictures/doctor.svg``
draws a terminal. ``python -m tools.pages`` draws ``agent-shim status`` and the chart.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from html import escape
from typing import Final

COLOURS: Final = {"32": "#3fb950", "33": "#d29922", "31": "#f85149", "2": "#8b949e"}
_SGR: Final = re.compile(r"\x1b\[([0-9;]*)m")
_OTHER: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")


# --- a terminal -------------------------------------------------------------------------------------------------------


def terminal(text: str, command: str) -> str:
    """Return a picture of a terminal window with a command and its coloured output."""
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
    """Return a bar chart of the durations in README.md's table of measurements, on a logarithmic scale."""
    table = page.partition("<!-- figures -->")[2].partition("<!-- /figures -->")[0]
    head, _, *rows = [[cell.strip(" `") for cell in line.strip("| ").split("|")] for line in table.split("\n") if line]
    timed = [(name.replace("`", ""), cells) for name, *cells in rows if all(_seconds(cell) for cell in cells)]
    left, width, decades = 330.0, 640.0, range(-4, 3)
    bottom = 46 * len(timed) + 40

    def at(seconds: float) -> float:
        return left + (math.log10(seconds) - decades[0]) / len(decades) * width

    drawn = []
    for power in decades:
        label = f"{10.0**power:.3g} s" if power >= 0 else f"{10.0 ** (power + 3):.3g} ms"
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
    """Return a duration such as ``56.5 ms`` in seconds, or 0 if the cell has another unit."""
    number, _, unit = cell.partition(" ")
    return float(number) * UNITS[unit] if unit in UNITS else 0.0


def _text(x: float, y: float, text: str, **attributes: object) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


def main() -> None:
    """Write the picture of a terminal to standard output."""
    match sys.argv[1:]:
        case ["terminal", command]:
            sys.stdout.write(terminal(sys.stdin.read(), command))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
