"""MNIST on one GPU, in float16, many whole steps as one XLA program.

python -m ctl.main --config=experiments/mnist_gpu.py

On a CPU it trains too, for trying it out, very slowly.
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "one_device"
    config.runtime.precision = "float16"
    config.runtime.xla = "loop"
    config.data.placement = "device"
    return config
