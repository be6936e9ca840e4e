"""The dashboard and the alert rules speak of metrics that exist, in expressions that parse."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from pydantic import BaseModel, ConfigDict

from streamrl.observability.metrics.families import PREFIX, RUN
from streamrl.settings.features import metric_families

GRAFANA = Path(__file__).parents[3] / "deploy" / "grafana"
RULE_TESTS = Path(__file__).with_name("alerts_test.yaml")
SERIES_OF = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
LABELS = {
    f"{PREFIX}{family.name}{ending}": {RUN, *family.labels, "le"}
    for family in metric_families()
    for ending in SERIES_OF[family.kind]
}
OF_OTHERS = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}
OF_TARGETS = {"instance", "job", "process"}


class Rule(BaseModel):
    """A rule as Prometheus wants it; other keys are mistakes."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    alert: str
    expr: str
    labels: dict[str, str]
    annotations: dict[str, str]


def rules() -> list[Rule]:
    loaded = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())
    assert set(loaded) == {"groups"}
    return [
        Rule.model_validate({key: value for key, value in rule.items() if key != "for"})
        for group in loaded["groups"]
        for rule in group["rules"]
    ]


def dashboard_expressions() -> list[str]:
    board = json.loads((GRAFANA / "dashboard.json").read_text())
    panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    return panels + [each["expr"] for each in board["annotations"]["list"]]


def selectors(node: Any) -> Iterator[Any]:
    """Every selector of series in a parsed expression."""
    match node:
        case promql_parser.VectorSelector():
            yield node
        case promql_parser.MatrixSelector():
            yield node.vector_selector
        case promql_parser.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case promql_parser.Call():
            for argument in node.args:
                yield from selectors(argument)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr() | promql_parser.UnaryExpr():
            yield from selectors(node.expr)


def parsed(expression: str) -> Any:
    return promql_parser.parse(expression.replace("$__rate_interval", "1m"))


@pytest.mark.parametrize("expression", [*dashboard_expressions(), *(rule.expr for rule in rules())])
def test_an_expression_parses_and_asks_for_series_that_we_export(expression: str) -> None:
    found = list(selectors(parsed(expression)))
    assert found or "time()" in expression
    for selector in found:
        if selector.name in OF_OTHERS:
            continue
        assert selector.name in LABELS, f"{selector.name} is not exported"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= LABELS[selector.name] | OF_TARGETS


def test_every_alert_says_how_bad_it_is_what_happened_and_what_to_do() -> None:
    names = [rule.alert for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule.alert.startswith("StreamRL")
        assert rule.labels["severity"] in ("info", "warning", "critical")
        assert set(rule.annotations) == {"summary", "description"}


def test_every_alert_has_a_unit_test() -> None:
    loaded = yaml.safe_load(RULE_TESTS.read_text())
    tested = {case["alertname"] for test in loaded["tests"] for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert tested == {rule.alert for rule in rules()}


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool on the path")
def test_the_alerts_fire_when_they_should() -> None:
    for arguments in (["check", "rules", str(GRAFANA / "alerts.yaml")], ["test", "rules", str(RULE_TESTS)]):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_panel_filters_by_run_and_has_a_place_of_its_own() -> None:
    board = json.loads((GRAFANA / "dashboard.json").read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in board["panels"])
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert all('run=~"$run"' in expression for expression in dashboard_expressions())
    assert all(PREFIX in expression for expression in dashboard_expressions())
