"""Builds a trainer: data, model, optimizer, metrics, counters, plan and engine, in this order."""

import contextlib
import functools
from typing import Any

from ctl.configs import durations
from ctl.configs.options import TrainerOptions
from ctl.data.autograph import convert
from ctl.data.caching import cache
from ctl.data.input_pipeline import BuildDataset, InputPipeline
from ctl.data.source import Batch
from ctl.hardware import strategies
from ctl.optimizers import FromConfig
from ctl.replica.arithmetic import precision, row_mask
from ctl.replica.layers.batch_norm import convert_sync_batch_norm
from ctl.replica.measure.non_finite import counter
from ctl.replica.step import keras_version, metrics
from ctl.replica.step.attributes import Attributes
from ctl.replica.step.engine import Engine
from ctl.replica.step.microbatches import row_count
from ctl.replica.step.model_building import (
    build_scope,
    check_before_model,
    check_model,
    check_optimizer,
    create_variables,
    make_optimizer,
    report_rejected_features,
    seed_and_precision,
)
from ctl.replica.step.plan import make_plan
from ctl.replica.step.preprocessing import call_preprocess
from ctl.replica.updates import parameter_groups, sharded_optimizer
from ctl.replica.updates.unfreezing import Unfreezing


def build_engine(trainer: Any, optimizer: Any, base: Any) -> Engine:
    """Builds a trainer's model, optimizer, metrics and counters, then its engine.

    Args:
        trainer: the `StandardTrainer`, with its strategy, batch size and options.
        optimizer: a function that makes the optimizer, or an optimizer.
        base: `StandardTrainer`, whose methods the trainer's class may override.

    Raises:
        UsageError: the options cannot compute the right update with this model, data or strategy.
    """
    options: TrainerOptions = trainer.options
    pipeline = InputPipeline(
        _cached(trainer.build_dataset, options.cache),
        strategy=trainer.strategy,
        seed=options.seed,
        prefetch=options.prefetch,
        build_scope=functools.partial(seed_and_precision, options),
    )
    layout = pipeline.layout(trainer.global_batch_size)
    # tf_keras would reject these only while it builds layers, with errors of its own.
    check_before_model(options, trainer.strategy, layout)
    with build_scope(options, trainer.strategy), keras_version.report_keras3():
        trainer.model = check_model(trainer.build_model())
        if options.model.get("sync_batch_norm"):
            convert_sync_batch_norm(trainer.model)
        if isinstance(optimizer, FromConfig):
            optimizer.examples_per_epoch = pipeline.examples_per_epoch()
        trainer.optimizer = precision.wrap_loss_scale(
            check_optimizer(make_optimizer(functools.partial(trainer.build_optimizer, optimizer))),
            options.precision,
            options.loss_scale,
        )
        trainer.metrics = metrics.prepare(trainer.build_metrics())
        trainer.global_step = counter("global_step")
        # Creates the variables of the model's first call, too: a checkpoint is restored, and slots are
        # created, before the first step.
        spec = pipeline.element_spec()
        is_default = type(trainer).forward is base.forward
        with report_rejected_features(spec) if is_default else contextlib.nullcontext():
            create_variables(functools.partial(_forward, trainer), spec)
        late = any(metrics.creates_variables_late(metric) for metric in trainer.metrics.values())
        if late and not strategies.spec_of(trainer.strategy).coordinated:  # it never skips a step
            # A skipped step restores the variables of metrics that exist before it.
            create_variables(functools.partial(_update_metrics, trainer), spec)
        if options.shard_state:
            sharded_optimizer.shard(trainer.optimizer, trainer.strategy)
        models = Attributes(trainer).named_models()
        # The constructor of a subclass may still create the models that a pattern matches.
        if type(trainer).__init__ is base.__init__:
            parameter_groups.check_patterns(models, options)
        parameter_groups.freeze(models, options)
        parameter_groups.configure(trainer.optimizer, models, options)
        trainer.optimizer.build(trainer.model.trainable_variables)
        plan = make_plan(
            options,
            strategy=trainer.strategy,
            pipeline=pipeline,
            layout=layout,
            model=trainer.model,
            own_replica_step=type(trainer).replica_step is not base.replica_step,
            own_train_step=type(trainer).train_step is not base.train_step,
            has_loss=type(trainer).per_example_loss is not base.per_example_loss,
        )
        groups = durations.resolve_groups(
            options.optimizer_groups,
            batch=trainer.global_batch_size,
            examples_per_epoch=pipeline.examples_per_epoch(),
        )
        unfreezing = Unfreezing(groups)
        engine = Engine(trainer, plan, pipeline, unfreezing)
        trainer.skipped_steps = engine.step.update.skipped_steps
        # The optimizer has slot variables for the model's variables by now.
        unfreezing.add_models({"": trainer.model})
    return engine


def _forward(trainer: Any, batch: Batch) -> None:
    with _rows(trainer, batch):
        convert(trainer.forward)(call_preprocess(trainer, batch), training=False)


def _update_metrics(trainer: Any, batch: Batch) -> None:
    def update() -> None:
        with _rows(trainer, batch):
            prepared = call_preprocess(trainer, batch)
            outputs = precision.cast_to_float32(convert(trainer.forward)(prepared, training=False))
            convert(trainer.update_metrics)(trainer.metrics, prepared, outputs, None)

    trainer.strategy.run(update)  # tf_keras updates metrics in a replica context only


def _rows(trainer: Any, batch: Batch) -> contextlib.AbstractContextManager[row_mask.Examples]:
    """Returns the context of a step's rows, because the user's code may read them."""
    options: TrainerOptions = trainer.options
    return row_mask.examples(
        count=row_count(batch), seed=options.seed, allow_unkeyed=options.allow_unkeyed_random
    )


def _cached(build_dataset: BuildDataset, place: str) -> BuildDataset:
    """Returns `build_dataset` with the parsed examples in the cache of `data.cache`."""
    if not place:
        return build_dataset
    return lambda split, context: cache.cache_data(build_dataset(split, context), place)
