"""Provides each chaos case with a test environment, checks the invariants afterwards, and writes the scorecard row."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.chaos.case import Case
from tests.chaos.scorecard import FULL, Row, row_of, table, write
from tests.support.instance import COMMAND
from tests.support.stand import CannotInjectError, NotHeldError, Stand
from tests.support.stand import stand as standing
from tests.support.witness import Witness

LIMIT: Final = 900.0
"""Maximum duration of a case in seconds."""
FULL_LIMIT: Final = 3 * 3600.0
LAST_CHARS: Final = 3000
"""Number of characters from the end of the agent's log that are shown after a failure."""
REPORTS: Final = pytest.StashKey[list[pytest.TestReport]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption(
        "--agent-command",
        default=COMMAND,
        help="run this command as the agent; {config} and {base} stand for agent.json and the base directory",
    )
    group.addoption("--full", action="store_true", help="run only cases that are otherwise reduced, at full size")
    group.addoption("--times", type=int, default=1, help="run each case this many times")
    group.addoption("--into", type=Path, default=None, metavar="FILE", help="page into which the rows are written")


def option(config: pytest.Config, name: str) -> Any:
    """Return a command-line option, or its default if pytest was started for a directory that does not define the
    option.
    """
    return config.getoption(name, {"agent_command": COMMAND, "full": False, "times": 1}.get(name))


def case_of(item: pytest.Item) -> Case | None:
    """Return the case that a test implements, or None."""
    mark = item.get_closest_marker("chaos")
    return mark.args[0] if mark is not None else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("chaos") and (times := option(metafunc.config, "times")) > 1:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(1, times + 1))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let ``-k N-02`` select a case, and ``-k N-`` a group."""
    if (case := case_of(item)) is not None:
        item.extra_keyword_matches.add(case.id)
        item.add_marker(pytest.mark.timeout(FULL_LIMIT if option(item.config, "full") else LIMIT))
        if case.is_long:
            item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--full``, select only the cases that are larger with that option."""
    if option(config, "full"):
        items[:] = [item for item in items if (case := case_of(item)) is not None and case.has_full]


@pytest.fixture
async def stand(request: pytest.FixtureRequest) -> AsyncIterator[Stand]:
    """Provide a bus behind a proxy, a Director, a Health Monitor, and an agent that has not been started yet."""
    async with standing(option(request.config, "agent_command"), is_full=option(request.config, "full")) as one:
        yield one


@pytest.fixture
async def witness(stand: Stand, request: pytest.FixtureRequest) -> AsyncIterator[Witness]:
    """Provide the case's ``Witness``. If the case's own checks pass, check all invariants afterwards."""
    yield stand.witness
    if stand.figures and (broken := await stand.witness.broken()):
        raise NotHeldError("; ".join(broken))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skip a case whose fault cannot be injected on this machine."""
    try:
        return (yield)
    except CannotInjectError as exc:
        pytest.skip(str(exc))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the case's scorecard row to the report and, after a failure, the end of the agent's log."""
    report = yield
    case, one = case_of(item), getattr(item, "funcargs", {}).get("stand")
    if case is None or one is None:
        return report
    if call.excinfo is not None:
        error = call.excinfo.value
        held = isinstance(error, NotHeldError | pytest.skip.Exception)
        report.user_properties.append(("why", str(error) if held else f"{type(error).__name__}: {error}"))
        log = one.world.scratch / "agent.log"
        if report.failed and log.exists():
            report.sections.append(("the end of the agent's log", log.read_text(errors="replace")[-LAST_CHARS:]))
    reports = item.stash.setdefault(REPORTS, [])
    reports.append(report)
    if report.when == "teardown":
        row = row_of(case, reports, one.figures, one.omitted, is_full=option(item.config, "full"))
        report.user_properties.append(("row", vars(row)))
    return report


class Scorecard:
    """The rows of this run. Each row is written into the page as soon as its case has finished."""

    def __init__(self, config: pytest.Config) -> None:
        self._into: Path | None = config.getoption("into", None)
        self._is_full, self._times = option(config, "full"), option(config, "times")
        self._rows: dict[str, list[Row]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "row" and isinstance(value, dict):
                row = Row(**value)
                self._rows.setdefault(row.id, []).append(row)
                if self._into is not None:
                    write(self._into, [self._whole(row.id)])

    def _whole(self, number: str) -> Row:
        """Return one row for all runs of a case so far.

        If a run has failed, this is the row of the first failed run. Otherwise, it is the row of the last run.
        """
        rows = self._rows[number]
        row = next((row for row in rows if row.verdict != "held"), rows[-1])
        return row.dated(FULL if self._is_full else f"{len(rows)} of {self._times}" if self._times > 1 else "")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._rows:
            terminalreporter.section("scorecard")
            terminalreporter.write_line(table([self._whole(number) for number in sorted(self._rows)]))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Scorecard(config))
