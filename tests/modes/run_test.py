"""What a run consists of."""

import pathlib
import types

import pytest

from ctl.errors import UsageError
from ctl.hardware import cluster
from ctl.loop.loop_numbers import learning_rates
from ctl.modes.run import ExperimentRun
from tests.support import experiments

CHIEF = cluster.make_local_clusters(workers=2, servers=0, ports=[1, 2])[0]


def test_making_a_run_and_its_controller_writes_nothing(make_arguments):
    run = ExperimentRun(make_arguments())
    controller = run.make_controller()
    assert controller.trainer is run.trainer and controller.checkpoints is run.checkpoints
    assert not pathlib.Path("run").exists()


def test_actions_of_the_trainer_must_be_a_list(make_arguments):
    arguments = make_arguments()
    method = "    def build_actions(self): return print\n\n    def build_m"
    text = experiments.DROPOUT.replace("    def build_m", method, 1)
    experiments.write(".", {"experiment.py": text})
    run = ExperimentRun(arguments, evaluates=False)
    assert run.experiment.evaluator is None  # training alone needs none
    with pytest.raises(UsageError, match=r"build_actions returned a builtin_function"):
        run.make_actions()


def test_thread_writes_the_checkpoints_of_a_single_process(make_arguments):
    def writes_in_background(writing, cluster=None):
        run.config = types.SimpleNamespace(train=types.SimpleNamespace(checkpoint_writing=writing))
        hardware = types.SimpleNamespace(cluster=cluster)
        run.experiment = types.SimpleNamespace(hardware=hardware)
        return run._writes_in_background()

    run = ExperimentRun(make_arguments())
    assert writes_in_background("auto") and writes_in_background("background")
    assert not writes_in_background("blocking") and not writes_in_background("auto", CHIEF)
    with pytest.raises(UsageError, match="requires a run in one process: choose auto or"):
        writes_in_background("background", CHIEF)


def test_folder_for_an_object_store_requires_one(make_arguments):
    with pytest.raises(UsageError, match=r"train\.local_dir .*--workdir"):
        ExperimentRun(make_arguments({"train.local_dir": "/scratch"}))


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


def save(controller, notes):
    controller.checkpoints.save(notes)
    controller.checkpoints.wait()


@pytest.fixture
def make_rates(make_arguments, monkeypatch):
    """Makes a run of one of the trainers above, and its controller; nothing is traced."""

    def make(trainer, rate, keys):
        experiments.write(".", {"rates.py": RATES})
        keys = {"optimizer.name": "sgd", "optimizer.learning_rate": rate} | dict(keys)
        run = ExperimentRun(make_arguments(keys | {"trainer": f"rates.py:{trainer}"}))
        return run.trainer, run.make_controller(actions=run.make_actions())

    monkeypatch.syspath_prepend(pathlib.Path.cwd())
    return make


CUSTOM = "tests.optimizers.custom"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "keys", "rates", "sets"),
    [  # the rate after a resume with the same config, and with a rate of 0.5 instead of 0.25
        ("Trainer", {}, (0.25, 0.5), False),
        ("Trainer", {"runtime.precision": "float16"}, (0.25, 0.5), True),
        ("Trainer", {"optimizer.name": f"{CUSTOM}:tenth"}, (0.025, 0.05), True),
        ("Trainer", {"optimizer.name": f"{CUSTOM}:decaying"}, (0.25, 0.5), False),
        ("Trainer", {"optimizer.schedule": "cosine"}, (0.25, 0.5), False),
        ("Halved", {"runtime.precision": "float64"}, (0.125, 0.25), True),
        ("Own", {}, (0.02, 0.02), True),
        ("Second", {"optimizer.name": f"{CUSTOM}:tenth"}, (0.025, 0.05), False),
    ],
)
def test_resumed_run_has_the_rates_of_the_checkpoint_or_of_a_changed_optimizer(
    make_rates, trainer, keys, rates, sets
):
    saved, controller = make_rates(trainer, 0.25, keys)
    inner = getattr(saved.optimizer, "inner_optimizer", saved.optimizer)
    if sets:  # as an action of the user may do
        inner.learning_rate = 1e-3
    save(controller, controller.actions.get_notes())
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
    save(controller, controller.actions.get_notes())
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
    save(controller, notes if state else None)
    resumed, controller = make_rates("Trainer", 0.5, {})
    controller.restore_checkpoint()
    assert float(resumed.optimizer.learning_rate) == pytest.approx(expected)
