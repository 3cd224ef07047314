"""``./dev compare-release`` renders a release's jobs with ruby, following bosh-template's rules."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tools.comparison.releases import ADDRESS, Checkout, Job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("ruby") is None, reason="no ruby: apt-get install ruby"),
]

SPEC = """
name: web
templates: {web.erb: config/web}
packages: [web]
consumes: [{name: db, type: db}, {name: cache, type: cache, optional: true}]
properties:
  web.port: {default: 8080}
  web.name: {example: shown}
  web.certs: {}
  web.databases: {}
"""
DATABASE = """
name: db
templates: {}
provides: [{name: db, type: db, properties: [db.user]}]
properties: {db.user: {default: root}}
"""


def rendered(where: Path, template: str, values: dict[str, Any] | None = None) -> Job:
    """Return the ``web`` job, rendered from ``template`` with the property values ``values``."""
    files = {"web/spec": SPEC, "web/monit": "", "web/templates/web.erb": template, "db/spec": DATABASE, "db/monit": ""}
    for name, text in files.items():
        place = where / "jobs" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return next(job for job in Checkout(where).jobs(values or {}, "PEM") if job.name == "web")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("<%= p('web.port') %> <%= p('none', 3) %> <%= p(['none', 'web.port']) %>", "8080 3 8080"),
        ("<%= properties.web.port %> <%= spec.index %> <%= spec.networks.default.ip %>", f"8080 0 {ADDRESS}"),
        (
            "<% if_p('none') do |n| %>a<% end.else_if_p('web.port') do |n| %>b<%= n %><% end.else do %>c<% end %>",
            "b8080",
        ),
        ("<% if_p('none') { |n| }.else do %>without<% end %>", "without"),
        ("<%= link('db').p('db.user') %> <%= link('db').instances[0].address %>", f"root {ADDRESS}"),
        ("<% if_link('cache') do %>one<% end.else do %>none<% end %>", "none"),
        ("<%- 1.times do -%>\nline\n<%- end -%>\n", "line\n"),
    ],
)
def test_comparison_renders_templates_like_a_director(tmp_path: Path, template: str, text: str) -> None:
    assert rendered(tmp_path, template).files["config/web"] == text


def test_comparison_values_override_defaults(tmp_path: Path) -> None:
    assert rendered(tmp_path, "<%= p('web.port') %>", {"web": {"web": {"port": 1}}}).files["config/web"] == "1"
