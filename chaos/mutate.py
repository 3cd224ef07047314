"""``./dev mutate [PATH…]``: make small wrong changes of the agent, one at a time, and list those that no test notices.

A mutant is one change of ``agent_shim``: a statement removed, a condition negated, another number, another constant.
The tests that reach its line run against it, fastest first, until one fails; if all pass, the mutant survives.

Two stages: forks of one process that has the unit tests loaded (``chaos.mutate_forked``; a fraction of a
second for each mutant), and for those that survive it a run of pytest with all daily tests, which start agents (seconds
to minutes for each). Coverage measures once for each stage, in the second also in child processes of tests, which tests
reach which line; ``.mutate`` keeps that and the results, so that an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, TypeAlias

ROOT: Final = Path(__file__).parents[1]
STORE: Final = Path(os.environ.get("SHIM_MUTATE_STORE") or ROOT / ".mutate")
DEFAULT_PATHS: Final = ("supervisor", "host", "services/disks", "edges/bus", "actions/dispatch.py")
MAX_TESTS: Final = 40
"""Tests that run against one mutant, the fastest of those that reach its line."""
MAX_S: Final = {"forks": 2.0, "processes": 20.0}
"""Sum of their durations under coverage, by stage."""
TIMEOUT_S: Final = 120.0
"""A mutant under which the tests take longer is noticed: something waits for ever."""
Result: TypeAlias = dict[str, object]
"""Members ``outcome`` (noticed, survived, unreached, not tried), ``tests``, ``by``, ``stage``."""
Results: TypeAlias = dict[str, Result]
_FORKS: Final = "forks"
_PROCESSES: Final = "processes"
_FORKS_TESTS: Final = ("tests/unit",)
DAILY: Final = "not root and not image and not slow and not kubernetes and not go_agent and not vm"

_COVERAGE: Final = """
[run]
branch = false
parallel = true
source = agent_shim
data_file = {data}
sigterm = true
"""
_CHILDREN: Final = """
patch = subprocess
context = ${PYTEST_CURRENT_TEST}
"""
"""Each test is a process's context: those that tests start inherit the variable."""


@dataclass(frozen=True)
class Mutant:
    """One change: characters ``begin`` to ``end`` of a file become ``after``."""

    path: str
    line: int
    kind: str
    begin: int
    end: int
    before: str
    after: str
    is_import_time: bool = False

    @property
    def key(self) -> str:
        """Stays the same while the text around it does."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    def applied(self, text: str) -> str:
        """The text of the file with the change."""
        assert text[self.begin : self.end] == self.before
        return text[: self.begin] + self.after + text[self.end :]


# --- mutants --------------------------------------------------------------------------------------------------------

_SWAPPED: Final[dict[type[ast.AST], str]] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


def mutants(path: str, text: str) -> Iterator[Mutant]:
    """All mutants of a module, in the order of its text. Docstrings, types, logging and imports are left alone."""
    lines = text.splitlines(keepends=True)
    starts = list(accumulate((len(line) for line in lines), initial=0))
    tree = ast.parse(text)
    skipped = set(_skipped(tree))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    inner = {node for function in functions for each in function.body for node in ast.walk(each)}

    def offset(line: int, column: int) -> int:
        """Convert a column to characters; ``ast`` counts columns in bytes of UTF-8."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(part: ast.expr | ast.stmt) -> tuple[int, int]:
        """Begin and end in the text."""
        assert part.end_lineno is not None
        assert part.end_col_offset is not None
        return offset(part.lineno, part.col_offset), offset(part.end_lineno, part.end_col_offset)

    found = []
    for node in ast.walk(tree):
        if node in skipped:
            continue
        for place, kind, after in _changes(node, lambda part: text[slice(*span(part))]):
            begin, end = span(place)
            found.append(Mutant(path, place.lineno, kind, begin, end, text[begin:end], after, node not in inner))
    return iter(sorted(found, key=lambda one: (one.begin, one.end)))


def _changes(node: ast.AST, source: Callable[[ast.expr], str]) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """List changes of a node: the part to replace, the kind of change, the new text; ``source`` gives a part's text."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
            yield node, "statement removed", "pass"
        case ast.Assign(targets=targets) if all(isinstance(one, ast.Attribute) for one in targets):
            yield node, "statement removed", "pass"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, "condition negated", f"(not ({source(test)}))"
        case ast.BoolOp(op=op, values=[first, *_]):
            yield node, f"only the first of {type(op).__name__.lower()}", f"({source(first)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _SWAPPED:
            yield node, "comparison", f"({source(left)} {_SWAPPED[type(op)]} {source(right)})"
        case ast.Constant(value=bool(value)):
            yield node, "constant", str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, "number", f"({value!r} * 2 + 1)"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield value, "returns None", "None"
        case _:
            return


def _skipped(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes whose change is no fault: annotations, docstrings, log calls, imports, module constants of types."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom():
                yield from ast.walk(node)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "audit" | "logging")))):
                yield from ast.walk(node)
            case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
                yield from ast.walk(annotation)
            case ast.FunctionDef(returns=ast.expr() as returns) | ast.AsyncFunctionDef(returns=ast.expr() as returns):
                yield from ast.walk(returns)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from ast.walk(node)
            case _:
                continue


# --- which tests reach which line -----------------------------------------------------------------------------------


def measure(copy: Path, stage: str, tests: Sequence[str], *, children: bool) -> None:
    """Run tests once under coverage; the lines that each reaches and its seconds go into the store."""
    place = STORE / stage
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    config = place / "coveragerc"
    config.write_text(_COVERAGE.format(data=place / "coverage") + (_CHILDREN if children else ""))
    environment = {**_environment(copy), "SHIM_MUTATE_DURATIONS": str(place / "durations.json")}
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", "-m", "pytest", "-q", "-m", DAILY]
    command += ["-p", "no:cacheprovider", "-p", "chaos.mutate_contexts", *tests]
    subprocess.run(command, cwd=copy, env=environment, check=False, stdout=sys.stderr)
    subprocess.run(
        [sys.executable, "-m", "coverage", "combine", f"--rcfile={config}", "-q"], cwd=copy, env=environment, check=True
    )


def reaching(stage: str) -> dict[str, dict[int, list[str]]]:
    """By file and line, the node ids of the tests that reach it, the fastest first."""
    durations = json.loads((STORE / stage / "durations.json").read_text())
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    connection = sqlite3.connect(STORE / stage / "coverage")
    rows = connection.execute(
        "select file.path, context.context, line_bits.numbits from line_bits "
        "join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id"
    )
    for path, context, bits in rows:
        test = context.split(" (")[0].partition("|")[0]
        if test not in durations:
            continue
        name = path[path.rindex("agent_shim/") :]
        for line in _lines(bits):
            found[name][line].add(test)

    def fastest(tests: Iterable[str]) -> list[str]:
        chosen = sorted(tests, key=lambda one: durations[one])[:MAX_TESTS]
        return [
            one
            for one, sum_s in zip(chosen, accumulate(durations[one] for one in chosen), strict=True)
            if sum_s < MAX_S[stage]
        ]

    return {name: {line: fastest(tests) for line, tests in lines.items()} for name, lines in found.items()}


def _lines(bits: bytes) -> Iterator[int]:
    for index, byte in enumerate(bits):
        for bit in range(8):
            if byte & (1 << bit):
                yield index * 8 + bit


# --- running --------------------------------------------------------------------------------------------------------


def survives(copy: Path, mutant: Mutant, tests: Sequence[str]) -> tuple[bool, str]:
    """Return True if all ``tests`` pass with the change, and the first that failed or hung."""
    target = copy / mutant.path
    original = target.read_text()
    target.write_text(mutant.applied(original))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    try:
        running = subprocess.Popen(
            command,
            cwd=copy,
            env=_environment(copy),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = running.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
            return False, f"took longer than {TIMEOUT_S:g} s"
    finally:
        target.write_text(original)
    if running.returncode == 0:
        return True, ""
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return False, (failed[0] if failed else printed[-200:])[:200]


def _tests_of(mutant: Mutant, lines: dict[int, list[str]]) -> list[str]:
    """Return the tests that reach a line; inside a statement, those of its first line.

    A line that runs at the import of a module is reached by all tests of the module.
    """
    for line in range(mutant.line, max(0, mutant.line - 8), -1):
        if line in lines:
            return lines[line]
    if mutant.is_import_time:
        return list(dict.fromkeys(test for tests in lines.values() for test in tests))[:MAX_TESTS]
    return []


def _environment(copy: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SHIM_MUTATE_STORE": str(STORE),
    }


def chosen(paths: Iterable[str]) -> list[Mutant]:
    """The mutants of these files and directories of ``agent_shim``."""
    files: list[Path] = []
    for name in paths:
        place = ROOT / name if name.startswith("agent_shim") else ROOT / "agent_shim" / name
        if not place.exists():
            raise SystemExit(f"cannot mutate {name}: no such file below agent_shim")
        files += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return [one for path in files for one in mutants(str(path.relative_to(ROOT)), path.read_text())]


def table(results: Results, wanted: Sequence[Mutant]) -> str:
    """Survivors by module."""
    by_module: dict[str, list[tuple[Mutant, Result]]] = defaultdict(list)
    for one in wanted:
        if one.key in results:
            by_module[one.path].append((one, results[one.key]))
    lines = ["| module | mutants | noticed | reached by no test | survived |", "|---|---|---|---|---|"]
    for path, rows in sorted(by_module.items()):
        counts = [sum(row["outcome"] == word for _, row in rows) for word in ("noticed", "unreached", "survived")]
        lines.append(f"| `{path}` | {len(rows)} | {counts[0]} | {counts[1]} | {counts[2]} |")
    lines.append("")
    for path, rows in sorted(by_module.items()):
        for one, row in rows:
            if row["outcome"] != "noticed":
                change = f"{' '.join(one.before.split())[:70]} -> {' '.join(one.after.split())[:70]}"
                lines.append(f"{path}:{one.line}: {row['outcome']} ({row['tests']} tests): {one.kind}: {change}")
    return "\n".join(lines)


def try_in_forks(wanted: Sequence[Mutant], results: Results, workers: int) -> None:
    """The first stage: ``chaos.mutate_forked`` in so many processes."""
    _collect(results)  # of a run that was interrupted
    reached = reaching(_FORKS)
    tasks = []
    for one in wanted:
        if one.key in results:
            continue
        if tests := [] if one.is_import_time else _tests_of(one, reached.get(one.path, {})):
            tasks.append((one, tests))
        else:
            results[one.key] = {"outcome": "unreached", "tests": 0, "by": "", "stage": _FORKS}
    running = []
    for number in range(workers):
        scratch = STORE / f"tmp-{number}"
        scratch.mkdir(exist_ok=True)
        given, taken = STORE / f"tasks-{number}.json", scratch / "results.jsonl"
        given.write_text(json.dumps([(asdict(one), tests) for one, tests in tasks[number::workers]]))
        taken.write_text("")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "chaos.mutate_forked",
            "-p",
            "no:cacheprovider",
            "-m",
            DAILY,
        ]
        command += [f"--basetemp={scratch / 'base'}", *_FORKS_TESTS]
        environment = {**_environment(ROOT), "SHIM_MUTATE_TASKS": str(given), "SHIM_MUTATE_RESULTS": str(taken)}
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL))
    while any(each.poll() is None for each in running):
        time.sleep(10)
        done = sum((STORE / f"tmp-{number}/results.jsonl").read_bytes().count(b"\n") for number in range(workers))
        sys.stderr.write(f"mutate: {done} of {len(tasks)} tried in forks\n")
    _collect(results)


def _confined(scratch: Path) -> list[str]:
    """Return a command that runs another one in namespaces in which only ``scratch`` and the results can be written.

    A mutant can remove the wrong directory or kill the wrong process. Without root it can do less.
    """
    if os.geteuid() != 0:
        return []
    script = """
        mount --bind "$1" "$1" && mount --bind /dev /dev && mount -o remount,bind,ro /dev &&
        mount -t tmpfs -o mode=1777 tmpfs /tmp && mount -o remount,bind,ro / && shift && exec "$@"
    """
    return [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "sh",
        "-c",
        script,
        "sh",
        str(scratch),
    ]


def _collect(results: Results) -> None:
    for path in STORE.glob("tmp-*/results.jsonl"):
        for line in path.read_text().splitlines():
            key, outcome, tests, by = json.loads(line)
            results[key] = {"outcome": outcome, "tests": tests, "by": by, "stage": _FORKS}
    _save(results)


def try_in_processes(wanted: Sequence[Mutant], results: Results, copy: Path, minutes: float) -> None:
    """The second stage, for what the first did not notice."""
    reached = reaching(_PROCESSES)
    left = [one for one in wanted if _is_left(results.get(one.key, {}))]
    begun_at = time.monotonic()
    for position, one in enumerate(left, 1):
        if minutes and time.monotonic() - begun_at > 60 * minutes:
            sys.stderr.write(f"mutate: time is up at {position} of {len(left)}\n")
            return
        if tests := _tests_of(one, reached.get(one.path, {})):
            alive, by = survives(copy, one, tests)
            outcome = "survived" if alive else "noticed"
        else:
            outcome, by = "unreached", ""
        results[one.key] = {"outcome": outcome, "tests": len(tests), "by": by, "stage": _PROCESSES}
        _save(results)
        sys.stderr.write(f"[{position} of {len(left)}] {one.path}:{one.line} {one.kind}: {outcome}\n")


def _is_left(result: Result) -> bool:
    return result.get("stage") != _PROCESSES and result.get("outcome") != "noticed"


def _save(results: Results) -> None:
    (STORE / "results.json").write_text(json.dumps(results))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if no mutant survived."""
    parser = argparse.ArgumentParser(prog="./dev mutate", description=__doc__)
    parser.add_argument("path", nargs="*", default=DEFAULT_PATHS, help=f"below agent_shim (default: {DEFAULT_PATHS})")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="N mutants of all, chosen at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="the first stage only")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of the first stage")
    parser.add_argument(
        "--minutes", type=float, default=0, help="stop the second stage after that; the next run goes on"
    )
    parser.add_argument("--measure", action="store_true", help="measure again which tests reach which line")
    asked = parser.parse_args(arguments)
    wanted = chosen(asked.path)
    if asked.sample:
        # In random order: what --minutes cuts off leaves a fair sample of all.
        wanted = random.Random(asked.seed).sample(wanted, min(asked.sample, len(wanted)))
    copy = STORE / "copy"
    _make_copy(copy)
    stages = [(_FORKS, _FORKS_TESTS)] if asked.quick else [(_FORKS, _FORKS_TESTS), (_PROCESSES, ("tests",))]
    for stage, tests in stages:
        if asked.measure or not (STORE / stage / "coverage").exists():
            sys.stderr.write(f"mutate: running {' '.join(tests)} once under coverage\n")
            measure(copy, stage, tests, children=stage == _PROCESSES)
    store = STORE / "results.json"
    results: Results = json.loads(store.read_text()) if store.exists() else {}
    try_in_forks(wanted, results, asked.workers)
    if not asked.quick:
        try_in_processes(wanted, results, copy, asked.minutes)
    sys.stdout.write(f"{table(results, wanted)}\n")
    return 1 if any(results.get(one.key, {}).get("outcome") == "survived" for one in wanted) else 0


def _make_copy(copy: Path) -> None:
    """Copy the files that git tracks or would add; their current content is mutated."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)


if __name__ == "__main__":
    sys.exit(main())
