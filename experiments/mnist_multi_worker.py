"""MNIST on two processes, each a replica; on machines with GPUs, a replica a GPU.

python -m ctl.launch --workers=2 -- --config=experiments/mnist_multi_worker.py

On several machines TF_CONFIG names the processes, or deploy/kubernetes does.
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "multi_worker_mirrored"
    return config
