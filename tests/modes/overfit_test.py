"""`data.overfit_batches` and --overfit: which data a run has, and what it reports."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.configs import flags
from ctl.data import sampler
from ctl.errors import UsageError
from ctl.modes import DONE, FAILED, overfit, train
from tests import experiments, reference_model

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
    cls = overfit.limit_data(type("Own", (Data,), {"data": data}), batches)
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
        overfit._read(data, 2, 4, 0)


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
