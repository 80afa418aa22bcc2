"""What a comparison runs on every split, and the trainer of a split."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.data.input_pipeline import InputPipeline
from ctl.replica.engine import engine_of
from ctl.replica.model_building import seed_and_precision
from ctl.testing.devices import make_strategy
from ctl.testing.splits import RATE, Split
from ctl.trainer import StandardTrainer


@dataclasses.dataclass(frozen=True)
class TrialSpec:
    """What is run on every split.

    Attributes:
        factory: the trainer's class, or a function with the arguments of its constructor.
        examples: name -> [examples, ...] array, in the order in which batches take them.
        optimizer: makes the optimizer; None for plain SGD.
        options: options of the trainer. Those that the split or the comparison determines are
            replaced.
        steps: number of training steps.
    """

    factory: Callable[..., StandardTrainer]
    examples: dict[str, np.ndarray]
    optimizer: Callable[[], Any] | None
    options: TrainerOptions
    steps: int

    @property
    def trainer_name(self) -> str:
        """The name of the trainer for messages."""
        return getattr(self.factory, "__name__", None) or str(self.factory)

    def dataset(self, part: str, batch: int) -> tf.data.Dataset:
        """Makes the dataset of examples that replaces the trainer's own.

        Args:
            part: "eval", or any other split of the data for training.
            batch: global batch size. An evaluation has `2 * batch - 1` rows, so its last batch is
                a partial one.
        """
        rows = self.examples
        if part == "eval":
            indexes = np.arange(2 * batch - 1) % len(next(iter(rows.values())))
            rows = {name: values[indexes] for name, values in rows.items()}
        return tf.data.Dataset.from_tensor_slices(rows)


def build_trainer(spec: TrialSpec, split: Split, **changes: Any) -> StandardTrainer:
    """Builds the trainer of a split, which reads the examples of the spec in their order.

    Args:
        spec: what to run.
        split: how the global batch is split.
        **changes: options to change.

    Raises:
        UsageError: ctl rejects the trainer on this split.
    """
    fixed: dict[str, Any] = dict(
        xla="off",
        placement="stream",
        logical_shards=0,
        all_reduce_dtype="",
        loss_scale=0.0,
        norms=False,
        prefetch=1,
        gradient_accumulation_steps=split.micro_batches,
    )
    if spec.options.on_non_finite == "stop":
        fixed["on_non_finite"] = "ignore"
    options = dataclasses.replace(spec.options, **{**fixed, **changes})
    factory = spec.factory
    if isinstance(factory, type):
        # A subclass, so that the trainer never calls its own build_dataset: its data may be absent.
        body = {"build_dataset": lambda self, part, context: spec.dataset(part, split.batch)}
        factory = type(factory.__name__, (factory,), body)
    trainer = factory(
        strategy=make_strategy(split.replicas),
        global_batch_size=split.batch,
        optimizer=spec.optimizer or (lambda: tf_keras.optimizers.SGD(RATE)),
        options=options,
    )
    if not isinstance(factory, type):
        _replace_data(trainer, spec)
    return trainer


def _replace_data(trainer: StandardTrainer, spec: TrialSpec) -> None:
    """Replaces the input pipeline of a trainer that a function built."""
    batch = trainer.global_batch_size
    engine_of(trainer).pipeline = InputPipeline(
        lambda part, _: spec.dataset(part, batch),
        strategy=trainer.strategy,
        seed=trainer.options.seed,
        prefetch=1,
        build_scope=functools.partial(seed_and_precision, trainer.options),
    )
    trainer.train_dataset = engine_of(trainer).pipeline.training_dataset(batch, start=0)
