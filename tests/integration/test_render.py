"""Tests ``agent-shim render``, which evaluates release templates as a Director does, with a real ruby."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

SPEC = {
    "name": "web",
    "templates": {"ctl.erb": "bin/ctl", "web.conf.erb": "config/web.conf"},
    "packages": ["web"],
    "properties": {"port": {"default": 80}, "tls.enabled": {"default": False}, "name": {}, "extra": {}},
    "consumes": [{"name": "db", "type": "db", "optional": True}],
}
CONF = """\
port <%= p('port') %>
name <%= p('name', 'nameless') %>
tls <%= properties.tls.enabled %>
<% if_p('extra') do |extra| -%>
extra <%= extra['a'] %>
<% end.else do -%>
no extra
<% end -%>
<% if_link('db') do |db| -%>
db <%= db.instances.first.address %> <%= db.p('port') %>
<% end -%>
at <%= spec.networks.default.ip %> of <%= spec.deployment %>/<%= name %>/<%= index %>
"""
MONIT = "check process web with pidfile /var/vcap/sys/run/web/web.pid\n"


def release(where: Path, conf: str = CONF) -> Path:
    files = {"spec": yaml.safe_dump(SPEC), "monit": MONIT, "templates/ctl.erb": "#!/bin/sh\n"}
    for name, text in {**files, "templates/web.conf.erb": conf}.items():
        path = where / "jobs/web" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return where


def manifest(where: Path, **job: object) -> Path:
    path = where / "manifest.yml"
    group = {"name": "front", "jobs": [{"name": "web", "release": "r", **job}]}
    path.write_text(yaml.safe_dump({"name": "shop", "instance_groups": [group]}))
    return path


def render(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    assert shutil.which("ruby"), "ruby is missing: ./dev ci installs it"
    argv = [sys.executable, "-m", "agent_shim", "render", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **environment})


def test_render_evaluates_defaults_properties_links_and_spec(tmp_path: Path) -> None:
    consumes = {"db": {"instances": [{"address": "10.0.0.9"}], "properties": {"port": 5432}}}
    given = manifest(tmp_path, properties={"port": 8080, "extra": {"a": "b"}}, consumes=consumes)
    done = render(given, release(tmp_path / "r"), "--out", tmp_path / "out")

    assert done.returncode == 0
    assert done.stderr.startswith("warning: web needs the package web: use a compiled release (")
    assert (tmp_path / "out/jobs/web/config/web.conf").read_text().splitlines() == [
        *("port 8080", "name nameless", "tls false", "extra b", "db 10.0.0.9 5432"),
        "at 127.0.0.1 of shop/front/0",
    ]
    assert (tmp_path / "out/jobs/web/monit").read_text() == MONIT
    assert (tmp_path / "out/jobs/web/bin/ctl").stat().st_mode & 0o777 == 0o755
    assert json.loads((tmp_path / "out/instance.json").read_text())["deployment"] == "shop"


def test_render_takes_packages_from_a_compiled_tarball(tmp_path: Path) -> None:
    source = release(tmp_path / "r")
    (source / "jobs/web/spec").rename(source / "jobs/web/job.MF")
    (tmp_path / "package/bin").mkdir(parents=True)
    (tmp_path / "package/bin/web").write_text("x")
    inner = {"jobs/web.tgz": source / "jobs/web", "compiled_packages/web.tgz": tmp_path / "package"}
    with tarfile.open(tmp_path / "r.tgz", "w:gz") as whole:
        for name, directory in inner.items():
            held = io.BytesIO()
            with tarfile.open(fileobj=held, mode="w:gz") as part:
                part.add(directory, ".")
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(held.getvalue())
            whole.addfile(member, io.BytesIO(held.getvalue()))
    done = render(manifest(tmp_path), tmp_path / "r.tgz", "--out", tmp_path / "out")

    assert (done.returncode, done.stderr) == (0, "")
    assert "no extra\n" in (tmp_path / "out/jobs/web/config/web.conf").read_text()
    assert (tmp_path / "out/packages/web/bin/web").read_text() == "x"


def test_rendered_templates_can_use_yaml_and_json_without_require(tmp_path: Path) -> None:
    conf = "<%= YAML.dump({'port' => p('port')}) %><%= JSON.dump([YAML.load('a: 1')]) %>\n"
    done = render(manifest(tmp_path), release(tmp_path / "r", conf), "--out", tmp_path / "out")

    assert done.returncode == 0
    assert (tmp_path / "out/jobs/web/config/web.conf").read_text() == '---\nport: 80\n[{"a":1}]\n'


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ("a\n<%= p('name') %>\n", ":2: there is no property name\n"),
        ("<%= link('db').address %>", ":1: there is no link db: it is optional, and no job of the manifest provides"),
        ("<%= link('x').address %>", ":1: there is no link x: the spec of web consumes none of this name\n"),
        ("<% if %>", ":1: syntax error, unexpected ';'\n"),
        ("<% abort('bad') %>", ":1: the template ends the program: bad\n"),
        (
            "\n<%= spec.networks.private.ip %>",
            ":2: a value is missing (nil), so it has no `ip`, in: <%= spec.networks.private.ip %>\n",
        ),
    ],
)
def test_template_error_names_the_file_and_line(tmp_path: Path, conf: str, said: str) -> None:
    done = render(manifest(tmp_path), release(tmp_path / "r", conf), "--out", tmp_path / "out")

    assert done.returncode == 78
    assert f"cannot render web/templates/web.conf.erb{said}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_render_error_names_each_faulty_template(tmp_path: Path) -> None:
    source = release(tmp_path / "r", "<%= p('name') %>")
    (source / "jobs/web/monit").write_text("<%= p('extra') %>")
    done = render(manifest(tmp_path), source, "--out", tmp_path / "out")

    assert done.stderr == (
        "agent-shim: cannot render web/templates/web.conf.erb:1: there is no property name\n"
        "cannot render web/monit:1: there is no property extra\n"
    )


LINKED = """\
<% link('db').instances.each do |one| -%>
<%= one.name %>/<%= one.index %> <%= one.id %> <%= one.az %> <%= one.bootstrap %> <%= one.address %>
<% end -%>
<%= link('db').p('port') %> <%= link('db').properties['port'] %> <%= link('db').if_p('x') { 1 }.else { 'no x' } %>
<% if_link('x') { } .else_if_link('db') do |db| -%>
<%= spec.links.db.default_network %>
<% end -%>
"""


def linked(where: Path, template: str = LINKED, **db: object) -> tuple[Path, Path]:
    """Return a manifest and a release in which the ``front`` group consumes a ``db`` link that the ``db`` group
    provides.
    """
    source = release(where / "r", template)
    spec = {
        "name": "db",
        "provides": [{"name": "db", "type": "db", "properties": ["port"]}],
        "properties": {"port": {}},
    }
    (source / "jobs/db").mkdir()
    (source / "jobs/db/spec").write_text(yaml.safe_dump(spec))
    given = manifest(where)
    document = yaml.safe_load(given.read_text())
    job = {"name": "db", "properties": {"port": 5432}}
    document["instance_groups"].append({"name": "db", "instances": 2, "azs": ["z1", "z2"], "jobs": [job], **db})
    given.write_text(yaml.safe_dump(document))
    return given, source


def test_render_resolves_a_link_to_another_group_in_the_manifest(tmp_path: Path) -> None:
    networks = [{"name": "private", "static_ips": ["10.0.0.4-10.0.0.5"]}]
    done = render(*linked(tmp_path, networks=networks), "--group", "front", "--out", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/jobs/web/config/web.conf").read_text().splitlines() == [
        *("db/0 db-0 z1 true 10.0.0.4", "db/1 db-1 z2 false 10.0.0.5"),
        *("5432 5432 no x", "private"),
    ]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("<%= link('db').instances.last.address %>", "the link db has no address of db/1: give static_ips in the"),
        ("<%= link('db').address %>", "the link db needs one address for 2 instances, which only bosh-dns has"),
        ("<%= link('db').instances[2].address %>", "a value is missing (nil), so it has no `address`, in: <%= link('"),
    ],
)
def test_render_error_for_an_unknown_address_suggests_a_remedy(tmp_path: Path, template: str, said: str) -> None:
    done = render(*linked(tmp_path, template), "--group", "front", "--out", tmp_path / "out")

    assert f"cannot render web/templates/web.conf.erb:1: {said}" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "<%= link('db').p('x') %>",
            "the link db has no property x: db/db does not set it, or its spec does not provide it\n",
        ),
        ("<%= link('db').p(['x', 'y']) %>", "the link db has no property x, y: db/db does not set it"),
        ("<%= link('db').p('port') %>", "the link db has no property port: db/db does not set it"),
    ],
)
def test_render_error_says_why_a_link_has_no_such_property(tmp_path: Path, template: str, said: str) -> None:
    job = {"name": "db", "properties": {}}
    done = render(*linked(tmp_path, template, jobs=[job]), "--group", "front", "--out", tmp_path / "out")

    assert done.stderr.startswith(f"agent-shim: cannot render web/templates/web.conf.erb:1: {said}")


def test_render_error_for_a_property_missing_in_a_manual_link_suggests_consumes(tmp_path: Path) -> None:
    consumes = {"db": {"instances": [{"address": "10.0.0.9"}], "properties": {"port": 5432}}}
    source = release(tmp_path / "r", "<%= link('db').p('x') %>")
    done = render(manifest(tmp_path, consumes=consumes), source, "--out", tmp_path / "out")

    assert "conf.erb:1: the link db has no property x: add it to its `properties` in `consumes`\n" in done.stderr


def test_render_error_names_a_release_that_is_not_given(tmp_path: Path) -> None:
    """A job with the same name in another release must not be used instead."""
    source = release(tmp_path / "r")
    (source / "config").mkdir()
    (source / "config/final.yml").write_text("name: other\n")
    done = render(manifest(tmp_path), source, "--out", tmp_path / "out")

    assert done.returncode == 66
    assert (
        "cannot render front/web: none of the given releases (other) has this job; add the release r\n" in done.stderr
    )


def test_render_error_names_an_invalid_tarball(tmp_path: Path) -> None:
    (tmp_path / "r.tgz").write_text("x")
    done = render(manifest(tmp_path), tmp_path / "r.tgz", "--out", tmp_path / "out")

    assert done.returncode == 78
    assert done.stderr == f"agent-shim: cannot read {tmp_path}/r.tgz: cannot unpack the archive: truncated header\n"


def test_render_warns_about_addons(tmp_path: Path) -> None:
    given = manifest(tmp_path)
    document = yaml.safe_load(given.read_text())
    addons = [
        {"name": "dns", "jobs": [{"name": "bosh-dns", "properties": {"a": "((b))"}}, {"name": "bpm"}]},
        {"name": "b", "jobs": [{"name": "bpm"}]},
    ]
    given.write_text(yaml.safe_dump({**document, "addons": addons}))
    done = render(given, release(tmp_path / "r"), "--out", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    assert (
        "warning: the jobs of addons are left out: bosh-dns; list them in the instance group instead\n" in done.stderr
    )


def test_render_warns_about_outdated_jobs_in_the_output_directory(tmp_path: Path) -> None:
    (tmp_path / "out/jobs/old").mkdir(parents=True)
    (tmp_path / "out/jobs/web").mkdir()
    done = render(manifest(tmp_path), release(tmp_path / "r"), "--out", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    old = f"{tmp_path}/out/jobs/old"
    assert f"warning: front has no job old, but an agent would run {old}; remove it if it is outdated\n" in done.stderr


def test_render_refuses_to_overwrite_a_release(tmp_path: Path) -> None:
    source = release(tmp_path / "r")
    done = render(manifest(tmp_path), source, "--out", tmp_path / "r/../r")

    assert done.returncode == 78
    assert done.stderr == f"agent-shim: cannot write to {tmp_path}/r/../r: it is a release; choose another --out\n"
    assert (source / "jobs/web/spec").is_file()


def test_render_kubernetes_warns_about_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = render(manifest(tmp_path), release(tmp_path / "r"), "--kubernetes", "--out", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: web needs the package web: use a compiled release (")


@pytest.mark.parametrize(
    ("releases", "said"),
    [
        (["../r"], "cannot copy ../r into an image: run the command in a directory above it"),
        (["."], "cannot copy . into an image: run the command in a directory above it"),
        (["a/r", "b/r"], "cannot copy a/r and b/r into an image: they have the same name; rename one"),
    ],
)
def test_render_kubernetes_rejects_releases_that_cannot_be_copied_into_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, releases: list[str], said: str
) -> None:
    given, here = manifest(tmp_path), tmp_path / "here"
    for place in (tmp_path / "r", here, here / "a/r", here / "b/r"):
        release(place)
    monkeypatch.chdir(here)
    done = render(given, *releases, "--kubernetes", "--out", "out")

    assert (done.returncode, done.stderr) == (78, f"agent-shim: {said}\n")


def test_render_passes_only_properties_that_the_job_spec_declares(tmp_path: Path) -> None:
    conf = "<%= p('other', 'none') %> <%= properties.extra.to_h.keys %> <%= ''.blank? %>"
    given = manifest(tmp_path, properties={"other": 1, "extra": {"b": 1, "a": 2}})
    done = render(given, release(tmp_path / "r", conf), "--out", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/jobs/web/config/web.conf").read_text() == "none [:a, :b] true"


def test_render_needs_no_release_for_the_built_in_bpm(tmp_path: Path) -> None:
    given = manifest(tmp_path)
    document = yaml.safe_load(given.read_text())
    document["instance_groups"][0]["jobs"].append({"name": "bpm", "release": "bpm"})
    given.write_text(yaml.safe_dump(document))
    done = render(given, release(tmp_path / "r"), "--out", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "out/jobs").iterdir()] == ["web"]


def test_render_refuses_a_variable_without_a_value(tmp_path: Path) -> None:
    done = render(manifest(tmp_path, properties={"name": "((secret))"}), release(tmp_path / "r"), "--out", tmp_path)

    assert done.returncode == 78
    assert "((secret)) has no value" in done.stderr


def test_render_passes_dates_to_templates_as_text(tmp_path: Path) -> None:
    given = manifest(tmp_path, properties={"port": "day"})
    given.write_text(given.read_text().replace("day", "2015-07-01"))
    source = release(tmp_path / "r", "<%= p('port') %> <%= p('name') %>\n")
    spec = source / "jobs/web/spec"
    spec.write_text(spec.read_text().replace("name: {}", "name: {default: 2016-01-01}"))
    done = render(given, source, "--out", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/jobs/web/config/web.conf").read_text() == "2015-07-01 2016-01-01\n"


@pytest.mark.parametrize("file", ["spec", "templates/ctl.erb"])
def test_render_error_names_a_file_that_the_release_lacks(tmp_path: Path, file: str) -> None:
    source = release(tmp_path / "r")
    (source / "jobs/web" / file).unlink()
    done = render(manifest(tmp_path), source, "--out", tmp_path / "out")

    assert done.returncode == 66
    assert f"jobs/web/{file}: there is no such file" in done.stderr


def test_render_error_names_a_binary_template(tmp_path: Path) -> None:
    source = release(tmp_path / "r")
    (source / "jobs/web/templates/ctl.erb").write_bytes(b"\xff")
    done = render(manifest(tmp_path), source, "--out", tmp_path / "out")

    assert done.returncode == 78
    assert "cannot read" in done.stderr
    assert "templates/ctl.erb" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("instance_groups: [{name: g, jobs: [{release: r}]}]", "`name` - at `$.instance_groups[0].jobs[0]`"),
        ("instance_groups: [{jobs: [{name: web}]}]", "`name` - at `$.instance_groups[0]`"),
        ("instance_groups: [g]", "at `$.instance_groups[0]`"),
        ("name: shop", "`instance_groups`"),
        ("a", "cannot read"),
        ("a: : [b", "manifest.yml: line 1 column 4: mapping values are not allowed here\n"),
        ("a: \0", "manifest.yml: character 4: special characters are not allowed\n"),
    ],
)
def test_manifest_error_names_the_file_and_position(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "manifest.yml").write_text(text)
    done = render(tmp_path / "manifest.yml", release(tmp_path / "r"), "--out", tmp_path / "out")

    assert done.returncode == 78
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_render_refuses_to_select_an_unknown_job(tmp_path: Path) -> None:
    words = ("--only", "web", "--only", "wbe", "--out", tmp_path / "out")
    done = render(manifest(tmp_path), release(tmp_path / "r"), *words)

    assert done.returncode == 78
    assert "front has no job wbe" in done.stderr


INSTANCE = """\
<%= [spec.id, index, spec.az, spec.bootstrap, spec.address, spec.ip, spec.persistent_disk].join(' ') %>
<%= link('db').instances.map(&:address).join(' ') %> <%= link('db').address %> <%= link('db').address(azs: ['z2']) %>
"""


def test_render_options_set_instance_properties(tmp_path: Path) -> None:
    options = {"--index": 1, "--address": "10.0.0.7", "--az": "z9"}
    patterns = {"--addresses": "{group}-{index}.{az}.{deployment}", "--group-address": "{group}.{network}"}
    words = [word for option in (options | patterns).items() for word in option]
    given, source = linked(tmp_path, INSTANCE)
    document = yaml.safe_load(given.read_text())
    document["instance_groups"][0].update(instances=2, azs=["z1", "z2"], persistent_disk=2048)
    given.write_text(yaml.safe_dump(document))
    done = render(given, source, "--group", "front", "--bootstrap", *words, "--out", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/jobs/web/config/web.conf").read_text().splitlines() == [
        "front-1 1 z9 true 10.0.0.7 10.0.0.7 2048",
        "db-0.z1.shop db-1.z2.shop db.default db-1.z2.shop",
    ]
    assert json.loads((tmp_path / "out/instance.json").read_text()) == {
        "deployment": "shop",
        "name": "front",
        "id": "front-1",
        "index": 1,
        "az": "z9",
        "persistent_disk": 2048,
    }


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"AGENT_SHIM_INDEX": "front-0"}, "front-0 0  true 127.0.0.1 127.0.0.1 0"),
        ({"AGENT_SHIM_BOOTSTRAP": "false"}, "front-0 0  false 127.0.0.1 127.0.0.1 0"),
        ({"AGENT_SHIM_ADDRESS": "::1", "AGENT_SHIM_AZ": "z3"}, "front-0 0 z3 true ::1 ::1 0"),
    ],
)
def test_render_environment_variables_set_instance_properties(
    tmp_path: Path, environment: dict[str, str], text: str
) -> None:
    source = release(tmp_path / "r", INSTANCE.splitlines()[0])
    done = render(manifest(tmp_path), source, "--out", tmp_path / "out", **environment)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/jobs/web/config/web.conf").read_text() == text


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"AGENT_SHIM_INDEX": "1"},
            "cannot render front/1: the manifest has only 1 instances of this group; raise `instances`",
        ),
        ({"AGENT_SHIM_INDEX": "front"}, "AGENT_SHIM_INDEX is neither a number nor the name of a pod: front"),
        ({"AGENT_SHIM_ADDRESS": "front"}, "cannot render front/0: its address front is not an IP address"),
        ({"AGENT_SHIM_BOOTSTRAP": "1"}, "AGENT_SHIM_BOOTSTRAP is neither true nor false: 1"),
    ],
)
def test_render_rejects_invalid_instance_properties(tmp_path: Path, environment: dict[str, str], said: str) -> None:
    done = render(manifest(tmp_path), release(tmp_path / "r"), "--out", tmp_path / "out", **environment)

    assert done.returncode == 78
    assert said in done.stderr
