"""Contrastive learning of MNIST without labels, on one device.

ctl experiments/simclr.py

Each evaluation fits a linear classifier to the features. Five epochs take 60 seconds of CPU time, 90
seconds on 2 cores. Its test accuracy, with the seeds 0, 1 and 2: 95.4, 95.8 and 96.1 %; with features of
the untrained network 79.1, 78.3 and 76.2 %.
"""

import ctl


def get_config():
    return ctl.config(
        trainer="trainers/simclr.py:SimclrTrainer",
        data=dict(dir="data/mnist", global_batch_size=256),
        model=dict(width=128, projection=32, temperature=0.5),
        optimizer=dict(name="adam", learning_rate=1e-3),
        train=dict(steps="5 epochs", steps_per_loop=100, checkpoint_interval="1 epoch"),
        eval=dict(interval="1 epoch", global_batch_size=1000, before_training=True),
    )
