"""MNIST on one GPU in float16, with many steps compiled into one XLA program.

ctl experiments/mnist_gpu.py

It also runs on a CPU, very slowly.
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "one_device"
    config.runtime.precision = "float16"
    config.runtime.xla = "loop"
    config.data.placement = "device"
    return config
