"""Each check of the first steps detects its planted mistake."""

import re

import pytest

from ctl.modes.check import learning_checks
from ctl.modes.check.outcome import FAIL, PASS, WARNING
from tests.modes.check import planted

LARGE_LOGITS = """
    def forward(self, batch, training):
        return 100 * super().forward(batch, training)
    """
LOGARITHM_OF_ZERO = """
    def per_example_loss(self, batch, outputs):
        return -tf.math.log(tf.nn.relu(outputs[:, 0]))
    """
LAYER_WITHOUT_GRADIENT = """
    def forward(self, batch, training):
        self.model(batch["x"])
        first, dropout, last = self.model.layers
        return last(tf.stop_gradient(first(batch["x"])))
    """
REGRESSION = """
    def per_example_loss(self, batch, outputs):
        return tf.square(outputs[:, 0] - tf.cast(batch["label"], outputs.dtype))

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": X, "label": LABEL.astype(np.float32)})
    """
FAR_MINIMUM = (
    REGRESSION
    + """
    def per_example_loss(self, batch, outputs):
        return 3 + tf.square(outputs[:, 0] - batch["label"] - 1)
    """
)


@pytest.mark.parametrize(
    ("body", "check", "verdict", "observation"),
    [
        (LARGE_LOGITS, "first_loss", WARNING, "a uniform guess among 3 classes has 1.099"),
        (LOGARITHM_OF_ZERO, "first_loss", FAIL, "losses are not finite"),
        (planted.NO_GRADIENT, "gradients", FAIL, "4 of 4 trainable variables do not change"),
        (
            LAYER_WITHOUT_GRADIENT,
            "gradients",
            WARNING,
            "2 of 4 trainable variables do not change: f",
        ),
    ],
)
def test_a_mistake_is_detected(assert_detects, body, check, verdict, observation):
    assert_detects(body, getattr(learning_checks, f"check_{check}"), verdict, observation)


PIXELS = """
    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential([layers.Dense(6), layers.Reshape([2, 3])])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": X, "label": np.stack([LABEL, 255 - 0 * LABEL], axis=1)})

    def sample_weight(self, batch):
        return tf.cast(batch["label"] != 255, tf.float32)

    def per_example_loss(self, batch, outputs):
        label = tf.where(batch["label"] == 255, 0, batch["label"])
        return tf_keras.losses.sparse_categorical_crossentropy(label, SCALE * outputs, from_logits=True)
    """


@pytest.mark.parametrize(("scale", "verdict"), [("0.1", PASS), ("100", WARNING)])
def test_the_losses_of_pixels_have_the_chance_level_of_their_classes(make_factory, scale, verdict):
    outcome = learning_checks.check_first_loss(make_factory(PIXELS.replace("SCALE", scale)))
    assert outcome.verdict == verdict
    assert outcome.observation.endswith("; a uniform guess among 3 classes has 1.099")


def test_a_regression_has_no_chance_level(make_factory):
    outcome = learning_checks.check_first_loss(make_factory(REGRESSION))
    assert outcome.verdict == PASS and "the chance level is unknown" in outcome.observation


SCALED_TWICE = """
    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential([layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(3)])

    def build_dataset(self, split, input_context):
        images = np.random.default_rng(0).integers(0, 255, (50, 4, 4, 3), np.uint8)
        return ctl.data.arrays({"image": images, "label": LABEL})
    """


@pytest.mark.parametrize(
    ("body", "fix"),
    [("pass", "raise optimizer.learning_rate"), (SCALED_TWICE, "The layer 'rescaling")],
)
def test_a_layer_that_scales_images_again_is_named_instead_of_the_learning_rate(
    make_factory, body, fix
):
    factory = make_factory(body, **{"optimizer.learning_rate": 1e-9})
    assert learning_checks.check_overfitting(factory).fix.startswith(fix)


def test_a_learning_rate_that_diverges_fails(make_factory):
    keys = {"optimizer.name": "sgd", "optimizer.learning_rate": 1e3}
    outcome = learning_checks.check_overfitting(make_factory(**keys))
    assert outcome.verdict == FAIL and "lower optimizer.learning_rate" in outcome.fix, outcome


def test_a_loss_whose_minimum_is_unknown_need_not_be_halved(make_factory):
    rate = {"optimizer.learning_rate": 0.1}
    outcome = learning_checks.check_overfitting(make_factory(FAR_MINIMUM, **rate))
    assert outcome.verdict == PASS, outcome
    assert outcome.observation.endswith("; not a classifier, so its minimum is unknown")


@pytest.mark.slow
def test_a_loss_whose_minimum_is_unknown_must_fall(make_factory):
    rate = {"optimizer.learning_rate": 1e-5}
    outcome = learning_checks.check_overfitting(make_factory(FAR_MINIMUM, **rate))
    assert outcome.verdict == WARNING and outcome.fix, outcome


def test_the_loss_of_a_classifier_must_be_halved(make_factory):
    outcome = learning_checks.check_overfitting(make_factory(**{"optimizer.learning_rate": 1e-3}))
    first, last = map(float, re.findall(r"[0-9.]+", outcome.observation)[:2])
    assert 0.5 * first < last < 0.9 * first
    assert outcome.verdict == WARNING and outcome.fix, outcome
