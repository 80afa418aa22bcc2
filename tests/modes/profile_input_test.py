"""--mode=profile_input measures training, its parts, and names what limits the speed."""

import collections
import dataclasses
import re
import sys
import types
from unittest import mock

import pytest
import tensorflow as tf

import ctl
from ctl import main, testing
from ctl.built.inner_loop import loop_of
from ctl.configs import loading
from ctl.errors import UsageError
from ctl.hardware.collectives import ProcessGroup
from ctl.modes import profile_input, step_time
from ctl.rows.waits import InputWait
from tests.support import experiments, reference_model

BATCH, PYTHON = 8, sys.executable


def test_number_of_steps_grows_until_they_take_half_of_the_time(monkeypatch):
    now, calls = [0.0], []

    def run(steps):
        calls.append(steps)
        now[0] += 0.01 * steps + 100 * (len(calls) == 1)  # the first call traces

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    seconds, last = profile_input._all_time(run, 3, ProcessGroup())
    assert calls == [3, 3, 24, 192]
    assert (seconds, last) == (pytest.approx(0.01), pytest.approx(1.92))


counts = collections.Counter()


def count(name):
    tf.numpy_function(lambda: counts.update([name]), [], [])


class Counting(reference_model.ReferenceTrainer):
    """Reads a tf.data.Dataset, and counts its batches and its steps."""

    @staticmethod
    def data_factory(split):
        dataset = tf.data.Dataset.from_tensor_slices(reference_model.examples(40)).repeat()
        return dataset.batch(BATCH).map(lambda batch: (count("batches"), batch)[1]).unbatch()

    def train_step(self, iterator):
        super().train_step(iterator)
        count("steps")


def measure(monkeypatch, times, cls, **options):
    """Profiles a trainer; returns the profile, the trainer, and what each measurement counts."""
    measured = []

    def all_time(run, unit, processes):
        run(unit)
        before = counts.copy()
        run(times * unit)
        measured.append({"unit": unit, **(counts - before)})
        return len(measured), 20.0

    monkeypatch.setattr(profile_input, "_all_time", all_time)
    monkeypatch.setattr(InputWait, "read", lambda self: 12.0)
    strategy = testing.make_strategy(1)
    trainer = reference_model.make_trainer(strategy, BATCH, cls=cls, **options)
    return profile_input.all_measure(trainer, ProcessGroup()), trainer, measured


@pytest.mark.slow
def test_training_its_input_and_its_step_are_measured_one_after_the_other(monkeypatch):
    profile, trainer, (both, pipeline, step) = measure(monkeypatch, 40, Counting, prefetch=1)
    assert profile == profile_input.Profile(1, 0.6, 2, 3, None)
    # The buffers of the pipeline hold some batches.
    assert (both["unit"], both["steps"]) == (1, 40) and both["batches"] > 20
    assert pipeline["unit"] == 1 and "steps" not in pipeline and pipeline["batches"] > 20
    assert (step["unit"], step["steps"]) == (1, 40) and step.get("batches", 0) < 20
    *_, bottleneck, fix = profile_input.describe(profile, trainer)
    assert bottleneck == "The input pipeline is the bottleneck."
    assert "num_parallel_calls=tf.data.AUTOTUNE" in fix
    slow_step = profile_input.Profile(0.04, waited=0.01, pipeline=0.01, step=0.04, examples=None)
    lines = list(profile_input.describe(slow_step, trainer))
    assert [line.split("  ")[0] for line in lines[:3]] == ["training", "input alone", "step alone"]
    assert re.search("40.00 ms per batch +200 examples/s, 1% of it waiting for input", lines[0])
    assert lines[3] == "The step is the bottleneck: no key of data.* makes training faster."


@pytest.mark.slow
def test_the_compiled_loop_is_measured_in_chunks(monkeypatch):
    cls = reference_model.ReferenceTrainer
    profile, trainer, measured = measure(monkeypatch, 2, cls, xla="loop")
    size = loop_of(trainer).compiled_loop.size
    assert [each["unit"] for each in measured] == [size] * 3 + [1] and size > 1
    assert profile.examples == 4  # which are read and parsed alone, since the data are a Source
    assert trainer.global_step.numpy() == 2 * 3 * size  # in training, and in the step alone


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


@pytest.mark.slow
def test_the_mode_prints_a_report_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile_input, "SECONDS", 0.01)
    monkeypatch.setattr(profile_input.Profile, "is_input_bound", False)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    assert main.run(["ctl", "--config=experiment.py", "--mode=profile_input"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("training ") and "examples/s" in out[2] and out[-1].startswith("-> ")
    modes = [line.split()[0] for line in out if line.endswith("times as fast")]
    assert modes == ["runtime.xla=loop", "runtime.xla=step", "runtime.xla=gradients"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_mode_is_timed_in_a_process_of_its_own_which_may_fail_or_never_end(tmp_path, monkeypatch):
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    path = str(tmp_path / "experiment.py")
    config = loading.load_config(path)
    with config.unlocked():
        config.runtime.xla, config.runtime.logical_devices = "gradients", 2
        config.runtime.strategy = "mirrored"
    assert 0 < step_time.measure(config, path) < 60
    with config.unlocked():
        config.runtime.xla = "loop"
    with pytest.raises(UsageError, match="several GPUs"):
        step_time.measure(config, path)
    program = tmp_path / "python"  # in place of `python -m ctl.modes.step_process`
    monkeypatch.setattr("sys.executable", str(program))
    for code, seconds, message in (
        ("signal.pause()", 0.5, "did not end within 0.5 s"),
        ("exit('no memory')", 60, "ended with exit code 1: no memory"),
        ("print('{\"difference\": 0.5}')", 60, "from those of runtime.xla=off by 5.0e-01"),
    ):
        program.write_text(f"#!{PYTHON}\nimport signal\n{code}\n")
        program.chmod(0o700)
        with pytest.raises(UsageError, match=re.escape(message)):
            step_time.measure(config, path, seconds=seconds)


@pytest.mark.parametrize(
    ("gpus", "runtime", "expected"),
    [
        ("0,1", {}, True),
        ("0,1,2", dict(strategy="mirrored", devices=["GPU:0", "GPU:1"]), True),
        ("0,1,2", dict(strategy="mirrored", devices=["GPU:2"]), False),
        ("0,1", dict(strategy="one_device"), False),
        ("0", {}, False),
        ("", dict(strategy="mirrored", devices=["CPU:0", "CPU:1"]), False),
    ],
)
def test_only_modes_of_several_gpus_are_timed_in_processes(monkeypatch, gpus, runtime, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert profile_input.has_several_gpus(ctl.config(runtime=runtime)) is expected


NO_KERNEL = tf.errors.InvalidArgumentError(None, None, "No kernel")


@pytest.mark.parametrize(
    ("key", "milliseconds", "lines"),
    [
        (
            "runtime.xla=off",
            {"loop": 30, "step": 25, "gradients": 80},
            [
                "runtime.xla=loop           30.00 ms per step alone, 1.33 times as fast",
                "runtime.xla=gradients      80.00 ms per step alone, 0.50 times as fast",
                "-> --config.runtime.xla=step",
            ],
        ),
        (
            "runtime.xla=step",
            {"off": 37, "loop": NO_KERNEL, "gradients": 40},
            [
                "runtime.xla=loop is not possible: InvalidArgumentError: No kernel",
                "-> runtime.precision or more devices; train.profile shows the operations",
            ],
        ),
        (
            "runtime.logical_shards=7",
            {},
            ["runtime.xla=gradients is not possible: runtime.logical_shards requires"],
        ),
    ],
)
def test_the_modes_of_xla_are_compared_if_the_step_is_the_bottleneck(
    tmp_path, monkeypatch, capsys, key, milliseconds, lines
):
    def all_time(trainer, unit, processes):
        took = milliseconds[trainer.options.xla]
        if isinstance(took, Exception):
            raise took
        return took / 1000, 1.0

    profile = profile_input.Profile(0.04, waited=0.01, pipeline=0.01, step=0.04, examples=None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile_input, "all_measure", lambda trainer, processes: profile)
    monkeypatch.setattr(profile_input, "_make_step", lambda trainer, element: trainer)
    monkeypatch.setattr(profile_input, "_all_time", all_time)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    assert main.run(["ctl", "profile_input", "experiment.py", f"--config.{key}"]) == 0
    out = capsys.readouterr().out
    assert [line for line in lines if f"\n{line}" not in out] == [], out
    assert len(out.splitlines()) == 4 + 3 + 1  # the times, the bottleneck, the modes, the advice


def test_parameter_servers_are_rejected(monkeypatch):
    strategy = mock.Mock(spec=tf.distribute.ParameterServerStrategy)
    built = types.SimpleNamespace(hardware=types.SimpleNamespace(strategy=strategy))
    monkeypatch.setattr(profile_input.experiment, "build", lambda *_, **__: built)
    arguments = types.SimpleNamespace(config=None, config_path="")
    with pytest.raises(UsageError, match="does not support parameter servers"):
        profile_input.profile_input(arguments)
