"""`assert_curve`: what a golden curve detects, what it accepts, and when it is written."""

import dataclasses
import functools
import os

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.errors import UsageError
from ctl.testing import golden, tiny
from ctl.testing.golden import RTOL, Curve, find_changes, find_difference
from tests.support import child, experiments

EXAMPLES = {k: v.astype(np.float32) if k == "x" else v for k, v in tiny.examples(40).items()}
STEPS = 6  # of 8 examples: each of the 40 is used once, and some twice
strategy = functools.cache(testing.make_strategy)


class Tiny(tiny.TinyTrainer):
    """Trains in float32 on EXAMPLES."""

    def build_dataset(self, split, input_context):
        return ctl.data.arrays(EXAMPLES)


class ReversedRows(Tiny):
    """Computes the same, but sums gradients over the rows in reverse order."""

    def forward(self, batch, training):
        outputs = self.model(tf.reverse(batch["x"], axis=[0]), training=training)
        return tf.reverse(outputs, axis=[0])


def make(cls=Tiny, *, replicas=1, batch=8, optimizer=None, **options):
    tf_keras.backend.reset_uids()
    return cls(
        strategy=strategy(replicas),
        global_batch_size=batch,
        optimizer=optimizer or (lambda: tf_keras.optimizers.Adam(1e-2)),
        options=ctl.TrainerOptions(**{"xla": "off", **options}),
    )


@functools.cache
def curve(cls=Tiny, **options):
    return golden.record(make(cls, **options), STEPS)


def change_environment(recording, **changes):
    return dataclasses.replace(recording, environment={**recording.environment, **changes})


@pytest.fixture
def file(tmp_path):
    golden.write(tmp_path / "golden/tiny.json", curve())
    return tmp_path / "golden/tiny.json"


def test_public_names_of_the_kit_exist():
    assert all(getattr(testing, name) for name in testing.__all__)


def test_an_unchanged_trainer_passes_and_writes_nothing(file):
    before = file.stat().st_mtime_ns
    assert testing.assert_curve(file, make(), steps=STEPS) == ()  # bits are compared
    assert file.stat().st_mtime_ns == before and os.listdir(file.parent) == [file.name]
    assert [*curve().tensors.values()] == [[4, 5], [5], [5, 3], [3]]
    assert next(iter(curve().tensors)) == "dense/kernel:0"


def test_a_changed_trainer_fails_and_writes_nothing(file):
    before = file.read_bytes()
    with pytest.raises(AssertionError) as error:
        testing.assert_curve(str(file), make(ReversedRows), steps=STEPS)
    message = str(error.value)
    assert message.startswith(f"{file}: Step ")
    assert "the same bits are required, since nothing that determines them" in message
    assert message.endswith("record the curve again: pytest --update_golden.")
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "content", [None, "", "{}", "[]", '{"format": 2, "steps": []}', '{"format": 3}', "[" * 100_000]
)
def test_a_missing_or_damaged_file_or_one_of_another_format_is_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(UsageError, match=r"cannot be read as a golden curve .* again") as error:
        testing.assert_curve(tmp_path / "a.json", "experiment.py", steps=2)
    assert "\n" not in str(error.value)
    assert (tmp_path / "a.json").exists() == (content is not None)


def test_a_trained_trainer_and_no_steps_are_rejected():
    trainer = make()
    trainer.global_step.assign(2)
    with pytest.raises(UsageError, match="has made 2 steps, but a golden curve starts"):
        golden.record(trainer, 2)
    with pytest.raises(UsageError, match="steps is 0"):
        golden.record(trainer, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "micro_batches", "batch"), [(4, 2, 8), (4, 1, 5)])
def test_other_replicas_and_micro_batches_are_within_the_tolerance(replicas, micro_batches, batch):
    actual = curve(replicas=replicas, micro_batches=micro_batches, batch=batch)
    assert find_difference(actual, curve(batch=batch), 1e-4) == ""
    assert f"replicas: 1 -> {replicas}" in find_changes(actual, curve(batch=batch))
    # It is not the same by chance.
    assert [s["bits"] for s in actual.steps] != [s["bits"] for s in curve(batch=batch).steps]


@pytest.mark.slow
def test_logical_shards_require_the_same_bits_on_other_replicas():
    curves = curve(replicas=2, logical_shards=2), curve(logical_shards=2)
    assert not find_changes(*curves) and not find_difference(*curves, 0.0)


def test_another_seed_is_detected_and_named(file):
    with pytest.raises(AssertionError) as error:
        testing.assert_curve(file, make(seed=1), steps=2)
    assert str(error.value).startswith(f"{file}: Step 1: the loss is ")
    assert "the relative tolerance rtol holds, since seed: 0 -> 1" in str(error.value)


def test_another_order_of_reduction_is_detected_by_its_bits():
    actual = curve(ReversedRows)
    assert not find_changes(actual, curve()) and find_difference(actual, curve(), 0.0)
    # On another CPU it is accepted, since its bits have no meaning there.
    (change,) = find_changes(actual, change_environment(curve(), CPU="another"))
    assert change.startswith("CPU: another -> ") and not find_difference(actual, curve(), RTOL)
    assert find_changes(actual, curve(), bits=False) == ["bits=False"]
    # Another version of ctl requires the same bits.
    assert not find_changes(actual, change_environment(curve(), ctl="0.0.1"))


def test_another_model_is_detected():
    wider = dataclasses.replace(make_curve(), tensors={"v": [2], "w_1": [3]})
    smaller = dataclasses.replace(make_curve(), tensors={"v_1": [2]})
    end = ", where w [2] was recorded"
    assert find_difference(wider, make_curve(), RTOL) == f"The trainer has w_1 [3]{end}"
    assert find_difference(smaller, make_curve(), RTOL) == f"The trainer has no variable{end}"


def test_a_file_of_fewer_steps_is_rejected():
    short = dataclasses.replace(curve(), steps=curve().steps[:2])
    with pytest.raises(UsageError, match="has 2 steps, but 6 are required"):
        find_difference(curve(), short, 0.0)
    assert not find_difference(short, curve(), 0.0)  # fewer steps may be compared


def make_curve(loss=1.0, update=(3.0, 4.0), bits="a"):
    return Curve({}, {"v": [2], "w": [2]}, [dict(loss=loss, update=update, bits=bits)])


def test_loss_and_updates_may_differ_by_the_tolerance_and_no_more():
    for factor, equal in ((0.999, True), (1.001, False)):
        loss = make_curve(loss=1 + 1e-3 * factor)
        # Relative to the norm of both updates, which is 5.
        update = make_curve(update=(3.0, 4 + 5e-3 * factor))
        for actual in (loss, update):
            assert (find_difference(actual, make_curve(), 1e-3) == "") == equal
    assert "the norm of the update of w is " in find_difference(update, make_curve(), 1e-3)
    assert not find_difference(update, make_curve(), 0.1)


@pytest.mark.parametrize("rtol", [0.0, RTOL])
def test_nan_equals_nan_only(rtol):
    nan = make_curve(loss=float("nan"))
    assert not find_difference(nan, nan, rtol)
    assert "the loss is 1 instead of nan" in find_difference(make_curve(), nan, rtol)


def test_bits_are_those_of_all_variables():
    values = {("update", "w"): np.array([[3.0, 4.0]], np.float32), ("state", "n"): np.array(7)}
    before = {("update", "w"): np.array([[3.0, 1.0]], np.float32), ("state", "n"): np.array(6)}
    step = golden.describe_step(0.5, values, before)
    assert (step["loss"], step["update"]) == (0.5, [3.0])
    other = golden.describe_step(0.5, {**values, ("state", "n"): np.array(8)}, before)
    assert other["update"] == step["update"] and other["bits"] != step["bits"]
    difference = find_difference(make_curve(bits="b"), make_curve(), 0.0)
    assert difference.startswith("Step 1: variables have other bits")


def test_what_determines_the_bits_is_recorded(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    described = golden.describe_environment(make(replicas=2, seed=3, model={"width": 4}))
    assert described["tensorflow"] == tf.__version__ and described["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert described["devices"] == "CPU" and described["CPU"] and int(described["threads"]) >= 1
    assert (described["replicas"], described["strategy"]) == ("2", "mirrored")
    assert described["seed"] == "3" and "'width': 4" in described["model"]
    assert described["optimizer learning_rate"] == str(np.float32(1e-2))
    assert described["optimizer"] == "Adam" and not {"GPU", "data"} & described.keys()
    sharded = golden.describe_environment(make(replicas=2, logical_shards=2))
    assert "replicas" not in sharded and sharded["logical_shards"] == "2"
    monkeypatch.setattr(golden.devices, "replica_devices", lambda _: ["GPU:0", "GPU:1"])
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: ["a", "b"])
    details = {"device_name": "NVIDIA H100"}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda _: details)
    assert golden.describe_environment(make())["GPU"] == str(details)


@pytest.mark.slow
def test_a_config_has_the_curve_of_its_trainer(file, monkeypatch):
    monkeypatch.chdir(child.ROOT)
    config = ctl.config(
        trainer="tests.testing.golden_test:Tiny",
        data=dict(global_batch_size=8),
        runtime=dict(strategy="one_device", devices=["CPU:0"], xla="off"),
        optimizer=dict(name="adam", learning_rate=1e-2),
    )
    testing.assert_curve(file, config, steps=STEPS)


@pytest.mark.slow
def test_a_config_file_is_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})
    monkeypatch.setenv(golden.UPDATE, "1")
    testing.assert_curve("golden.json", "experiment.py", steps=3)
    assert "golden.json: recorded 3 steps of " in capsys.readouterr().out
    monkeypatch.delenv(golden.UPDATE)
    assert testing.assert_curve("golden.json", "experiment.py", steps=3) == ()
    assert {*os.listdir(tmp_path)} - {"__pycache__"} == {"experiment.py", "golden.json"}


@pytest.mark.slow
def test_option_of_pytest_records(tmp_path):
    text = (
        "from ctl import testing\n\n"
        "def test_curve():\n"
        "    testing.assert_curve('tiny.json', testing.tiny_trainer(), steps=2)\n"
    )
    experiments.write(tmp_path, {"golden_test.py": text})
    command = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "golden_test.py"]
    assert "1 passed" in child.run([*command, "--update_golden"], cwd=tmp_path).stdout
    assert "1 passed" in child.run(command, cwd=tmp_path).stdout
