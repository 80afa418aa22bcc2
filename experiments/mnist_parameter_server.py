"""MNIST on workers that asynchronously update variables on a parameter server.

python -m ctl.launch --workers=2 --ps=1 -- --config=experiments/mnist_parameter_server.py
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "parameter_server"
    return config
