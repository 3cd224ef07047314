"""The jobs of a release, rendered by ruby with the rules of bosh-template."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from comparison.releases import ADDRESS, Checkout, Job

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
    """Return the job ``web`` with this template."""
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
def test_templates_are_rendered_as_a_director_does(tmp_path: Path, template: str, text: str) -> None:
    assert rendered(tmp_path, template).files["config/web"] == text


def test_values_come_before_defaults(tmp_path: Path) -> None:
    assert rendered(tmp_path, "<%= p('web.port') %>", {"web": {"web": {"port": 1}}}).files["config/web"] == "1"


def test_what_has_no_default_is_guessed_and_named(tmp_path: Path) -> None:
    template = (
        "<%= p('web.name') %> <%= p('web.certs') %> <%= p('web.databases').find { |d| d['tag'] == 'cc' }['name'] %>"
    )
    job = rendered(tmp_path, template)

    assert job.files["config/web"] == "shown PEM cc"
    assert set(job.guessed) == {"web.name", "web.certs", "web.databases"}


def test_a_template_that_raises_is_an_error_with_its_line(tmp_path: Path) -> None:
    job = rendered(tmp_path, "\n<% raise 'this release needs more' %>")

    assert job.files == {}
    assert job.error == "templates/web.erb:2: this release needs more"


def test_links_of_a_git_directory_are_followed(tmp_path: Path) -> None:
    rendered(tmp_path, "shared")
    (tmp_path / "common").mkdir()
    (tmp_path / "common/shared.erb").write_text("from common")
    (tmp_path / "jobs/web/templates/shared").symlink_to("../../../common")
    spec = SPEC.replace("web.erb: config/web", "shared/shared.erb: config/web")
    (tmp_path / "jobs/web/spec").write_text(spec)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    for place in (tmp_path, tmp_path / ".git"):
        job = next(job for job in Checkout(place).jobs({}, "PEM") if job.name == "web")
        assert job.files["config/web"] == "from common"


def test_an_optional_link_is_there_for_a_template_that_needs_it(tmp_path: Path) -> None:
    template = "<% if_link('cache') { |one| @found = one.address } %><% raise 'needs it' unless @found %><%= @found %>"

    assert rendered(tmp_path, template).files["config/web"] == ADDRESS
