"""Exported models, in a process that cannot import ctl."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.errors import Failure
from ctl.loop import exports, inference
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.exports import write_version
from ctl.modes.export import TrainedModel
from tests.loop.shared import arrays, same
from tests.support import child

DRAW = np.random.default_rng(3)
IMAGES = DRAW.integers(0, 255, (20, 4, 4, 3), np.uint8)
LABELS = DRAW.integers(0, 3, 20)

# Loads the exported model, and writes its outputs for the raw images.
READER = """
import sys
sys.modules["ctl"] = None
sys.modules["orbit"] = None
import pathlib
import numpy as np, tensorflow as tf, tf_keras

folder, version = map(pathlib.Path, sys.argv[1:])
images = np.load(folder / "images.npy")
signature = tf.saved_model.load(version).signatures["serving_default"]
outputs = signature(image=tf.constant(images))["outputs"].numpy()
one = signature(image=tf.constant(images[:1]))["outputs"].numpy()
assert np.allclose(one, outputs[:1], atol=1e-6)
bare = tf_keras.models.load_model(version / "model.keras")
bare = bare.predict(images / np.float32(255), verbose=0)
np.savez(folder / "outputs.npz", outputs=outputs, bare=bare)
"""


class Images(ctl.StandardTrainer):
    """Preprocessing, dropout, noise, two kinds of batch normalization; the outputs are collected."""

    def build_model(self):
        layers = tf_keras.layers
        of_pixels = [layers.Dense(4), ctl.SyncBatchNormalization(momentum=0.5)]
        hidden = [layers.Dense(6, activation="relu"), layers.BatchNormalization(momentum=0.5)]
        noise = [layers.GaussianNoise(0.1), layers.Flatten()]
        end = [layers.Dropout(0.5), layers.Dense(3)]
        return tf_keras.Sequential([layers.Input((4, 4, 3)), *of_pixels, *noise, *hidden, *end])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"image": IMAGES, "label": LABELS})

    def preprocess(self, batch):
        return {**super().preprocess(batch), "label": tf.one_hot(batch["label"], 3)}

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.categorical_crossentropy(batch["label"], outputs, from_logits=True)

    def collect_outputs(self, batch, outputs):
        return {"outputs": outputs}

    def compute_metrics(self, collected):
        EVALUATED.append(collected["outputs"])
        return {}


EVALUATED = []


def train(folder, replicas):
    """Trains five steps, and returns the path of a checkpoint and the trainer."""
    trainer = Images(
        strategy=testing.make_strategy(replicas),
        global_batch_size=8,
        optimizer=lambda: tf_keras.optimizers.Adam(0.02),
        options=ctl.TrainerOptions(ema_decay=0.9),
    )
    trainer.train(tf.constant(5))
    checkpoints = Checkpointer(folder, trainer)
    path = checkpoints.save()
    # Each replica has its own moving statistics of a plain batch normalization, of which the mean is
    # saved, and evaluated from then on.
    checkpoints.restore(path)
    return path, trainer


def restore(path, trainer, cls=Images, **options):
    return inference.restore_trainer(cls, trainer.options, path, global_batch_size=8, **options)


@pytest.mark.slow
def test_exported_model_computes_what_the_evaluator_computed(tmp_path):
    np.save(tmp_path / "images.npy", IMAGES)
    path, trainer = train(tmp_path / "checkpoints", replicas=2)
    ctl.StandardEvaluator(trainer, global_batch_size=7).evaluate(tf.constant(-1))
    restored = restore(path, trainer)
    ctl.StandardEvaluator(restored, global_batch_size=7).evaluate(tf.constant(-1))
    np.testing.assert_allclose(EVALUATED[-1], EVALUATED[-2], rtol=0, atol=1e-6)  # averages, too
    version = write_version(restored, tmp_path / "export", {})
    child.run(["-c", READER, str(tmp_path), str(version)], fork=True).check_returncode()
    read = np.load(tmp_path / "outputs.npz")
    assert np.abs(EVALUATED[-1]).max() > 0.05
    assert read["outputs"].dtype == np.float32
    np.testing.assert_allclose(read["outputs"], EVALUATED[-1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(read["bare"], read["outputs"], rtol=0, atol=1e-5)


class Labels(Images):
    """Outputs that depend on the label."""

    def preprocess(self, batch):
        batch = super().preprocess(batch)
        return {**batch, "image": batch["image"] + batch["label"][:, :1, None, None]}


class Python(Images):
    def preprocess(self, batch):
        def scale(image):
            return image / np.float32(255)

        image = tf.numpy_function(scale, [batch["image"]], tf.float32)
        label = tf.one_hot(batch["label"], 3)
        return {"image": tf.ensure_shape(image, [None, 4, 4, 3]), "label": label}


class Table(Images):
    """A table that the trainer holds, and one that nobody holds."""

    def build_model(self):
        keys, values = tf.constant([0, 1, 2], tf.int64), tf.constant([5.0, 6.0, 7.0])
        initializer = tf.lookup.KeyValueTensorInitializer(keys, values)
        self.table = tf.lookup.StaticHashTable(initializer, 0.0)
        return super().build_model()

    def serve(self, features):
        classes = tf.argmax(super().serve(features), -1)
        return {"class": classes, "value": self.table.lookup(classes)}

    def export_signatures(self):
        return {**super().export_signatures(), "logits": super().serve}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return train(tmp_path_factory.mktemp("checkpoint"), replicas=1)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Labels, "outputs of Labels.serve depend on 'label'"),
        (Python, "serving_default calls Python"),
    ],
)
def test_model_that_cannot_be_exported_is_rejected_in_one_line(checkpoint, tmp_path, cls, message):
    restored = restore(*checkpoint, cls)
    with pytest.raises(ctl.UsageError, match=message) as error:
        write_version(restored, tmp_path, {})
    assert "\n" not in str(error.value)
    assert not [p for p in tmp_path.iterdir() if not p.name.startswith(".")]


def test_options_that_are_not_of_training_are_those_of_the_trained_one():
    @dataclasses.dataclass(frozen=True)
    class Later(ctl.TrainerOptions):
        added: str = ""

    def make(options, **_):
        raise KeyError(options)

    options = Later(
        added="later", cache="memory", norms="layers", precision="float16", model={"width": 3}
    )
    with pytest.raises(KeyError) as error:
        inference.restore_trainer(make, options, "ckpt-1", global_batch_size=8)
    (made,) = error.value.args
    assert (made.added, made.cache, made.norms) == ("later", "memory", "")
    assert (made.precision, made.model.width) == ("float32", 3)


def test_signatures_and_tables_of_the_trainer_are_exported(checkpoint, tmp_path):
    restored = restore(*checkpoint, Table)
    version = write_version(restored, tmp_path, {})
    del restored
    loaded = tf.saved_model.load(version)
    outputs = loaded.signatures["serving_default"](image=tf.constant(IMAGES))
    logits = loaded.signatures["logits"](image=tf.constant(IMAGES))["outputs"]
    np.testing.assert_array_equal(outputs["class"], tf.argmax(logits, -1))
    np.testing.assert_array_equal(outputs["value"], outputs["class"].numpy() + 5.0)


class Targets(Images):
    """Two targets, and a feature that the model does not use."""

    def build_dataset(self, split, input_context):
        label = {"digit": LABELS, "parity": LABELS % 2}
        return ctl.data.arrays({"image": IMAGES, "label": label, "unused": LABELS})

    def preprocess(self, batch):
        digit = tf.one_hot(batch["label"]["digit"], 3)
        return {**super(Images, self).preprocess(batch), "label": digit}

    def forward(self, batch, training):
        assert "unused" in batch
        return self.model(batch["image"], training=training)


def test_signature_has_neither_targets_nor_unused_inputs(checkpoint, tmp_path):
    restored = restore(*checkpoint, Targets)
    version = write_version(restored, tmp_path, {"name": "targets"})
    description = json.loads((version / "export.json").read_text())
    assert description["step"] == 5 and description["name"] == "targets"
    inputs = {"image": {"dtype": "uint8", "shape": [None, 4, 4, 3]}}
    outputs = {"outputs": {"dtype": "float32", "shape": [None, 3]}}
    assert description["signatures"] == {"serving_default": dict(inputs=inputs, outputs=outputs)}
    assert list(tmp_path.iterdir()) == [version] and version.name == "5"
    images = tf.constant(IMAGES)
    outputs = tf.saved_model.load(version).signatures["serving_default"](image=images)["outputs"]
    expected = restored.model(IMAGES / np.float32(255), training=False)
    np.testing.assert_allclose(outputs, expected, atol=1e-6)
    loaded = TrainedModel(restored, checkpoint[0])
    for features in (IMAGES, {"image": IMAGES}, {"image": IMAGES, "unused": LABELS, "label": 0}):
        np.testing.assert_allclose(loaded(features), expected, atol=1e-6)
    with pytest.raises(ctl.UsageError, match="The features are other, but must be image"):
        loaded({"other": IMAGES, "unused": LABELS})


def test_plain_weights_can_be_restored_instead_of_the_averages(checkpoint):
    path, trainer = checkpoint
    weights = arrays(trainer.model.variables)
    with trainer.averaged_weights():
        averages = arrays(trainer.model.variables)
    for average, expected in ((False, weights), (True, averages)):
        assert same(restore(path, trainer, average=average).model.variables, expected)
    assert not np.array_equal(weights[0], averages[0])


@pytest.fixture
def write(checkpoint, tmp_path):
    """Writes a version with a number, in a format that takes no time."""
    restored = restore(*checkpoint)

    def write_numbered(number, *formats):
        restored.export_formats = formats
        write_version(restored, tmp_path, {"number": number})

    return write_numbered


def read_number(folder):
    return json.loads((folder / "5/export.json").read_text())["number"]


def test_earlier_version_exists_at_every_moment_of_its_replacement(write, tmp_path, monkeypatch):
    write(1)
    seen = []

    def record(function):
        def call(*arguments, **options):
            result = function(*arguments, **options)
            seen.append(read_number(tmp_path))
            return result

        return call

    for owner, name in ((shutil, "rmtree"), (pathlib.Path, "rename"), (exports, "_exchange")):
        monkeypatch.setattr(owner, name, record(getattr(owner, name)))
    write(2)
    assert seen == sorted(seen) and {*seen} == {1, 2}


def test_version_of_a_kill_between_two_renames_is_recovered(write, tmp_path, monkeypatch):
    """Where folders cannot be exchanged."""
    monkeypatch.setattr(exports, "_exchange", lambda *_: False)
    monkeypatch.setitem(exports.FORMATS, "killed", lambda *_: 1 / 0)
    write(1)
    (tmp_path / "5").rename(tmp_path / ".5.old")
    with pytest.raises(ZeroDivisionError):
        write(2, "killed")
    assert read_number(tmp_path) == 1
    write(3)
    assert read_number(tmp_path) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["5"]


def test_unknown_format_is_rejected_with_the_known_one(write):
    with pytest.raises(ctl.UsageError, match=r"'saved_modle': did you mean saved_model\?"):
        write(1, "saved_modle")


def test_full_disk_is_not_a_property_of_the_model(checkpoint, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("Can't decrement id ref count (error message = 'Input/output error')")

    path, trainer = checkpoint
    monkeypatch.setattr(tf_keras.Sequential, "save", fail)
    monkeypatch.setattr(Images, "export_formats", ("keras",))
    with pytest.raises(Failure, match=r"export .*Input/output"):
        exports.export_checkpoint(
            Images, trainer.options, path, tmp_path / "export", global_batch_size=8
        )
