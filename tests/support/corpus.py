"""Reads the corpus in ``tests/data/corpus``: control files from real releases, and requests from a real Director."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).resolve().parents[1] / "data/corpus"


@dataclass(frozen=True)
class CorpusEntry:
    """A file in the corpus. ``verdict`` says whether monit or bpm itself accepts the file."""

    file: str
    text: str
    verdict: str
    path: Path

    @property
    def is_accepted(self) -> bool:
        return self.verdict.startswith("accepts")

    def __str__(self) -> str:
        return self.file


def entries(kind: str) -> list[CorpusEntry]:
    """Return all corpus files of one kind (``monit`` or ``bpm``), in the order of the index."""
    with (CORPUS / kind / "index.tsv").open(newline="") as rows:
        header, *found = csv.reader(rows, delimiter="\t")
    assert header[0] == "file"
    paths = [CORPUS / kind / row[0] for row in found]
    return [
        CorpusEntry(path.name, path.read_bytes().decode(), row[-1], path)
        for row, path in zip(found, paths, strict=True)
    ]
