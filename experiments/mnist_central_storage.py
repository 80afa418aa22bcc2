"""MNIST on a replica a GPU, the variables once, in the memory of the CPU.

python -m ctl.main --config=experiments/mnist_central_storage.py

With no GPU, on two halves of the CPU.
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "central_storage"
    return config
