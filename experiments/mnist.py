"""MNIST on one device.

ctl experiments/mnist.py

Eight epochs take 80 to 105 seconds and 750 MiB on 2 CPU cores. Test accuracy: 99.11, 99.15 and 99.17 %
with the seeds 0, 1 and 2.
"""

import ctl


def get_config():
    return ctl.config(
        trainer="trainers/mnist.py:MnistTrainer",
        data=dict(dir="data/mnist", global_batch_size=128),
        model=dict(dropout=0.5),
        optimizer=dict(name="adam", learning_rate=1e-3, schedule="cosine"),
        train=dict(steps=3752, steps_per_loop=100, checkpoint_interval=938),
        eval=dict(interval=938, global_batch_size=1000),
    )
