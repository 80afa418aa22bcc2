"""--mode=explain prints the step of a config and the complete config, and writes nothing."""

import pathlib
import re

import pytest

from ctl import main
from ctl.hardware import strategies
from ctl.rows import packs
from tests.support import experiments

TWO_REPLICAS = ("runtime.strategy=mirrored", "runtime.logical_devices=2")


@pytest.fixture
def explain(tmp_path, monkeypatch, capsys):
    """Explains the config with changes; returns the rows by name, and the complete output."""
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})

    def run(*changes):
        arguments = [f"--config.{change}" for change in changes]
        assert main.run(["ctl", "--config=experiment.py", "--mode=explain", *arguments]) == 0
        out = capsys.readouterr().out
        lines = out.partition("config:")[0].splitlines()
        return dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines if line), out

    return run


def test_the_rows_describe_an_uneven_step_with_micro_batches(explain):
    rows, _ = explain(*TWO_REPLICAS, "optimizer.clip.global_norm=1.5", "optimizer.micro_batches=2")
    assert rows["strategy"].startswith("mirrored (")
    assert rows["replicas"] == "2"
    assert rows["data"] == "features: x; label: label; weight: none"
    assert rows["global batch"] == "7 = 4+3 rows, each in 2 micro-batches"
    assert rows["denominator"].startswith("the total weight of the rows that exist")
    assert rows["reduction"].startswith("one SUM all-reduce, ")
    assert "by global norm 1.5, after the reduction" in rows["clip"]
    assert not pathlib.Path("runs").exists()


def test_the_rows_describe_one_replica(explain):
    rows, out = explain("data.global_batch_size=8")
    assert rows["global batch"] == "8 = 8 rows"
    assert rows["denominator"] == "8, a constant, unless the batch has weights"
    assert rows["reduction"] == "none: one replica"
    assert rows["optimizer"] == "Adam(beta_1=0.9, beta_2=0.999, epsilon=1e-07, amsgrad=False)"
    assert rows["schedule"] == "constant: 0.001"
    assert rows["xla"].startswith("off (auto: on CPUs ")
    assert rows["variables"].startswith("4 trainable, ")
    config = out.partition("config:")[2]  # the complete one
    assert "steps: 30" in config and "dropout: 0.3" in config and "global_batch_size: 8" in config
    changes = ("optimizer.schedule=linear", "optimizer.warmup_steps=10", "train.steps=40")
    rates = {0: "0", 10: "0.001", 20: "0.0006667", 30: "0.0003333", 40: "0"}
    shown = ", ".join(f"{rate} at update {step}" for step, rate in rates.items())
    assert explain(*changes)[0]["schedule"] == f"linear: {shown}"


@pytest.mark.slow
def test_steps_after_the_last_frozen_until_are_described(explain):
    text = experiments.DROPOUT.replace("Dense(8)", "Dense(8, name='first')")
    experiments.write(".", {"experiment.py": text})
    groups = "[{'variables':'first/*','frozen_until':'1 epoch'}]"
    rows, out = explain(f"optimizer.groups={groups}")
    assert rows["variables"] == "4 trainable, 67 parameters"
    assert "frozen_until: 1 epoch" in out
    trained = explain()[0]
    assert all(rows[name] == trained[name] for name in ("gradients", "memory"))


def test_memory_is_listed_by_part(explain):
    rows, _ = explain("optimizer.micro_batches=2", "optimizer.ema_decay=0.9")
    assert rows["memory"].endswith(" MiB on a replica at its peak, estimated")
    names = [
        "memory", "weights", "slots", "ema", "gradients", "sums", "activations of 4 rows", "input",
        "prefetched by the host",
    ]  # fmt: skip
    assert [name for name in rows if name in names] == names


def test_memory_of_a_step_that_cannot_be_traced_is_not_estimated(explain):
    text = experiments.DROPOUT.replace('batch["label"]', 'batch["lable"]')
    experiments.write(".", {"experiment.py": text})
    rows, _ = explain("eval.splits=[]")
    assert rows["memory"].startswith("not estimated: The batch has no 'lable': did you mean")


def test_parts_of_the_user_are_named(explain):
    method = (
        "def transform_gradients(self, gradients, variables):\n        return gradients\n\n    "
    )
    text = experiments.DROPOUT.replace("def per_example_loss", f"{method}def per_example_loss")
    experiments.write(".", {"experiment.py": text})
    rows, _ = explain()
    assert rows["parts"] == "The updates have parts of your own: transform_gradients."


def test_actions_are_listed_in_order(explain):
    rows, _ = explain()
    assert rows["actions"] == "none"
    experiments.write(".", {"mine.py": "def make():\n    def plot(o): pass\n    return plot\n"})
    best = [f"train.best.{key}" for key in ("metric=eval/loss", "mode=min", "patience=3")]
    rows, _ = explain(*best, "train.export=last", "actions=['mine.py:make']")
    names = ("BestCheckpoint", "EarlyStopping", "plot")
    actions = [f"{name} (each evaluation)" for name in names]
    assert rows["actions"].split("; ") == [*actions, "ExportModel (at the end)"]


@pytest.mark.slow
def test_packs_and_a_reduced_dtype_are_part_of_the_reduction(explain, monkeypatch):
    mirrored = (*TWO_REPLICAS, "data.global_batch_size=8")
    text = "SUM all-reduce, 0.00 MiB in "
    assert explain(*mirrored)[0]["reduction"] == f"one {text}float32"
    monkeypatch.setattr(packs, "BYTES", 64)
    assert explain(*mirrored)[0]["reduction"] == f"{text}float32, in packs of 0.00 MiB"
    monkeypatch.setattr(strategies, "bucket_bytes", lambda strategy: 1)
    rows, _ = explain(*mirrored, "runtime.all_reduce.dtype=bfloat16")
    assert rows["reduction"] == f"{text}bfloat16, in packs during the backward pass"


@pytest.mark.slow
def test_memory_and_bytes_of_compressed_gradients_include_further_models(explain):
    constructor = """
    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.other = tf_keras.Sequential([tf_keras.layers.Dense(1000, input_shape=(1000,))])

    def build_metrics"""
    text = experiments.DROPOUT.replace("\n    def build_metrics", constructor)
    experiments.write(".", {"experiment.py": text})
    compression = "runtime.all_reduce.compression=float16"
    rows, _ = explain(compression, *TWO_REPLICAS)
    assert rows["compression"] == "3.82 MiB"
    assert "compressed by float16: 1.91 MiB in place of 3.82 MiB " in rows["reduction"]
    rows, _ = explain(compression)
    assert "by float16: as those of several replicas, but one" in rows["reduction"]


ATTENTION = """\
x = layers.RepeatVector(512)(inputs := layers.Input([4]))
        x = layers.MultiHeadAttention(2, 8, name="first")(x, x, use_causal_mask=True)
        x = layers.MultiHeadAttention(2, 8, dropout=0.1, name="second")(x, x)
        return tf_keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))"""


@pytest.mark.slow
def test_each_attention_has_its_form_and_the_reason(explain):
    model = "return tf_keras.Sequential([layers.Dense(8), dropout, layers.Dense(3)])"
    text = experiments.DROPOUT.replace(model, ATTENTION)
    experiments.write(".", {"experiment.py": text})
    dropout = "formula (attention dropout, whose masks the kernel cannot key by row): second"
    for changes, form in (
        ((), "formula (XLA does not compile it for a GPU)"),
        (("runtime.kernels=off",), "formula (runtime.kernels=off)"),
    ):
        rows, _ = explain("runtime.precision=bfloat16", *changes)
        assert rows["attention"] == f"{form}: first; {dropout}"
