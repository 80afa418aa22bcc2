"""The settings of PROJECT_NAME: `ctl config.py` trains and evaluates."""

import ctl


def get_config():
    return ctl.config(
        trainer="trainer.py:Trainer",
        data=dict(global_batch_size=32),
        model=dict(width=32, dropout=0.1),
        optimizer=dict(name="adam", learning_rate=5e-3, schedule="cosine"),
        train=dict(steps="10 epochs", checkpoint_interval="1 epoch"),
        eval=dict(interval="1 epoch", global_batch_size=256),
    )
