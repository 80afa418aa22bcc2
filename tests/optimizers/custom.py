"""Functions that configs of the tests name."""

import tf_keras


def halving(learning_rate, decay_steps):
    return tf_keras.optimizers.schedules.ExponentialDecay(learning_rate, decay_steps, 0.5)


def number(learning_rate, decay_steps):
    return learning_rate


def heavy_ball(learning_rate, friction=0.1):
    return tf_keras.optimizers.SGD(learning_rate, momentum=1 - friction)


def tenth(learning_rate):
    return tf_keras.optimizers.SGD(learning_rate / 10)


def decaying(learning_rate):
    return tf_keras.optimizers.SGD(halving(learning_rate, 10))


def nothing(learning_rate):
    return None


def fails(learning_rate):
    raise ValueError("of\na bad mood")
