"""Whether ctl and the hand-written loop end with the same weights.

python -m benchmarks.same
"""

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import models, variants
import ctl

STEPS, TOLERANCE = 20, 1e-5


def largest_difference(model: models.Model) -> float:
    """Of the weights after 20 steps from the same weights on the same batches, without dropout."""
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
    first = trainer.model.get_weights()
    batches = iter(trainer.feed.training_dataset(model.batch, start=0))
    for _ in range(STEPS):
        batch, _ = next(batches)
        step(floats(batch["x"]), batch["label"])
    trainer.train(tf.constant(STEPS))
    pairs = list(zip(trainer.model.get_weights(), network.get_weights(), first, strict=True))
    if all(np.array_equal(ctls, before) for ctls, _, before in pairs):
        raise AssertionError("The weights have not moved.")
    return max(float(np.abs(ctls - own).max()) for ctls, own, _ in pairs)


def floats(x: tf.Tensor) -> tf.Tensor:
    """Pixels as the tutorials have them."""
    return tf.cast(x, tf.float32) / 255 if x.dtype == tf.uint8 else x


def main() -> None:
    """Prints the difference; fails where it is too large."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    difference = largest_difference(models.MODELS["mnist64"])
    print(
        f"Weights of ctl and of the hand-written loop after {STEPS} steps of SGD (float32, the "
        f"same batches): they differ by at most {difference:.1e}."
    )
    if not difference <= TOLERANCE:
        raise SystemExit(f"That is more than {TOLERANCE:.0e}: the speeds compare nothing.")


if __name__ == "__main__":
    main()
