"""`data.overfit_batches`: trains and evaluates on the first batches only."""

from typing import Any

import tensorflow as tf

from ctl.data import batching
from ctl.data.elements import name_dataset_features
from ctl.data.features import flatten_features
from ctl.data.layout import Layout
from ctl.data.source import Arrays, GlobalBatches, PerReplica
from ctl.errors import UsageError, type_name
from ctl.trainer import StandardTrainer


def limit_data(trainer_class: type[StandardTrainer], batches: int) -> type[StandardTrainer]:
    """Returns a subclass whose data, for every split, is the first training batches of the run.

    The examples are read once, in the run's own order and with the augmentation of those steps, and are
    held in memory: the augmentation of an example no longer changes.

    Args:
        trainer_class: the experiment's trainer.
        batches: the number of global batches.
    """
    read: list[Arrays] = []  # once, for all splits

    def build_dataset(self: Any, split: str, input_context: tf.distribute.InputContext) -> Arrays:
        if not read:
            data = trainer_class.build_dataset(self, "train", input_context)
            read.append(_read(data, batches, self.global_batch_size, self.options.seed))
        return read[0]

    attributes = {"build_dataset": build_dataset, "__module__": trainer_class.__module__}
    return type(trainer_class.__name__, (trainer_class,), attributes)


def _read(data: Any, batches: int, batch_size: int, seed: int) -> Arrays:
    if isinstance(data, PerReplica):
        raise UsageError(
            "data.overfit_batches cannot take the first batches of ctl.data.PerReplica: let "
            "build_dataset return examples, or ctl.data.GlobalBatches."
        )
    data = name_dataset_features(data)
    if isinstance(data, GlobalBatches):
        elements = list(batching.global_batches(data, start=0, endless=True).take(batches))
    else:
        layout = Layout(batch_size, replicas=1)
        stream = batching.training_batches(data, layout, seed=seed, start=0, prefetch=1)
        elements = [element.batch for element in stream.take(batches)]
    for name, value in flatten_features(elements[0]).items():
        if not isinstance(value, tf.Tensor):
            raise UsageError(
                f"data.overfit_batches requires features that are tensors, but {name!r} is "
                f"{type_name(value)}."
            )
        shapes = {tuple(flatten_features(element)[name].shape[1:]) for element in elements}
        if len(shapes) > 1:
            raise UsageError(
                f"data.overfit_batches requires batches of one shape, but {name!r} has "
                f"{' and '.join(map(str, sorted(shapes)))}: use ctl.data.packed, or "
                "data.overfit_batches=1."
            )
    return Arrays(tf.nest.map_structure(lambda *values: tf.concat(values, 0), *elements))
