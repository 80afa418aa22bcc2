"""--mode=check from the command line: the table, the exit code, and that nothing is written."""

import pytest

from ctl import main
from ctl.modes.check import checks, learning_checks
from tests.modes.check import planted


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the correct experiment."""
    monkeypatch.chdir(tmp_path)
    planted.write_experiment(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_all_checks_pass_on_a_correct_experiment_and_write_nothing(folder, capsys):
    before = set(folder.rglob("*"))
    assert main.run(["ctl", "--config=experiment.py", "--mode=check"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[1:9]] == ["pass"] * 8
    assert out[8].split(None, 3)[:3] == ["pass", "replica", "equivalence"]
    assert out[9] == "8 checks: 8 passed, 0 warnings, 0 failed."
    assert {p for p in folder.rglob("*") if "__pycache__" not in p.parts} <= before


def test_a_failed_check_is_exit_code_1(folder, capsys, monkeypatch):
    monkeypatch.setattr(checks, "CHECKS", {"gradients": learning_checks.check_gradients})
    planted.write_experiment(folder, planted.NO_GRADIENT)
    assert main.run(["ctl", "--config=experiment.py", "--mode=check"]) == 1
    out = capsys.readouterr().out
    assert "FAIL     gradients" in out and "-> let the loss depend on them" in out
    assert "1 check: 0 passed, 0 warnings, 1 failed." in out


@pytest.mark.parametrize("arguments", [["--workdir=x"], ["--fresh"]])
def test_flags_without_an_effect_are_rejected(folder, capsys, arguments):
    assert main.run(["ctl", "--config=experiment.py", "--mode=check", *arguments]) == 2
    assert "has no effect with --mode=check" in capsys.readouterr().err
