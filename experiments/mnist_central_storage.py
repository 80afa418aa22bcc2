"""MNIST with one replica per GPU and a single copy of the variables in CPU memory.

ctl experiments/mnist_central_storage.py

Without a GPU it uses two logical CPU devices.
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "central_storage"
    return config
