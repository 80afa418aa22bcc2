"""MNIST on two processes with one replica each; with GPUs, one replica per GPU.

python -m ctl.launch --workers=2 -- --config=experiments/mnist_multi_worker.py

On several machines, start it by Slurm, MPI, Ray or Kubernetes: docs/clusters.md.
"""

import mnist


def get_config():
    config = mnist.get_config()
    config.runtime.strategy = "multi_worker_mirrored"
    return config
