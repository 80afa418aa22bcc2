"""Steps that share models: one checkpoint of both, and separate checkpoints of different positions."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing

DRAW = np.random.default_rng(0)
ROWS = {"noise": DRAW.normal(size=(20, 3)), "real": DRAW.normal(size=(20, 2))}


def data(strategy, start=0):
    source = ctl.data.arrays(ROWS)
    return ctl.data.distribute(source, 5, strategy, start_step=start)


def make():
    """Returns the steps of a generator and of a critic, which are built."""
    strategy = testing.make_strategy(1)
    with strategy.scope():
        tf_keras.utils.set_random_seed(0)
        generator = tf_keras.Sequential([tf_keras.layers.Dense(2, dtype="float64")])
        critic = tf_keras.Sequential([tf_keras.layers.Dense(1, dtype="float64")])

    def generate(batch, training):
        return generator(batch["noise"], training=training)

    def critic_loss(batch, scores):
        return critic(generate(batch, True))[:, 0] - scores[:, 0] + scores[:, 0] ** 2

    options = dict(global_batch_size=5, strategy=strategy, precision="float64")
    adam = functools.partial(tf_keras.optimizers.Adam, 0.1)
    steps = (
        ctl.Step(generator, adam, lambda batch, fake: -critic(fake)[:, 0],
                 forward=generate, models=[critic], **options),
        ctl.Step(critic, adam, critic_loss, models=[generator], **options,
                 forward=lambda batch, training: critic(batch["real"], training=training)),
    )  # fmt: skip
    for step in steps:
        step.build(next(iter(data(strategy))))
    return steps


def weights(steps):
    return np.concatenate([w.ravel() for step in steps for w in step.model.get_weights()])


@pytest.mark.slow
def test_steps_of_one_checkpoint_resume_with_the_same_bits(tmp_path):
    """The critic, which has two steps for one of the generator, and a model of the user's own."""

    def start():
        steps, count = make(), tf.Variable(0)
        teacher = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(2,))])
        return steps, teacher, count, ctl.Checkpointer(tmp_path, [*steps, teacher, count])

    def train(steps, end):
        generator, critic = steps
        first = generator.global_step.numpy()
        for batch in itertools.islice(data(generator.strategy, first), int(end - first)):
            for step in (critic, critic, generator):
                step(batch)

    steps, teacher, count, checkpoints = start()
    train(steps, 2)
    count.assign(7)
    assert checkpoints.save() == str(tmp_path / "ckpt-4") and checkpoints.latest_step() == 4
    train(steps, 3)

    resumed, other, count, checkpoints = start()
    checkpoints.all_restore_latest()
    assert [int(step.global_step.numpy()) for step in resumed] == [2, 4] and int(count) == 7
    np.testing.assert_array_equal(other.get_weights()[0], teacher.get_weights()[0])
    train(resumed, 3)
    np.testing.assert_array_equal(weights(resumed), weights(steps))

    with pytest.raises(ctl.UsageError, match="does not match this trainer"):
        ctl.Checkpointer(tmp_path, resumed[0]).all_restore_latest()


@functools.cache
def made():
    return make()


def save_apart(folder, positions):
    """Saves the steps one after the other, each time with both at the given positions."""
    steps = made()
    checkpointers = [ctl.Checkpointer(folder / str(i), step) for i, step in enumerate(steps)]
    for saved, both in positions:
        for step, position in zip(steps, both, strict=True):
            step.global_step.assign(position)
        checkpointers[saved].save()


KILLED = [(0, (4, 4)), (1, (4, 4)), (0, (8, 8))]


@pytest.mark.parametrize(
    ("positions", "order", "fails"),
    [
        (KILLED, (0, 1), True),
        (KILLED, (1, 0), True),
        # Two steps of the critic for one of the generator.
        ([(0, (4, 8)), (1, (4, 8))], (1, 0), False),
        ([(1, (3, 4)), (0, (4, 4))], (0, 1), False),  # each after its own step
    ],
)
def test_steps_that_were_saved_at_different_positions_are_rejected(
    tmp_path, positions, order, fails
):
    save_apart(tmp_path, positions)
    steps = make()
    checkpointers = [ctl.Checkpointer(tmp_path / str(i), step) for i, step in enumerate(steps)]
    checkpointers[order[0]].all_restore_latest()
    if not fails:
        checkpointers[order[1]].all_restore_latest()
        return
    with pytest.raises(ctl.UsageError, match="were not saved together") as error:
        checkpointers[order[1]].all_restore_latest()
    assert "\n" not in str(error.value)


def test_steps_can_go_back_together(tmp_path):
    """One after the other, although the other one is still where it was restored."""
    save_apart(tmp_path, [*KILLED, (1, (8, 8))])
    checkpointers = [ctl.Checkpointer(tmp_path / str(i), step) for i, step in enumerate(make())]
    for number in (8, 4):
        for checkpoints in checkpointers:
            checkpoints.restore(checkpoints.path(number))


def test_step_that_has_trained_since_it_was_restored_is_not_compared(tmp_path):
    save_apart(tmp_path, KILLED)
    first, second = make()
    ctl.Checkpointer(tmp_path / "0", first).all_restore_latest()
    first.global_step.assign(9)
    assert ctl.Checkpointer(tmp_path / "1", second).all_restore_latest()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "got a list without one"),
        ([tf_keras.Sequential], "got the class Sequential"),
        (["model"], "got a str, but must get a ctl.Step"),
    ],
)
def test_list_must_hold_a_step(parts, message):
    with pytest.raises(ctl.UsageError, match=message):
        ctl.Checkpointer("folder", parts)


def test_steps_of_one_checkpoint_have_one_strategy():
    with pytest.raises(ctl.UsageError, match="saves steps of one strategy"):
        ctl.Checkpointer("folder", [made()[0], make()[0]])
