"""A worker that trains the number of steps that `benchmarks.network` requests.

    python -m benchmarks.network.worker MODEL

It first writes a line of JSON with the number of parameters. It then reads lines such as "reduce 20"
from stdin, trains this number of steps, and writes a line of JSON with the seconds that they took.
"compute" trains the same step on the same strategy without its all-reduces: each worker then updates
its own copy of the weights from its own share of the batch, and sends nothing.
"""

import dataclasses
import json
import os
import sys
import time
from typing import TextIO
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
import tf_keras

from benchmarks import variants, windows
from benchmarks.network.models import MODELS
import ctl
from ctl.hardware import selection
from ctl.hardware.strategies import StrategyOptions

# Seconds. Workers that share few cores may send no heartbeat for a long time while they trace.
_HEARTBEAT_TIMEOUT = 600.0


def main(name: str, answers: TextIO) -> None:
    """Answers requests until the end of stdin."""
    tf.get_logger().setLevel("ERROR")
    options = StrategyOptions.from_config(ctl.config().runtime, os.environ)
    options = dataclasses.replace(options, heartbeat_timeout=_HEARTBEAT_TIMEOUT)
    strategy = selection.build("multi_worker_mirrored", options).strategy
    trainers = {mode: _make_trainer(name, strategy) for mode in ("reduce", "compute")}
    trainers["reduce"].train(tf.constant(2))  # traces the step
    with mock.patch.object(tf.distribute.ReplicaContext, "all_reduce", _return_values):
        trainers["compute"].train(tf.constant(2))
    variables = trainers["reduce"].model.trainable_variables
    sizes = [variable.shape.num_elements() for variable in variables]
    print(json.dumps({"parameters": sum(sizes)}), file=answers, flush=True)
    for line in sys.stdin:
        mode, steps = line.split()
        start = time.perf_counter()
        trainers[mode].train(tf.constant(int(steps)))  # reads the loss, and so waits for the steps
        print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)


def _make_trainer(name: str, strategy: tf.distribute.Strategy) -> variants.Trainer:
    model = MODELS[name]
    model = dataclasses.replace(model, batch=model.batch * strategy.num_replicas_in_sync)
    return variants.Trainer(model, strategy=strategy, optimizer=lambda: model.optimizer(tf_keras))


def _return_values(context, reduce_op, values, options=None):
    return values


if __name__ == "__main__":
    with windows.answers_only() as file:
        main(sys.argv[1], file)
