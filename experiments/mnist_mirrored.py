"""MNIST on a replica a GPU; on a machine with no GPU, on two halves of the CPU.

python -m ctl.main --config=experiments/mnist_mirrored.py
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "mirrored"
    return config
