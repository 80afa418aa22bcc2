"""The program: its command line, its exit codes, and the three ways to start it.

tests/end_to_end/mistakes_test.py has the mistakes that a user can make.
"""

import errno
import json
import os
import pathlib
import re
import subprocess
from typing import Any
from unittest import mock

import pytest

from ctl import main
from ctl.configs.modes import MODES, Mode
from ctl.errors import Failure, LostWorker, UsageError
from tests.support import child, experiments
from tests.support.experiments import CONFIG, TRAINER

MODEL = CONFIG.replace("))\n", "), model=dict(bias=True))\n")
READER = TRAINER.replace("Dense(2,", "Dense(2, use_bias=self.options.model.bias,")


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The current folder, with an experiment, exp.py, whose trainer reads model.bias."""
    experiments.write(tmp_path, {"exp.py": MODEL, "tiny.py": READER})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def replace_modes(monkeypatch):
    """Replaces every mode's function, which needs TensorFlow, by one that returns or raises."""

    def replace(result: int | BaseException) -> list[tuple]:
        calls: list[tuple] = []

        def load(mode):
            def function(arguments):
                calls.append((mode.function, arguments))
                if isinstance(result, BaseException):
                    raise result
                return result

            return function

        monkeypatch.setattr(Mode, "load", load)
        return calls

    return replace


def test_last_change_of_a_key_reaches_the_config(folder, replace_modes):
    calls = replace_modes(0)
    changes = ["--config.train.steps=6", "--config.train.steps=7", "--noconfig.model.bias"]
    assert main.run(["ctl", "-config", "exp.py", *changes]) == 0
    ((_, received),) = calls
    assert (received.config.train.steps, received.config.model.bias) == (7, False)


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ("--config=./exp.py --mode=train", "train:train False ./exp.py runs/exp"),
        ("--config=exp.py --workdir=a/b", "train:train_and_eval False exp.py a/b"),
        ("--config=exp.py --mode explain --fresh=0", "explain:explain False exp.py runs/exp"),
        ("--config.seed=7 check ./exp.py", "check:check False ./exp.py runs/exp.seed=7"),
        ("--config=exp.py --fresh", "train:train_and_eval True exp.py runs/exp"),
    ],
)
def test_flags_reach_the_mode_and_its_exit_code_is_returned(folder, replace_modes, arguments, call):
    calls = replace_modes(75)
    assert main.run(["ctl", *arguments.split()]) == 75
    ((function, received),) = calls
    values = (function, received.fresh, received.config_path, received.workdir.path)
    assert " ".join(map(str, values)) == call


def test_a_run_resumes_with_a_harmless_change_or_an_allowed_one(folder, replace_modes, capsys):
    calls = replace_modes(0)
    saved = {"trainer": "tiny.py:Tiny", "data": {"global_batch_size": 4}, "model": {"bias": True}}
    experiments.write(folder, {"runs/exp/config.json": json.dumps(saved)})
    for more in ([], ["--config.train.steps=7"], ["--config.seed=7", "--allow_config_change"]):
        assert main.run(["ctl", "--config=exp.py", *more]) == 0
    assert main.run(["ctl", "--config=exp.py", "--config.seed=7", "--workdir=runs/exp"]) == 2
    assert "(seed: 0 -> 7)" in capsys.readouterr().err
    assert len(calls) == 3


@pytest.mark.parametrize("arguments", [["--config=none.py", "--help"], ["-help"]])
def test_help_names_every_flag_and_mode(capsys, arguments):
    assert main.run(["ctl", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "python -m ctl.main --config=" in printed
    words = ("--config", "--workdir", "--mode", "fresh", "allow_config_change", *MODES)
    assert [word for word in words if word not in printed] == []


@pytest.mark.parametrize("mode", MODES)
def test_help_of_a_mode_has_its_flags_and_two_examples(mode, capsys):
    assert main.run(["ctl", mode, "-h"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"\n  ctl {mode}") == 2
    flags = {line.split("=")[0].split()[0] for line in printed.splitlines() if line[:4] == "  --"}
    assert flags == {"--config.KEY", *(f"--{flag}" for flag in MODES[mode].flags)}


def test_a_very_long_message_is_printed_without_its_middle(folder, capsys):
    assert main.run(["ctl", "--config=exp.py", "--config.train.steps=" + "x" * 99_999]) == 2
    line = capsys.readouterr().err
    assert re.match("ctl: train.steps is 'x{1000,} [.]{3} x{1000,}', but must be an integer", line)
    assert len(line) < 5_000


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError("one\n  two"), 2), (Failure("one\n  two"), 1), (LostWorker("one\n  two"), 75)],
)
def test_an_error_is_printed_in_one_line_and_decides_the_exit_code(
    folder, replace_modes, capsys, error, code
):
    replace_modes(error)
    assert main.run(["ctl", "--config=exp.py"]) == code
    assert capsys.readouterr().err == "ctl: one two\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ESTALE, os.strerror(errno.ESTALE), "run/events.jsonl"),
         "run/events.jsonl cannot be read: Stale file handle. Check the disk, then rerun the same"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
         "A file of the run cannot be read: Too many open files. Allow more open files"),
    ],
)  # fmt: skip
def test_a_disk_that_fails_is_no_mistake(monkeypatch, capsys, error, line):
    monkeypatch.setattr(main, "execute", mock.Mock(side_effect=error))
    assert main.run(["ctl", "--config=exp.py"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"ctl: {line}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [KeyError("No space left on device"), FileNotFoundError(2, "No such file", "x")]
)
def test_another_error_keeps_its_traceback(monkeypatch, error):
    monkeypatch.setattr(main, "execute", mock.Mock(side_effect=error))
    with pytest.raises(type(error)):
        main.run(["ctl", "--config=exp.py"])


def test_an_interrupt_before_training_is_exit_code_75(folder, replace_modes, capsys):
    replace_modes(KeyboardInterrupt())
    assert main.run(["ctl", "--config=exp.py"]) == 75
    printed = capsys.readouterr()
    assert not printed.err
    assert printed.out == "Interrupted: rerun the same command.\n"


@pytest.mark.parametrize(
    "mistake", ["--config.train.stps=5", "--config.train.steps=0", "--wrkdir=x"]
)
def test_a_mistake_of_the_command_line_is_reported_before_the_config_file_runs(
    folder, capsys, mistake
):
    (folder / "exp.py").write_text("raise RuntimeError('it ran')\n")
    assert main.run(["ctl", "--config=exp.py"]) == 2
    assert "it ran" in capsys.readouterr().err
    assert main.run(["ctl", "--config=exp.py", mistake]) == 2
    assert "it ran" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "strategy", "devices"),
    [
        ([], "auto", 0),
        (["--config.runtime.strategy=mirrored"], "mirrored", 0),
        (["--config=exp.py", "--config.runtime.logical_devices=2"], "auto", 2),
    ],
)
def test_devices_accepts_a_config_but_does_not_require_one(
    folder, monkeypatch, capsys, arguments, strategy, devices
):
    describe = lambda r: f"{r.strategy} {r.logical_devices}"  # noqa: E731
    monkeypatch.setattr("ctl.modes.devices.describe", describe)
    assert main.run(["ctl", "--mode=devices", *arguments]) == 0
    assert capsys.readouterr().out == f"{strategy} {devices}\n"


def test_devices_lists_what_is_replaced(capsys):
    assert main.run(["ctl", "devices", "--replaced"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert "(runtime.kernels)" in lines["tensorflow.nn.gelu"]
    assert lines["tf_keras.src.backend.RandomGenerator.dropout"].strip().startswith("in a step: ")


def test_devices_describes_this_machine_and_writes_nothing(folder, capsys):
    before = sorted(folder.iterdir())
    code = main.run(["ctl", "--mode=devices", "--config=exp.py"])
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    names = [line.split("  ")[0] for line in printed.out.splitlines()]
    assert [n for n in names if n.rstrip("s0123456789 ") != "GPU"] == [
        "CPU", "memory", "TensorFlow", "TPU", "engine", "strategy", "xla",
    ]  # fmt: skip
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


STARTS = {
    "as a file": [str(child.ROOT / "ctl" / "main.py")],
    "as a module": ["-m", "ctl.main"],
    "as a script": ["-c", "import sys; sys.path.pop(0); from ctl.main import console; console()"],
}


def start(how: str, arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Starts the program in the current folder; as a file it must find the package ctl itself."""
    if how == "as a file":
        options["PYTHONPATH"] = ""
    return child.run([*STARTS[how], *arguments], cwd=pathlib.Path.cwd(), **options)


@pytest.mark.parametrize("how", STARTS)
def test_the_current_folder_is_importable_however_the_program_is_started(folder, how):
    sibling = "def fail():\n    raise RuntimeError('found')\n"
    files = {"sub/exp.py": "import sibling\nsibling.fail()\n", "sibling.py": sibling}
    experiments.write(folder, files)
    process = start(how, ["--config=sub/exp.py"], fresh=True)
    line = "ctl: The config file cannot be read: sibling.py:2: RuntimeError: found\n"
    assert (process.returncode, process.stdout, process.stderr) == (2, "", line)


@pytest.mark.slow
def test_explain_prints_the_same_however_it_is_started_and_tensorflow_is_silent(folder):
    experiments.write(folder, {"package/net.py": READER})
    arguments = ["--config=exp.py", "--config.trainer=package.net:Tiny", "--mode=explain"]
    processes = [start(how, arguments) for how in ("as a file", "as a script")]
    assert [(p.returncode, p.stderr) for p in processes] == [(0, "")] * 2
    assert processes[0].stdout == processes[1].stdout
    assert "trainer: package.net:Tiny" in processes[0].stdout
