"""--mode=profile_input names what limits the speed, with a pipeline and a step that sleep."""

import dataclasses
import time

import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep

import ctl
from ctl import testing
from ctl.data.layout import Layout
from ctl.errors import UsageError
from ctl.hardware.collectives import ProcessGroup
from ctl.modes import profile_input
from tests import experiments, reference_model

BATCH = 8


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(profile_input, "SECONDS", 0.5)


def make_trainer(replicas=1, *, pipeline=0.0, step=0.0, **options):
    """A trainer whose input pipeline and step sleep for so many seconds per batch."""

    class Slow(reference_model.ReferenceTrainer):
        @staticmethod
        def data_factory(split):
            dataset = tf.data.Dataset.from_tensor_slices(reference_model.examples(40)).repeat()
            if not pipeline:
                rows = Layout(BATCH, replicas).rows_per_replica
                return ctl.data.PerReplica(dataset.batch(rows).take(1).cache().repeat())
            return dataset.batch(BATCH).apply(sleep(int(1e6 * pipeline))).unbatch()

        def train_step(self, iterator):
            super().train_step(iterator)
            tf.numpy_function(lambda: time.sleep(step), [], [])

    strategy = testing.make_strategy(replicas)
    return reference_model.make_trainer(strategy, BATCH, cls=Slow, **options)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_slow_pipeline_is_the_bottleneck(replicas):
    trainer = make_trainer(replicas, pipeline=0.04, step=0.01)
    profile = profile_input.all_measure(trainer, ProcessGroup())
    assert profile.both == pytest.approx(0.045, abs=0.015)
    assert profile.pipeline == pytest.approx(0.045, abs=0.015)
    assert profile.step < 0.035 and profile.waited > 0.4
    *_, bottleneck, fix = profile_input.describe(profile, trainer)
    assert bottleneck == "The input pipeline is the bottleneck."
    assert "num_parallel_calls=tf.data.AUTOTUNE" in fix


def test_a_slow_step_is_the_bottleneck():
    trainer = make_trainer(step=0.04)
    profile = profile_input.all_measure(trainer, ProcessGroup())
    assert profile.both == pytest.approx(profile.step, rel=0.3) and profile.step > 0.035
    assert profile.pipeline < 0.02 and profile.waited < 0.05
    lines = list(profile_input.describe(profile, trainer))
    assert [line.split("  ")[0] for line in lines[:3]] == ["training", "input alone", "step alone"]
    assert lines[3] == "The step is the bottleneck: no key of data.* makes training faster."


def test_the_compiled_loop_is_measured_in_chunks():
    trainer = reference_model.make_trainer(testing.make_strategy(1), BATCH, xla="loop")
    profile = profile_input.all_measure(trainer, ProcessGroup())
    assert 0 < profile.pipeline < 0.05 and 0 < profile.step < 0.05 and 0 < profile.both < 0.05


@pytest.mark.parametrize(
    ("examples", "cache", "fix"),
    [(0.9, "", "set data.cache=memory"), (0.1, "", "augments examples"), (0.9, "memory", "cores")],
)
def test_the_fix_depends_on_what_takes_the_time(examples, cache, fix):
    class Squares(ctl.data.RowSource):
        def __len__(self):
            return 40

        def read(self, indexes):
            return indexes

        def parse(self, row):
            return {name: value[row] for name, value in features.items()}

    features = {k: tf.constant(v) for k, v in reference_model.examples(40).items()}
    data = ctl.data.augmented(Squares(), lambda example, seed: example)

    class Augmented(reference_model.ReferenceTrainer):
        data_factory = staticmethod(lambda split: data)

    trainer = reference_model.make_trainer(
        testing.make_strategy(1), BATCH, cls=Augmented, cache=cache
    )
    profile = profile_input.Profile(both=1.0, waited=0.9, pipeline=1.0, step=0.1, examples=examples)
    assert fix in list(profile_input.describe(profile, trainer))[-1]
    assert dataclasses.replace(profile, waited=None).is_input_bound
    assert not dataclasses.replace(profile, pipeline=0.01).is_input_bound  # only the hand-over


def test_the_mode_prints_a_report_and_writes_nothing(tmp_path, monkeypatch, capsys):
    from ctl import main

    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    assert main.run(["ctl", "--config=experiment.py", "--mode=profile_input"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("training ") and "examples/s" in out[2] and out[-1].startswith("-> ")
    assert not (tmp_path / "runs").exists()


def test_parameter_servers_are_rejected(monkeypatch):
    monkeypatch.setattr(profile_input.coordinator, "is_coordinated", lambda strategy: True)
    monkeypatch.setattr(
        profile_input.experiment,
        "build",
        lambda *_, **__: type("Built", (), {"hardware": type("H", (), {"strategy": None})}),
    )
    arguments = type("Arguments", (), {"config": None, "config_path": ""})
    with pytest.raises(UsageError, match="does not support parameter servers"):
        profile_input.profile_input(arguments)
