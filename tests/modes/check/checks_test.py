"""--mode=check from the command line: the table, the exit code, and that nothing is written."""

import concurrent.futures
import os
import re
import types

import pytest

from ctl import main
from ctl.configs.modes import MODES
from ctl.modes import check
from ctl.modes.check import replica_check
from ctl.modes.check.outcome import FAIL, PASS, Outcome, format_row
from ctl.testing.equivalence_report import Report
from ctl.testing.splits import Split
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
    assert out[9:] == ["8 checks: 8 passed, 0 warnings, 0 failed."]
    assert {p for p in folder.rglob("*") if "__pycache__" not in p.parts} <= before


@pytest.mark.parametrize("name", [name for name in check.CHECKS if name != "save and restore"])
def test_a_check_passes_on_a_correct_experiment(correct_factory, name):
    outcome = check.CHECKS[name](correct_factory)
    assert (outcome.verdict, outcome.fix) == (PASS, ""), outcome


def test_the_fix_is_on_a_second_line_below_the_observation():
    first, second = format_row("inputs", Outcome(FAIL, "NaN", "fix the data")).splitlines()
    assert second.lstrip().startswith("-> fix the data")
    assert second.index("->") == first.index("NaN")


def test_layers_of_frozen_until_are_checked_as_from_its_step_on(folder, capsys):
    groups = "--config.optimizer.groups=[{'variables':'*','frozen_until':3}]"
    assert main.run(["ctl", "check", "experiment.py", "--checks=gradients", groups]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "optimizer.groups unfreezes layers up to step 3: checks the steps from then"
    )
    assert "all 4 trainable variables change" in out


def test_an_exception_is_a_failed_row_with_the_users_line_and_the_others_go_on(folder, capsys):
    config = planted.write_user_experiment(folder, "RaisesInMetrics")
    checks = "--checks=first_loss,gradients,one_batch_overfitted"
    assert main.run(["ctl", "check", config, checks]) == 1
    captured = capsys.readouterr()
    rows = captured.out.splitlines()
    entries = "features: x; label: label; weight: none"
    assert rows[0] == f"Checking user_trainers.py:RaisesInMetrics ({entries})."
    assert rows[1].startswith("pass     first loss ")
    assert re.fullmatch(r"FAIL     gradients +user_trainers.py:\d+: KeyError: 'accurracy'", rows[2])
    assert re.fullmatch(r"FAIL     one batch overfitted +for the same cause as gradients", rows[3])
    assert rows[4:] == ["3 checks: 1 passed, 0 warnings, 2 failed."]
    assert "Traceback" not in captured.err


@pytest.mark.slow
def test_a_killed_comparison_is_one_row(make_factory):
    with replica_check.start_processes() as processes:
        crashing = types.SimpleNamespace(submit=lambda *_: processes.submit(os.abort))
        outcome = replica_check.start(make_factory(), crashing)()
    assert outcome.verdict == FAIL
    assert outcome.observation.startswith("not compared: a process crashed, or was killed")


@pytest.mark.parametrize("arguments", [["--workdir=x"], ["--fresh"]])
def test_flags_without_an_effect_are_rejected(folder, capsys, arguments):
    assert main.run(["ctl", "--config=experiment.py", "--mode=check", *arguments]) == 2
    assert "has no effect with --mode=check" in capsys.readouterr().err


def test_checks_are_chosen_by_name_and_the_longest_are_left_out_by_quick():
    everything = [*check.CHECKS, check.REPLICAS]
    assert check.choose_checks("", quick=False) == everything
    assert check.choose_checks("gradients,data_order", quick=True) == ["data order", "gradients"]
    assert check.choose_checks("overfit", quick=True) == ["one batch overfitted"]
    (flag,) = [flag for flag in MODES["check"].own if flag.choices]
    assert [*flag.choices] == [*(name.replace(" ", "_") for name in everything), "overfit"]
    left_out = set(everything) - set(check.choose_checks("", quick=True))
    assert left_out == {"one batch overfitted", "save and restore"}


def test_a_check_that_does_not_exist_is_one_line(folder, capsys):
    assert main.run(["ctl", "check", "experiment.py", "--checks=gradient"]) == 2
    assert "--checks names 'gradient': did you mean gradients?" in capsys.readouterr().err


def test_quick_compares_an_even_and_an_uneven_batch(make_factory, monkeypatch):
    given = []

    def compare(*_, batch_sizes, replicas, optimizer, **__):
        given.append((batch_sizes, replicas, optimizer is not None))
        return Report("Planted", "float64", (Split(*batch_sizes, 2),), {})

    monkeypatch.setattr(replica_check, "check_replica_equivalence", compare)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        outcome = replica_check.start(make_factory(), thread, quick=True)()
    assert outcome.observation.startswith("2 ways to split a batch, "), outcome
    assert sorted(given) == [([4], (1, 2), False), ([5], (1, 2), True)]
