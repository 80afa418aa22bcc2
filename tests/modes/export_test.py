"""--mode=export, train.export and ctl.load, on one run."""

import gc
import json
import logging
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.errors import UsageError
from ctl.modes import DONE, export, train
from tests.support import experiments

# The features are bytes, which preprocess scales to a mean of 0.
BYTES = (
    experiments.DROPOUT.replace('"x": X,', '"x": np.clip(X * 40 + 128, 0, 255).astype(np.uint8),')
    .replace(
        "    def per_example_loss",
        """    def preprocess(self, batch):
        return {**batch, "x": (np.float32(1) * tf.cast(batch["x"], tf.float32) - 128) / 40}

    def per_example_loss""",
    )
    .replace("import tf_keras\n", "import tensorflow as tf\nimport tf_keras\n")
)
KEYS = {
    "train.steps": 60, "eval.interval": 20, "train.best.metric": "eval/loss", "train.best.mode": "min",
    "train.export": "best", "optimizer.learning_rate": 0.05,
}  # fmt: skip


@pytest.fixture
def make(make_arguments):
    experiments.write(".", {"experiment.py": BYTES})
    return make_arguments


@pytest.mark.slow
def test_best_checkpoint_is_exported_at_the_end_and_loaded(make, capsys, caplog, monkeypatch):
    gc.collect()  # what earlier tests left warns now
    logger = logging.getLogger("tensorflow")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "level", logging.WARNING)
    assert train.train_and_eval(make(KEYS)) == DONE
    result = experiments.read_result("run")
    step = result["best"]["step"]
    exported = result["export"]
    assert exported == {
        "path": f"run/export/{step}", "checkpoint": f"run/best/ckpt-{step}", "weights": "plain",
    }  # fmt: skip
    assert f"Exported run/best/ckpt-{step} to run/export/{step}." in capsys.readouterr().out
    events = [event for event in experiments.read_events("run") if event[0] == "export"]
    assert events == [("export", step)]

    # Another version of another checkpoint, by the mode.
    assert export.export(make(KEYS, checkpoint="50")) == DONE
    assert {p.name for p in pathlib.Path("run/export").iterdir()} == {str(step), "50"}
    assert json.loads(pathlib.Path("run/export/50/export.json").read_text())["weights"] == "plain"

    model = ctl.load("run", "best")
    assert model.step == step and model.path == f"run/best/ckpt-{step}"
    rows = model.trainer.build_dataset("eval", None).gather(list(range(50)))
    raw, labels = rows["x"].numpy(), rows["label"].numpy()
    logits = model(rows)  # the label is ignored
    accuracy = np.mean(np.argmax(logits, -1) == labels)
    assert accuracy >= 0.9
    nonsense = model.model_without_preprocess(raw.astype(np.float32))
    assert np.mean(np.argmax(nonsense, -1) == labels) < accuracy
    # The evaluator's loss, from the loaded model's outputs.
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    assert np.mean(loss) == pytest.approx(result["best"]["value"], rel=1e-6)
    saved = tf.saved_model.load(f"run/export/{step}").signatures["serving_default"]
    np.testing.assert_array_equal(saved(x=tf.constant(raw))["outputs"], model(raw))
    np.testing.assert_allclose(model.predict(raw, batch_size=7), logits, atol=1e-6)
    assert ctl.load("run").step == 60

    del model, saved
    gc.collect()  # TensorFlow warns of values that were not restored when they are deleted
    assert not [r for r in caplog.records if "unrestored" in r.getMessage()]
    model = ctl.load("run", "best")

    for features, message in {
        "scaled": r"x is float32 \(50, 4\), but must be raw examples, uint8 \(None, 4\)",
        "one": r"x is uint8 \(4,\), but must be raw examples",
        "lists": r"x is no array of uint8 \(None, 4\)",
        "name": "The features are image, but must be x",
    }.items():
        wrong = {
            "scaled": {"x": raw.astype(np.float32)}, "one": raw[0], "name": {"image": raw},
            "lists": [[1, 2], [3]],
        }[features]  # fmt: skip
        with pytest.raises(UsageError, match=message):
            model(wrong)
    with pytest.raises(UsageError, match="batch_size is 0, but must be at least 1"):
        model.predict(raw, batch_size=0)
    with pytest.raises(UsageError, match="has no checkpoint of this step, but of"):
        ctl.load("run", 7)


def test_export_of_nothing_is_rejected(make, tmp_path):
    with pytest.raises(UsageError, match="run has no checkpoint: train first"):
        export.export(make())
    with pytest.raises(UsageError, match=r"no run: .*--workdir"):
        ctl.load(tmp_path / "nothing")
