"""Checks that the Prometheus rules, the Grafana dashboard and the monitors use only existing metrics and labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kubernetes_cpi import names
from tests.support import metrics_page

DEPLOY = Path(__file__).parents[2] / "deploy"
WORDS = frozenset({"instance", "job", "le"})
"""Labels that Prometheus itself adds."""
_NAME = re.compile(r"\bagent_shim_\w+(?:\{[^}]*\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def families() -> dict[str, set[str]]:
    """Return the names of all metric series with their labels."""
    found = {}
    for row in metrics_page.table().partition("\n\n")[0].splitlines()[2:]:
        name, (kind, *labels) = row.split("|")[1].strip(" `"), re.findall(r"\w+", row.split("|")[2])
        known = set(labels)
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
def test_rules_and_dashboard_use_existing_metrics_and_labels(expression: str) -> None:
    known = families()
    # Remove the names of recorded series, which contain colons and are not the agent's metrics.
    plain = re.sub(r"\w+:\w+:\w+", "", expression)

    for selector in _NAME.findall(plain):
        name, _, labels = selector.partition("{")
        assert name in known
        assert set(_LABEL.findall(labels)) <= known[name] | WORDS, selector


def test_recorded_series_in_rules_and_dashboard_have_a_rule() -> None:
    rules = [
        rule
        for group in yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    used = {name for expression in expressions() for name in re.findall(r"\w+:\w+:\w+", expression)}

    assert used <= recorded


def test_every_alert_has_a_test_a_severity_and_a_description() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text())
    tests = yaml.safe_load((DEPLOY / "prometheus/rules_test.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    tested = {
        test["alertname"] for one in tests["tests"] for test in one.get("alert_rule_test", ()) if "exp_alerts" in test
    }

    assert {alert["alert"] for alert in alerts} == tested
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url", "bosh_instance"}


def test_dashboard_panels_have_titles_and_descriptions_and_do_not_overlap() -> None:
    board = json.loads((DEPLOY / "grafana/agent-shim.json").read_text())
    cells: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert place["x"] + place["w"] <= 24
        for column in range(place["x"], place["x"] + place["w"]):
            for row in range(place["y"], place["y"] + place["h"]):
                assert cells.setdefault((column, row), panel["title"]) == panel["title"]


def test_dashboard_can_be_limited_to_a_deployment() -> None:
    board = json.loads((DEPLOY / "grafana/agent-shim.json").read_text())
    variables = {one["name"]: one for one in board["templating"]["list"]}
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]

    assert list(variables) == ["datasource", "deployment", "group", "instance"]
    assert 'deployment=~"$deployment",group=~"$group"' in variables["instance"]["query"]
    assert "allValue" not in variables["instance"]
    assert [one for one in expressions if 'instance=~"$instance"' not in one] == []
    assert [one for one in expressions if re.search(r"\brate\([^)]*\[(?!\$__rate_interval])", one)] == []


@pytest.mark.parametrize("name", ["podmonitor", "servicemonitor"])
def test_prometheus_monitors_select_only_ports_of_this_agent(name: str) -> None:
    """Selectors need labels that the manifests or the CPI set, because any pod may have a port named ``agent``."""
    pod = yaml.safe_load((DEPLOY / "kubernetes/base/statefulset.yaml").read_text())["spec"]["template"]
    service = yaml.safe_load((DEPLOY / "kubernetes/base/service.yaml").read_text())
    ports = {port["name"] for one in pod["spec"]["containers"] for port in one["ports"]}
    ours = [(pod if name == "podmonitor" else service)["metadata"]["labels"], names.labels(names.KIND_VM, "director")]
    monitors = list(yaml.safe_load_all((DEPLOY / f"prometheus/{name}.yaml").read_text()))

    for monitor, labels in zip(monitors, ours, strict=False):
        endpoints = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
        assert [(one["port"], one["path"]) for one in endpoints] == [("agent", "/metrics")]
        wanted = monitor["spec"]["selector"]["matchLabels"]
        assert wanted
        assert wanted.items() <= labels.items()
    assert "agent" in ports


@pytest.mark.parametrize("path", ["example/pod.yaml", "cpi/pod.yaml"])
def test_pods_have_the_label_that_the_monitor_selects(path: str) -> None:
    monitor = next(iter(yaml.safe_load_all((DEPLOY / "prometheus/podmonitor.yaml").read_text())))
    objects = yaml.safe_load_all((DEPLOY / "kubernetes" / path).read_text())
    pod = next(one for one in objects if one["kind"] == "Pod")

    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
