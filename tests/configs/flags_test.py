"""Parsing the command line. The messages for its mistakes: mistakes_test.py."""

import sys

import pytest

from ctl.configs import flags
from ctl.configs.modes import MODES
from ctl.errors import UsageError


def parse(*arguments):
    return flags.parse(["ctl", *arguments])


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["-config.train.steps=7"], [("train.steps", "7")]),
        (["--config.train.steps", "7"], [("train.steps", "7")]),
        (["--config.data.prefetch", "-1"], [("data.prefetch", "-1")]),
        (["--config.train.steps="], [("train.steps", "")]),
        (["--config.data.dir=a=b\nc"], [("data.dir", "a=b\nc")]),
        (["--config.eval.before_training"], [("eval.before_training", None)]),
        (["--config.eval.before_training", "--fresh"], [("eval.before_training", None)]),
        (["--noconfig.eval.before_training"], [("eval.before_training", "false")]),
        (["--config.train.summary-interval=7"], [("train.summary_interval", "7")]),
        (["--config.loss_weights.next-token=7"], [("loss_weights.next-token", "7")]),
        (["--config.seed=1", "--config.seed=2"], [("seed", "1"), ("seed", "2")]),
    ],
)
def test_changes_of_the_config_are_separated_from_the_flags(arguments, changes):
    for command_line in (["--config=exp.py", *arguments], [*arguments, "--config=exp.py"]):
        values, parsed = parse(*command_line)
        assert (values.config, parsed) == ("exp.py", changes)


@pytest.mark.parametrize(
    ("arguments", "mode", "config"),
    [
        (["exp.py"], "train_and_eval", "exp.py"),
        (["check", "a/exp.py:text"], "check", "a/exp.py:text"),
        (["exp.py", "check"], "check", "exp.py"),
        (["check", "--config=exp.py"], "check", "exp.py"),
        (["exp.py", "--mode=check"], "check", "exp.py"),
        (["devices"], "devices", None),
        (["--workdir", "a", "eval", "--fresh=0", "exp.py"], "eval", "exp.py"),
    ],
)
def test_mode_and_config_need_no_flags(arguments, mode, config):
    values, changes = parse(*arguments)
    assert (values.mode, values.config, changes) == (mode, config, [])


def test_flagfile_may_contain_flags_and_changes(tmp_path):
    (tmp_path / "flags").write_text("# a comment\n--config=exp.py\n--config.train.steps=8\n")
    values, changes = parse(f"--flagfile={tmp_path / 'flags'}", "--config.train.steps=9")
    assert values.config == "exp.py"
    assert changes == [("train.steps", "8"), ("train.steps", "9")]


def test_the_names_of_flags_may_have_dashes_for_underscores():
    values, _ = parse("exp.py", "--allow-config-change", "--dry-run=true", "--workdir=a-b")
    assert values.allow_config_change and values.dry_run and values.workdir == "a-b"
    assert not parse("exp.py", "--dry_run", "--nodry-run")[0].dry_run
    with pytest.raises(UsageError, match="There is no flag --allow_confg_change: did you mean"):
        parse("exp.py", "--allow-confg-change")


@pytest.mark.parametrize("arguments", [["--overfit=4"], ["--overfit", "4"], ["--overfit"]])
def test_flag_that_was_removed_names_what_replaces_it(arguments):
    with pytest.raises(UsageError, match="--overfit: run ctl check CONFIG --checks"):
        parse("exp.py", *arguments)
    with pytest.raises(UsageError, match="--resume: the same command resumes the"):
        parse("exp.py", "--resume")


def test_sys_argv_and_earlier_command_lines_are_not_read(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest", "--config=other.py", "--config.train.stps=5"])
    parse("--config=first.py", "--mode=aot_compile", "--topology=v5e:2x2", "--workdir=a")
    values, changes = parse("--config=exp.py")
    assert (values.config, values.mode, changes) == ("exp.py", "train_and_eval", [])
    assert values.workdir is None and values.topology is None
    assert not any(values[name].value for name in flags.SWITCHES)


def test_last_spelling_of_a_flag_wins():
    assert parse("exp.py", "--nofresh", "--fresh=1")[0].fresh
    assert not parse("exp.py", "--fresh", "--nofresh")[0].fresh
    for mode in MODES:
        assert parse("exp.py", "--mode=check", f"--mode={mode}")[0].mode == mode


def test_each_mode_and_flag_is_described():
    assert all(mode.text for mode in MODES.values())
    described = {name.partition("=")[0] for name in flags.describe_flags()}
    assert described >= {f"--{name}" for mode in MODES.values() for name in mode.flags}


def test_help_and_version_are_accepted_with_nothing_else():
    assert parse("--help")[0].help
    assert parse("--version")[0].version
    assert parse()[0].help and parse("exp.py", "-h")[0].help
