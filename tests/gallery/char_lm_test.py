"""The byte-level Transformer of experiments/char_lm.py, with a small model on a small text."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.configs.options import Clip
from ctl.layers import recompute
from experiments.trainers import char_lm
from tests.gallery import curves

MODEL = dict(layers=1, heads=2, width=8, context=8)
TEXT = np.resize(np.random.default_rng(0).integers(256, size=11), 893).astype(np.uint8)


class Small(char_lm.CharLmTrainer):
    """On 893 bytes that repeat: 112 blocks of training, of which the last has four bytes."""

    def build_dataset(self, split, input_context):
        return char_lm.split_text(TEXT, self.options.model.context)


def train(replicas, switch):
    trainer = curves.build(
        Small, replicas, tf_keras.optimizers.AdamW(1e-2, weight_decay=0.1),
        model={**MODEL, "recompute": switch}, clip=Clip(global_norm=1.0),
        weight_decay_exclude=["*/bias", "*/gamma", "*/beta"],
    )  # fmt: skip
    with recompute.detect_use() as used:
        results = curves.train(trainer)
        assert used() == bool(switch)
    return results


@pytest.mark.slow
def test_the_update_is_that_of_one_device_without_recomputation():
    losses = curves.assert_same(train(1, ""), train(2, "blocks"))
    assert losses[0] < np.log(256) + 0.1 and losses[-1] < losses[0]


def test_every_byte_after_the_first_is_predicted_once():
    text = np.arange(21, dtype=np.uint8)
    batch = char_lm.split_text(text, 8).gather(tf.range(3, dtype=tf.int64))
    weight = batch["weight"].numpy() > 0
    np.testing.assert_array_equal(batch["label"].numpy()[weight], text[1:])
    np.testing.assert_array_equal(batch["x"].numpy()[weight], text[:-1])
    assert batch["x"].shape == (3, 8)


def test_a_byte_does_not_affect_the_logits_of_earlier_ones():
    model = char_lm.Transformer(**MODEL, recompute="")
    tokens = np.arange(8)[np.newaxis]
    changed = np.where(np.arange(8) == 5, 99, tokens)
    difference = np.abs(model(tokens) - model(changed)).max(axis=(0, 2))
    assert difference[:5].max() == 0 and difference[5:].min() > 0


@pytest.mark.slow
def test_the_experiment_trains_evaluates_and_writes_a_sample(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("To be, or not to be, that is the question: " * 40)
    keys = {
        "data.dir": tmp_path / "text", "train.steps": 30, "optimizer.warmup_steps": 3, "seed": 1,
        "optimizer.learning_rate": 0.01, "model.layers": 1, "model.heads": 2, "model.width": 16,
        "model.context": 16,
    }  # fmt: skip
    result = curves.run_experiment("char_lm", tmp_path / "run", keys)
    assert result["eval"]["loss"] < 4.0
    values = [v for tag, v in curves.summaries(tmp_path / "run") if tag == "sample"]
    (sample,) = (value.tensor.string_val[0].decode() for value in values)
    assert 0 < len(sample) <= 300


def test_the_default_text_is_the_standard_library_and_a_folder_without_files_is_rejected(tmp_path):
    text = bytes(char_lm.read_text(""))
    assert b"class ArgumentParser(" in text and len(text) > 10**6
    with pytest.raises(ctl.UsageError, match="must be a folder of text files"):
        char_lm.read_text(str(tmp_path))
