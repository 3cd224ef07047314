"""``agent-shim render`` with a real ruby: the templates of a release, as a Director evaluates them."""

from __future__ import annotations

import io
import json
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


def render(*words: object) -> subprocess.CompletedProcess[str]:
    assert shutil.which("ruby"), "ruby is missing: ./dev ci installs it"
    argv = [sys.executable, "-m", "agent_shim", "render", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True)


def test_defaults_properties_links_and_spec(tmp_path: Path) -> None:
    consumes = {"db": {"instances": [{"address": "10.0.0.9"}], "properties": {"port": 5432}}}
    given = manifest(tmp_path, properties={"port": 8080, "extra": {"a": "b"}}, consumes=consumes)
    done = render(given, release(tmp_path / "r"), "--out", tmp_path / "out")

    assert done.returncode == 0
    assert done.stderr.startswith("warning: web needs the package web: give its compiled release (")
    assert (tmp_path / "out/jobs/web/config/web.conf").read_text().splitlines() == [
        *("port 8080", "name nameless", "tls false", "extra b", "db 10.0.0.9 5432"),
        "at 127.0.0.1 of shop/front/0",
    ]
    assert (tmp_path / "out/jobs/web/monit").read_text() == MONIT
    assert (tmp_path / "out/jobs/web/bin/ctl").stat().st_mode & 0o777 == 0o755
    assert json.loads((tmp_path / "out/instance.json").read_text())["deployment"] == "shop"


def test_a_compiled_tarball_brings_its_packages(tmp_path: Path) -> None:
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


def test_templates_write_yaml_and_json_without_asking_for_them(tmp_path: Path) -> None:
    conf = "<%= YAML.dump({'port' => p('port')}) %><%= JSON.dump([YAML.load('a: 1')]) %>\n"
    done = render(manifest(tmp_path), release(tmp_path / "r", conf), "--out", tmp_path / "out")

    assert done.returncode == 0
    assert (tmp_path / "out/jobs/web/config/web.conf").read_text() == '---\nport: 80\n[{"a":1}]\n'


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ("a\n<%= p('name') %>\n", "cannot render web/config/web.conf:2: there is no property name"),
        ("<%= link('db').address %>", "cannot render web/config/web.conf:1: there is no link db: consumes of the job"),
        ("<% if %>", "cannot render web/config/web.conf"),
    ],
)
def test_a_mistake_names_its_place(tmp_path: Path, conf: str, said: str) -> None:
    done = render(manifest(tmp_path), release(tmp_path / "r", conf), "--out", tmp_path / "out")

    assert done.returncode == 78
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_variable_without_a_value_is_refused(tmp_path: Path) -> None:
    done = render(manifest(tmp_path, properties={"name": "((secret))"}), release(tmp_path / "r"), "--out", tmp_path)

    assert done.returncode == 78
    assert "((secret)) has no value" in done.stderr


def test_a_date_is_its_text(tmp_path: Path) -> None:
    given = manifest(tmp_path, properties={"port": "day"})
    given.write_text(given.read_text().replace("day", "2015-07-01"))
    source = release(tmp_path / "r", "<%= p('port') %> <%= p('name') %>\n")
    spec = source / "jobs/web/spec"
    spec.write_text(spec.read_text().replace("name: {}", "name: {default: 2016-01-01}"))
    done = render(given, source, "--out", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/jobs/web/config/web.conf").read_text() == "2015-07-01 2016-01-01\n"


@pytest.mark.parametrize("file", ["spec", "templates/ctl.erb"])
def test_a_file_that_the_release_lacks_is_named(tmp_path: Path, file: str) -> None:
    source = release(tmp_path / "r")
    (source / "jobs/web" / file).unlink()
    done = render(manifest(tmp_path), source, "--out", tmp_path / "out")

    assert done.returncode == 66
    assert f"jobs/web/{file}: there is no such file" in done.stderr


def test_the_error_names_a_binary_template(tmp_path: Path) -> None:
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
    ],
)
def test_a_mistake_of_a_manifest_names_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "manifest.yml").write_text(text)
    done = render(tmp_path / "manifest.yml", release(tmp_path / "r"), "--out", tmp_path / "out")

    assert done.returncode == 78
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_each_job_of_only_is_one_of_the_group(tmp_path: Path) -> None:
    words = ("--only", "web", "--only", "wbe", "--out", tmp_path / "out")
    done = render(manifest(tmp_path), release(tmp_path / "r"), *words)

    assert done.returncode == 78
    assert "front has no job wbe" in done.stderr
