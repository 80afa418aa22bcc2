"""No operation of a compiled step becomes a loop of many iterations."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.modes import profile_input
from experiments.trainers.char_lm import CharLmTrainer
from experiments.trainers.two_tower import TwoTowerTrainer
from tests.support import reference_model

TWO_TOWER = dict(
    user_count=90, item_count=400, width=3, interactions=230, eval_interactions=13, negatives=0
)
CHAR_LM = dict(layers=1, heads=2, width=8, context=80, recompute="")


class Ranks(reference_model.ReferenceTrainer):
    """The code of the user makes a loop."""

    def forward(self, batch, training):
        # The next line is the user's.
        rows = tf.unique(tf.range(100) % self.modulus)[1]
        return super().forward(batch, training) + 0 * tf.cast(tf.reduce_sum(rows), tf.float64)

    modulus = 7


def lines(cls, optimizer, batch=80, **options):
    trainer = cls(
        strategy=testing.make_strategy(1),
        global_batch_size=batch,
        optimizer=lambda: optimizer,
        options=ctl.TrainerOptions(xla="loop", **options),
    )
    trainer.train(tf.constant(1))
    assert np.isfinite(loop_of(trainer).step.results.read()["loss"].numpy())
    return list(profile_input.describe_serial_loops(trainer))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "optimizer", "options"),
    [
        (TwoTowerTrainer, tf_keras.optimizers.Adam(0.1, clipnorm=1.0), {"model": TWO_TOWER}),
        (CharLmTrainer, tf_keras.optimizers.AdamW(1e-3), {"model": CHAR_LM, "data": {"dir": ""}}),
    ],
)
def test_the_step_of_a_model_with_embeddings_has_no_serial_loop(cls, optimizer, options):
    assert lines(cls, optimizer, **options) == []


@pytest.mark.slow
def test_a_loop_of_the_users_code_is_named_with_its_line():
    (line,) = lines(Ranks, tf_keras.optimizers.SGD(0.1), batch=7, precision="float64")
    place, text = line.split(": ", 1)
    code = pathlib.Path(__file__).read_text().splitlines()
    number = code.index("        # The next line is the user's.") + 2
    assert place.endswith(f"serial_loops_test.py:{number}")
    assert text.startswith("XLA makes a loop of 100 iterations per step of Unique")
