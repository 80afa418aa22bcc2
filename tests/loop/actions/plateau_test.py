"""The rate falls when a metric stops improving, and a kill changes nothing."""

import contextlib
import signal

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.loop.actions.plateau import ReduceOnPlateau
from ctl.optimizers.warm_up import Plateau, WarmUp
from tests.loop.shared import control
from tests.support.faults.kills import killing

ROWS = 7
X = np.random.default_rng(0).normal(size=[ROWS, 3])
Y = np.random.default_rng(1).normal(size=[ROWS])
RATE, FACTOR = np.float32(0.1), np.float32(0.5)
# After steps 2, 4, ...: NaN, better, two equal ones -> a lower rate; the same again; then better.
SCORES = [float("nan"), 0.5, 0.5, 0.5, 0.25, 0.5, 0.75, 0.75, 0.5]


class Linear(ctl.StandardTrainer):
    def build_model(self):
        layer = tf_keras.layers.Dense(1, kernel_initializer="ones", input_shape=[3])
        return tf_keras.Sequential([layer])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": X, "label": Y})

    def per_example_loss(self, batch, outputs):
        return tf.square(batch["label"] - outputs[:, 0])


class Scripted(ctl.StandardEvaluator):
    def eval_end(self):
        step = int(self.trainer.global_step.numpy())
        return {**super().eval_end(), "score": SCORES[step // 2 - 1]}


def warm_up():
    return WarmUp(float(RATE), 3, Plateau(float(RATE)))


def run(folder, replicas=1, kill_at=None, schedule=lambda: Plateau(float(RATE))):
    """One process of a run."""
    trainer = Linear(
        global_batch_size=ROWS,
        optimizer=lambda: tf_keras.optimizers.SGD(schedule(), momentum=0.5),
        strategy=testing.make_strategy(replicas),
        options=ctl.TrainerOptions(precision="float64"),
    )
    options = {"patience": 2, "factor": float(FACTOR), "end_factor": 0.25}
    actions = [ReduceOnPlateau("eval/score", "max", **options)]
    options = dict(evaluator=Scripted(trainer), steps_per_loop=2, checkpoint_interval=4)
    controller = control(trainer, folder, actions=actions, **options)
    controller.restore_checkpoint()
    kill = killing(kill_at, by=signal.SIGINT) if kill_at else contextlib.nullcontext()
    with contextlib.suppress(KeyboardInterrupt), kill:
        controller.train_and_evaluate(18, eval_interval=2)
    return controller


def plain(schedule=lambda step, factor: RATE * factor):
    """A loop without ctl on one device, with the rule of the Keras callback."""
    model = Linear.build_model(None)
    weights = [w.astype(np.float64) for w in model.get_weights()]
    momenta, best, wait, factor = [0.0, 0.0], -np.inf, 0, np.float32(1)
    for step in range(18):
        error = X @ weights[0][:, 0] + weights[1] - Y
        gradients = [2 * X.T @ error[:, None] / ROWS, 2 * error.sum(keepdims=True) / ROWS]
        rate = np.float64(schedule(step, factor))
        momenta = [0.5 * m - rate * g for m, g in zip(momenta, gradients, strict=True)]
        weights = [w + m for w, m in zip(weights, momenta, strict=True)]
        if step % 2:
            score, wait = SCORES[step // 2], wait + 1
            if score > best:
                best, wait = score, 0
            if wait >= 2:
                factor, wait = max(factor * FACTOR, np.float32(0.25)), 0
    return weights[0], factor


def test_the_updates_are_those_of_a_plain_loop(tmp_path):
    controller = run(tmp_path, 4)
    want, factor = plain()
    np.testing.assert_allclose(controller.trainer.model.get_weights()[0], want, atol=1e-10)
    assert factor == 0.25
    lines = [line for line in controller.reporter.lines if "learning rate" in line]
    assert "has not improved over 0.5000 at step 4 for 2 evaluations" in lines[0]
    factors = [line.partition(" is multiplied by ")[2] for line in lines]
    assert factors == ["0.5 from now on.", "0.25 from now on."]


def test_a_warm_up_comes_first(tmp_path):
    controller = run(tmp_path, schedule=warm_up)
    want, _ = plain(lambda step, factor: RATE * np.float32(step / 3 if step < 3 else factor))
    np.testing.assert_allclose(controller.trainer.model.get_weights()[0], want, atol=1e-10)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), 2)


@pytest.mark.parametrize("kill_at", ["step:14", "eval:4", "save:2"])
def test_a_killed_run_ends_with_the_same_bits(whole, tmp_path, kill_at):
    killed = run(tmp_path, 2, kill_at)
    assert killed.step < 18
    resumed = run(tmp_path, 2)
    for one, two in zip(whole.trainer.model.weights, resumed.trainer.model.weights, strict=True):
        np.testing.assert_array_equal(one, two)
    # The lines of both processes are those of the whole run, and each is printed once or twice.
    lines = [
        line for each in (killed, resumed) for line in each.reporter.lines if "rate is" in line
    ]
    assert {*lines} == {line for line in whole.reporter.lines if "rate is" in line}


def test_an_optimizer_without_the_schedule_is_rejected(tmp_path):
    with pytest.raises(ctl.UsageError, match="no optimizer of the trainer has this schedule"):
        run(tmp_path, schedule=lambda: 0.1)
