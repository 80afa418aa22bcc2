"""What is logged with each inner loop beside its outputs."""

import types

import pytest
import tf_keras

import ctl
from ctl.loop.loop_numbers import LoopNumbers, learning_rates, measure_loop
from ctl.loop.timing import Throughput
from tests.loop.shared import make_reference


def make_with(optimizer, *, replicas=1, **options):
    return make_reference(replicas, 7, optimizer=optimizer, **options)


def test_learning_rate_is_that_of_the_next_update():
    schedule = tf_keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0)
    trainer = make_with(lambda: tf_keras.optimizers.SGD(schedule), replicas=2, precision="float16")
    assert learning_rates(trainer) == {"learning_rate": 1.0}
    trainer.optimizer.iterations.assign(3)
    assert learning_rates(trainer)["learning_rate"] == pytest.approx(0.7)


def test_groups_and_other_optimizers_have_their_own_rates():
    groups = [
        dict(variables=["dense*/kernel", "dense*/bias"], learning_rate_scale=0.5),
        dict(variables="embedding*", frozen=True),
    ]
    adam = lambda: tf_keras.optimizers.Adam(0.5)  # noqa: E731
    trainer = make_with(
        lambda: tf_keras.optimizers.SGD(0.25),
        optimizer_groups=[dict(variables="*/bias", optimizer=adam), *groups],
    )
    assert learning_rates(trainer)["learning_rate/*/bias"] == 0.5
    trainer = make_with(lambda: tf_keras.optimizers.SGD(0.25), optimizer_groups=groups)
    trainer.second_optimizer = tf_keras.optimizers.Adam(0.0625)
    assert learning_rates(trainer) == {
        "learning_rate": 0.25,
        "learning_rate/dense*/kernel,dense*/bias": 0.125,
        "learning_rate/second_optimizer": 0.0625,
    }


def test_speed_of_the_last_loop_and_peak_memory():
    trainer = make_with(lambda: tf_keras.optimizers.SGD(0.5))
    throughput = Throughput(batch=7)
    throughput.add(10, seconds=50.0)
    first = measure_loop(trainer, throughput)
    assert set(first) - {"gpu_peak_memory_gib"} == {"learning_rate", "peak_memory_gib"}
    throughput.add(10, seconds=2.0)
    throughput.add(10, seconds=4.0)
    second = measure_loop(trainer, throughput)
    assert second["examples_per_second_last_loop"] == 17.5
    assert second["milliseconds_per_step"] == 400.0
    assert throughput.examples_per_second == pytest.approx(140 / 6)
    assert 0.05 < second["peak_memory_gib"] < 100
    throughput.add_input_wait(1.0)
    assert measure_loop(trainer, throughput)["input_wait"] == 0.25


@pytest.mark.parametrize(("trained_step", "step"), [(30, 30), (None, 20)])
def test_result_has_what_was_mixed_up_to_the_last_step(trained_step, step):
    numbers = ctl.data.arrays({"x": range(10)})
    mixture = ctl.data.mixture({"a": (numbers, 1), "b": (numbers, 2)})
    make, options = types.SimpleNamespace, ctl.TrainerOptions(seed=3)
    inner_loop = make(pipeline=make(training_source=lambda: mixture))
    trainer = make(_ctl_loop=inner_loop, global_batch_size=10, options=options)
    action = LoopNumbers()
    # The step is that of the best checkpoint, which may be restored at the end.
    action.begin(make(trainer=trainer, step=20, trained_step=trained_step, is_chief=False))
    assert action.result() == {"sources": mixture.count_examples(10 * step, seed=3)}
