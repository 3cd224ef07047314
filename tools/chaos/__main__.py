"""``./dev chaos [CASE…]``: play the cases of the scorecard, print a table, and write it into ``docs/reliability.md``.

``--agent-command`` tests another agent: ``{config}`` in the command is its agent.json, ``{base}`` its directory in
place of /var/vcap. Nothing is written then without ``--into``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.support import guest
from tests.support.instance import COMMAND
from tools.chaos import crash, disks, kernel, messages, namespaces, network, resources, sabotage, soak, supervision
from tools.chaos.cases import CASES, NOT_INJECTED, Case
from tools.chaos.sabotage import Saboteur
from tools.chaos.saboteurs import GENERAL, SABOTEURS
from tools.chaos.scorecard import DOCUMENT, FULL, GROUPS, Row, earlier, enter_general, enter_saboteur, table, write
from tools.chaos.stand import CannotInjectError, NotHeldError, stand

MODULES: Final = (crash, network, supervision, disks, resources, messages, kernel)
LIMIT: Final = 900.0
"""Maximum duration of a case in seconds."""
FULL_LIMIT: Final = 3 * 3600.0


async def play(case: Case, command: str, *, is_full: bool = False) -> Row:
    """Play one case on a new stand and check the invariants afterwards."""
    try:
        async with asyncio.timeout(FULL_LIMIT if is_full else LIMIT), stand(command, is_full=is_full) as one:
            try:
                figures = await case.play(one)
                broken, omitted = await one.witness.broken(), one.omitted
            except BaseException:
                keep = one.world.scratch / "agent.log"
                if keep.exists():
                    sys.stderr.write(f"--- the last words of the agent\n{keep.read_text()[-3000:]}\n---\n")
                raise
    except NotHeldError as exc:
        return Row(case.id, case.fault, "not held", str(exc))
    except CannotInjectError as exc:
        return Row(case.id, case.fault, "not run", str(exc))
    except Exception as exc:  # noqa: BLE001 - any failure is the outcome of the case
        return Row(case.id, case.fault, "not held", f"{type(exc).__name__}: {exc}")
    if broken:
        return Row(case.id, case.fault, "not held", "; ".join(broken))
    figures = "; ".join([figures, *(f"without {name}: {why}" for name, why in sorted(omitted.items()))])
    return Row(case.id, case.fault, "held", f"{figures} ({case.scale})" if case.scale and not is_full else figures)


async def play_all(
    cases: Sequence[Case],
    command: str,
    times: int,
    *,
    is_full: bool = False,
    enter: Callable[[Row], None] = lambda _: None,
) -> list[Row]:
    """Play each case ``times`` times in a row, until one fails. The row of a case goes to ``enter`` at once."""
    rows = []
    for position, case in enumerate(cases, 1):
        for number in range(1, times + 1):
            begun_at = time.monotonic()
            row = await play(case, command, is_full=is_full)
            took = time.monotonic() - begun_at
            how_far = f"[{position} of {len(cases)}, {number} of {times}, {time.strftime('%H:%M:%S')}]"
            sys.stderr.write(f"{how_far} {row.id} {row.verdict} {took:.1f} s  {row.fault}: {row.figures}\n")
            if row.verdict != "held":
                break
        if row.verdict != "not run":
            how_often = f"{FULL} on " if is_full else f"{number} of {times} on " if times > 1 else ""
            row = replace(row, played=how_often + time.strftime("%Y-%m-%d"))
        rows.append(row)
        enter(row)
    return rows


def play_in_guest(cases: Sequence[Case], command: str, times: int, *, is_full: bool = False) -> list[Row]:
    """Play the cases in one virtual machine, which contains this project's agent only."""
    if command != COMMAND:
        return [Row(case.id, case.fault, "not run", "this agent is not in the virtual machine") for case in cases]
    with tempfile.TemporaryDirectory() as name:
        rows = Path(name, "rows.md")
        options = ["--times", str(times), "--into", f"/out/{rows.name}"]
        if is_full:
            options.append("--full")
        words = ["python3", "-m", "tools.chaos", *options, *(case.id for case in cases)]
        limit = (FULL_LIMIT if is_full else LIMIT) * times * len(cases)
        try:
            guest.run(words, Path(name), limit=120 + limit)
            found, why = earlier(rows.read_text()), "the virtual machine returned no row for it"
        except (guest.GuestError, OSError) as exc:
            found, why = {}, f"no virtual machine: {exc}"
            sys.stderr.write(f"{why}\n")
    return [found.get(case.id) or Row(case.id, case.fault, "not run", why.partition("\n")[0]) for case in cases]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all played cases held."""
    parser = argparse.ArgumentParser(prog="./dev chaos", description=__doc__)
    parser.add_argument("case", nargs="*", metavar="CASE", help="C-01, N, ... (default: all)")
    parser.add_argument("--agent-command", default=COMMAND, metavar="COMMAND")
    parser.add_argument("--times", type=int, default=1, help="play each case this many times in a row (default: 1)")
    parser.add_argument("--full", action="store_true", help="play only the reduced cases, at full size")
    parser.add_argument("--short", action="store_true", help="play only cases shorter than ten seconds")
    parser.add_argument("--into", type=Path, default=None, metavar="FILE", help=f"default: {DOCUMENT.name}")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="play a mix of all faults for this time")
    parser.add_argument(
        "--load", type=float, metavar="SECONDS", help="play a load that never pauses for this time: 202 services"
    )
    parser.add_argument(
        "--sabotage",
        nargs="+",
        metavar="ROW",
        help="break the agent on purpose, and check that these rows fail: C-01, I4, N, all",
    )
    parser.add_argument("--on", nargs="+", default=["all"], metavar="CASE", help="with --sabotage G: these cases")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="with --sabotage: play N at once")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="with --sabotage: keep the output of each case")
    words = sys.argv[1:] if arguments is None else arguments
    asked = parser.parse_args(arguments)
    if asked.sabotage:
        return _sabotage(asked.sabotage, asked.on, asked.into or DOCUMENT, asked.logs, asked.at_once)
    seconds = asked.soak if asked.load is None else asked.load
    if not asked.list and not guest.is_here():
        namespaces.enter(words, network=seconds is not None)
    if asked.load is not None:
        return soak.main(asked.agent_command, asked.load, soak.LOAD)
    if asked.soak is not None:
        return soak.main(asked.agent_command, asked.soak)
    chosen = [
        one
        for one in sorted(CASES.values(), key=lambda one: (GROUPS.index(one.id[0]), one.id))
        if (not asked.case or any(one.id == name or one.id[0] == name for name in asked.case))
        and not (asked.short and one.is_long)
        and (one.has_full or not asked.full)
    ]
    if asked.list:
        sys.stdout.writelines(f"{one.id}  {one.fault}\n" for one in chosen)
        sys.stdout.writelines(f"{number}  {fault}: not run: {why}\n" for number, (fault, why) in NOT_INJECTED.items())
        return 0
    into = asked.into or (DOCUMENT if asked.agent_command == COMMAND else None)

    def enter(row: Row) -> None:
        if into is not None:
            write(into, [row])

    there = [] if guest.is_here() else [one for one in chosen if one.guest]
    here = [one for one in chosen if one not in there]
    rows = asyncio.run(play_all(here, asked.agent_command, asked.times, is_full=asked.full, enter=enter))
    for row in play_in_guest(there, asked.agent_command, asked.times, is_full=asked.full) if there else []:
        rows.append(row)
        enter(row)
    sys.stdout.write(f"{table(rows)}\n")
    return 1 if any(row.verdict == "not held" for row in rows) else 0


def _sabotage(chosen: Sequence[str], on: Sequence[str], into: Path, logs: Path | None, at_once: int) -> int:
    """Return 0 if every chosen row fails under its saboteurs. The document gets the outcomes."""
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    playing = [one for one in SABOTEURS if {"all", one.row, one.row[0]} & set(chosen)]
    general = [one for one in GENERAL if {"all", one.row, one.row[0]} & set(chosen)]
    cases = [each.id for each in CASES.values() if {"all", each.id, each.id[0]} & set(on) and not each.guest]
    if not playing and not (general and cases):
        sys.stderr.write(f"cannot sabotage {' '.join(chosen)}: no such row\n")
        return 2

    def played(saboteur: Saboteur) -> int:
        cell = sabotage.report(saboteur, logs)
        if cell and into.exists():
            enter_saboteur(into, saboteur.row, cell)
        return not cell.startswith(sabotage.CAUGHT)

    def enter(saboteur: Saboteur, outcome: str) -> None:
        if into.exists():
            enter_general(into, saboteur.row, saboteur.case, outcome)

    def told(case: str) -> int:
        return sabotage.tell([replace(one, case=case) for one in general], enter, logs)

    with ThreadPoolExecutor(at_once) as pool:
        missed = sum(pool.map(played, playing)) + (sum(pool.map(told, cases)) if general else 0)
    sys.stdout.write(f"{missed} not caught\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
