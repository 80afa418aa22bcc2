"""Builds a trained trainer for inference: one replica, float32, and no state of training.

The trainer is built a second time from its class, without the strategy and the dtype policy of
training, and restored from a checkpoint.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import pathlib
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.built.inner_loop import loop_of, pipeline_of, step_of
from ctl.built.state import state_of
from ctl.configs import keys
from ctl.configs.option_keys import OPTION_KEYS, PARTS
from ctl.configs.options import TrainerOptions
from ctl.data.autograph import convert, traced
from ctl.data.features import RESERVED
from ctl.data.source import Batch, Nest
from ctl.errors import UsageError
from ctl.graphs.assignments import find_assignments
from ctl.graphs.dataflow import depends_on
from ctl.keras import precision
from ctl.loop.checkpoints.checkpointer import Checkpointer, DamagedCheckpoint
from ctl.loop.checkpoints.files import hold
from ctl.private import classes
from ctl.rows import row_mask
from ctl.trainer import StandardTrainer
from ctl.update.microbatches import row_count
from ctl.update.snapshot import Snapshot

# The options of the updates and of the hardware, which inference leaves at their defaults.
_OF_TRAINING = (
    "loss_scale", "placement", "logical_shards", "all_reduce_dtype", "micro_batches",
    "clip_global_norm", "clip_norm", "clip_value", "loss_spike",
    *(option for option in PARTS if not keys.BY_NAME[OPTION_KEYS[option]].evaluated),
)  # fmt: skip


def restore_trainer(
    trainer_class: type[StandardTrainer], options: TrainerOptions, path: str,
    *, global_batch_size: int, average: bool = True,
) -> StandardTrainer:  # fmt: skip
    """Builds a trainer for inference, and restores its models from a checkpoint.

    Args:
        trainer_class: the class that was trained.
        options: the options of the training.
        path: the checkpoint.
        global_batch_size: the batch size of the training, which some data requires.
        average: whether to use the averaged weights, if there are any.

    Raises:
        UsageError: the checkpoint does not match the trainer, or cannot be read.
    """
    with hold(path) as held:
        # 16-bit layers have float32 variables: without the policy the same weights compute in float32.
        of_variables = precision.of(options.precision).floatx
        trainer = trainer_class(
            strategy=tf.distribute.get_strategy(),  # the default one: no replicas
            global_batch_size=global_batch_size,
            optimizer=lambda: tf_keras.optimizers.SGD(0.0),  # has no state
            options=dataclasses.replace(
                options,
                precision=of_variables,
                xla="off",
                on_non_finite="ignore",
                **{name: getattr(TrainerOptions, name) for name in _OF_TRAINING},
            ),
        )
        models: Any = _Models(trainer)  # all that a `Checkpointer` reads of a trainer
        try:
            Checkpointer(pathlib.Path(held).parent, models, reads_only=True).restore(held)
        except DamagedCheckpoint as error:
            raise UsageError(f"{path} cannot be read ({error}): name another checkpoint.") from None
    if average:
        step_of(trainer).finish()
    return trainer


def make_function(trainer: StandardTrainer, function: Callable[[Batch], Any]) -> Any:
    """Returns a `tf.function` of raw features that calls `function` for any number of rows.

    It returns the outputs of `function`, with 16-bit floats cast to float32. Its inputs are the
    features that the outputs depend on. `function` gets zeros for the others. Variables that `function`
    assigns have their old values again afterwards.

    Args:
        trainer: the result of `restore_trainer`.
        function: `trainer.serve`, or a function like it.

    Raises:
        UsageError: the outputs depend on a label or a weight.
    """
    specs = pipeline_of(trainer).element_spec()
    hidden = {name: spec for name, spec in specs.items() if name in RESERVED}
    shown = {name: spec for name, spec in specs.items() if name not in RESERVED}
    options = trainer.options
    restored: list[tf.Variable] = []

    def serve(features: Batch) -> Any:
        unused = {k: _zeros(features, spec) for k, spec in shown.items() if k not in features}
        batch = _Features({**features, **unused}, hidden)
        rows = row_mask.examples(
            count=row_count(features), seed=options.seed, allow_unkeyed=options.allow_unkeyed_random
        )
        with step_of(trainer).trace_scope(), rows:
            state = Snapshot(restored)
            try:
                outputs = precision.cast_to_float32(convert(function)(batch))
            except KeyError as error:
                name = error.args[0] if error.args else ""
                if name not in hidden:
                    raise
                raise UsageError(_describe_use(trainer, name)) from error
            state.restore()
        for name, zeros in batch.zeros.items():
            zeros = tf.nest.flatten(zeros)
            if any(depends_on(output, zeros) for output in tf.nest.flatten(outputs)):
                raise UsageError(_describe_use(trainer, name))
        return outputs

    def trace(names: Iterable[str]) -> Any:
        signature = {k: tf.TensorSpec(shown[k].shape, shown[k].dtype, name=k) for k in names}
        return traced(serve, input_signature=[signature])

    complete = trace(shown)
    graph = complete.get_concrete_function()
    assigned = {id(a.handle) for a in find_assignments(graph.graph.get_operations())}
    restored += [v for v in state_of(step_of(trainer).attributes) if id(v.handle) in assigned]
    if restored:
        complete = trace(shown)
    # The inputs of the graph are in the order of the sorted names.
    inputs = zip(sorted(shown), graph.inputs, strict=False)
    used = [k for k, x in inputs if any(depends_on(output, [x]) for output in graph.outputs)]
    return trace(used) if 0 < len(used) < len(shown) else complete


class _Features(dict[str, Any]):
    """Raw features, in which a label or weight that is read by its name is 0.

    Attributes:
        zeros: the labels and weights that were read.
    """

    def __init__(self, features: Mapping[str, tf.Tensor], hidden: Mapping[str, tf.TensorSpec]):
        super().__init__(features)
        self._hidden = hidden
        self.zeros: dict[str, Any] = {}

    def __missing__(self, name: str) -> Any:
        if name not in self._hidden:
            raise KeyError(name)
        if name not in self.zeros:
            self.zeros[name] = _zeros(self, self._hidden[name])
        return self.zeros[name]


def _zeros(features: Mapping[str, tf.Tensor], specs: Nest) -> Any:
    """Returns zeros, or empty strings, with as many rows as the features; 1 for unknown lengths."""
    rows = row_count(dict(features))
    return tf.nest.map_structure(
        lambda s: tf.zeros([rows, *(size or 1 for size in s.shape[1:])], s.dtype), specs
    )


class _Models:
    """The part of a trainer that a `Checkpointer` restores for inference: no optimizers."""

    def __init__(self, trainer: StandardTrainer):
        self.strategy = trainer.strategy
        self.global_step = trainer.global_step
        self.optimizer = trainer.optimizer
        self.model = trainer.model
        self._ctl_loop = loop_of(trainer)

    def checkpoint_items(self) -> dict[str, Any]:
        """Returns the models, the averages and the variables by the names in a checkpoint."""
        items = self._ctl_loop.step.checkpoint_items()
        optimizers = (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)
        of_training = self._ctl_loop.step.update.loss_spikes
        return {
            name: item
            for name, item in items.items()
            # No data that training makes either, whose entries are made for a training.
            if not isinstance(item, optimizers)
            and item is not of_training
            and not hasattr(item, "freeze")
        }


def unwrap(layers: Iterable[tf_keras.layers.Layer]) -> None:
    """Replaces ctl's parts of layers by the originals of tf_keras, for files of tf_keras."""
    for layer in layers:
        if "counts_all_rows" in vars(type(layer)):  # ctl.SyncBatchNormalization
            # In place, because the graph of a functional model holds the layer.
            classes.set_class(layer, tf_keras.layers.BatchNormalization)


def _describe_use(trainer: StandardTrainer, name: str) -> str:
    return (
        f"The outputs of {type(trainer).__name__}.serve depend on {name!r}, which is not known when a "
        "model is used: override serve(features), or compute them from the other features."
    )
