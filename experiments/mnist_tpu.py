"""MNIST on a TPU slice of eight cores, in bfloat16.

python -m ctl.main --config=experiments/mnist_tpu.py

Four times the batch of one device and four times the learning rate, so a quarter of the steps. It has
not been run on a TPU; --mode=aot_compile --topology=v5e:2x4 compiles it for one that is not here.
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
