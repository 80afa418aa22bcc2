"""Measures the slots and the CPU time of a step with and without `optimizer.shard_state`.

    python -m benchmarks.shard_state --replicas 4 --width 1024

Replicas are logical CPUs of this machine. Both trainers are in one process and train alternately; the
ratio is the median over rounds. A model of dense layers with few rows is the worst case: its step is
mostly the update.
"""

import argparse
import os
import statistics
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import flags as command_line

_MIB = 2**20


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measures and prints one line; returns the numbers."""
    flags = command_line.parse(
        __doc__, arguments, replicas=4, width=1024, batch=64, optimizer="Adam", steps=10, rounds=7
    )
    import tensorflow as tf

    from ctl import testing

    testing.split_cpu(flags.replicas)
    trainers = [_trainer(flags, shard) for shard in (False, True)]
    times: list[list[float]] = [[], []]
    for _ in range(flags.rounds + 1):
        for each, trainer in zip(times, trainers, strict=True):
            start = time.process_time()  # of all threads
            trainer.train(tf.constant(flags.steps))
            each.append((time.process_time() - start) / flags.steps)
    ratios = [b / a for a, b in zip(*times, strict=True)][1:]  # the first round traces
    slots = [_slot_bytes(trainer) for trainer in trainers]
    weights = [[w.tobytes() for w in trainer.model.get_weights()] for trainer in trainers]
    seconds = [1e3 * statistics.median(each[1:]) for each in times]
    share, ratio, same = slots[1] / slots[0], statistics.median(ratios), weights[0] == weights[1]
    print(
        f"{flags.optimizer}, {flags.replicas} replicas: slots {slots[1] / _MIB:.2f} of "
        f"{slots[0] / _MIB:.2f} MiB per replica (share {share:.4f}), CPU time of a step "
        f"{seconds[1]:.1f} of {seconds[0]:.1f} ms (ratio {ratio:.2f}, "
        f"rounds {min(ratios):.2f} to {max(ratios):.2f}), same bits: {same}"
    )
    return {"share": share, "ratios": ratios, "ratio": ratio, "same_bits": same}


def _slot_bytes(trainer: Any) -> int:
    """The bytes of the slot variables that one replica holds."""
    slots = [getattr(v, "slices", v) for v in trainer.optimizer.variables if v.shape.rank]
    return sum(v.shape.num_elements() * v.dtype.size for v in slots)


def _trainer(flags: argparse.Namespace, shard: bool) -> Any:
    import numpy as np
    import tensorflow as tf
    import tf_keras

    from benchmarks import models, variants
    import ctl
    from ctl import testing

    tf.get_logger().setLevel("ERROR")

    class Layers(models.Model):
        def build(self, keras: Any, dropout: float = 0.0) -> Any:
            layers = [keras.layers.Dense(flags.width, activation="tanh") for _ in range(4)]
            return keras.Sequential([keras.layers.InputLayer((flags.width,)), *layers])

        def arrays(self) -> Any:
            rows = np.random.default_rng(0).normal(size=(flags.batch, flags.width))
            rows = rows.astype(np.float32)
            return rows, rows[:, ::-1].copy()

        def loss_fn(self, keras: Any) -> Any:
            return lambda labels, outputs: tf.reduce_mean(tf.square(labels - outputs), axis=-1)

    return variants.Trainer(
        Layers(flags.batch, has_accuracy=False),
        strategy=testing.make_strategy(flags.replicas),
        optimizer=getattr(tf_keras.optimizers, flags.optimizer),
        options=ctl.TrainerOptions(shard_state=shard, prefetch=1),
    )


if __name__ == "__main__":
    main()
