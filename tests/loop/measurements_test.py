"""What is logged of an inner loop in addition to its outputs."""

import pytest
import tensorflow as tf
import tf_keras

from ctl.loop import measurements
from ctl.loop.timing import Throughput
from tests.loop.shared import make_reference


def make_trainer(optimizer, *, replicas=1, **options):
    return make_reference(replicas, 7, optimizer=optimizer, **options)


@pytest.mark.parametrize("replicas", [1, 2])
def test_learning_rate_is_that_of_the_next_update(replicas):
    schedule = tf_keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0)
    trainer = make_trainer(lambda: tf_keras.optimizers.SGD(schedule), replicas=replicas)
    assert measurements.learning_rates(trainer) == {"learning_rate": 1.0}
    trainer.train(tf.constant(3))
    assert measurements.learning_rates(trainer)["learning_rate"] == pytest.approx(0.7)


def test_groups_and_other_optimizers_have_their_own_rates():
    groups = [
        dict(variables=["dense*/kernel", "dense*/bias"], learning_rate_scale=0.5),
        dict(variables="embedding*", frozen=True),
    ]
    trainer = make_trainer(lambda: tf_keras.optimizers.SGD(0.25), optimizer_groups=groups)
    trainer.second_optimizer = tf_keras.optimizers.Adam(0.0625)
    assert measurements.learning_rates(trainer) == {
        "learning_rate": 0.25,
        "learning_rate/dense*/kernel,dense*/bias": 0.125,
        "learning_rate/second_optimizer": 0.0625,
    }


def test_rate_of_an_optimizer_with_a_loss_scale():
    trainer = make_trainer(lambda: tf_keras.optimizers.SGD(0.5), precision="float16")
    assert measurements.learning_rates(trainer) == {"learning_rate": 0.5}


def test_speed_of_the_last_loop_and_peak_memory():
    trainer = make_trainer(lambda: tf_keras.optimizers.SGD(0.5))
    throughput = Throughput(batch=7)
    throughput.add(10, seconds=50.0)
    first = measurements.measure_loop(trainer, throughput)
    assert set(first) - {"gpu_peak_memory_gib"} == {"learning_rate", "peak_memory_gib"}
    throughput.add(10, seconds=2.0)
    throughput.add(10, seconds=4.0)
    second = measurements.measure_loop(trainer, throughput)
    assert second["examples_per_second_last_loop"] == 17.5
    assert second["milliseconds_per_step"] == 400.0
    assert throughput.examples_per_second == pytest.approx(140 / 6)
    assert 0.05 < second["peak_memory_gib"] < 100
    throughput.add_input_wait(1.0)
    assert measurements.measure_loop(trainer, throughput)["input_wait"] == 0.25
