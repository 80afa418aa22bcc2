"""The settings of PROJECT_NAME: `ctl config.py` trains and evaluates."""

import ctl


def get_config():
    return ctl.config(
        trainer="trainer.py:Trainer",
        data=dict(global_batch_size=128),
        model=dict(latent=4, width=32),
        optimizer=dict(name="adam", arguments=dict(beta_1=0.5), learning_rate=1e-3, ema_decay=0.99),
        train=dict(steps=2000, checkpoint_interval=500),
        eval=dict(interval=500, global_batch_size=500),
    )
