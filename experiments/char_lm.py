"""A byte-level Transformer in nanoGPT's setting for CPUs, on a folder of text files.

ctl experiments/char_lm.py --config.data.dir=FOLDER

The last 10 % of the bytes are the evaluation. Without `data.dir` the text is the source of Python's own
standard library, which needs no download. Each evaluation writes a sample of the model to the summaries.

2,000 steps took 1:50 minutes of CPU time, and 2:50 to 4:40 minutes on 2 busy cores. Validation loss on
tiny Shakespeare with the seeds 0, 1 and 2: 1.868, 1.879 and 1.869 (nanoGPT publishes 1.88 in this
setting).
"""

import ctl


def get_config():
    return ctl.config(
        trainer="trainers/char_lm.py:CharLmTrainer",
        data=dict(global_batch_size=12),
        model=dict(layers=4, heads=4, width=128, context=64, recompute=""),
        optimizer=dict(
            name="adamw",
            arguments=dict(beta_2=0.99),
            learning_rate=1e-3,
            schedule="cosine",
            schedule_arguments=dict(end_factor=0.1),
            warmup_steps=100,
            weight_decay=0.1,
            weight_decay_exclude=["*/bias", "*/gamma", "*/beta"],
            clip=dict(global_norm=1.0),
        ),
        train=dict(steps=2000, steps_per_loop=100, checkpoint_interval=500),
        eval=dict(interval=500, global_batch_size=128),
    )
