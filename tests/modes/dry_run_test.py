"""A dry run trains two steps and leaves nothing."""

import json
import pathlib

import pytest

import ctl
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.lock import RunLock
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, STOPPED, train
from ctl.modes.dry_run import _temporary_workdir
from tests.support import experiments


def files():
    return {p: p.stat().st_mtime_ns for p in pathlib.Path(".").rglob("*") if p.is_file()}


@pytest.fixture
def recorded(monkeypatch):
    """What a run does: saved steps, the outputs of evaluations, the files of its workdir."""
    record = {"saved": [], "evaluated": [], "files": set()}

    class Recorder(ctl.Action):
        def __call__(self, outputs):
            record["evaluated"].append((self.controller.step, outputs["examples"]))

        def end(self):
            record["files"] = {p.name for p in self.controller.workdir.iterdir()}

    save = Checkpointer.save
    monkeypatch.setattr("ctl.StandardTrainer.build_actions", lambda trainer: [Recorder()])

    def record_save(checkpointer, *arguments, **options):
        path = save(checkpointer, *arguments, **options)
        record["saved"].append(path)
        return path

    monkeypatch.setattr(Checkpointer, "save", record_save)
    return record


def test_dry_run_trains_evaluates_and_saves_two_steps_and_leaves_nothing(
    make_arguments, recorded, capsys
):
    arguments = make_arguments({"train.steps": 1000, "optimizer.schedule": "cosine"}, dry_run=True)
    before = files()
    assert train.train_and_eval(arguments) == DONE
    assert files() == before and not list(pathlib.Path(".").glob("run*"))
    assert recorded["saved"] == [f"run.dry_run/checkpoints/ckpt-{step}" for step in (1, 2)]
    assert recorded["evaluated"] == [(1, 14), (2, 14)]  # two batches of 7
    assert {"config.json", "events.jsonl", "checkpoints", "summaries"} <= recorded["files"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == (
        "Dry run: 2 steps with their evaluations, checkpoints and actions passed, and nothing was kept."
    )
    assert not any("result.json" in line for line in lines)


@pytest.mark.slow
def test_run_in_the_workdir_is_not_touched(make_arguments, make_complete):
    make_complete(train.train)
    before = files()
    assert train.train(make_arguments(dry_run=True, fresh=True)) == DONE
    assert files() == before


def test_folder_of_a_dry_run_in_the_current_folder_is_next_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with _temporary_workdir(Workdir(".")) as temporary:
        assert temporary.path == tmp_path.with_name(f"{tmp_path.name}.dry_run")


def test_stopped_dry_run_leaves_nothing(make_arguments, monkeypatch, capsys):
    monkeypatch.setattr("ctl.loop.stop.StopRequest.requested", True)
    arguments = make_arguments(dry_run=True)
    object.__setattr__(arguments, "workdir", Workdir("runs/a/b"))  # whose parents are new, too
    assert train.train(arguments) == STOPPED
    assert not list(pathlib.Path(".").glob("run*"))
    assert capsys.readouterr().out.splitlines()[-1] == "Dry run: stopped, and nothing was kept."


def test_mistake_in_a_step_leaves_nothing(make_arguments, monkeypatch):
    def fail(trainer, batch):
        raise ValueError("wrong shape")

    monkeypatch.setattr("ctl.StandardTrainer.sample_weight", fail)
    with pytest.raises(ValueError, match="wrong shape"):
        train.train(make_arguments(dry_run=True))
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
