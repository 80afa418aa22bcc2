"""A dry run trains two steps and leaves nothing."""

import json
import pathlib
from typing import ClassVar

import pytest

import ctl
from ctl.loop.lock import RunLock
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, STOPPED, train
from ctl.modes.dry_run import _temporary_workdir
from tests.modes.shared import Stopping, read_files
from tests.support import experiments


class Recorder(ctl.Action):
    """Records the outputs of evaluations, and at the end the files of the workdir."""

    evaluated: ClassVar = []
    files: ClassVar = []

    def __call__(self, outputs):
        self.evaluated.append((self.controller.step, outputs["examples"]))

    def end(self):
        workdir = self.controller.workdir
        self.files += [str(path.relative_to(workdir)) for path in workdir.rglob("*")]


def test_dry_run_trains_evaluates_and_saves_two_steps_and_leaves_nothing(make_arguments, capsys):
    keys = {"train.steps": 1000, "optimizer.schedule": "cosine"}
    keys["actions"] = f"['{__name__}:Recorder']"
    arguments = make_arguments(keys, dry_run=True)
    before = read_files()
    assert train.train_and_eval(arguments) == DONE
    assert read_files() == before and not list(pathlib.Path(".").glob("run*"))
    assert Recorder.evaluated == [(1, 14), (2, 14)]  # two batches of 7
    saved = {f"checkpoints/ckpt-{step}.index" for step in (1, 2)}
    assert {"config.json", "events.jsonl", "summaries"} | saved <= set(Recorder.files)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("Dry run: 2 steps with their evaluations, checkpoints and actions")
    assert not any("result.json" in line for line in lines)


@pytest.mark.slow
def test_run_in_the_workdir_is_not_touched(make_arguments, make_complete):
    make_complete(train.train)
    before = read_files()
    assert train.train(make_arguments(dry_run=True, fresh=True)) == DONE
    assert read_files() == before


def test_folder_of_a_dry_run_in_the_current_folder_is_next_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with _temporary_workdir(Workdir(".")) as temporary:
        assert temporary.path == tmp_path.with_name(f"{tmp_path.name}.dry_run")


def test_stopped_dry_run_leaves_nothing(make_arguments, capsys):
    stopping = f"[{{'name': '{Stopping.__module__}:Stopping', 'step': 1}}]"
    arguments = make_arguments({"actions": stopping}, dry_run=True)
    object.__setattr__(arguments, "workdir", Workdir("runs/a/b"))  # whose parents are new, too
    assert train.train(arguments) == STOPPED
    assert not list(pathlib.Path(".").glob("run*"))
    assert capsys.readouterr().out.splitlines()[-1] == "Dry run: stopped, and nothing was kept."


def test_mistake_in_a_step_leaves_nothing(make_arguments):
    arguments = make_arguments(dry_run=True)
    # Of another length: bytecode of the same second and length would be used again.
    text = experiments.DROPOUT.replace('batch["label"]', 'batch["lables"]')
    experiments.write(".", {"experiment.py": text})
    with pytest.raises(Exception, match="lables"):
        train.train(arguments)
    assert not list(pathlib.Path(".").glob("run*"))


def test_folder_of_a_killed_dry_run_is_replaced_and_one_in_use_is_not(make_arguments):
    folder = pathlib.Path("run.dry_run")
    experiments.write(folder, {"config.json": json.dumps({"trainer": "a"}), "old": ""})
    with RunLock(folder) as lock:
        lock.acquire()
        with pytest.raises(ctl.UsageError, match="in use by another run"):
            train.train(make_arguments(dry_run=True))
    assert train.train(make_arguments(dry_run=True)) == DONE
    assert not folder.exists()
