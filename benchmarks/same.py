"""Checks that ctl and the hand-written loop end with the same weights.

python -m benchmarks.same
"""

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import models, variants
import ctl
from ctl.built.inner_loop import loop_of

STEPS, TOLERANCE = 20, 1e-5


def largest_difference(model: models.Model) -> float:
    """Returns the largest difference of the weights after 20 steps on the same batches.

    Both start with the same weights and train without dropout.
    """
    trainer = variants.Trainer(
        model,
        dropout=0.0,
        optimizer=lambda: tf_keras.optimizers.SGD(0.01),
        options=ctl.TrainerOptions(xla="off"),
    )
    network = model.build(tf_keras, dropout=0.0)
    network.set_weights(trainer.model.get_weights())
    step, _ = variants.make_step(model, network, tf_keras.optimizers.SGD(0.01))
    step = tf.function(step)
    initial = trainer.model.get_weights()
    batches = iter(loop_of(trainer).pipeline.training_dataset(model.batch, start=0))
    for _ in range(STEPS):
        batch, _ = next(batches)
        step(floats(batch["x"]), batch["label"])
    trainer.train(tf.constant(STEPS))
    weights = trainer.model.get_weights()
    if all(map(np.array_equal, weights, initial)):
        raise AssertionError("The weights have not changed.")
    pairs = zip(weights, network.get_weights(), strict=True)
    return max(float(np.abs(one - other).max()) for one, other in pairs)


def floats(x: tf.Tensor) -> tf.Tensor:
    """Converts pixels as the tutorials do."""
    return tf.cast(x, tf.float32) / 255 if x.dtype == tf.uint8 else x


def main() -> None:
    """Prints the difference; fails if it is too large."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    difference = largest_difference(models.MODELS["mnist64"])
    print(
        f"The weights of ctl and of the hand-written loop after {STEPS} steps of SGD (float32, same "
        f"batches) differ by at most {difference:.1e}."
    )
    if not difference <= TOLERANCE:
        raise SystemExit(f"That is more than {TOLERANCE:.0e}, so the speeds cannot be compared.")


if __name__ == "__main__":
    main()
