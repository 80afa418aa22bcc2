"""Random numbers that an optimizer draws are those of the step, on every replica."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from tests.support import reference_model

SGD = tf_keras.optimizers.SGD


def add_noise(gradient, **keying):
    noise = ctl.random.normal(gradient.shape, dtype=tf.float64, **keying)
    return tf.convert_to_tensor(gradient) + noise


class OfEachVariable(SGD):
    """Draws where TensorFlow has merged the replicas to update a variable."""

    def update_step(self, gradient, variable):
        super().update_step(add_noise(gradient, shared=True), variable)


class OfAllGradients(SGD):
    """Draws in a replica, and again for each variable; its draws have no row, and need not say so."""

    def apply_gradients(self, grads_and_vars, **kwargs):
        pairs = [(add_noise(g), v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs, **kwargs)

    def update_step(self, gradient, variable):
        super().update_step(add_noise(gradient), variable)


def train(optimizer, replicas, batch, steps, **options):
    trainer = reference_model.make_trainer(
        testing.make_strategy(replicas), batch, optimizer=lambda: optimizer(0.1), **options
    )
    weights = [trainer.model.get_weights()]
    for _ in range(steps):
        trainer.train(tf.constant(1))
        weights.append(trainer.model.get_weights())
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, on_non_finite",
    [(OfEachVariable, "skip"), (OfAllGradients, "skip"), (OfAllGradients, "ignore")],
)
def test_noise_of_an_optimizer_does_not_depend_on_the_split(optimizer, on_non_finite):
    one = train(optimizer, 1, 5, 2, on_non_finite=on_non_finite)
    for replicas in (2, 4):
        other = train(optimizer, replicas, 5, 2, on_non_finite=on_non_finite)
        for a, b in zip(one, other, strict=True):
            assert max(np.abs(x - y).max() for x, y in zip(a, b, strict=True)) < 1e-12


def test_noise_differs_between_steps_and_variables():
    plain, noisy = (train(cls, 2, 8, 2) for cls in (SGD, OfAllGradients))

    def noise(weights, base, step):
        kernels = [i for i, w in enumerate(weights[0]) if w.size >= 8]  # each has 8 numbers
        change = [np.ravel(weights[step][i] - weights[step - 1][i])[:8] for i in kernels]
        without = [np.ravel(base[step][i] - base[step - 1][i])[:8] for i in kernels]
        return [a - b for a, b in zip(change, without, strict=True)]

    first = noise(noisy, plain, 1)
    assert all(np.std(x) > 0.01 for x in first)  # 0.1 times the normal distribution
    drawn = [*first, *noise(noisy, plain, 2)]
    for i, one in enumerate(drawn):
        assert all(np.abs(one - other).max() > 0.01 for other in drawn[:i])


def test_two_updates_of_a_step_draw_different_numbers():
    class Twice(reference_model.ReferenceTrainer):
        def replica_step(self, batch):
            kernel = self.model.trainable_variables[1:2]

            def zero(rows):
                return tf.reduce_sum(rows["x"], axis=1) * tf.reduce_sum(kernel[0]) * 0.0

            for start in self.starts:
                start.assign(kernel[0])
                self.minimize(batch, zero, variables=kernel, regularization=list)
            return tf.constant(0.0, tf.float64)

        def build_model(self):
            model = super().build_model()
            first = tf.VariableAggregation.ONLY_FIRST_REPLICA
            self.starts = [
                tf.Variable(model.trainable_variables[1], aggregation=first, trainable=False)
                for _ in range(2)
            ]
            return model

    trainer = reference_model.make_trainer(
        testing.make_strategy(2), 8, cls=Twice, optimizer=lambda: OfEachVariable(1.0)
    )
    trainer.train(tf.constant(1))
    one, two = (start.numpy() for start in trainer.starts)
    end = trainer.model.trainable_variables[1].numpy()
    assert np.std(one - two) > 0.3 and np.std(two - end) > 0.3
    assert np.abs((one - two) - (two - end)).max() > 0.1


def test_draw_on_a_replica_outside_of_a_step_is_an_error():
    strategy = testing.make_strategy(2)
    with strategy.scope():
        variable = tf.Variable(1.0)
        assert ctl.random.normal([2]).shape == [2]  # while something is built

    def update(variable):
        variable.assign_add(ctl.random.normal([], shared=True))

    @tf.function(autograph=False)
    def in_replica():
        strategy.run(lambda: ctl.random.normal([], shared=True))

    @tf.function(autograph=False)
    def in_update():
        strategy.extended.update(variable, update)

    for function in (in_replica, in_update):
        with pytest.raises(ctl.UsageError, match=r"ctl\.random.normal draws .* outside of a step"):
            function()
