"""The settings of PROJECT_NAME: `ctl config.py` trains and evaluates."""

import ctl


def get_config():
    return ctl.config(
        trainer="trainer.py:Trainer",
        data=dict(global_batch_size=32),
        model=dict(width=8, sync_batch_norm=True),
        optimizer=dict(name="adam", learning_rate=1e-2, schedule="cosine"),
        train=dict(steps="10 epochs", checkpoint_interval="1 epoch"),
        eval=dict(interval="1 epoch", global_batch_size=128),
    )
