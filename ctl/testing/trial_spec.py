"""Describes a comparison, and builds the trainer of each split."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.data.input_pipeline import InputPipeline
from ctl.replica.step.build import seed_and_precision
from ctl.replica.step.engine import engine_of
from ctl.testing.devices import make_strategy
from ctl.testing.nested import unwrap
from ctl.testing.splits import RATE, Split
from ctl.trainer import StandardTrainer


@dataclasses.dataclass(frozen=True)
class TrialSpec:
    """The trainer and the examples that are run on every split.

    Attributes:
        factory: the trainer's class, or a function with the arguments of its constructor.
        examples: name -> [examples, ...] array, in the order in which batches take them.
        optimizer: makes the optimizer; None for plain SGD.
        options: options of the trainer. Those that the split or the comparison determines are
            replaced.
        steps: number of training steps.
        plain: replace every optimizer of the trainer by plain SGD.
    """

    factory: Callable[..., StandardTrainer]
    examples: dict[str, np.ndarray]
    optimizer: Callable[[], Any] | None
    options: TrainerOptions
    steps: int
    plain: bool = False

    @property
    def trainer_name(self) -> str:
        """The name of the trainer for messages."""
        return getattr(self.factory, "__name__", None) or str(self.factory)

    def cast_examples(self, dtype: str) -> "TrialSpec":
        """Returns a spec whose floating-point examples have another dtype."""
        examples = {
            name: values.astype(dtype) if values.dtype.kind == "f" else values
            for name, values in self.examples.items()
        }
        return dataclasses.replace(self, examples=examples)

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
        compression="",
        compression_rank=0,
        compression_start=0,
        loss_scale=0.0,
        norms="",
        histogram_interval=0,
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
    # Layers without a name of their own are numbered by process, and options name them by pattern.
    tf_keras.backend.reset_uids()
    trainer = factory(
        strategy=make_strategy(split.replicas),
        global_batch_size=split.batch,
        optimizer=(None if spec.plain else spec.optimizer) or _make_sgd,
        options=options,
    )
    if not isinstance(factory, type):
        _replace_data(trainer, spec)
    if spec.plain:
        _replace_own_optimizers(trainer)
    engine_of(trainer).checks_copies = False  # the report names the difference and its cause
    return trainer


def _make_sgd() -> Any:
    return tf_keras.optimizers.SGD(RATE)


def _replace_own_optimizers(trainer: StandardTrainer) -> None:
    """Replaces the optimizers that the trainer makes itself, such as the second one of a GAN.

    An update by Adam does not show a wrong factor of the gradient.
    """
    for name, value in trainer.checkpoint_items().items():
        leaves = tf.nest.flatten(unwrap(value))
        with trainer.build_scope():
            replaced = [
                _make_sgd() if item is not trainer.optimizer and _is_replaceable(item) else item
                for item in leaves
            ]
        if any(a is not b for a, b in zip(leaves, replaced, strict=True)):
            setattr(trainer, name, tf.nest.pack_sequence_as(unwrap(value), replaced))


def _is_replaceable(item: Any) -> bool:
    """Returns whether an object is an optimizer of tf_keras; a user's own may have other methods."""
    is_optimizer = isinstance(item, tf_keras.optimizers.Optimizer)
    has_scale = isinstance(item, tf_keras.mixed_precision.LossScaleOptimizer)
    return is_optimizer and not has_scale and type(item).__module__.startswith("tf_keras.")


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
