"""Tests that modules are compiled for the image without docstrings or function annotations."""

from __future__ import annotations

import marshal
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "stemcell_overlay/make/compile"
MODULE = '''"""Of the module."""

from __future__ import annotations


class Empty:
    """Of the class."""


def half(number: int) -> int:
    """Of the function."""
    assert number % 2 == 0
    return number // 2


def nothing() -> None:
    """Of a function without a body."""


@(lambda function: function)
def typed(number: int): ...


class Typed:
    number: int = 1

    @property
    def half(self) -> float:
        return self.number / 2


NAME: str = "kept"
later: int
'''


def script() -> Any:
    found = types.ModuleType("make_compile")
    exec(SourceFileLoader(found.__name__, str(SCRIPT)).get_code(found.__name__) or "", found.__dict__)  # noqa: S102
    return found


def test_compiled_modules_lose_docstrings_and_annotations_but_keep_assertions(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(MODULE)

    raw = script().compile_file(source).read_bytes()

    names: dict[str, Any] = {}
    exec(marshal.loads(raw[16:]), names)  # noqa: S102, S302 - compiled two lines above
    assert [names.get("__doc__"), *(names[name].__doc__ for name in ("Empty", "half", "nothing"))] == [None] * 4
    assert names["NAME"] == "kept"
    assert names["half"](4) == 2
    assert (names["half"].__annotations__, names["typed"].__annotations__) == ({}, {"number": "int"})
    assert names["Typed"].__annotations__ == {"number": "int"}
    assert names["Typed"].half.fget.__annotations__ == {}
    assert (names["Typed"]().half, names["__annotations__"]) == (0.5, {"later": "int"})
    with pytest.raises(AssertionError):
        names["half"](3)
    positions = list(names["half"].__code__.co_positions())
    assert not any(begin or end for *_, begin, end in positions)
    assert {line for line, *_ in positions} == {10, 12, 13}
    assert names["half"].__code__.co_firstlineno == MODULE.splitlines().index("def half(number: int) -> int:") + 1


def test_module_that_does_not_compile_is_reported_and_the_rest_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text("def (")
    (tmp_path / "good.py").write_text(MODULE)

    assert script().main([str(tmp_path)]) == 0

    assert f"cannot compile {tmp_path / 'bad.py'}" in capsys.readouterr().err
    assert [path.name.split(".")[0] for path in (tmp_path / "__pycache__").iterdir()] == ["good"]
