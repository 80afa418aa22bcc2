"""MNIST with one replica per GPU; without a GPU, on two logical CPU devices.

ctl experiments/mnist_mirrored.py

It takes 86 seconds and 750 MiB on 2 CPU cores. Test accuracy: 99.18 % with the seed 0.
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "mirrored"
    return config
