"""What a run consists of."""

import json
import pathlib
import types

import pytest

import ctl
from ctl.errors import UsageError
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.lock import RunLock
from ctl.loop.reporter import learning_rates
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, STOPPED, train
from ctl.modes.run import RunParts, _temporary_workdir
from tests.support import experiments


def test_making_a_run_and_its_controller_writes_nothing(make_arguments):
    run = RunParts(make_arguments())
    controller = run.make_controller()
    assert controller.trainer is run.trainer and controller.checkpoints is run.checkpoints
    assert not pathlib.Path("run").exists()


def test_training_alone_needs_no_evaluator(make_arguments):
    assert RunParts(make_arguments(), evaluates=False).experiment.evaluator is None


@pytest.mark.parametrize(
    ("writing", "processes", "background"),
    [("auto", 1, True), ("background", 1, True), ("blocking", 1, False), ("auto", 2, False)],
)
def test_thread_writes_the_checkpoints_of_a_single_process(
    make_arguments, writing, processes, background
):
    run = RunParts(make_arguments({"train.checkpoint_writing": writing}))
    run.experiment = types.SimpleNamespace(
        hardware=types.SimpleNamespace(cluster=None if processes == 1 else object())
    )
    assert run._writes_in_background() == background


def test_several_processes_cannot_write_in_the_background(make_arguments):
    run = RunParts(make_arguments({"train.checkpoint_writing": "background"}))
    run.experiment = types.SimpleNamespace(hardware=types.SimpleNamespace(cluster=object()))
    with pytest.raises(UsageError, match=r"requires a run in one process: choose auto or blocking"):
        run._writes_in_background()


def test_folder_for_an_object_store_requires_one(make_arguments):
    with pytest.raises(
        UsageError, match=r"train\.local_dir has no effect without a --workdir in an"
    ):
        RunParts(make_arguments({"train.local_dir": "/scratch"}))


@pytest.mark.parametrize("is_chief", [True, False])
def test_every_process_has_the_rollbacks_of_the_chief(make_arguments, is_chief):
    decisions = [{"step": 13, "tensor": "the loss"}, {"step": 31}]

    class Processes:
        def broadcast_json_from_chief(self, value):
            assert value == (decisions if is_chief else [])
            return decisions

    run = RunParts(make_arguments())
    run.is_chief = is_chief
    run.processes = Processes()
    run.workdir.create(run.config.to_dict())
    if is_chief:
        run.workdir.write_rollbacks(decisions)
    policy = run.broadcast_rollback_policy()
    assert policy.steps == [13, 31]


RATES = """
from experiment import *


class Halved(Trainer):
    def build_optimizer(self, optimizer):
        made = optimizer()
        made.learning_rate = made.learning_rate / 2
        return made


class Own(Trainer):
    def build_optimizer(self, optimizer):
        optimizer()
        return tf_keras.optimizers.SGD(0.02)


class Second(Trainer):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.others = [tf_keras.optimizers.SGD(self.optimizer.learning_rate / 4)]
"""


@pytest.fixture
def make_rates(make_arguments, monkeypatch):
    """Makes a run of one of the trainers above, and its controller; nothing is traced."""

    def make(trainer, rate, keys):
        experiments.write(".", {"rates.py": RATES})
        keys = {"optimizer.name": "sgd", "optimizer.learning_rate": rate} | dict(keys)
        run = RunParts(make_arguments(keys | {"trainer": f"rates.py:{trainer}"}))
        return run.trainer, run.make_controller(actions=run.make_actions())

    monkeypatch.syspath_prepend(pathlib.Path.cwd())
    return make


CUSTOM = "tests.optimizers.custom"


@pytest.mark.parametrize(
    ("trainer", "keys", "rates"),
    [  # the rate after a resume with the same config, and with a rate of 0.5 instead of 0.25
        ("Trainer", {}, (0.25, 0.5)),
        ("Trainer", {"runtime.precision": "float16"}, (0.25, 0.5)),
        ("Trainer", {"optimizer.name": f"{CUSTOM}:tenth"}, (0.025, 0.05)),
        ("Trainer", {"optimizer.name": f"{CUSTOM}:decaying"}, (0.25, 0.5)),
        ("Trainer", {"optimizer.schedule": "cosine"}, (0.25, 0.5)),
        ("Halved", {"runtime.precision": "float64"}, (0.125, 0.25)),
        ("Own", {}, (0.02, 0.02)),
        ("Second", {"optimizer.name": f"{CUSTOM}:tenth"}, (0.025, 0.05)),
    ],
)
@pytest.mark.parametrize("sets", [False, True])
def test_resumed_run_has_the_rates_of_the_checkpoint_or_of_a_changed_optimizer(
    make_rates, trainer, keys, rates, sets
):
    saved, controller = make_rates(trainer, 0.25, keys)
    inner = getattr(saved.optimizer, "inner_optimizer", saved.optimizer)
    sets = sets and not callable(inner._learning_rate)
    if sets:  # as an action of the user may do
        inner.learning_rate = 1e-3
    controller.checkpoints.save(controller.actions.get_notes())
    controller.checkpoints.wait()
    for rate, expected in zip((0.25, 0.5), rates, strict=True):
        resumed, controller = make_rates(trainer, rate, keys)
        controller.restore_checkpoint()
        kept = rate == 0.25 or expected == rates[0]
        assert learning_rates(resumed)["learning_rate"] == pytest.approx(
            1e-3 if sets and kept else expected
        )
        if trainer == "Second":
            assert float(resumed.others[0].learning_rate) == pytest.approx(expected / 4)


def test_optimizer_of_a_group_has_the_rate_of_the_checkpoint_or_a_changed_one(make_rates):
    def make(rate):
        groups = [{"variables": "*/bias", "optimizer": {"name": "adam", "learning_rate": rate}}]
        trainer, controller = make_rates("Trainer", 0.25, {"optimizer.groups": groups})
        return trainer.optimizer._ctl_groups[0].learning_rate, controller

    set_rate, controller = make(0.125)
    set_rate.assign(1e-3)
    controller.checkpoints.save(controller.actions.get_notes())
    controller.checkpoints.wait()
    for rate, expected in ((0.125, 1e-3), (0.5, 0.5)):
        resumed, controller = make(rate)
        controller.restore_checkpoint()
        assert float(resumed) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("state", "expected"), [({}, 0.5), ({"configured": 0.25}, 0.5), ({"configured": 0.5}, 0.1)]
)
def test_checkpoint_of_an_older_ctl_gets_the_rate_of_the_config(make_rates, state, expected):
    _, controller = make_rates("Trainer", 0.25, {})
    notes = {"actions": {"LearningRate": {**state, "learning_rate": 0.1, "step": 0}}}
    controller.checkpoints.save(notes if state else None)
    controller.checkpoints.wait()
    resumed, controller = make_rates("Trainer", 0.5, {})
    controller.restore_checkpoint()
    assert float(resumed.optimizer.learning_rate) == pytest.approx(expected)


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

    def record_save(checkpointer, notes=None):
        path = save(checkpointer, notes)
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


@pytest.mark.parametrize("fresh", [pytest.param(False, marks=pytest.mark.slow), True])
def test_run_in_the_workdir_is_not_touched(make_arguments, make_complete, fresh):
    make_complete(train.train)
    before = files()
    assert train.train(make_arguments(dry_run=True, fresh=fresh)) == DONE
    assert files() == before


def test_parents_of_a_new_workdir_are_removed(make_arguments, tmp_path):
    arguments = make_arguments(dry_run=True)
    object.__setattr__(arguments, "workdir", Workdir("runs/a/b"))
    assert train.train(arguments) == DONE
    assert not pathlib.Path("runs").exists()


def test_folder_of_a_dry_run_in_the_current_folder_is_next_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with _temporary_workdir(Workdir(".")) as temporary:
        assert temporary.path == tmp_path.with_name(f"{tmp_path.name}.dry_run")


def test_stopped_dry_run_leaves_nothing(make_arguments, monkeypatch, capsys):
    monkeypatch.setattr("ctl.loop.stop.StopRequest.requested", True)
    assert train.train(make_arguments(dry_run=True)) == STOPPED
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
