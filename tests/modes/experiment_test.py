"""A config becomes a strategy, a trainer and an evaluator, with the global batch size resolved."""

import re

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.configs import flags, loading
from ctl.data import sampler
from ctl.errors import UsageError
from ctl.modes import DONE, FAILED, experiment, train
from tests import experiments, reference_model


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads the config of an experiment with keys changed: load(**{key: value})."""
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})

    def load(**keys):
        config = loading.load_config("experiment.py")
        config.update_from_flattened_dict(keys)
        return config

    return load


def build(config, **arguments):
    return experiment.build(config, "experiment.py", **arguments)


def test_the_trainer_and_the_evaluator_have_the_settings_of_the_config(load):
    built = build(load(**{"eval.global_batch_size": 25, "runtime.precision": "float64"}))
    assert type(built.trainer).__name__ == "Trainer"
    assert built.trainer.global_batch_size == 7
    assert built.trainer.options.precision == "float64"
    assert built.trainer.options.model.dropout == 0.3
    assert built.evaluator.global_batch_size == 25
    assert built.hardware.name == "one_device"


def test_the_evaluator_is_built_only_for_a_mode_that_evaluates(load):
    assert build(load(), evaluates=False).evaluator is None


def test_the_global_batch_size_is_computed_from_the_per_replica_batch_size(load):
    sizes = {"data.global_batch_size": 0, "data.per_replica_batch_size": 3}
    config = load(**sizes)
    built = build(
        load(**sizes, **{"runtime.strategy": "mirrored", "runtime.logical_devices": 4}),
        evaluates=False,
    )
    assert built.config.data.to_dict() | {"global_batch_size": 12} == built.config.data.to_dict()
    assert built.config.data.per_replica_batch_size == 0
    assert built.trainer.global_batch_size == 12
    assert config.data.per_replica_batch_size == 3  # the config itself is not changed
    assert built.config.is_locked


def test_another_strategy_can_replace_that_of_the_config(load):
    hardware = build(load(), evaluates=False).hardware
    assert build(load(), evaluates=False, hardware=hardware).hardware is hardware


def test_a_model_key_that_the_trainer_never_reads_is_rejected(load, tmp_path):
    # In two files: a key that the trainer's own file mentions counts as read.
    config = experiments.CONFIG.replace("))\n", "), model=dict(units=4))\n")
    experiments.write(tmp_path, {"experiment.py": config, "tiny.py": experiments.TRAINER})
    with pytest.raises(ctl.UsageError, match=r"model\.units has no effect: .* never reads"):
        build(load(), evaluates=False)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("build_dataset", "build_datset", "defines build_datset: did you mean build_dataset?"),
        ("def build_model", "def network", "does not define build_model: define it."),
        # A hook that need not be defined would never be called.
        ("def per_ex", "def sample_weights(self, batch): pass\n    def per_ex",
         "defines sample_weights: did you mean sample_weight?"),
    ],
)  # fmt: skip
def test_misspelt_method_is_named_with_the_right_name(load, tmp_path, old, new, line):
    text = experiments.TRAINER.replace(old, new)
    experiments.write(tmp_path, {"experiment.py": experiments.CONFIG, "tiny.py": text})
    with pytest.raises(ctl.UsageError, match=re.escape(f"tiny.py:Tiny {line}")):
        build(load(), evaluates=False)


def test_recomputation_that_the_trainer_never_reads_is_rejected(load, tmp_path):
    config = experiments.CONFIG.replace("))\n", '), model=dict(recompute="blocks"))\n')
    # A trainer that always recomputes a layer does not read the key.
    trainer = experiments.TRAINER.replace(
        "tf_keras.layers.Dense(", "ctl.recompute(tf_keras.layers.Dense("
    )
    trainer = trainer.replace("input_shape=(3,))", "input_shape=(3,)))")
    experiments.write(tmp_path, {"experiment.py": config, "tiny.py": trainer})
    with pytest.raises(ctl.UsageError, match=r"model\.recompute has no effect: .* never reads"):
        build(load(), evaluates=False)


def test_a_model_key_that_only_the_step_reads_is_accepted(load, tmp_path):
    text = experiments.DROPOUT.replace(
        "model=dict(dropout=0.3)", "model=dict(dropout=0.3, scale=4.0)"
    )
    text = text.replace(
        "    def build_metrics",
        "    def forward(self, batch, training):\n"
        "        return self.options.model.scale * super().forward(batch, training)\n\n"
        "    def build_metrics",
    )
    experiments.write(tmp_path, {"experiment.py": text})
    assert build(load(), evaluates=False).trainer.options.model.scale == 4.0


KEYS = {
    "data.overfit_batches": 2, "eval.before_training": "true", "train.steps": 150,
    "optimizer.learning_rate": 0.05, "model.dropout": 0.0,
}  # fmt: skip


class Data(reference_model.ReferenceTrainer):
    data = None

    def build_dataset(self, split, input_context):
        assert split == "train"
        return self.data


def read(data, batches=2, batch=3, seed=5):
    """The examples of a limited class, for both splits."""
    trainer = tf.Module()  # only its two attributes are read
    trainer.global_batch_size, trainer.options = batch, ctl.TrainerOptions(seed=seed)
    cls = experiment.limit_data(type("Own", (Data,), {"data": data}), batches)
    trainer.data = data
    arrays = [cls.build_dataset(trainer, split, None) for split in ("train", "eval", "test")]
    assert arrays[0] is arrays[1] is arrays[2]
    return {name: value.numpy() for name, value in arrays[0].gather(range(len(arrays[0]))).items()}


def test_examples_are_those_of_the_first_steps_of_the_run():
    source = ctl.data.arrays({"x": np.arange(20)})
    order = sampler.example_indexes(tf.range(6, dtype=tf.int64), count=20, seed=5, span=6)
    assert list(read(source)["x"]) == list(order.numpy())


def test_augmentation_is_that_of_the_first_steps():
    source = ctl.data.arrays({"x": np.arange(20)})

    def augment(example, seed):
        return {**example, "noise": tf.random.stateless_uniform([2], seed)}

    examples = read(ctl.data.augmented(source, augment))
    assert examples["noise"].shape == (6, 2) and len(np.unique(examples["noise"])) == 12
    assert list(examples["x"]) == list(read(source)["x"])


@pytest.mark.parametrize(
    "data",
    [
        tf.data.Dataset.range(20).map(lambda x: {"x": x}),
        tf.data.Dataset.range(20).map(lambda x: (x, x)),
        ctl.data.GlobalBatches(tf.data.Dataset.range(20).batch(3).map(lambda x: {"x": x})),
    ],
)
def test_datasets_begin_at_their_first_example(data):
    assert list(read(data)["x"]) == [0, 1, 2, 3, 4, 5]


def test_per_replica_data_is_rejected():
    data = ctl.data.PerReplica(tf.data.Dataset.range(20).batch(3).map(lambda x: {"x": x}))
    with pytest.raises(UsageError, match="cannot take the first batches of"):
        read(data)


def test_batches_of_several_shapes_are_rejected_in_one_line():
    data = ctl.data.bucketed(ctl.data.sequences({"x": [[1]] * 4 + [[1, 2]] * 4}), [1, 2])
    with pytest.raises(UsageError, match=r"requires batches of one shape, but 'x' has \(1,\)"):
        experiment._read(data, 2, 4, 0)


@pytest.mark.slow
def test_run_reports_that_the_loss_went_down(make_arguments, capsys):
    assert train.train_and_eval(make_arguments(KEYS)) == DONE
    result = experiments.read_result("run")
    assert result["eval"]["examples"] == 14  # two batches of 7, the same as in training
    entry = result["overfit"]
    assert entry["batches"] == 2 and entry["down"]
    assert entry["first"]["step"] == 0 and entry["last"]["loss"] == result["eval"]["loss"]
    assert entry["last"]["loss"] < 0.1 * entry["first"]["loss"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "Overfitting" in line]
    assert len(lines) == 1 and lines[0].startswith("Overfitting 2 batches: loss ")
    assert lines[0].endswith("at step 150; it went down: the model can learn these examples.")


def test_run_whose_loss_does_not_go_down_fails(make_arguments, capsys, monkeypatch):
    monkeypatch.setattr(
        "ctl.StandardTrainer.sample_weight", lambda trainer, batch: batch["x"][:, 0] * 0
    )
    assert train.train_and_eval(make_arguments(KEYS | {"train.steps": 10})) == FAILED
    assert "it did not go down: check the loss" in capsys.readouterr().out


@pytest.mark.slow
def test_run_on_a_few_batches_is_not_resumed_as_the_run_on_all(make_arguments):
    assert train.train_and_eval(make_arguments(KEYS | {"train.steps": 10})) in (DONE, FAILED)
    with pytest.raises(UsageError, match="overfit_batches: 2 -> 0"):
        train.train_and_eval(make_arguments({k: KEYS[k] for k in KEYS if "overfit" not in k}))


def test_flag_changes_the_config():
    _, changes = flags.parse(["ctl", "--config=a.py", "--overfit=4", "--config.seed=1"])
    assert changes == [
        ("seed", "1"),
        ("data.overfit_batches", "4"),
        ("eval.before_training", "true"),
        ("eval.splits", "['eval']"),
    ]


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_number_of_batches_must_be_positive(value):
    with pytest.raises(
        UsageError, match=f"--overfit is '{value}', but must be a number of batches"
    ):
        flags.parse(["ctl", "--config=a.py", f"--overfit={value}"])
