"""A second model with an optimizer of its own, as a mixin of a trainer of four features.

class Two(SecondModel, tiny.TinyTrainer):
    ...
"""

import tensorflow as tf
import tf_keras


class SecondModel:
    """Adds the model `judge`, which each step updates before the first model.

    Attributes:
        is_built: whether the constructor builds the second model, and its optimizer.
        trains_first: whether the first model is trained, too.
    """

    is_built = True
    trains_first = True

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            judge, optimizer = self.make_judge(), self.make_judge_optimizer()
            if self.is_built:
                judge.build([None, 4])
                optimizer.build(judge.trainable_variables)
        self.second = lambda: (judge, optimizer)
        self.keep(judge, optimizer)

    def make_judge(self):
        layers = tf_keras.layers
        return tf_keras.Sequential([layers.Dense(3, name="hidden"), layers.Dense(1, name="end")])

    def make_judge_optimizer(self):
        return tf_keras.optimizers.SGD(0.5)

    def keep(self, judge, optimizer):
        """Makes them attributes, by which ctl finds them."""
        self.judge, self.judge_optimizer = judge, optimizer

    def judge_losses(self, rows):
        return tf.square(self.second()[0](rows["x"])[:, 0] - 1)

    def replica_step(self, batch):
        judge, optimizer = self.second()
        judge(batch["x"])  # builds it, if the constructor has not
        variables = judge.trainable_variables
        loss = self.minimize(batch, self.judge_losses, variables=variables, optimizer=optimizer)
        return super().replica_step(batch) if self.trains_first else loss
