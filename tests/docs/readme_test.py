"""The README's lines do what they say."""

import json
import re
import shutil
import sys

import pytest

from tests import child

README = (child.ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands():
    return [line for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path):
    """A folder with my_model.py and the data, as the README's reader has."""
    model = next(block for block in blocks("python") if "def get_config" in block)
    (tmp_path / "my_model.py").write_text(model)
    shutil.copytree(child.ROOT / "experiments", tmp_path / "experiments")
    return tmp_path


def program(command):
    """The arguments of a README line that runs the program, for this environment's Python."""
    return command.split("python3 -m uv run python ")[1].split()


def test_every_command_is_run_here_or_is_the_test_command():
    known = [c for c in commands() if "-m ctl.main" in c or "-m ctl.launch" in c]
    assert [c for c in commands() if c not in known] == [
        "python3 -m pip install -q uv && python3 -m uv run pytest"
    ]
    assert len(known) == 6


def test_the_new_model_trains(folder):
    command = next(c for c in commands() if c.endswith("--config=my_model.py"))
    done = child.run(program(command), cwd=folder)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "runs/my_model/result.json").read_text())
    assert result["eval"]["examples"] == 10_000
    assert result["eval"]["accuracy"] > 0.85
    lines = (folder / "my_model.py").read_text().strip().splitlines()
    assert len([line for line in lines if line]) <= 15


def test_orbits_controller_drives_the_new_model(folder):
    script = next(block for block in blocks("python") if "import orbit" in block)
    done = child.run(["-c", script], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "'examples': np.int64(10000)" in done.stdout


def test_explain_line(folder):
    command = next(c for c in commands() if "--mode=explain" in c)
    done = child.run(program(command), cwd=folder)
    assert done.returncode == 0, done.stderr
    for name in ("devices", "replicas", "rows", "denominator", "reduction", "clip"):
        assert f"\n{name} " in done.stdout


def test_mirrored_line_trains(folder):
    command = next(c for c in commands() if c.endswith("mnist_mirrored.py"))
    done = child.run([*program(command), "--config.train.steps=20"], cwd=folder)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "runs/mnist_mirrored/result.json").read_text())
    assert (result["strategy"], result["replicas"]) == ("mirrored", 2)
    assert result["eval"]["examples"] == 10_000


def test_two_processes_train(folder):
    command = next(c for c in commands() if "-m ctl.launch" in c)
    done = child.run([*program(command), "--config.train.steps=20"], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "runs/mnist_multi_worker/result.json").read_text())
    assert (result["strategy"], result["replicas"]) == ("multi_worker_mirrored", 2)
    assert result["eval"]["examples"] == 10_000


@pytest.mark.slow
def test_check_line_prints_what_is_shown(folder):
    command = next(c for c in commands() if "--mode=check" in c)
    done = child.run(program(command), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in blocks("text")[1].splitlines():
        assert line in done.stdout


@pytest.mark.slow
def test_table_of_three_examples_is_what_is_measured():
    measured = child.run(["-m", "benchmarks.uneven_split"])
    assert measured.returncode == 0, measured.stderr
    table = README.split("| program | update of w | error |")[1].split("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 8
    for row in rows:
        assert row in measured.stdout, row


def test_output_shown_is_in_the_form_that_is_printed():
    shown = blocks("text")[0].splitlines()
    assert shown[0].startswith("one_device (auto: no GPU): 1 replica; global batch 128")
    assert re.fullmatch(
        r"eval +\d+/\d+ \| loss [\d.]+ \| accuracy 0\.99\d\d \| examples 10,000", shown[-2]
    )


def test_python_of_the_readme_is_the_one_supported():
    assert sys.version_info >= (3, 10)
    assert 'requires-python = ">=3.10,<3.14"' in (child.ROOT / "pyproject.toml").read_text()
    assert "Python 3.10 to 3.13" in README
