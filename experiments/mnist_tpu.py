"""MNIST on a TPU slice of four cores, in bfloat16.

ctl experiments/mnist_tpu.py

The batch and the learning rate are four times those of one device, with a quarter of the steps. It has
not been run on a TPU. Without one, the step can be compiled:

ctl aot_compile experiments/mnist_tpu.py --topology=v5e:2x2
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "tpu"
    config.runtime.precision = "bfloat16"
    config.data.global_batch_size = 512
    config.optimizer.learning_rate_batch_size = 128
    config.optimizer.warmup_steps = 100
    config.train.steps = 938
    config.train.checkpoint_interval = 469
    config.eval.interval = 469
    return config
