"""Values of a control file."""

from __future__ import annotations

from agent_shim.supervisor.monit.ast import Check, MonitFile


def test_where_it_stood_is_no_part_of_it() -> None:
    """The same text in another file and line is the same."""
    assert Check("system", "a", line=1) == Check("system", "a", line=2)
    assert MonitFile(origin="a") == MonitFile(origin="b")
    assert hash(MonitFile(origin="a")) == hash(MonitFile(origin="b"))
