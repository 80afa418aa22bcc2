"""MNIST on workers that update by themselves variables that a parameter server holds.

python -m ctl.launch --workers=2 --ps=1 -- --config=experiments/mnist_parameter_server.py
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "parameter_server"
    return config
