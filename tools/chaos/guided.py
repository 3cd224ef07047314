"""``python -m tools.chaos.guided TARGET [OPTION…]``: run a target of ``./dev fuzz`` with coverage guidance.

The options are libFuzzer's. Needs ``atheris``, which is too large to be a dependency. A finding stops
the run with a traceback and leaves its input in a ``crash-…`` file.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Run until an input breaks the parser, or until a limit in libFuzzer's options such as ``-max_total_time=600`` is
    reached.
    """
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["agent_shim"]):
        from tools.chaos.fuzz import TARGETS

    name, *options = sys.argv[1:]
    target = TARGETS[name]

    def read(data: bytes) -> None:
        try:
            target.read(data)
        except target.known:
            return

    with tempfile.TemporaryDirectory(prefix="agent-shim-fuzz-") as scratch:
        words, corpus = Path(scratch, "words"), Path(scratch, "corpus")
        corpus.mkdir()
        for number, seed in enumerate(target.seeds):
            (corpus / str(number)).write_bytes(seed)
        spelled = ["".join(rf"\x{byte:02x}" for byte in word) for word in target.words]
        words.write_text("".join(f'"{word}"\n' for word in spelled))
        atheris.Setup([sys.argv[0], *options, f"-dict={words}", str(corpus)], read)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
