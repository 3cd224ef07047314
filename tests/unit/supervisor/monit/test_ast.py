"""Tests how the values that represent a monit file are compared."""

from __future__ import annotations

from agent_shim.supervisor.monit.ast import ALERT, Check, Ignored, Missing, MonitFile, PidChanged, Rule


def test_monit_checks_compare_equal_regardless_of_position() -> None:
    assert Check("system", "a", line=1) == Check("system", "a", line=2)
    assert MonitFile(origin="a") == MonitFile(origin="b")
    assert hash(MonitFile(origin="a")) == hash(MonitFile(origin="b"))
    assert MonitFile((Check("system", "a", line=1),)) == MonitFile((Check("system", "a", line=2),))


def test_monit_checks_with_different_content_are_not_equal() -> None:
    rule = Rule(Missing(), ALERT, line=1)
    assert Check("system", "a", rules=(rule,)) == Check("system", "a", rules=(Rule(Missing(), ALERT, line=2),))
    assert Check("system", "a", rules=(rule,)) != Check("system", "a", rules=(Rule(PidChanged(), ALERT, line=1),))
    assert MonitFile() != Ignored("")
    assert MonitFile((), ()) != ((), (), "")
