"""Exported models, in a process that cannot import ctl."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import time

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.loop import exports, inference
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.exports import write_version
from ctl.modes.export import TrainedModel
from tests.loop.shared import arrays, same
from tests.support import child

DRAW = np.random.default_rng(3)
IMAGES = DRAW.integers(0, 255, (20, 4, 4, 3), np.uint8)
LABELS = DRAW.integers(0, 3, 20)

# Loads every exported model, and writes its outputs for the raw images.
READER = """
import sys
sys.modules["ctl"] = None
sys.modules["orbit"] = None
import pathlib
import numpy as np, tensorflow as tf, tf_keras

folder = pathlib.Path(sys.argv[1])
images = np.load(folder / "images.npy")
for version in sorted(folder.glob("*/*/saved_model.pb")):
    version = version.parent
    loaded = tf.saved_model.load(version)
    signature = loaded.signatures["serving_default"]
    outputs = signature(image=tf.constant(images))["outputs"].numpy()
    one = signature(image=tf.constant(images[:1]))["outputs"].numpy()
    assert np.allclose(one, outputs[:1], atol=1e-6)
    bare = tf_keras.models.load_model(version / "model.keras")
    np.savez(folder / f"{version.parent.name}.npz", outputs=outputs,
             bare=bare.predict(images / np.float32(255), verbose=0),
             policy=str({layer.dtype_policy.name for layer in bare.layers}))
"""


class Images(ctl.StandardTrainer):
    """Preprocessing, dropout, noise, two kinds of batch normalization; the outputs are collected."""

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [
                layers.Input((4, 4, 3)),
                layers.Dense(4),  # of each pixel; a 16-bit convolution takes seconds on a CPU
                ctl.SyncBatchNormalization(momentum=0.5),
                layers.GaussianNoise(0.1),
                layers.Flatten(),
                layers.Dense(6, activation="relu"),
                layers.BatchNormalization(momentum=0.5),
                layers.Dropout(0.5),
                layers.Dense(3),
            ]
        )

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
OPTIONS = {"average": {"ema_decay": 0.9}, "half": {"ema_decay": 0.9, "precision": "float16"}}


def train(folder, cls=Images, *, replicas=2, **options):
    """Trains five steps, and returns the path of a checkpoint and the trainer."""
    trainer = cls(
        strategy=testing.make_strategy(replicas),
        global_batch_size=8,
        optimizer=lambda: tf_keras.optimizers.Adam(0.02),
        options=ctl.TrainerOptions(**options),
    )
    trainer.train(tf.constant(5))
    checkpoints = Checkpointer(folder, trainer)
    path = checkpoints.save()
    # Each replica has its own moving statistics of a plain batch normalization, of which the mean is
    # saved, and evaluated from then on.
    checkpoints.restore(path)
    return path, trainer


def restore(path, trainer, **arguments):
    return inference.restore_trainer(
        type(trainer), trainer.options, path, global_batch_size=8, **arguments
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """name -> its folder and the outputs of the evaluator; each is exported once."""

    @functools.cache
    def export(name):
        folder = tmp_path_factory.mktemp("exports")
        np.save(folder / "images.npy", IMAGES)
        replicas = 2 if name == "average" else 1
        path, trainer = train(folder / "checkpoints" / name, replicas=replicas, **OPTIONS[name])
        ctl.StandardEvaluator(trainer, global_batch_size=7).evaluate(tf.constant(-1))
        outputs = EVALUATED[-1]
        write_version(restore(path, trainer), folder / name, {"name": name})
        child.run(["-c", READER, str(folder)], fork=True).check_returncode()
        return folder, outputs

    return export


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tolerance"), [("average", 1e-6), pytest.param("half", 5e-3, marks=pytest.mark.slow)]
)
def test_exported_model_computes_what_the_evaluator_computed(exported, name, tolerance):
    folder, outputs = exported(name)
    read = np.load(folder / f"{name}.npz")
    assert np.abs(outputs).max() > 0.05
    assert read["outputs"].dtype == np.float32
    np.testing.assert_allclose(read["outputs"], outputs, rtol=0, atol=tolerance)
    np.testing.assert_allclose(read["bare"], read["outputs"], rtol=0, atol=1e-5)
    assert read["policy"] == "{'float32'}"


@pytest.mark.parametrize("name", ["average", pytest.param("half", marks=pytest.mark.slow)])
def test_version_describes_itself(exported, name):
    folder, _ = exported(name)
    version = folder / name / "5"
    description = json.loads((version / "export.json").read_text())
    assert description["step"] == 5 and description["name"] == name
    assert description["signatures"] == {
        "serving_default": {
            "inputs": {"image": {"dtype": "uint8", "shape": [None, 4, 4, 3]}},
            "outputs": {"outputs": {"dtype": "float32", "shape": [None, 3]}},
        }
    }
    assert [path.name for path in version.parent.iterdir()] == ["5"]


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
        return {
            "image": tf.ensure_shape(image, [None, 4, 4, 3]),
            "label": tf.one_hot(batch["label"], 3),
        }


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
    return train(tmp_path_factory.mktemp("checkpoint"), replicas=1, ema_decay=0.5)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Labels, "The outputs of Labels.serve depend on 'label', which is not known"),
        (Python, r"The signature serving_default calls Python .* override serve\(features\)"),
    ],
)
def test_model_that_cannot_be_exported_is_rejected_in_one_line(checkpoint, tmp_path, cls, message):
    path, trainer = checkpoint
    restored = inference.restore_trainer(cls, trainer.options, path, global_batch_size=8)
    with pytest.raises(ctl.UsageError, match=message) as error:
        write_version(restored, tmp_path, {})
    assert "\n" not in str(error.value)
    assert not [p for p in tmp_path.iterdir() if not p.name.startswith(".")]


def test_damaged_checkpoint_is_rejected_in_one_line(checkpoint, tmp_path):
    path, trainer = checkpoint
    shutil.copytree(pathlib.Path(path).parent, tmp_path / "copy")
    os.truncate(tmp_path / "copy" / f"{pathlib.Path(path).name}.data-00000-of-00001", 100)
    with pytest.raises(ctl.UsageError, match=r"copy/ckpt-5 cannot be read \(.*\): name another"):
        restore(str(tmp_path / "copy" / "ckpt-5"), trainer)


def test_options_that_are_not_of_training_are_those_of_the_trained_one():
    @dataclasses.dataclass(frozen=True)
    class Later(ctl.TrainerOptions):
        added: str = ""

    def make(options, **_):
        raise KeyError(options)

    options = Later(added="later", cache="memory", norms="layers", model={"width": 3})
    with pytest.raises(KeyError) as error:
        inference.restore_trainer(make, options, "ckpt-1", global_batch_size=8)
    (made,) = error.value.args
    assert (made.added, made.cache, made.norms) == ("later", "memory", "")
    assert made.model.width == 3


def test_signatures_and_tables_of_the_trainer_are_exported(checkpoint, tmp_path):
    path, trainer = checkpoint
    restored = inference.restore_trainer(Table, trainer.options, path, global_batch_size=8)
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
    path, trainer = checkpoint
    restored = inference.restore_trainer(Targets, trainer.options, path, global_batch_size=8)
    version = write_version(restored, tmp_path, {})
    description = json.loads((version / "export.json").read_text())
    assert description["signatures"]["serving_default"]["inputs"].keys() == {"image"}
    images = tf.constant(IMAGES)
    outputs = tf.saved_model.load(version).signatures["serving_default"](image=images)["outputs"]
    expected = restored.model(IMAGES / np.float32(255), training=False)
    np.testing.assert_allclose(outputs, expected, atol=1e-6)
    loaded = TrainedModel(restored, path)
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


def test_earlier_version_exists_at_every_moment_of_its_replacement(
    checkpoint, tmp_path, monkeypatch
):
    path, trainer = checkpoint
    write_version(restore(path, trainer), tmp_path, {"number": 1})
    seen = []

    def record(function):
        def call(*arguments, **options):
            result = function(*arguments, **options)
            seen.append(json.loads((tmp_path / "5/export.json").read_text())["number"])
            return result

        return call

    for module, name in (
        (shutil, "rmtree"),
        (pathlib.Path, "rename"),
        (exports, "_exchange"),
    ):
        monkeypatch.setattr(module, name, record(getattr(module, name)))
    write_version(restore(path, trainer), tmp_path, {"number": 2})
    assert seen == sorted(seen) and {*seen} == {1, 2}


def test_version_of_a_kill_between_two_renames_is_recovered(checkpoint, tmp_path, monkeypatch):
    """Where folders cannot be exchanged."""
    path, trainer = checkpoint
    monkeypatch.setattr(exports, "_exchange", lambda *_: False)
    write_version(restore(path, trainer), tmp_path, {"number": 1})
    (tmp_path / "5").rename(tmp_path / ".5.old")
    with monkeypatch.context() as patch:
        patch.setitem(exports.FORMATS, "keras", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_version(restore(path, trainer), tmp_path, {"number": 2})
    assert json.loads((tmp_path / "5/export.json").read_text())["number"] == 1
    write_version(restore(path, trainer), tmp_path, {"number": 3})
    assert json.loads((tmp_path / "5/export.json").read_text())["number"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["5"]


# Exports the same version again and again, each time with other weights.
EXPORTER = """
import itertools, sys, pathlib
import tensorflow as tf, tf_keras
from ctl.loop import inference
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.exports import write_version
from ctl.testing import tiny

folder = pathlib.Path(sys.argv[1])
trainer = tiny.TinyTrainer(global_batch_size=8, optimizer=tf_keras.optimizers.SGD(0.1))
path = Checkpointer(folder / "checkpoints", trainer).save()
for number in itertools.count(int(sys.argv[2])):
    restored = inference.restore_trainer(
        tiny.TinyTrainer, trainer.options, path, global_batch_size=8)
    for variable in restored.model.variables:
        variable.assign(tf.fill(variable.shape, tf.cast(number, variable.dtype)))
    write_version(restored, folder / "export", {"number": number})
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.long)])
def test_kills_at_random_instants_leave_the_old_or_the_new_version(tmp_path, kills):
    draw = np.random.default_rng(4)
    last, versions = 0, []
    for _ in range(kills):
        process = child.start(["-c", EXPORTER, str(tmp_path), str(last + 1)], fork=True)
        ended = int(process.stdout.readline())
        time.sleep(draw.uniform(0, 1.0))
        process.kill()
        ended = max([ended, *map(int, process.communicate()[0].split())])
        version = tmp_path / "export/0"
        last = json.loads((version / "export.json").read_text())["number"]
        assert last in (ended, ended + 1)
        loaded = tf.saved_model.load(version)
        bare = tf_keras.models.load_model(version / "model.keras")
        for variable in (*bare.variables, *loaded.signatures["serving_default"].captured_inputs):
            if variable.dtype == tf.resource:
                variable = tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.float32)
            assert np.all(np.asarray(variable) == last)
        versions.append(last)
    assert versions == sorted(versions)


def test_unknown_format_is_rejected_with_the_known_one():
    with pytest.raises(ctl.UsageError, match=r"'saved_modle': did you mean saved_model\?"):
        exports.select(["saved_modle"])
