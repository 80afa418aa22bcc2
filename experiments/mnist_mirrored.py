"""MNIST on a replica a GPU; on a machine with no GPU, on two halves of the CPU.

python -m ctl.main --config=experiments/mnist_mirrored.py

86 seconds on 2 CPU cores and 750 MiB; 99.18 % of the test images right with the seed 0.
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "mirrored"
    return config
