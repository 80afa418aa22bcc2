"""Every command and every program in README.md works, and prints what README.md shows."""

import gzip
import json
import re
import shutil
import struct
import sys

import pytest

from ctl import main
from tests import child

README = (child.ROOT / "README.md").read_text()
TEST_EXAMPLES = 1_000


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands():
    return [line for block in blocks("sh") for line in block.splitlines()]


def arguments(pattern):
    """The arguments of Python in the one command of README.md that matches a regular expression."""
    (command,) = (line for line in commands() if re.search(pattern, line))
    return command.split("python3 -m uv run python ")[1].split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as a reader of README.md has it: my_model.py and experiments, with less data."""
    folder = tmp_path_factory.mktemp("readme")
    (model,) = (block for block in blocks("python") if "def get_config" in block)
    (folder / "my_model.py").write_text(model)
    shutil.copytree(child.ROOT / "experiments", folder / "experiments")
    for path in (folder / "experiments/data/mnist").glob("*.gz"):
        raw = gzip.decompress(path.read_bytes())
        count = TEST_EXAMPLES if path.name.startswith("t10k") else 10_000
        header = 4 + 4 * raw[3]
        end = header + count * (len(raw) - header) // struct.unpack_from(">I", raw, 4)[0]
        raw = raw[:4] + struct.pack(">I", count) + raw[8:end]
        path.write_bytes(gzip.compress(raw, compresslevel=1))
    return folder


def train(folder, *arguments):
    """Runs the program; returns its result.json."""
    done = child.run(arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (workdir,) = re.findall(r"Done: (\S+)/result\.json", done.stdout)
    return json.loads((folder / workdir / "result.json").read_text())


def test_every_command_is_run_by_a_test_here_or_runs_the_tests():
    programs = [line for line in commands() if "-m ctl.main" in line or "-m ctl.launch" in line]
    assert len(programs) == 6  # the first one is run in tests/end_to_end/program_test.py
    assert [line for line in commands() if line not in programs] == [
        "python3 -m pip install -q uv && python3 -m uv run pytest"
    ]


def test_the_new_model_trains(folder):
    result = train(folder, *arguments("--config=my_model.py$"))
    assert result["eval"]["examples"] == TEST_EXAMPLES
    assert result["eval"]["accuracy"] > 0.8
    lines = (folder / "my_model.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 15


def test_orbits_controller_trains_the_new_model(folder):
    (script,) = (block for block in blocks("python") if "import orbit" in block)
    done = child.run(["-c", script], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"'examples': np.int64({TEST_EXAMPLES})" in done.stdout


def test_explain_prints_what_the_text_promises(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    module, program, *flags = arguments("--mode=explain")
    assert (module, program, main.run(["ctl", *flags])) == ("-m", "ctl.main", 0)
    printed = capsys.readouterr().out
    for name in ("devices", "replicas", "rows", "denominator", "reduction", "clip"):
        assert f"\n{name} " in printed


@pytest.mark.slow
def test_the_mirrored_strategy_trains(folder):
    result = train(folder, *arguments("mnist_mirrored.py$"), "--config.train.steps=10")
    assert (result["strategy"], result["replicas"]) == ("mirrored", 2)
    assert result["eval"]["examples"] == TEST_EXAMPLES


@pytest.mark.slow
def test_two_processes_train(folder):
    result = train(folder, *arguments("-m ctl.launch"), "--config.train.steps=10")
    assert (result["strategy"], result["replicas"]) == ("multi_worker_mirrored", 2)
    assert result["eval"]["examples"] == TEST_EXAMPLES


@pytest.mark.slow
def test_check_prints_the_lines_shown(folder, tmp_path):
    # README.md shows the numbers of the complete data.
    shutil.copy(folder / "my_model.py", tmp_path)
    (tmp_path / "experiments").symlink_to(child.ROOT / "experiments")
    done = child.run(arguments("--mode=check"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in blocks("text")[1].splitlines():
        assert line in done.stdout


@pytest.mark.slow
def test_the_table_of_three_examples_is_what_the_benchmark_prints():
    measured = child.run(["-m", "benchmarks.uneven_split"])
    assert measured.returncode == 0, measured.stderr
    table = README.split("| program | update of w | error |")[1].split("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 8
    for row in rows:
        assert row in measured.stdout, row


def test_the_output_shown_has_the_format_of_what_is_printed():
    shown = blocks("text")[0].splitlines()
    assert shown[0].startswith("one_device (auto: no GPU): 1 replica; global batch 128")
    assert re.fullmatch(
        r"eval +\d+/\d+ \| loss [\d.]+ \| accuracy 0\.99\d\d \| examples 10,000", shown[-2]
    )


def test_the_python_versions_in_the_text_are_the_supported_ones():
    assert sys.version_info >= (3, 10)
    assert 'requires-python = ">=3.10,<3.14"' in (child.ROOT / "pyproject.toml").read_text()
    assert "Python 3.10 to 3.13" in README
