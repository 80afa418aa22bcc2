"""MNIST on two processes with one replica each; with GPUs, one replica per GPU.

python -m ctl.launch --workers=2 -- --config=experiments/mnist_multi_worker.py

On several machines, set TF_CONFIG in each process, or use deploy/kubernetes.
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "multi_worker_mirrored"
    return config
