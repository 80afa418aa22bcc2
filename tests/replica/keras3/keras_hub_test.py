"""Text classifiers of KerasHub, with random weights, are fine-tuned on two replicas."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from tests.replica.keras3 import twins
from tests.replica.keras3.twins import difference, make_trainer, train

keras_hub = pytest.importorskip("keras_hub", reason="keras_hub (Keras 3.15) is not installed")
ROWS, TOKENS, WORDS, CLASSES = 48, 12, 200, 4


def build(package):
    """The sizes of bert_tiny_en_uncased, with a smaller vocabulary."""
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=WORDS, num_layers=2, num_heads=2, hidden_dim=128, intermediate_dim=512,
        max_sequence_length=TOKENS,
    )  # fmt: skip
    return keras_hub.models.BertTextClassifier(backbone, num_classes=CLASSES)


class Classifier(twins.Twin):
    make = staticmethod(build)

    def build_dataset(self, split, input_context):
        rng = np.random.default_rng(0)
        tokens = rng.integers(CLASSES, WORDS, (ROWS, TOKENS))
        label = np.arange(ROWS) % CLASSES
        tokens[:, 1] = label  # what the classifier has to find
        length = rng.integers(3, TOKENS + 1, (ROWS, 1))
        return ctl.data.arrays(
            {
                "token_ids": tokens,
                "padding_mask": np.arange(TOKENS) < length,
                "segment_ids": np.zeros_like(tokens),
                "label": label,
            }
        )

    def preprocess(self, batch):
        return batch

    def forward(self, batch, training):
        names = ("token_ids", "padding_mask", "segment_ids")
        return self.model({name: batch[name] for name in names}, training=training)


@pytest.mark.slow
def test_classifier_is_fine_tuned_on_two_replicas_as_on_one():
    def make(replicas, precision="float64"):
        return make_trainer(
            cls=Classifier, make=build, replicas=replicas, seed=3, precision=precision,
            optimizer=lambda: tf_keras.optimizers.Adam(1e-3),
        )  # fmt: skip

    (one, weights), (two, others) = (train(make(replicas), 20) for replicas in (1, 2))
    assert difference(weights, others) < 1e-10
    assert abs(one["loss"] - two["loss"]) < 1e-10
    trainer = make(2, "float32")
    (first, _), (last, _) = train(trainer, 10), train(trainer, 100)
    assert last["loss"] < first["loss"] / 2


@pytest.mark.slow
def test_frozen_backbone_stays_as_it_is():
    def frozen(package):
        model = build(package)
        model.backbone.trainable = False
        return model

    trainer = make_trainer(cls=Classifier, make=frozen, replicas=2)
    before = [v.numpy() for v in trainer.model.weights]
    trainer.train(tf.constant(2))
    changed = [
        v.name for v, old in zip(trainer.model.weights, before, strict=True) if np.any(v != old)
    ]
    assert changed == ["logits/kernel:0", "logits/bias:0"]
