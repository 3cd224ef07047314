"""The lists of attacks in ``docs/security.md``: their form, and that modules, tests and cases in them exist."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.structure.source import ROOT
from tools.chaos import crash, disks, fuzz, messages, network, resources, supervision
from tools.chaos.cases import CASES

PLAYED = (crash, disks, messages, network, resources, supervision)
"""Importing them enters their cases."""

OPEN = "open: "

ATTACKERS = frozenset(
    {"vcap", "bpm", "bpm-1", "bpm-2", "bpm-3", "jail-root", "agent", "neighbour", "terminal", "blob", "director"}
    | {"ssh-user", "reader"}
)

ONCE_SUCCESSFUL = (
    "Content-Length with leading zeros",
    "bytes without end after the head",
    "length of thousands of digits",
    "FIFO, or a link to settings, instead of its own `NAME.stderr.log`",
    "`bpm logs` follows such a link",
    "`bpm run` follows such a link",
    "environment of terabytes (PR_SET_MM_MAP), its number in the pidfile",
    "environment of terabytes without the pidfile",
    "command line of 450 KB against `matching`",
    "checked by `if match`",
    "TIOCSTI from a planted `.bashrc`",
    "exchanges its directory with a link between check and mount",
    "a `mount_only` or `shared` volume that is a link",
    "fresh pidfile names a younger process",
    "hides from `stop`: forked twice with an empty environment and setsid",
    "hides from `stop`: carries another job's mark",
    "keeps forking and exiting",
    "not UTF-8 ends the stream",
    "not UTF-8 stops rotation",
    "500 files keep other jobs out of the stream",
    "400 000 empty archives",
    "sparse log of 15 TB",
    "setuid bit and has it archived as uid 0",
    "reach the terminal by `logs`",
    "reach the terminal by `status`",
    "reach the terminal by `monit status`",
    "`unmount_disk` with an empty or null cid",
    '`mount_disk ""`',
    "text of a megabyte that does not end",
    "megabyte of PEM beginnings without an end",
    "private key whose decryption takes 2 000 000 000 rounds",
    "a password that ends its host early",
    "too long in characters or bytes",
    "braces that stand for a billion patterns",
    "tens of thousands of addresses",
)
"""Attacks that this agent once did not withstand: none of them leaves the page."""

NAMED_AIMS = (
    "hostile certificates",
    "hostile settings",
    "ssh action",
    "disk hints",
    "create-env door with credentials",
    "`sync_dns`",
    "workers",
)
"""Doors that each have an attack of their own."""


class Row(NamedTuple):
    attackers: str
    attack: str
    defence: str
    tests: str

    @property
    def is_open(self) -> bool:
        return self.tests.startswith(OPEN)


def attacks_of(page: str) -> str:
    """The part of the page with the attacks."""
    return page.partition("\n## Attacks\n")[2].partition("\n## ")[0]


def rows_of(attacks: str) -> list[list[str]]:
    """Attackers, attack, defence and tests of each item: ``- **`NAME`** attack``, with defence and tests below it."""
    items = re.findall(r"^- \*\*(.*)\*\* (.*)\n((?:  - .*\n)*)", attacks, re.MULTILINE)
    return [[names, attack, *re.findall(r"^  - (.*)$", rest, re.MULTILINE)] for names, attack, rest in items]


def complaints_of(cells: list[str]) -> list[str]:
    """Return the violations of the form of a row."""
    if len(cells) != len(Row._fields) or not all(cells):
        return ["not attackers, attack, defence and tests"]
    row, found = Row(*cells), []
    if not quoted(row.attackers) or not set(quoted(row.attackers)) <= ATTACKERS:
        found.append("an unknown attacker")
    if row.is_open:
        if len(row.tests) < len(OPEN) + 5:
            found.append("open without a reason")
    elif not names_in(row.tests) and not cases_in(row.tests) and not re.search(r"\bI\d", row.tests):
        found.append("neither a test nor a case, and not open")
    return found


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def names_in(text: str) -> set[str]:
    return {name for name in quoted(text) if name.startswith("test_")}


def cases_in(text: str) -> set[str]:
    return set(re.findall(r"\b[CNSDRM]-\d\d\b", text))


PAGE = (ROOT / "docs/security.md").read_text()
CELLS = rows_of(attacks_of(PAGE))
ROWS = [Row(*cells) for cells in CELLS if not complaints_of(cells)]


def test_rows_have_their_form() -> None:
    assert len(CELLS) > 100
    assert len(re.findall(r"^ *- ", attacks_of(PAGE), re.MULTILINE)) == 3 * len(CELLS)
    assert [(cells, found) for cells in CELLS if (found := complaints_of(cells))] == []


@pytest.mark.parametrize(
    ("item", "complaint"),
    [
        ("**`vcap`** a\n  - b", "not attackers, attack, defence and tests"),
        ("**`vcap`** \n  - b\n  - `test_x`", "not attackers, attack, defence and tests"),
        ("**`stranger`** a\n  - b\n  - `test_x`", "an unknown attacker"),
        ("**`vcap`** a\n  - b\n  - nothing", "neither a test nor a case, and not open"),
        ("**`vcap`** a\n  - b\n  - open:", "neither a test nor a case, and not open"),
        ("**`vcap`** a\n  - b\n  - open: x", "open without a reason"),
    ],
)
def test_an_item_of_another_form_is_found(item: str, complaint: str) -> None:
    (cells,) = rows_of(f"- {item}\n")
    assert complaint in complaints_of(cells)


def test_every_attacker_is_described_and_has_rows() -> None:
    described = PAGE.partition("| attacker | position |")[2].partition("\n\n")[0]
    assert set(quoted("".join(line.split(" | ")[0] for line in described.splitlines()))) == ATTACKERS
    assert {name for row in ROWS for name in quoted(row.attackers)} == ATTACKERS
    played = {name for row in ROWS if not row.is_open for name in quoted(row.attackers)}
    assert played == ATTACKERS - {"bpm-3"}, "level 3 has no rules of its own: its rows are open, or of every level"


@pytest.mark.parametrize("attack", ONCE_SUCCESSFUL + NAMED_AIMS)
def test_a_known_attack_has_a_row(attack: str) -> None:
    assert [row for row in ROWS if attack in row.attack] != []


def test_tests_of_attacks_exist() -> None:
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert {name for row in ROWS for name in names_in(row.tests)} - there == set()
    assert {name for name in names_in(PAGE) if "/" not in name} - there == set()


def test_cases_of_attacks_exist() -> None:
    assert {number for row in ROWS for number in cases_in(row.tests)} - set(CASES) == set()


def test_every_fuzz_target_is_listed() -> None:
    targets = PAGE.partition("**Targets**: ")[2].partition("\n\n")[0]
    assert re.findall(r"`(\w+)`\s\(", targets) == sorted(fuzz.TARGETS)
