"""Rules and dashboard speak of metrics that are there, with labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from agent_shim.edges import metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
WORDS = frozenset({"instance", "job", "le"})
"""Labels that Prometheus gives."""
_NAME = re.compile(r"\bagent_shim_\w+(?:\{[^}]*\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def families() -> dict[str, set[str]]:
    """Names of series, and the labels of each."""
    found = {}
    for row in metrics.table().splitlines()[2:]:
        name, kind, labels = (cell.strip(" `") for cell in row.split("|")[1:4])
        known = set(re.findall(r"\w+", labels))
        for ending in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            found[name + ending] = known
    return found


def expressions() -> Iterator[str]:
    for group in yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]
    board = json.loads((DEPLOY / "grafana/agent-shim.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    yield from (variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query")


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_speaks_of_metrics_that_are_there(expression: str) -> None:
    known = families()
    # A recorded rule has a name with colons, which no metric has.
    plain = re.sub(r"\w+:\w+:\w+", "", expression)

    for selector in _NAME.findall(plain):
        name, _, labels = selector.partition("{")
        assert name in known
        assert set(_LABEL.findall(labels)) <= known[name] | WORDS, selector


def test_what_an_expression_takes_from_a_record_is_recorded() -> None:
    rules = [
        rule
        for group in yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    used = {name for expression in expressions() for name in re.findall(r"\w+:\w+:\w+", expression)}

    assert used <= recorded


def test_every_alert_has_a_test_a_severity_and_words_for_people() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text())
    tests = yaml.safe_load((DEPLOY / "prometheus/rules_test.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    tested = {
        test["alertname"] for one in tests["tests"] for test in one.get("alert_rule_test", ()) if "exp_alerts" in test
    }

    assert {alert["alert"] for alert in alerts} == tested
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert set(alert["annotations"]) == {"summary", "description"}


def test_panels_do_not_overlap_and_have_a_title() -> None:
    board = json.loads((DEPLOY / "grafana/agent-shim.json").read_text())
    cells: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert panel["title"]
        assert place["x"] + place["w"] <= 24
        for column in range(place["x"], place["x"] + place["w"]):
            for row in range(place["y"], place["y"] + place["h"]):
                assert cells.setdefault((column, row), panel["title"]) == panel["title"]


@pytest.mark.parametrize("name", ["podmonitor", "servicemonitor"])
def test_monitors_ask_the_port_the_manifests_name(name: str) -> None:
    monitor = yaml.safe_load((DEPLOY / f"prometheus/{name}.yaml").read_text())
    endpoints = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
    manifest = yaml.safe_load((DEPLOY / "kubernetes/base/statefulset.yaml").read_text())
    ports = {port["name"] for one in manifest["spec"]["template"]["spec"]["containers"] for port in one["ports"]}

    assert [(one["port"], one["path"]) for one in endpoints] == [("agent", "/metrics")]
    assert "agent" in ports
