"""--mode=check: each look passes on a right experiment, and tells of one planted mistake."""

import textwrap

import pytest

from ctl import main
from ctl.configs import loading
from ctl.modes import experiment
from ctl.modes.check import checkpoint_check, data_checks, learning_checks, replica_check
from ctl.modes.check.outcome import FAIL, PASS, WARNING
from ctl.modes.check.trainer_factory import TrainerFactory

RIGHT = """
import numpy as np
import tensorflow as tf
import tf_keras
import ctl

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(50, 4)).astype(np.float32)
LABEL = (X[:, 0] > 0).astype(np.int32) + (X[:, 1] > 0)


class Right(ctl.StandardTrainer):
    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential([
            layers.Dense(16, activation="relu", name="first"),
            layers.Dropout(0.1),
            layers.Dense(3, name="last")])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": X, "label": LABEL})

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True)


def get_config():
    return ctl.config(
        trainer="experiment.py:Planted", data=dict(global_batch_size=8),
        optimizer=dict(learning_rate=0.03))
"""


@pytest.fixture
def blueprint(tmp_path, monkeypatch):
    """Makes the blueprint of an experiment whose trainer has a method or two of its own."""
    monkeypatch.chdir(tmp_path)

    def build(body="pass", **keys):
        planted = f"\n\nclass Planted(Right):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
        (tmp_path / "experiment.py").write_text(RIGHT + planted)
        config = loading.load_config("experiment.py")
        config.update_from_flattened_dict(keys)
        return TrainerFactory(
            experiment.build(config, "experiment.py", evaluates=True), "experiment.py"
        )

    return build


QUICK = (
    data_checks.inputs, data_checks.order, data_checks.evaluation, learning_checks.first_loss,
    learning_checks.gradients, learning_checks.one_batch, checkpoint_check.round_trip,
)  # fmt: skip


@pytest.mark.parametrize("look", QUICK)
def test_a_right_experiment_passes(blueprint, look):
    outcome = look(blueprint())
    assert (outcome.verdict, outcome.fix) == (PASS, ""), outcome


@pytest.mark.parametrize("look", QUICK)
def test_on_two_replicas_too(blueprint, look):
    keys = {"runtime.strategy": "mirrored", "runtime.logical_devices": 2}
    outcome = look(blueprint(**keys))
    assert outcome.verdict == PASS, outcome


MISTAKES = {
    "a NaN in the data": (
        """
        def build_dataset(self, split, input_context):
            x = X.copy()
            x[13, 2] = np.nan
            return ctl.data.arrays({"x": x, "label": LABEL})
        """, data_checks.inputs, FAIL, "x has 1 values that are not finite",
    ),
    "inputs that are not scaled": (
        """
        def preprocess(self, batch):
            return {**batch, "x": 128 + 64 * batch["x"]}
        """, data_checks.inputs, WARNING, "x: mean 1",
    ),
    "an order that depends on the clock": (
        """
        def build_dataset(self, split, input_context):
            order = np.random.default_rng().permutation(50)
            return ctl.data.arrays({"x": X[order], "label": LABEL[order]})
        """, data_checks.order, FAIL, "read twice, x of batch 0 differs",
    ),
    "evaluation data that changes": (
        """
        reads = 0

        def build_dataset(self, split, input_context):
            if split == "train":
                return super().build_dataset(split, input_context)
            def examples():
                Planted.reads += 1
                for i in range(20 - Planted.reads):
                    yield {"x": X[i], "label": LABEL[i]}
            spec = {"x": tf.TensorSpec([4]), "label": tf.TensorSpec([], tf.int32)}
            return tf.data.Dataset.from_generator(examples, output_signature=spec)
        """, data_checks.evaluation, FAIL, "counted 18 of 19 examples",
    ),
    "logits of another scale": (
        """
        def forward(self, batch, training):
            return 100 * super().forward(batch, training)
        """, learning_checks.first_loss, WARNING, "guessing among 3 classes is 1.099",
    ),
    "a logarithm of zero": (
        """
        def per_example_loss(self, batch, outputs):
            return -tf.math.log(tf.nn.relu(outputs[:, 0]))
        """, learning_checks.first_loss, FAIL, "losses are not finite",
    ),
    "a layer that no gradient reaches": (
        """
        def forward(self, batch, training):
            self.model(batch["x"])
            first, dropout, last = self.model.layers
            return last(tf.stop_gradient(first(batch["x"])))
        """, learning_checks.gradients, WARNING, "2 of 4 trainable variables do not move: first/",
    ),
    "no gradient at all": (
        """
        def per_example_loss(self, batch, outputs):
            return tf.stop_gradient(super().per_example_loss(batch, outputs))
        """, learning_checks.gradients, FAIL, "4 of 4 trainable variables do not move",
    ),
    "state that is in no checkpoint": (
        """
        def build_model(self):
            first = tf.VariableAggregation.ONLY_FIRST_REPLICA
            self.box = lambda: None  # an object that TensorFlow does not look into
            self.box.calls = tf.Variable(0.0, trainable=False, aggregation=first)
            return super().build_model()

        def per_example_loss(self, batch, outputs):
            self.box.calls.assign_add(1.0)
            return super().per_example_loss(batch, outputs) * self.box.calls
        """, checkpoint_check.round_trip, FAIL, "variables differ, by up to",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told(blueprint, mistake):
    body, look, verdict, found = MISTAKES[mistake]
    outcome = look(blueprint(body))
    assert outcome.verdict == verdict and found in outcome.found and outcome.fix, outcome


def test_a_rate_that_learns_nothing_and_one_that_blows_up(blueprint):
    slow = learning_checks.one_batch(blueprint(**{"optimizer.learning_rate": 1e-9}))
    assert slow.verdict == WARNING and "in 101 steps" in slow.found, slow
    assert slow.fix.startswith("raise optimizer.learning_rate")
    keys = {"optimizer.name": "sgd", "optimizer.learning_rate": 1e3}
    blown = learning_checks.one_batch(blueprint(**keys))
    assert blown.verdict == FAIL and "lower optimizer.learning_rate" in blown.fix, blown


def test_a_regression_has_no_chance_level(blueprint):
    body = """
        def per_example_loss(self, batch, outputs):
            return tf.square(outputs[:, 0] - tf.cast(batch["label"], outputs.dtype))

        def build_dataset(self, split, input_context):
            return ctl.data.arrays({"x": X, "label": LABEL.astype(np.float32)})
        """
    outcome = learning_checks.first_loss(blueprint(body))
    assert outcome.verdict == PASS and "no chance level is known" in outcome.found


@pytest.mark.slow
def test_a_mean_over_the_local_batch_is_told(blueprint):
    body = """
        def per_example_loss(self, batch, outputs):
            losses = super().per_example_loss(batch, outputs)
            return tf.fill(tf.shape(losses), tf.reduce_mean(losses))
        """
    outcome = replica_check.equivalence(blueprint(body))
    assert outcome.verdict == FAIL and "2 replicas" in outcome.found, outcome


@pytest.mark.slow
def test_the_program(blueprint, capsys, tmp_path):
    blueprint()
    before = set(tmp_path.rglob("*"))
    assert main.run(["ctl", "--config=experiment.py", "--mode=check"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[1:9]] == ["pass"] * 8
    assert out[8].split(None, 3)[:3] == ["pass", "replica", "equivalence"]
    assert out[9] == "8 looks: 8 passed, 0 warnings, 0 failed."
    assert {p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts} <= before


def test_a_failed_look_is_exit_code_1(blueprint, capsys, monkeypatch):
    monkeypatch.setattr("ctl.modes.check.checks.LOOKS", {"gradients": learning_checks.gradients})
    blueprint(MISTAKES["no gradient at all"][0])
    assert main.run(["ctl", "--config=experiment.py", "--mode=check"]) == 1
    out = capsys.readouterr().out
    assert "FAIL     gradients" in out and "-> let the loss depend on them" in out
    assert "1 looks: 0 passed, 0 warnings, 1 failed." in out


@pytest.mark.parametrize("arguments", [["--workdir=x"], ["--fresh"]])
def test_what_has_no_effect_is_refused(blueprint, capsys, arguments):
    blueprint()
    assert main.run(["ctl", "--config=experiment.py", "--mode=check", *arguments]) == 2
    assert "has no effect with --mode=check" in capsys.readouterr().err
