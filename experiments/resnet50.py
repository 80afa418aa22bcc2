"""ResNet-50 with synchronized batch normalization, in bfloat16, on a TPU slice of any size.

ctl aot_compile experiments/resnet50.py --topology=v5e:2x2

It shows the memory and cost of a real model on a TPU. Its images are synthetic, so that nothing has to
be downloaded. The schedule is that of Goyal et al. 2017: a learning rate of 0.1 per 256 examples of the
batch, five epochs of linear warm-up, and 90 epochs in total: in epochs, so that the batch, which grows
with the number of cores, does not change the length. It has not been trained to the end.
`--config.model.recompute=blocks` keeps the inputs of the residual blocks only (docs/precision.md).
"""

import ctl


def get_config():
    return ctl.config(
        trainer="trainers/resnet.py:ResNetTrainer",
        runtime=dict(strategy="tpu", precision="bfloat16"),
        data=dict(per_replica_batch_size=64),
        model=dict(size=224, classes=1000, sync_batch_norm=True, recompute=""),
        optimizer=dict(
            name="sgd",
            momentum=0.9,
            arguments=dict(nesterov=True),
            learning_rate=0.1,
            learning_rate_batch_size=256,
            schedule="cosine",
            warmup_steps="5 epochs",
        ),
        train=dict(steps="90 epochs", checkpoint_interval="1 epoch"),
        eval=dict(interval="1 epoch"),
    )
