"""A generative adversarial network of MNIST: two models, two optimizers, second derivatives.

ctl experiments/dcgan.py

Each evaluation writes samples to the summaries, and compares 10,000 of them with the test images by a
Frechet distance in the features of a small classifier, which the first evaluation trains. It is 5.29,
5.10 and 5.72 with the seeds 0, 1 and 2, after 14.00, 13.70 and 12.12 at the end of the first epoch.
The distance of 10,000 training images is 0.52, and that of noise 216. It compares means and covariances
only, and distances in the features of other networks are not comparable. Four epochs take 120 to 140
seconds of CPU time.
"""

import ctl


def get_config():
    return ctl.config(
        trainer="trainers/dcgan.py:DcganTrainer",
        data=dict(dir="data/mnist", global_batch_size=128),
        model=dict(latent=64, width=32, penalty=1.0),
        optimizer=dict(name="adam", arguments=dict(beta_1=0.5), learning_rate=1e-3, ema_decay=0.99),
        train=dict(steps="4 epochs", steps_per_loop=100, checkpoint_interval="1 epoch"),
        eval=dict(interval="1 epoch", global_batch_size=1000),
    )
