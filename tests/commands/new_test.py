"""ctl new: a project whose tests pass, and mistakes that change nothing."""

import fnmatch
import json
import os
import re
import types
from unittest import mock

import pytest

from ctl import main
from ctl.commands import new
from ctl.configs.loading import load_config
from ctl.errors import UsageError
from tests.support import child


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("flags", [[], *([f"--kind={kind}"] for kind in new.KINDS)])
def test_project_has_every_file_and_no_placeholder(tmp_path, capsys, flags):
    assert main.run(["ctl", "new", "my-digits", *flags]) == 0
    out = capsys.readouterr().out
    assert out.endswith("Test and train: cd my-digits && pytest && ctl config.py\n")
    project = tmp_path / "my-digits"
    files = sorted(str(p.relative_to(project)) for p in project.rglob("*") if p.is_file())
    assert files == [
        ".github/workflows/test.yml", ".gitignore", "README.md", "config.py", "conftest.py",
        "requirements.txt", "test_trainer.py", "trainer.py",
    ]  # fmt: skip
    assert all(name in out for name in files)
    texts = "".join((project / name).read_text() for name in files)
    assert not re.search("PROJECT_NAME|CTL_REQUIREMENT", texts) and "my-digits" in texts
    for name in fnmatch.filter(files, "*.py"):
        compile((project / name).read_text(), name, "exec")
    assert load_config(str(project / "config.py")).trainer == "trainer.py:Trainer"


@pytest.mark.parametrize(
    ("origin", "place"),
    [
        (None, "==1.2"),
        ({"url": "file:///a/ctl", "dir_info": {"editable": True}}, " @ file:///a/ctl"),
        (
            {"url": "https://host/ctl", "vcs_info": {"vcs": "git", "commit_id": "12ab"}},
            " @ git+https://host/ctl@12ab",
        ),
    ],
)
def test_project_requires_ctl_from_where_it_was_installed(tmp_path, monkeypatch, origin, place):
    direct_url = origin and json.dumps(origin)
    installed = types.SimpleNamespace(version="1.2", read_text=lambda file: direct_url)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: installed)
    new.main(["a"])
    text = (child.ROOT / "pyproject.toml").read_text()
    package = re.search(r'^name = "(.+?)"', text, re.MULTILINE)
    requirement = (tmp_path / "a/requirements.txt").read_text().splitlines()[0]
    assert requirement == f"{package[1]}[cpu]{place}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[
            (["--", name], "is not the name of a project: use letters")
            for name in ("1a", "-x/..", "é", "a.b", ".")
        ],
        *[(["a" * length], "cannot be created (File name too long)") for length in (250, 300)],
        ([], "following arguments are required: NAME: write ctl new NAME --kind=text."),
        (["a", "--kind=audio"], "ctl new: argument --kind: invalid choice: 'audio'"),
        (["no/a"], "no is not a folder: create it first."),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, message):
    assert main.run(["ctl", "new", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_existing_folders_files_and_links_are_not_changed(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "file", "link"):
        with pytest.raises(UsageError, match=f"{name} exists already, and was not changed"):
            new.main([name])
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link"]
    assert (tmp_path / "file").read_text() == "kept" and os.listdir("folder") == []


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):

    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("pathlib.Path.rename", full)
    with pytest.raises(UsageError, match=r"a cannot .*No space left"):
        new.main(["a"])
    assert os.listdir(tmp_path) == []


def test_a_project_may_have_the_name_of_a_placeholder(tmp_path):
    new.main(["CTL_REQUIREMENT"])
    assert (tmp_path / "CTL_REQUIREMENT/README.md").read_text().startswith("# CTL_REQUIREMENT\n")


def test_every_file_of_the_template_is_package_data():
    text = (child.ROOT / "pyproject.toml").read_text()
    patterns = re.findall(r'"(commands/project_template/[^"]*)"', text)
    sources = [source for kind in new.KINDS for source in new.list_files(kind).values()]
    names = [str(source.relative_to(child.ROOT / "ctl")) for source in sources]
    for name in names:
        depth = [p for p in patterns if p.count("/") == name.count("/")]  # * is within one folder
        assert any(fnmatch.fnmatch(name, pattern) for pattern in depth), name


OTHERS = [kind for kind in new.KINDS if kind != "tabular"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["tabular", *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS)]
)
def test_tests_of_a_new_project_pass_and_it_trains(tmp_path, kind):
    new.main(["project", f"--kind={kind}"])
    project = tmp_path / "project"
    tests = child.run(["-m", "pytest", "-n", "0", "-p", "no:cacheprovider"], cwd=project)
    assert tests.returncode == 0 and "2 passed" in tests.stdout, tests.stdout
    trained = child.run(["-m", "ctl.main", "config.py", "--config.train.steps=20"], cwd=project)
    assert trained.returncode == 0, trained.stderr
    assert len([*project.glob("runs/config*/result.json")]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_new_project_of_each_kind_trains(monkeypatch, kind):
    new.main(["project", f"--kind={kind}"])
    monkeypatch.chdir("project")
    assert main.run(["ctl", "config.py", "--dry_run"]) == 0
