"""Resolves and validates every option of a trainer, once, into the plan of its updates.

`ctl.configs` rejects what depends on the options alone. This module rejects what depends on the model,
the data or an override of the trainer.
"""

import logging

import tensorflow as tf
import tf_keras

from ctl.compile import xla
from ctl.configs import option_keys
from ctl.configs.options import TrainerOptions
from ctl.data.input_pipeline import TrainingData
from ctl.data.layout import Layout
from ctl.errors import UsageError
from ctl.hardware import strategies
from ctl.private.tensorflow import config
from ctl.update.plan import Plan

_LOG = logging.getLogger("ctl")


def make_plan(
    options: TrainerOptions,
    *,
    strategy: tf.distribute.Strategy,
    data: TrainingData,
    layout: Layout,
    model: tf_keras.Model,
    own_replica_step: bool = False,
    own_train_step: bool = False,
    has_loss: bool = True,
    own_parts: bool = False,
) -> Plan:
    """Resolves and validates the options of a trainer.

    Args:
        options: the trainer's options.
        strategy: where the replicas are.
        data: what is known of the training batches.
        layout: which replica holds which rows.
        model: the built model.
        own_replica_step: whether the trainer overrides `replica_step`.
        own_train_step: whether the trainer overrides `train_step`.
        has_loss: whether the trainer defines `per_example_loss`.
        own_parts: whether the user adds parts to the update.

    Returns:
        The plan.

    Raises:
        UsageError: a combination cannot compute the right update.
    """
    sync = any(getattr(layer, "synchronized", False) for layer in model._flatten_layers())
    if options.model.get("sync_batch_norm") and not sync:
        raise UsageError(
            "model.sync_batch_norm has no effect: the model has no BatchNormalization."
        )
    name = strategies.strategy_name(strategy)
    # XLA has no strings: they are detected here, because its own error comes from inside the step.
    strings = any(f.dtype == tf.string for f in tf.nest.flatten(data.spec))
    # Logical devices, because those that the user hid from TensorFlow do not count.
    gpu = bool(tf.config.list_logical_devices("GPU"))
    mode, reason = xla.choose(
        options.xla,
        gpu=gpu,
        replicas=layout.replicas,
        sync_batch_norm=sync,
        shards=bool(options.logical_shards),
        groups=strategies.bucket_bytes(strategy) > 0,
        chunks=data.supports_chunks and not own_train_step,
        strings=strings,
        deterministic=config.is_op_determinism_enabled(),
        strategy=name,
    )
    plan = Plan(
        options=options,
        layout=layout,
        strategy=name,
        full_batches=data.full_batches,
        xla=mode,
        xla_reason=reason,
        sync_batch_norm=sync,
        string_features=strings,
        own_replica_step=own_replica_step,
        own_train_step=own_train_step,
        has_loss=has_loss,
        own_parts=own_parts,
        compiles_collectives=xla.compiles_collectives(strategy),
    )
    # Validated after "auto" is resolved, so the rules see the mode that is used.
    option_keys.check_rules(plan.values)
    _check_overrides(plan, data)
    _check_layers(model, plan)
    # Only for a valid plan, because it changes the complete process.
    if mode == "autocluster":
        xla.enable_autoclustering(gpu=gpu)
    return plan


def _check_overrides(plan: Plan, data: TrainingData) -> None:
    if not (plan.has_loss or plan.own_replica_step or plan.own_train_step):
        raise UsageError(
            "The trainer has no loss: define per_example_loss, or override replica_step for a step of "
            "your own."
        )
    if plan.options.loss_spike and (plan.own_replica_step or plan.own_train_step):
        raise UsageError(
            "train.loss_spike checks the single loss of ctl's own step, but this trainer overrides "
            f"{'replica_step' if plan.own_replica_step else 'train_step'}: set train.loss_spike=0."
        )
    loops = plan.strategy in (*xla.LOOP_STRATEGIES, "tpu") or plan.compiles_collectives
    if plan.xla == "loop" and not loops:
        raise UsageError(
            f"runtime.xla=loop is not supported by runtime.strategy={plan.strategy}: choose one_device, "
            "or runtime.xla=step."
        )
    if plan.xla == "loop" and plan.own_train_step:
        # The compiled loop calls the replica step directly; an ignored override would be silent.
        raise UsageError(
            "runtime.xla=loop does not call your train_step: choose another runtime.xla."
        )
    if (plan.xla == "loop" or plan.strategy == "tpu") and not data.has_one_shape:
        what = "A TPU" if plan.strategy == "tpu" else "runtime.xla=loop"
        raise UsageError(
            f"{what} requires batches of one shape, but those of ctl.data.bucketed have several: use "
            f"ctl.data.packed{'' if plan.strategy == 'tpu' else ', or choose runtime.xla=step'}."
        )
    if plan.xla == "loop" and not data.supports_chunks:
        raise UsageError(
            "runtime.xla=loop requires a Source or a Dataset of single examples: return one from "
            "build_dataset, or choose runtime.xla=step."
        )


def _check_layers(model: tf_keras.Model, plan: Plan) -> None:
    """Rejects layers that make the update depend on how the batch is split."""
    for layer in model._flatten_layers():
        # tf_keras divides the penalty by the rows of the part, so it has no global denominator.
        if getattr(layer, "activity_regularizer", None) is not None and not plan.even:
            raise UsageError(
                f"Layer {layer.name} has an activity regularizer, which is a mean over the rows of a "
                f"part of the batch, and the {plan.layout.global_batch_size} rows do not split into "
                "equal parts: choose a batch that splits evenly, or add the penalty to per_example_loss."
            )
