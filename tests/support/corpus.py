"""The corpus of real control files: it is not part of the project and is read where it lies, beside the checkout."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest

CORPUS = Path(__file__).resolve().parents[2] / "../shared/corpus"

needs_corpus = pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not beside the checkout")


@dataclass(frozen=True)
class Entry:
    """A file of the corpus and what the program it is written for says of it."""

    file: str
    text: str
    verdict: str
    path: Path

    @property
    def is_accepted(self) -> bool:
        return self.verdict.startswith("accepts")

    def __str__(self) -> str:
        return self.file


def entries(kind: str) -> list[Entry]:
    """All files of a kind (``monit``, ``bpm``), in the order of the index; none without the corpus."""
    index = CORPUS / kind / "index.tsv"
    if not index.is_file():
        return []
    with index.open(newline="") as rows:
        header, *found = csv.reader(rows, delimiter="\t")
    assert header[0] == "file"
    paths = [CORPUS / kind / row[0] for row in found]
    return [Entry(path.name, path.read_bytes().decode(), row[-1], path) for row, path in zip(found, paths, strict=True)]
