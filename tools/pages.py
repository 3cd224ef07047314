"""``./dev run python -m tools.pages``: write the generated files and the generated parts of documentation pages."""

from __future__ import annotations

import ast
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from agent_shim.cli import ansi, status_text
from agent_shim.daemon import boot
from agent_shim.supervisor.monit import parser, rules
from agent_shim.supervisor.state import ACTIVE, NEXT, State, Trigger
from tests.support import attacks_page, limits_page, metrics_page, state_files
from tests.support.source import PACKAGE, ROOT, Module, floors, modules
from tools import commands_page
from tools.bench import draw

PAGES: Final = ROOT / "docs"
PROMETHEUS: Final = ROOT / "deploy/prometheus"


def floor_table() -> str:
    """Return a table of the floors (layers of packages), top first: number, folder, and purpose."""
    rows = [
        f"| {number} | `{folder}/` | {purpose(modules()[folder])} |"
        for number, folder in floors()
        if folder in modules()
    ]
    return "\n".join(["| floor | folder | content |", "|---|---|---|", *rows, ""])


def purpose(module: Module) -> str:
    """Return the first sentence of the module's docstring on one line, for a table cell.

    Raises ``ValueError`` for a module without a docstring.
    """
    first = (ast.get_docstring(module.tree) or "").partition("\n\n")[0]
    sentence = " ".join(first.split()).partition(". ")[0].removesuffix(".")
    if not sentence:
        raise ValueError(f"{PACKAGE}.{module.name} has no docstring")
    return sentence.replace("``", "`").replace("|", "\\|")


def mermaid() -> str:
    """Return a service's state transitions as a Mermaid diagram.

    An arrow is labelled with all events that cause its transition. The states in which a service should run are in a
    box. If an event leads from all of these states to the same target, a single arrow starts at the box. An invalid
    monit file can be found in any state, but its arrow is drawn only from the start.
    """
    inner = [state for state in State if state in ACTIVE | {State.DOWN}]
    arrows: dict[State, dict[Trigger, State]] = {
        state: {trigger: move.to for trigger, move in moves.items() if trigger is not Trigger.FILE_BROKE}
        for state, moves in NEXT.items()
    }
    common = dict(set.intersection(*(set(arrows[state].items()) for state in inner)))
    lines = ["stateDiagram-v2", "    [*] --> stopped", "    [*] --> broken: file unusable", "    state wanted {"]
    for state in inner:
        own = {trigger: to for trigger, to in arrows.pop(state).items() if trigger not in common and to is not state}
        lines += [f"        {arrow}" for arrow in _arrows(state.value, own)]
    lines.append("    }")
    for name, moves in [("wanted", common), *((state.value, moves) for state, moves in arrows.items())]:
        lines += [f"    {arrow}" for arrow in _arrows(name, moves) if not arrow.startswith(f"{name} --> {name}:")]
    return "\n".join(lines) + "\n"


def _arrows(source: str, moves: Mapping[Trigger, State]) -> list[str]:
    events: dict[State, list[str]] = {}
    for trigger in [trigger for trigger in Trigger if trigger in moves]:
        events.setdefault(moves[trigger], []).append(trigger.value)
    return [f"{source} --> {target.value}: {', '.join(names)}" for target, names in events.items()]


def boot_steps() -> str:
    """Return the names of the boot steps in the order in which they run. The log uses the same names."""
    functions = {node.name: node for node in modules()["daemon.boot"].tree.body if isinstance(node, ast.FunctionDef)}

    def rows(node: ast.AST) -> Iterator[str]:
        """Yield the name of each ``Step`` that is created in ``node`` or in a function that ``node`` calls."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in functions:
                yield from rows(functions[node.func.id])
            elif node.func.id == "Step":
                flags = {word.arg for word in node.keywords}
                given = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
                for name in boot.LEFT_TO_THE_CONTAINER if given is None else (given,):
                    yield f"`{name!s}`{'¹' if 'vital' in flags else ''}{'²' if 'late' in flags else ''}"
        for child in ast.iter_child_nodes(node):
            yield from rows(child)

    steps = [f"1. {name}" for name in (*rows(functions["tree_step"]), *rows(functions["steps"]))]
    return "\n".join([*steps, "", "¹ A failure aborts the boot. ² Runs while the agent connects to the bus.", ""])


def statements() -> str:
    """Return a table of the keywords that begin a statement or a rule's test, with the kinds of checks that accept
    each.
    """
    words = {word: option.kinds for word, option in parser.OPTIONS.items() if word != "if"}
    tests = {f"if {'N restarts' if word == 'NUMBER' else word}": reading.kinds for word, reading in rules.TESTS.items()}
    grouped: dict[str, list[str]] = {}
    for word, kinds in sorted((words | tests).items()):
        grouped.setdefault("all" if kinds == rules.ALL else ", ".join(sorted(kinds)), []).append(f"`{word}`")
    rows = [f"| {kinds} | {', '.join(same)} |" for kinds, same in sorted(grouped.items())]
    return "\n".join(["| type of `check` | statements |", "|---|---|", *rows, ""])


def without_effect() -> str:
    """Return a table of the statements that are accepted but have no effect, with the reason for each."""
    rows = [f"| `{words}` | {why} |" for words, why in rules.WITHOUT_EFFECT.items()]
    return "\n".join(["| statement | why |", "|---|---|", *rows, ""])


def decisions() -> str:
    """Return a table of the decision records with their status."""
    rows = ["| record | decision | status |", "|---|---|---|"]
    for path in sorted((PAGES / "decisions").glob("0*.md")):
        text = path.read_text()
        number, title = text.partition("\n")[0].removeprefix("# ").split(". ", 1)
        later = re.search(r"^Superseded by \[record (\d+)\]", text, re.MULTILINE)
        rows.append(f"| [{number}]({path.name}) | {title} | {f'superseded by {later[1]}' if later else 'in force'} |")
    return "\n".join([*rows, ""])


GENERATED: Final[Mapping[tuple[str, str], Callable[[], str]]] = {
    ("architecture.md", "floors"): floor_table,
    ("architecture.md", "states"): lambda: f"```mermaid\n{mermaid()}```\n",
    ("attacks.md", "attacks"): attacks_page.sections,
    ("commands.md", "commands"): commands_page.tables,
    ("decisions/README.md", "records"): decisions,
    ("lifecycle.md", "boot steps"): boot_steps,
    ("configuration.md", "limits"): limits_page.table,
    ("monit-deviations.md", "statements"): statements,
    ("monit-deviations.md", "without effect"): without_effect,
    ("metrics.md", "metrics"): metrics_page.table,
    ("reliability.md", "state files"): state_files.table,
}
"""The function that generates each part of a page, by page and by the part's name.

A page encloses each part in ``<!-- NAME -->`` and ``<!-- /NAME -->``.
"""


def prometheus_rule() -> str:
    """Return the alerting rules as a PrometheusRule object for the Prometheus operator."""
    rules = (PROMETHEUS / "rules.yaml").read_text().partition("\ngroups:")[2]
    for name, text in re.findall(r"&(\w+) (>-\n(?: {12}.*\n)+)", rules):
        # Replace YAML aliases with the values of their anchors, because some tools that process manifests do not
        # support them.
        rules = rules.replace(f"&{name} ", "").replace(f"*{name}\n", text)
    head = "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: agent-shim\n"
    return f"# Made by `python -m tools.pages`.\n{head}spec:\n{textwrap.indent(f'groups:{rules}', '  ')}"


def status_picture() -> str:
    """Return a picture of ``agent-shim status`` in a terminal with 80 columns.

    The picture is drawn from the recorded answer of a real agent (``agent-shim status --json``).
    """
    answer = json.loads((PAGES / "pictures/status.json").read_text())
    return draw.terminal(status_text.render(answer, ansi.coloured, columns=80), "$ agent-shim status")


FILES: Final[Mapping[str, Callable[[], str]]] = {
    "deploy/prometheus/prometheusrule.yaml": prometheus_rule,
    "docs/pictures/status.svg": status_picture,
    "docs/pictures/figures.svg": lambda: draw.figures((ROOT / "README.md").read_text()),
}
"""The function that generates the content of each generated file, by path."""


def regenerated(page: str, text: str) -> str:
    """Return the text of a page after replacing its generated parts. Raises ``ValueError`` if a marker is missing."""
    for (where, name), generate in GENERATED.items():
        if where == page:
            begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
            before, found, rest = text.partition(begin)
            _, closed, after = rest.partition(end)
            if not (found and closed):
                raise ValueError(f"{page} has no place for {name}")
            text = before + begin + generate() + end + after
    return text


def main() -> int:
    """Write all generated files and parts. Return 0."""
    for page in {page for page, _ in GENERATED}:
        path = PAGES / page
        path.write_text(regenerated(page, path.read_text()))
    for name, made in FILES.items():
        (ROOT / name).write_text(made())
    return 0


if __name__ == "__main__":
    sys.exit(main())
