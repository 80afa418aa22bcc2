"""Builds a trainer: data, model, optimizer, metrics, counters, plan and step, in this order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import pkgutil
import random
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.built import hooks, metrics, observers, preparations
from ctl.built.attributes import STATELESS, Attributes, Owner, check_stateless
from ctl.built.built_step import BuiltStep
from ctl.built.explanations import explained
from ctl.built.hooks import warn_of_model
from ctl.built.inner_loop import InnerLoop, TrainerOwner
from ctl.built.planning import make_plan
from ctl.built.state import state_of
from ctl.configs import option_keys
from ctl.configs.error_location import describe, name_function, user_line
from ctl.configs.options import TrainerOptions
from ctl.data.autograph import convert, traced
from ctl.data.features import select_features
from ctl.data.input_pipeline import InputPipeline, TrainingData
from ctl.data.layout import Layout
from ctl.data.source import Batch, Nest
from ctl.errors import UsageError, type_name
from ctl.hardware import garbage, strategies
from ctl.keras import models, precision
from ctl.keras.precision import Optimizer
from ctl.keras.variables import check_scope
from ctl.optimizers import FromConfig
from ctl.private import replaced
from ctl.rows import row_mask
from ctl.rows.trace import Trace, symbolic
from ctl.update import held_variables, loss
from ctl.update.microbatches import row_count
from ctl.update.non_finite import counter
from ctl.update.part import Building, Part, open_parts
from ctl.update.preprocessing import Hooks, call_sample_weight, default_sample_weight, preprocess

# Parts of tf_keras' messages about the inputs of a model.
_INPUT_CHECKS = (
    "incompatible with the layer", "input(s), but it received", "Missing data for input",
    "required positional argument", "unexpected keyword argument",
)  # fmt: skip


@garbage.pause_collection()
def build_trainer(trainer: TrainerOwner, optimizer: Optimizer, base: Any) -> InnerLoop:
    """Builds a trainer's model, optimizer, metrics and counters, then its step and inner loop.

    Args:
        trainer: the `StandardTrainer`, with its strategy, batch size and options.
        optimizer: a function that makes the optimizer, or an optimizer.
        base: `StandardTrainer`, whose methods the trainer's class may override.

    Raises:
        UsageError: the options cannot compute the right update with this model, data or strategy.
    """
    hooks.check_methods(type(trainer), base)
    prepare_process()
    options: TrainerOptions = trainer.options
    pipeline = InputPipeline(
        trainer.build_dataset,
        strategy=trainer.strategy,
        seed=options.seed,
        prefetch=options.prefetch,
        cache=options.cache,
        build_scope=functools.partial(seed_and_precision, options),
    )
    layout = pipeline.layout(trainer.global_batch_size)
    # tf_keras would reject these only while it builds layers, with errors of its own.
    check_before_model(options, trainer.strategy, layout, type(trainer))
    with build_scope(options, trainer.strategy), explained():
        trainer.model = check_model(trainer.build_model())
        if options.model.get("sync_batch_norm"):
            preparations.synchronize_batch_norm(trainer.model)
        if isinstance(optimizer, FromConfig):
            optimizer.examples_per_epoch = pipeline.examples_per_epoch()
        trainer.optimizer = make_optimizer(lambda: trainer.build_optimizer(optimizer), options)
        trainer.metrics = metrics.prepare(trainer.build_metrics(), trainer.weighted_metrics)
        trainer.global_step = counter("global_step")
        spec = pipeline.element_spec()
        # What a user's own hooks do with a weight is not known.
        names = ("sample_weight", "preprocess", "replica_step", "train_step")
        if all(getattr(type(trainer), name) is getattr(base, name) for name in names):
            default_sample_weight(spec)
        groups: Sequence[Any] = ()
        if options.optimizer_groups:
            from ctl.configs import durations

            groups = durations.resolve_groups(
                options.optimizer_groups,
                batch=trainer.global_batch_size,
                examples_per_epoch=pipeline.examples_per_epoch(),
            )
        own_replica_step = type(trainer).replica_step is not base.replica_step
        of_class = type(trainer).transform_gradients is not base.transform_gradients
        has_transform = of_class or "transform_gradients" in vars(trainer)
        step, check_losses = build_step(
            trainer,
            dataclasses.replace(options, optimizer_groups=groups),
            layout=layout,
            data=pipeline.training_data(trainer.global_batch_size),
            hooks=trainer,
            loss_code=type(trainer),
            function=trainer.replica_step if own_replica_step else None,
            is_default=type(trainer).forward is base.forward,
            # The constructor of a subclass may still create the models that a pattern matches.
            complete=type(trainer).__init__ is base.__init__,
            source=optimizer,
            transform=(lambda: trainer.transform_gradients) if has_transform else None,
            own_replica_step=own_replica_step,
            own_train_step=type(trainer).train_step is not base.train_step,
            has_loss=type(trainer).per_example_loss is not base.per_example_loss,
        )
        compare_workers("data", trainer.strategy, pipeline)
        inner_loop = InnerLoop(trainer, step, pipeline)
        if not (step.plan.own_replica_step or step.plan.own_train_step):
            check_losses()
    return inner_loop


def build_step(
    owner: Owner,
    options: TrainerOptions,
    *,
    layout: Layout,
    data: TrainingData,
    hooks: Hooks,
    loss_code: Any,
    function: Callable[[Batch], tf.Tensor] | None = None,
    first_batch: Callable[..., Any] | None = None,
    is_default: bool,
    complete: bool = True,
    source: object = None,
    transform: Callable[[], Any] | None = None,
    **overrides: bool,
) -> tuple[BuiltStep, Callable[[], None]]:
    """Builds the step of a trainer or a `ctl.Step`, with its variables.

    Args:
        owner: holds `model`, `optimizer`, `metrics`, `strategy`, `options`, `global_step` and possibly
            further models; gets `skipped_steps`.
        options: its options, with every duration as a number of steps.
        layout: which replica holds which rows.
        data: what is known of the training batches.
        hooks: as for `BuiltStep`.
        loss_code: the loss function; or the trainer's class, whose step reports errors of the losses.
        function: as for `BuiltStep`.
        first_batch: as for `BuiltStep`.
        is_default: whether `hooks.forward` is ctl's own.
        complete: whether the owner will have no further models.
        source: makes the optimizers of the config's groups, if it is a `FromConfig`.
        transform: returns the user's `transform_gradients`; None if there is none.
        **overrides: which methods of the trainer are overridden, as for `make_plan`.

    Returns:
        The step; and a function that checks the losses of the first batch.

    Raises:
        UsageError: the options cannot compute the right update with this model, data or strategy.
    """
    traces: list[observers.Losses] = []

    def trace(batch: Batch, *, updates_metrics: bool = False, stop: bool = False) -> None:
        """Calls the model; keeps the losses of its rows, if they can be traced here."""
        with row_mask.examples(  # the user's code may read the rows of a step
            count=row_count(batch),
            seed=options.seed,
            allow_unkeyed=options.allow_unkeyed_random,
            trace=Trace(batch, call=traces[0].trace.call if traces else {}),
        ) as rows:
            prepared = preprocess(hooks, batch)
            prepared = _without_gradient(prepared) if stop else prepared
            outputs = precision.cast_to_float32(convert(hooks.forward)(prepared, training=True))
            if updates_metrics:
                metrics.call(hooks.update_metrics, owner.metrics, prepared, outputs, None)
                return
            try:
                factors = options.loss_weights or loss.SINGLE
                losses = loss.compute(hooks.per_example_loss, prepared, outputs, factors)
                weights: list[tf.Tensor] = []
                with contextlib.suppress(Exception):  # the step reports it
                    weights = symbolic(call_sample_weight(hooks, prepared, training=True))
                # Those of the last trace.
                traces[:] = [observers.Losses([*losses.values()], rows.trace, weights)]
            except Exception as error:
                # The loss of a trainer may read attributes that do not exist yet, or need a static
                # number of rows; that of a ctl.Step may use the context of a replica.
                is_context = isinstance(error, AttributeError) or "replica context" in str(error)
                if not (isinstance(loss_code, type) or is_context):
                    raise

    def trace_again(count: int) -> observers.Losses:
        traces.clear()
        with_rows = lambda v: tf.TensorSpec([count, *v.shape[1:]], v.dtype)  # noqa: E731
        create_variables(trace, tf.nest.map_structure(with_rows, data.spec))
        return traces[0]

    def check_losses(step: BuiltStep) -> None:
        losses, name = (traces[0] if traces else None), name_function(hooks.per_example_loss)
        for observer in observers.load(split=step.plan.is_split):
            observers.checked(observer.check_losses, step, losses, trace_again, name)

    def read_losses(batch: Batch) -> list[tf.Tensor]:
        """Returns the losses of a batch and the penalties; [] if they cannot be traced yet."""
        if function is None:
            trace(batch, stop=True)
            values = [value for each in traces for value in each.values]
            with contextlib.suppress(Exception):  # the step reports it
                values += convert(hooks.regularization_losses)() if values else []
            return values
        reports: list[Trace] = []

        def compute(batch: Batch) -> None:
            reports.append(Trace(batch, losses_only=True))
            with row_mask.examples(
                count=row_count(batch),
                seed=options.seed,
                allow_unkeyed=options.allow_unkeyed_random,
                trace=reports[-1],
            ):
                convert(function)(_without_gradient(preprocess(hooks, batch)))

        with contextlib.suppress(Exception):  # the step reports it
            owner.strategy.run(compute, args=(batch,))
        updates = [each for report in reports for each in report.updates if not each.chosen]
        return [x for update in updates for part in update.micro_batches for x in part.losses]

    def find_read(candidates: Sequence[tf.Variable]) -> list[tf.Variable] | None:
        """Returns the variables that the losses depend on; None if they cannot be traced yet."""
        # This trace is another one than that of the losses, which `check_losses` reads later.
        kept, results = traces.copy(), []
        traces.clear()

        def search(batch: Batch) -> None:
            compute = functools.partial(read_losses, batch)
            results.append(held_variables.find_read(candidates, compute, owner.strategy))

        with precision.scope(options.precision), owner.strategy.scope():
            create_variables(search, data.spec)
        traces[:] = kept
        return results[0]

    # Creates the variables of the model's first call, too: a checkpoint is restored, and slots are
    # created, before the first step.
    with report_rejected_features(data.spec) if is_default else contextlib.nullcontext():
        try:
            create_variables(trace, data.spec)
        except (TypeError, ValueError) as error:  # such as of int(x.shape[0])
            try:
                if isinstance(error, UsageError):
                    raise
                trace_again(layout.rows_per_replica)
            except Exception:
                raise error  # noqa: B904
            traces.clear()  # the checks of the losses need two numbers of rows
    # The first update of a metric may create its variables, as in F1Score.
    late = any(not (m.built and getattr(m, "_built", True)) for m in owner.metrics.values())
    if late and not strategies.spec_of(owner.strategy).coordinated:  # it never skips a step
        # A skipped step restores the variables of metrics that exist before it. tf_keras updates metrics
        # in a replica context only.
        update = functools.partial(trace, updates_metrics=True)
        create_variables(lambda batch: owner.strategy.run(update, args=(batch,)), data.spec)
    own = hooks.build_parts()
    parts = open_parts(options, own, transform)
    attributes = Attributes(owner, find_read)
    attributes.find_held()
    _prepare_optimizer(attributes, parts, complete=complete, source=source)
    plan = make_plan(
        owner.options,
        strategy=owner.strategy,
        data=data,
        layout=layout,
        model=owner.model,
        own_parts=bool(own or transform),
        **overrides,
    )
    step = BuiltStep(
        plan,
        attributes,
        hooks,
        function=function,
        global_step=owner.global_step,
        first_batch=first_batch,
        parts=parts,
    )
    step.transforms = transform is not None
    owner.skipped_steps = step.update.skipped_steps
    compare_workers("models", owner.strategy, state_of(attributes))
    warn_of_model(owner.model, precision.inner(owner.optimizer), loss_code)
    return step, functools.partial(check_losses, step)


def _without_gradient(batch: Batch) -> Batch:
    """Returns a batch through which no gradient flows, as in a step, which records no `preprocess`."""
    stop = lambda value: tf.stop_gradient(value) if tf.is_tensor(value) else value  # noqa: E731
    return tf.nest.map_structure(stop, batch, expand_composites=True)


def _prepare_optimizer(
    attributes: Attributes, parts: Sequence[Part], *, complete: bool, source: object
) -> None:
    """Applies the parts to a built model and its optimizer, and creates the slot variables."""
    owner = attributes.owner
    building = Building(
        attributes.named_models(),
        owner.optimizer,
        owner.strategy,
        parts=parts,
        make_plain=_make_optimizer,
        source=source,
        complete=complete,
    )
    building.prepare(owner.optimizer)
    # One replica can train what was built outside of its scope, but TensorFlow makes no slots for it.
    if owner.strategy.num_replicas_in_sync > 1 or not getattr(owner.optimizer, "_built", False):
        check_scope(attributes.trained_variables(), owner.strategy)
    owner.optimizer.build(attributes.trained_variables())


# Model and optimizer, as functions of the seed and the precision.


def check_before_model(
    options: TrainerOptions, strategy: tf.distribute.Strategy, layout: Layout, function: object
) -> None:
    """Rejects options for which tf_keras would fail, with its own error, while the model is built.

    Collective with several processes, which must have the same options and code.

    Args:
        options: the trainer's options.
        strategy: where the replicas are.
        layout: which replica holds which rows.
        function: the class of the trainer, or the loss function.

    Raises:
        UsageError: a dtype is not supported, or a key of `model` that ctl defines has a wrong value.
    """
    compare_workers("programs", strategy, options, layout.global_batch_size, function)
    option_keys.check_rules(
        options.by_key(),
        replicas=layout.replicas,
        batch=layout.global_batch_size,
        rows_per_replica=layout.rows_per_replica,
        strategy=strategies.strategy_name(strategy),
        cpu_collectives=strategies.uses_cpu_collectives(strategy),
    )
    value = options.model.get("sync_batch_norm")
    if value not in (None, False, True, "per_micro_batch"):
        raise UsageError(
            f"model.sync_batch_norm is {value!r}, but must be True, False or 'per_micro_batch'."
        )
    # Only the trainer's own code reads model.recompute; if it does not, the key is rejected as unread.
    if options.recompute not in (None, "", "blocks"):
        value = options.recompute
        raise UsageError(f"model.recompute is {value!r}, but must be 'blocks', or '' for none.")


def compare_workers(name: str, strategy: tf.distribute.Strategy, *facts: Any) -> Any:
    """Calls `compare_<name>` of ctl.checks.workers, if a strategy runs in several processes."""
    spec = strategies.spec_of(strategy)
    if not spec.multi_process or spec.coordinated:
        return contextlib.nullcontext()
    workers = pkgutil.resolve_name("ctl.checks.workers")
    processes = workers.processes_of(strategy)
    if processes.is_single:
        return contextlib.nullcontext()
    return getattr(workers, f"compare_{name}")(processes, *facts)


def prepare_process() -> None:
    """Replaces what ctl replaces in TensorFlow and Keras; call it before a model is built.

    Raises:
        UsageError: TensorFlow's eager execution is switched off for the process.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise UsageError(
            "TensorFlow's eager execution is disabled in this process: remove "
            "tf.compat.v1.disable_eager_execution() or disable_v2_behavior()."
        )
    replaced.apply()


@contextlib.contextmanager
def seed_and_precision(options: TrainerOptions) -> Iterator[None]:
    """Makes everything that is built inside a function of the seed and the precision alone.

    The generators of Python, numpy and TensorFlow are seeded. Those of Python and numpy are restored
    afterwards.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    # This sets TensorFlow's global seed too, which is not restored: it has no public getter.
    tf_keras.utils.set_random_seed(options.seed)
    try:
        with precision.scope(options.precision):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def build_scope(options: TrainerOptions, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Combines the strategy's scope with the seed and the precision of a trainer's options."""
    try:
        comparing = compare_workers("new_variables", strategy)
        with seed_and_precision(options), strategy.scope(), comparing:
            yield
    except ValueError as error:
        if isinstance(error, UsageError) or "Stateful RNNs" not in str(error):  # of tf_keras
            raise
        place = user_line(error) or "build_model"
        raise UsageError(f"{place} makes a layer with stateful=True: {STATELESS}") from error


def make_optimizer(build: Callable[[], Optimizer], options: TrainerOptions) -> Optimizer:
    """Returns the optimizer that `build` makes, of tf_keras and with the loss scale of the options."""
    return precision.wrap_loss_scale(_make_optimizer(build), options.precision, options.loss_scale)


def _make_optimizer(build: Callable[[], Optimizer]) -> Optimizer:
    """Returns the tf_keras optimizer that `build` makes.

    All replicas assign the variable that holds a schedule's current rate. Central storage allows that
    only for a variable with an aggregation, which tf_keras does not set.
    """

    def add_aggregation(next_creator: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        if arguments.get("name") == "current_learning_rate":
            arguments["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return next_creator(**arguments)

    with tf.variable_creator_scope(add_aggregation):
        return check_optimizer(models.convert(build()))


def check_model(model: tf_keras.Model) -> tf_keras.Model:
    """Returns what `build_model` returned as a tf_keras model; raises a UsageError if it is no model."""
    model = models.adapt(model)
    if isinstance(model, models.Adapted):
        model.check_built()
    models.check(model, "build_model returned")
    if not isinstance(model, tf_keras.layers.Layer):
        raise UsageError(
            f"build_model returned {type_name(model)}, but must return a tf_keras.Model, or a model of "
            "Keras 3."
        )
    check_stateless(model)
    return model


def check_optimizer(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer, or raises a UsageError if it cannot compute the update of a step."""
    inner = precision.inner(optimizer)
    models.check(inner, "The optimizer is")
    if isinstance(inner, tf_keras.optimizers.legacy.Optimizer):
        name = type(inner).__name__
        fix = f"tf_keras.optimizers.{name}"
        if not hasattr(tf_keras.optimizers, name):  # such as those of Model Garden
            fix = "optimizer.name=adamw, lamb or lars, another key of the section, or another optimizer"
        raise UsageError(
            f"The optimizer is {type_name(inner)}, a tf_keras.optimizers.legacy.Optimizer: use {fix}."
        )
    if not isinstance(inner, tf_keras.optimizers.Optimizer):
        shown = repr(inner) if isinstance(inner, str) else type_name(inner)
        raise UsageError(
            f"The optimizer is {shown}, but must be an optimizer of tf_keras, or a function that makes "
            "one: write for example optimizer=lambda: tf_keras.optimizers.Adam(1e-3)."
        )
    hooks.check_optimizer(inner)
    nadam = tf_keras.optimizers.Nadam
    if isinstance(inner, nadam) and type(inner).update_step is nadam.update_step:
        # The count is a constant of the trace, and differs from variable to variable and from replica
        # to replica: even on one replica, equal gradients change equal variables differently.
        raise UsageError(
            "tf_keras.optimizers.Nadam counts its updates in Python, which is wrong in a traced step: "
            "use Adam or AdamW, or override its update_step."
        )
    return optimizer


def create_variables(
    forward: Callable[[Batch], object], spec: Nest
) -> tf.types.experimental.ConcreteFunction:
    """Creates a model's variables, so that a checkpoint can be restored before the first step.

    The forward pass is traced and not run: the model may not accept an example of zeros.

    Args:
        forward: the forward pass.
        spec: the `tf.TensorSpec`s of a batch.

    Returns:
        The trace, a concrete function.
    """

    def create(batch: Batch) -> object:
        with tf.variable_creator_scope(_create_outside):
            return forward(batch)

    # A trace computes nothing, and it accepts a spec with an unknown number of rows.
    return traced(create).get_concrete_function(spec)


def _create_outside(creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
    """Creates a variable outside of the trace, as tf_keras does; Keras 3 may create it inside.

    There it would have no value, and its copies on the other replicas could not be made from it.
    """
    if tf.executing_eagerly() or not callable(options["initial_value"]):
        return creator(**options)
    with tf.init_scope():
        return tf.Variable(**options)


@contextlib.contextmanager
def report_rejected_features(features: Mapping[str, tf.TensorSpec]) -> Iterator[None]:
    """Turns tf_keras' error in the first call of a model into a UsageError; for the default `forward`.

    Args:
        features: name -> spec of the features of a batch.

    Raises:
        UsageError: the model does not accept the features, or fails with them.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UsageError) or user_line(error):
            raise
        names, reason = ", ".join(select_features(features)), describe(error)
        if not isinstance(error, KeyError) and not any(part in reason for part in _INPUT_CHECKS):
            raise UsageError(
                f"The call of the model with {names} failed ({reason}): fix the model or the data, or "
                "override forward."
            ) from error
        fix = "fix the model's inputs or the data"
        if "label" not in features and "," in names:
            fix = 'name the target "label", which is not passed to the model'
        if "weight" in features:
            fix += ' ("weight" is the weight of the losses and not passed: rename it if it is a feature)'
        raise UsageError(
            f"The model does not accept {names} ({reason}): {fix}, or override forward."
        ) from error
