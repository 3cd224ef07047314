"""``./dev mutate [PATH…]``: make small wrong changes to the agent, one at a time, and list those that no test notices.

A mutant is one change to ``agent_shim`` or ``kubernetes_cpi``: a statement removed, a condition negated, a number or
another constant changed. The tests that reach its line run against it until one fails, beginning with the test files
that are named after its module. If all tests pass, the mutant survives.

There are three stages, and each gets only the mutants that the previous ones did not notice. The first forks a process
that has loaded the unit tests. The second forks one that has loaded the contract and integration tests
(``tools.chaos.mutate_forked``). These two stages need from a fraction of a second to a few seconds per mutant, but they
do not mutate an agent that a test starts as another process. The third stage runs pytest with all daily tests on a
changed copy of the code, in which such agents are mutated as well (seconds to minutes per mutant).

Before a stage, its tests run once under coverage, which records the lines that each test reaches. ``.mutate`` contains
these records and the results. Mutants are tried in random order, so an interrupted run is a fair sample, and the next
run continues it. Each process that runs a mutant is confined (``tools.chaos.confined``), because a mutant that runs as
root could delete the wrong directory.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import random
import shutil
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

import hatch_build
from tools.chaos import confined

ROOT: Final = Path(__file__).parents[2]
STORE: Final = Path(os.environ.get("SHIM_MUTATE_STORE") or ROOT / ".mutate")
DEFAULT_PATHS: Final = ("supervisor", "host", "bulk", "services", "edges", "actions", "daemon", "kubernetes_cpi")
MAX_TESTS: Final = 150
"""Maximum number of tests that run against a mutant."""
TIMEOUT_S: Final = 120.0
"""Time limit for one run of pytest in seconds. A test that exceeds it probably waits forever, so the mutant counts as
noticed.
"""
Result: TypeAlias = dict[str, object]
"""A mutant's result in a stage.

``outcome`` is noticed, survived, unreached or not tried. ``tests`` is the number of tests that ran. ``by`` is the test
that noticed the mutant, or the reason why the mutant was not tried.
"""
Results: TypeAlias = dict[str, dict[str, Result]]
"""Results by mutant key and stage name."""


@dataclass(frozen=True)
class Stage:
    """The tests to run against each mutant.

    ``max_s`` limits the sum of their durations in seconds, as measured under coverage.
    """

    name: str
    tests: tuple[str, ...]
    max_s: float
    is_forked: bool = True


STAGES: Final = (
    Stage("unit", ("tests/unit",), 3.0),
    Stage("integration", ("tests/contract", "tests/integration", "tests/cpi"), 6.0),
    Stage("processes", ("tests",), 20.0, is_forked=False),
)
DAILY: Final = "not root and not image and not slow and not kubernetes and not go_agent and not vm"

_COVERAGE: Final = """
[run]
core = ctrace
branch = false
parallel = true
source = agent_shim,kubernetes_cpi
data_file = {data}
sigterm = true
"""
_CHILDREN: Final = "context = ${PYTEST_CURRENT_TEST}\n"
"""Added to the coverage configuration of processes that tests start. pytest sets the environment variable
PYTEST_CURRENT_TEST to the name of the running test, so that name becomes the coverage context.
"""


@dataclass(frozen=True)
class Mutant:
    """One change: the characters from ``begin`` to ``end`` of a file are replaced with ``after``."""

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
        """Return a hash that identifies the change.

        The hash stays the same in later versions of the file unless the text before the change is edited.
        """
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    def applied(self, text: str) -> str:
        """Return the text of the file after the change."""
        assert text[self.begin : self.end] == self.before
        return text[: self.begin] + self.after + text[self.end :]


# --- mutants ----------------------------------------------------------------------------------------------------------

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
    """Yield a module's mutants in source order.

    Docstrings, types, logging and imports are not changed.
    """
    lines = text.splitlines(keepends=True)
    starts = list(accumulate((len(line) for line in lines), initial=0))
    tree = ast.parse(text)
    skipped = set(_skipped(tree))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    inner = {node for function in functions for each in function.body for node in ast.walk(each)}

    def offset(line: int, column: int) -> int:
        """Convert a line and column to an index into the text. Columns from ``ast`` count UTF-8 bytes."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(part: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the indexes at which a node begins and ends in the text."""
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
    """Yield each change to a node as a tuple: the part to replace, the kind of change, and the new text.

    ``source`` returns the text of a part.
    """
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
    """Yield the nodes in which a change would not be a defect.

    These are annotations, docstrings, log calls, imports, and constants that are types.
    """
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


# --- line coverage of tests -------------------------------------------------------------------------------------------


def measure(copy: Path, stage: Stage, workers: int) -> None:
    """Run the tests once under coverage in ``workers`` processes.

    Store which lines each test reaches and how many seconds it takes.
    """
    place = STORE / stage.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    config = place / "coveragerc"
    config.write_text(_COVERAGE.format(data=place / "coverage") + ("" if stage.is_forked else _CHILDREN))
    named = (copy / tests for tests in stage.tests)
    files = sorted(str(path) for one in named for path in ([one] if one.is_file() else one.rglob("test_*.py")))
    running, taken = [], []
    for number in range(workers):
        taken.append(place / f"durations-{number}.json")
        environment = {**_environment(copy), "SHIM_MUTATE_DURATIONS": str(taken[-1])}
        if not stage.is_forked:
            environment["SHIM_MUTATE_CHILDREN"] = str(config)
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", "-m", "pytest", "-q", "-m", DAILY]
        command += ["-p", "no:cacheprovider", "-p", "tools.chaos.mutate_contexts", *files[number::workers]]
        argv = confined.command(place, command)
        running.append(subprocess.Popen(argv, cwd=copy, env=environment, stdout=sys.stderr))
    for each in running:
        each.wait()
    durations = {test: seconds for path in taken for test, seconds in json.loads(path.read_text()).items()}
    (place / "durations.json").write_text(json.dumps(durations))
    combine = [sys.executable, "-m", "coverage", "combine", f"--rcfile={config}", "-q"]
    subprocess.run(combine, cwd=copy, env=_environment(copy), check=True)


def reaching(stage: Stage) -> dict[str, dict[int, list[str]]]:
    """For each line of each file, return the tests that reach it.

    If these tests would take longer than the stage's time limit per mutant, return only as many as fit.
    """
    durations = _durations(stage)
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    with contextlib.closing(sqlite3.connect(STORE / stage.name / "coverage")) as connection:
        rows = connection.execute(
            "select file.path, context.context, line_bits.numbits from line_bits "
            "join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id"
        ).fetchall()
    for path, context, bits in rows:
        test = context.split(" (")[0].partition("|")[0]
        if test not in durations:
            continue
        name = path[max(path.rfind("agent_shim/"), path.rfind("kubernetes_cpi/")) :]
        for line in _lines(bits):
            found[name][line].add(test)

    def nearest(name: str, tests: Iterable[str]) -> list[str]:
        """Put the tests in files that are named after the module first, and otherwise sort by duration. Return as many
        tests as fit into the stage's time limit.
        """
        module = Path(name).stem
        quick = (one for one in tests if durations[one] < stage.max_s)
        chosen = sorted(quick, key=lambda one: (module not in one.partition("::")[0], durations[one]))[:MAX_TESTS]
        return [
            one
            for one, sum_s in zip(chosen, accumulate(durations[one] for one in chosen), strict=True)
            if sum_s < stage.max_s
        ]

    return {name: {line: nearest(name, tests) for line, tests in lines.items()} for name, lines in found.items()}


def _durations(stage: Stage) -> dict[str, float]:
    return dict(json.loads((STORE / stage.name / "durations.json").read_text()))


def _lines(bits: bytes) -> Iterator[int]:
    for index, byte in enumerate(bits):
        for bit in range(8):
            if byte & (1 << bit):
                yield index * 8 + bit


# --- running ----------------------------------------------------------------------------------------------------------


def survives(copy: Path, mutant: Mutant, tests: Sequence[str]) -> tuple[bool, str]:
    """Return True and "" if all ``tests`` pass with the change, otherwise False and the test that failed or hung."""
    target = copy / mutant.path
    original = target.read_text()
    target.write_text(mutant.applied(original))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    scratch = STORE / "tmp-processes"
    scratch.mkdir(exist_ok=True)
    try:
        running = subprocess.Popen(
            confined.command(scratch, command),
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
            running.terminate()  # This also kills all processes in its namespaces.
            running.communicate()
            return False, f"took longer than {TIMEOUT_S:g} s"
    finally:
        target.write_text(original)
    if running.returncode == 0:
        return True, ""
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return False, (failed[0] if failed else printed[-200:])[:200]


def _tests_of(mutant: Mutant, lines: dict[int, list[str]]) -> list[str] | None:
    """Return the tests that reach a mutant's line, or None if there are none.

    Coverage records only the first line of a statement, so the lines above are tried as well. A line that runs when its
    module is imported is reached by all of that module's tests.
    """
    for line in range(mutant.line, max(0, mutant.line - 8), -1):
        if line in lines:
            return lines[line]
    if mutant.is_import_time:
        return list(dict.fromkeys(test for tests in lines.values() for test in tests))[:MAX_TESTS]
    return None


def _environment(copy: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SHIM_MUTATE_STORE": str(STORE),
        "HYPOTHESIS_STORAGE_DIRECTORY": "/tmp/hypothesis",
    }


def chosen(paths: Iterable[str]) -> list[Mutant]:
    """Return the mutants in the files and directories ``paths`` of ``agent_shim`` or ``kubernetes_cpi``."""
    files: list[Path] = []
    for name in paths:
        place = ROOT / name if name.startswith(("agent_shim", "kubernetes_cpi")) else ROOT / "agent_shim" / name
        if not place.exists():
            raise SystemExit(f"cannot mutate {name}: no such file below agent_shim or kubernetes_cpi")
        files += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return [one for path in files for one in mutants(str(path.relative_to(ROOT)), path.read_text())]


def table(results: Results, wanted: Sequence[Mutant], stages: Sequence[Stage]) -> str:
    """Return a table of counts by module and stage, followed by a list of the mutants that no stage noticed.

    *Unreached* mutants are on lines that no test in the stage runs in a process with coverage. The next stage may reach
    them.
    """
    names = ("module", "stage", "mutants", "noticed", "survived", "unreached", "not tried")
    lines = [f"| {' | '.join(names)} |", "|---|---|---|---|---|---|---|"]
    by_module: dict[str, list[Mutant]] = defaultdict(list)
    for one in wanted:
        by_module[one.path].append(one)
    for path, ones in [*sorted(by_module.items()), ("all", wanted)]:
        for position, stage in enumerate(stages):
            counts = _counts([one for one in ones if not _is_noticed(results, one, stages[:position])], results, stage)
            lines.append(f"| `{path}` | {stage.name} | {' | '.join(map(str, counts))} |")
    lines.append("")
    for path, ones in sorted(by_module.items()):
        for one in ones:
            if not _is_noticed(results, one, stages):
                tried = results.get(one.key, {})
                verdict = ", ".join(f"{name} {row['outcome']} ({row['tests']} tests)" for name, row in tried.items())
                change = f"{' '.join(one.before.split())[:70]} -> {' '.join(one.after.split())[:70]}"
                lines.append(f"{path}:{one.line}: {verdict or 'not tried'}: {one.kind}: {change}")
    return "\n".join(lines)


def _counts(ones: Sequence[Mutant], results: Results, stage: Stage) -> tuple[int, int, int, int, int]:
    """Count the mutants: all of them, noticed, survived, not reached, and without a result."""
    outcomes = [results.get(one.key, {}).get(stage.name, {}).get("outcome") for one in ones]
    noticed, survived, unreached = map(outcomes.count, ("noticed", "survived", "unreached"))
    return len(ones), noticed, survived, unreached, len(ones) - noticed - survived - unreached


def _is_noticed(results: Results, mutant: Mutant, stages: Sequence[Stage] | None = None) -> bool:
    """Return True if the mutant was noticed in one of ``stages``, or in any stage if ``stages`` is None."""
    names = None if stages is None else {stage.name for stage in stages}
    tried = results.get(mutant.key, {}).items()
    return any(row["outcome"] == "noticed" for name, row in tried if names is None or name in names)


def left(wanted: Sequence[Mutant], results: Results, stage: Stage) -> list[tuple[Mutant, list[str]]]:
    """Return the mutants that a stage still has to try, with their tests, in random order.

    Mutants that no test reaches are recorded as unreached.
    """
    reached = reaching(stage)
    tasks = []
    for one in wanted:
        if stage.name in results.get(one.key, {}) or _is_noticed(results, one):
            continue
        tests = None if stage.is_forked and one.is_import_time else _tests_of(one, reached.get(one.path, {}))
        if tests:
            tasks.append((one, tests))
        else:
            outcome, why = ("unreached", "") if tests is None else ("not tried", f"each test takes {stage.max_s:g} s")
            results.setdefault(one.key, {})[stage.name] = {"outcome": outcome, "tests": 0, "by": why}
    random.Random(len(tasks)).shuffle(tasks)
    return tasks


def try_in_forks(
    tasks: Sequence[tuple[Mutant, list[str]]], results: Results, stage: Stage, workers: int, until: float
) -> None:
    """Run a stage with ``tools.chaos.mutate_forked`` in ``workers`` processes. Stop at ``until``, a Unix timestamp."""
    running, taken = [], []
    seconds = _durations(stage)
    for number in range(workers):
        scratch = STORE / f"tmp-{stage.name}-{number}"
        scratch.mkdir(parents=True, exist_ok=True)
        given = scratch / "tasks.json"
        shared = [(asdict(one), {test: seconds[test] for test in tests}) for one, tests in tasks[number::workers]]
        given.write_text(json.dumps(shared))
        taken.append(scratch / "results.jsonl")
        taken[-1].write_text("")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.chaos.mutate_forked", "-p", "no:cacheprovider"]
        command += ["-m", DAILY, "--basetemp=/tmp/mutant/base", *stage.tests]
        environment = {**_environment(ROOT), "SHIM_MUTATE_TASKS": str(given), "SHIM_MUTATE_RESULTS": str(taken[-1])}
        with (scratch / "out").open("wb") as out:
            argv = confined.command(scratch, command)
            running.append(subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=out))
    try:
        while any(each.poll() is None for each in running) and time.time() < until:
            time.sleep(1 if len(tasks) < 100 else 10)
            _collect(taken, results, stage)
            done = sum(stage.name in results.get(one.key, {}) for one, _ in tasks)
            sys.stderr.write(f"mutate: {stage.name}: {done} of {len(tasks)} tried\n")
    finally:
        for each in running:
            each.terminate()
            each.wait()
        _collect(taken, results, stage)


def _collect(taken: Iterable[Path], results: Results, stage: Stage) -> None:
    for path in taken:
        for line in path.read_text().splitlines():
            if line.endswith("]"):  # The last line may be incomplete.
                key, outcome, tests, by = json.loads(line)
                results.setdefault(key, {})[stage.name] = {"outcome": outcome, "tests": tests, "by": by}
    _save(results)


def try_in_processes(
    tasks: Sequence[tuple[Mutant, list[str]]], results: Results, stage: Stage, copy: Path, until: float
) -> None:
    """Run a stage in which each mutant gets its own pytest process. Stop at ``until``, a Unix timestamp."""
    for position, (one, tests) in enumerate(tasks, 1):
        if time.time() > until:
            return
        alive, by = survives(copy, one, tests)
        outcome = "survived" if alive else "noticed"
        results.setdefault(one.key, {})[stage.name] = {"outcome": outcome, "tests": len(tests), "by": by}
        _save(results)
        sys.stderr.write(f"[{position} of {len(tasks)}] {one.path}:{one.line} {one.kind}: {outcome}\n")


def _save(results: Results) -> None:
    written = STORE / "results.json.new"
    written.write_text(json.dumps(results))
    written.replace(STORE / "results.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutants and print a table. Return 0 if every mutant was noticed."""
    parser = argparse.ArgumentParser(prog="./dev mutate", description=__doc__)
    parser.add_argument(
        "path", nargs="*", default=DEFAULT_PATHS, help=f"files or directories (default: {' '.join(DEFAULT_PATHS)})"
    )
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="try N mutants, chosen at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=int, default=1, metavar="N", help="try one of N mutants, always the same ones")
    parser.add_argument("--stages", type=int, choices=(1, 2, 3), default=3, help="run only the first N stages")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="use only these, in forks and then in processes")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="number of processes in stages that fork")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this time; the next run continues")
    parser.add_argument("--measure", action="store_true", help="measure the coverage again")
    parser.add_argument("--table", action="store_true", help="only print the table of earlier results")
    asked = parser.parse_args(arguments)
    wanted = [one for one in chosen(asked.path) if int(one.key, 16) % asked.share == 0]
    if asked.sample:
        wanted = random.Random(asked.seed).sample(wanted, min(asked.sample, len(wanted)))
    store = STORE / "results.json"
    results: Results = json.loads(store.read_text()) if store.exists() else {}
    tests = tuple(asked.tests or ())
    alone = (Stage("chosen", tests, 3.0), Stage("chosen in processes", tests, 40.0, is_forked=False))
    stages = (alone if tests else STAGES)[: asked.stages]
    if not asked.table:
        run(wanted, results, stages, asked.workers, time.time() + 60 * asked.minutes, measured=not asked.measure)
    sys.stdout.write(f"{table(results, wanted, stages)}\n")
    return 0 if all(_is_noticed(results, one, stages) for one in wanted) else 1


def run(
    wanted: Sequence[Mutant], results: Results, stages: Sequence[Stage], workers: int, until: float, *, measured: bool
) -> None:
    """Run the stages one after the other. Stop at ``until``, a Unix timestamp.

    If ``measured`` is set, reuse the coverage that an earlier run recorded, if there is any.
    """
    copy = STORE / "copy"
    _make_copy(copy)
    for stage in stages:
        if not measured or not (STORE / stage.name / "coverage").exists():
            sys.stderr.write(f"mutate: running {' '.join(stage.tests)} once under coverage\n")
            measure(copy, stage, workers)
        tasks = left(wanted, results, stage)
        _save(results)
        if tasks and stage.is_forked:
            try_in_forks(tasks, results, stage, workers, until)
        else:
            try_in_processes(tasks, results, stage, copy, until)


def _make_copy(copy: Path) -> None:
    """Copy the files that git tracks or would track, so that mutants can be written to the copy.

    Uncommitted changes are included.
    """
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    # Also copy the compiled keeper. git ignores it, but tests in a read-only copy cannot compile it themselves.
    hatch_build.build_keeper_of_checkout()
    shutil.copy2(ROOT / hatch_build.KEEPER, copy / hatch_build.KEEPER)


if __name__ == "__main__":
    sys.exit(main())
