"""Step: the update of ctl in a training loop of your own."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import inspect
import logging
import pkgutil
from typing import Any, NamedTuple

import tensorflow as tf
import tf_keras

from ctl.built import build, hooks, metric_updates
from ctl.built import metrics as metric_results
from ctl.built.built_step import BuiltStep
from ctl.built.evaluation import Evaluation
from ctl.built.explanations import explained
from ctl.compile import xla
from ctl.compile.traced_function import TracedFunction
from ctl.configs.error_location import name_function
from ctl.configs.options import TrainerOptions
from ctl.data import distribution
from ctl.data.autograph import convert, traced
from ctl.data.features import check_names
from ctl.data.input_pipeline import TrainingData
from ctl.data.layout import Layout
from ctl.data.source import Batch, MaskedBatch, Nest
from ctl.errors import (
    NegativeWeight,
    NonFiniteStep,
    UsageError,
    did_you_mean,
    name_arguments,
    type_name,
)
from ctl.hardware import strategies
from ctl.keras import precision as precisions
from ctl.keras.models import adapt, is_layer
from ctl.keras.precision import Optimizer
from ctl.keras.variables import check_scope, variables_of
from ctl.update import preprocessing
from ctl.update.gradients import Transform
from ctl.update.loss import Denominator
from ctl.update.microbatches import first_rows, row_count, unpack
from ctl.update.non_finite import counter
from ctl.update.part import Part
from ctl.update.preprocessing import Metrics
from ctl.update.update import UpdateResult

_LOG = logging.getLogger("ctl")
_FIND_ROWS = "ctl.built.bad_rows:non_finite_rows"  # imported for a step that is not finite
_ROW_LOSSES = "ctl.keras.losses:row_losses"  # these for a loss object, and a mean of rows
_MEAN_OF_ROWS = "ctl.rows.means:mean_of_rows"
_MINIMIZE = "ctl.built.minimizing:%s"  # imported for several optimizers
_AGREED = "ctl.update.conditions:agreed"  # for a condition inside of the user's strategy.run
# Options that only a trainer's data, model and inner loop read.
_OF_TRAINERS = ("cache", "data", "model", "placement", "prefetch", "histogram_interval")


class StepResult(NamedTuple):
    """The result of one step.

    Attributes:
        loss: scalar, the loss of the global batch; the sum of several.
        applied: scalar bool, whether the update was applied, or all of them.
        outputs: the outputs of the replica's rows, 16-bit floats cast to float32, if `outputs=True`;
            one value per replica. A scalar has one entry per micro-batch, if there are several.
        losses: name -> scalar, the losses with an optimizer of their own.
    """

    loss: tf.Tensor
    applied: tf.Tensor
    outputs: Nest = None
    losses: Mapping[str, tf.Tensor] | None = None


class Step:
    """Computes and applies the one update that a global batch defines, in a loop of your own.

        with strategy.scope():
            model, optimizer = make_model(), tf_keras.optimizers.Adam()
        step = ctl.Step(model, optimizer, loss_fn, global_batch_size=64, strategy=strategy)
        for batch in ctl.data.distribute(source, 64, strategy):
            loss = step(batch).loss

    Call it with an element of a distributed dataset; with a plain batch on one replica; inside of your
    `tf.function` and its loops, inside of your own `strategy.run`, or outside of both. A batch is a dict
    of tensors of shape [rows, ...]; `(x, y)` and `(x, y, w)` are read as {"x": x, "label": y,
    "weight": w}.

    Args:
        model: a tf_keras model of the strategy's scope, or a function that makes one. The function is
            called in the scope, with the seed and the precision.
        optimizer: a tf_keras optimizer, or a function that makes one. For several losses of one forward
            pass, each with its own optimizer, a dict of name of a loss -> (what it trains, optimizer).
            What it trains is a model, or a list of models or variables; the first one trains `model`.
        loss_fn: (batch, outputs) -> [rows] losses, not reduced: ctl divides once, by the weight of the
            global batch. Losses of tokens, [rows, ...], require a `sample_weight` of their shape.
            Several losses are a dict of name -> losses, whose factors are the option `loss_weights`.
            A loss object of Keras compares `batch["label"]` with the outputs.
        global_batch_size: the rows of a full batch, over all replicas and micro-batches; required. A
            batch may have fewer rows.
        strategy: the strategy whose replicas compute a step; the current strategy by default.
        loss: what `loss_fn` returns: "rows", or "mean" for a function of a library that returns the mean
            of the losses of its rows; see `ctl.replica.mean_of_rows`.
        forward: (batch, training) -> outputs. By default the model is called with the one feature that
            is neither `label` nor `weight`, or with a dict of them if there are several.
        sample_weight: (batch, training) -> the weights of the losses, or None for 1. By default it is
            `batch["weight"]`, if that exists.
        denominator: what the sum of the losses is divided by: "weights", "batch" or "none", or a
            function (batch) -> numbers of the rows, as the method of `ctl.StandardTrainer`.
        transform_gradients: (gradients, variables) -> the new gradients of the global batch, as the
            method of `ctl.StandardTrainer`.
        parts: parts of your own of the update, `ctl.Part`s.
        metrics: name -> metric of `batch["label"]` and the outputs; `results` returns them.
        weighted_metrics: the names of the metrics that are weighted by `sample_weight`.
        models: further models that `loss_fn` or `forward` calls, such as the discriminator of a GAN.
        outputs: whether a step returns the outputs.
        precision: "float32", "float64", "bfloat16" or "float16"; by default that of the
            model, or of the global policy.
        on_non_finite: "skip" to apply no update that is not finite, or "ignore" to apply it.
        **options: the other fields of `ctl.TrainerOptions`, such as `seed`, `clip`, `ema_decay`, `xla`
            or `micro_batches`.

    Attributes:
        model: the model.
        optimizer: the optimizer, or the first one; a LossScaleOptimizer under float16.
        updates: name of a loss -> (what it trains, its optimizer), if there are several optimizers.
        metrics: name -> metric.
        global_step: int64 variable, the number of steps, by which random numbers are keyed.
        skipped_steps: int64 variable, the number of updates that were not applied; after `build`.

    Raises:
        UsageError: the options cannot compute the right update with this model or strategy.
    """

    skipped_steps: tf.Variable

    def __init__(
        self,
        model: tf_keras.Model | Callable[[], tf_keras.Model],
        optimizer: Optimizer | Callable[[], Optimizer] | Mapping[str, tuple[Any, Any]],
        loss_fn: Callable[[Batch, Nest], tf.Tensor],
        *,
        global_batch_size: int = 0,
        strategy: tf.distribute.Strategy | None = None,
        loss: str = "rows",
        forward: Callable[[Batch, bool], Nest] | None = None,
        sample_weight: Callable[[Batch, bool], tf.Tensor | None] | None = None,
        denominator: str | Callable[[Batch], Denominator] = "weights",
        transform_gradients: Transform | None = None,
        parts: Sequence[Part] = (),
        metrics: Mapping[str, tf_keras.metrics.Metric] | None = None,
        weighted_metrics: Sequence[str] | None = None,
        models: Sequence[tf_keras.Model] = (),
        outputs: bool = False,
        precision: str | None = None,
        on_non_finite: str = "skip",
        **options: Any,
    ):
        self.strategy = strategy or tf.distribute.get_strategy()
        _check_arguments(self.strategy, model, optimizer, loss_fn, loss)
        if hasattr(loss_fn, "reduction"):  # a loss object of Keras
            loss_fn = pkgutil.resolve_name(_ROW_LOSSES)(loss_fn)
        elif loss == "mean":
            mean_of_rows = functools.partial(pkgutil.resolve_name(_MEAN_OF_ROWS), loss_fn)
            loss_fn = functools.update_wrapper(mean_of_rows, loss_fn)
        self.global_batch_size = global_batch_size
        self.loss_fn = loss_fn
        self._is_default = forward is None
        self.forward = forward or (
            lambda batch, training: preprocessing.call_model(self.model, batch, training=training)
        )
        self.sample_weight = sample_weight or (
            lambda batch, training: preprocessing.default_sample_weight(batch)
        )
        self.denominator = denominator if callable(denominator) else lambda batch: denominator
        self.transform_gradients, self.parts = transform_gradients, parts
        functions: dict[str, Sequence[str]] = {"loss_fn": ("batch", "outputs")}
        functions |= dict.fromkeys(("forward", "sample_weight"), ("batch", "training"))
        functions["denominator"] = ("batch",)
        if transform_gradients:
            functions["transform_gradients"] = ("gradients", "variables")
        for name, given in functions.items():
            hooks.check(name, getattr(self, name), given)
        if isinstance(optimizer, Mapping):
            _check_optimizers(optimizer, options)
            options["loss_weights"] = dict.fromkeys(optimizer, 1.0)
        build.prepare_process()
        self.models = list(models)
        self.options = _make_options(
            model, precision=precision, on_non_finite=on_non_finite, **options
        )
        self._returns_outputs = outputs
        self._built: BuiltStep | None = None
        self._function: TracedFunction | None = None
        # By their metrics, which are kept too: another object could get the id of one that is freed.
        self._evaluations: dict[Hashable, tuple[Evaluation, Any, Any]] = {}
        # The descriptions of the data of ctl.data.distribute that the updates depend on.
        self.descriptions: list[str] = []
        self._read: Any = None  # reads the global batch of a step again
        self._calls = 0
        self._reported_unread = False
        # Rows and their mask for the checks, until the code is checked.
        self._example: tuple[Any, Any] | None = None
        layout = Layout(global_batch_size, self.strategy.num_replicas_in_sync)
        if strategies.spec_of(self.strategy).coordinated:
            raise UsageError(
                "ctl.Step does not support parameter servers, whose workers step independently: use "
                "ctl.StandardTrainer."
            )
        build.check_before_model(self.options, self.strategy, layout, loss_fn)
        with build.build_scope(self.options, self.strategy), _report_errors():
            self.model = build.check_model(model if is_layer(model) else model())
            make = lambda own: build.make_optimizer(  # noqa: E731
                own if callable(own) else lambda: own, self.options
            )
            self.updates: Mapping[str, tuple[Any, Optimizer]] = {}
            if isinstance(optimizer, Mapping):
                members = pkgutil.resolve_name(_MINIMIZE % "members")
                updates = {k: (members(each), make(own)) for k, (each, own) in optimizer.items()}
                # Wrapped as an entry of a checkpoint.
                self.updates = tf.__internal__.tracking.wrap(updates)
            first = next(iter(self.updates.values()), None)
            self.optimizer = first[1] if first else make(optimizer)
            self.metrics = metric_results.prepare(metrics or {}, weighted_metrics)
            self.global_step = counter("global_step")

    def __call__(
        self, batch: Nest, when: tf.Tensor | bool | Mapping[str, tf.Tensor | bool] | None = None
    ) -> StepResult:
        """Runs one step; counts it in `global_step`.

        Args:
            batch: an element of a distributed dataset, or one replica's rows inside of `strategy.run`.
            when: scalar bool, the same on every replica, in place of a conditional around the call in
                your own `tf.function`. Where it is False, the step is computed and leaves nothing behind
                but its count in `global_step`. Always applied by default. With several optimizers it may
                be a dict with the conditions of some of them, by the names of their losses.

        Returns:
            The result. Inside of `strategy.run` it is that of this replica.
        """
        is_eager = tf.executing_eagerly()
        if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
            self._describe(batch)
            self._check_inside(is_eager)
            if when is not None:
                when = tf.nest.map_structure(pkgutil.resolve_name(_AGREED), when)
            result = self._run_replica(batch, when, equal=isinstance(batch, MaskedBatch))
            self._report_unread()
            return result
        self.build(batch)
        if not is_eager:
            self._check_constant()
            result = self._run(batch, when)
            self._report_unread()
            return result
        step = self.built()
        if step.parts:  # each call of a function counts in the time of a small step
            step.check_ready()
            list(step.split(1))  # prepares the parts for this step
        with explained(read=lambda: self._read_again(batch)):
            if step.must_trace() or self._function is None:
                self._function = TracedFunction(lambda arguments: self._run(*arguments))
            # As a tensor, because a number of Python would be a constant of the trace.
            convert_all = functools.partial(tf.nest.map_structure, tf.convert_to_tensor)
            result = self._function((batch, when if when is None else convert_all(when)))
        if step.is_unfinished:
            self._example = None
            step.note_trace()
            step.finish_loop()
        self._calls += 1
        is_power = not self._calls & (self._calls - 1)
        if is_power and step.plan.compiles_micro_batches:  # XLA does not report a negative weight
            self._report_non_finite(step, batch)
        # The first batch is searched before its step. What follows are 2, 4, 8, ...
        if step.repeated and self._calls > 1 and is_power:
            step.repeat_checks([lambda: first_rows(unpack(batch), self.strategy)])
        return result

    def build(self, batch: Nest) -> None:
        """Creates the variables that do not exist yet, and checks the options with the model.

        The first step calls it. Call it earlier to restore a checkpoint before the first step, or to
        check code that your own `tf.function` will trace: the checks compute with the batch.

        Args:
            batch: an element of the distributed dataset.

        Raises:
            UsageError: the options cannot compute the right update with this model.
        """
        self._describe(batch)
        if self._built:
            return
        if isinstance(batch, dict):
            check_names(batch)
        distribution.check_distributed(batch, self.strategy, most=self.global_batch_size)
        rows, row_mask = first_rows(unpack(batch), self.strategy)
        if not isinstance(rows, dict):
            raise UsageError(
                f"The batch is {type_name(rows)}, but must be a dict of tensors, (x, y) or (x, y, w)."
            )
        if strategies.spec_of(self.strategy).multi_process and not isinstance(batch, MaskedBatch):
            _LOG.warning(
                "TensorFlow divides this dataset among the workers, so the examples of a global batch "
                "depend on their number: ctl.data.distribute gives the same batches to any number."
            )
        if tf.is_tensor(tf.nest.flatten(rows)[0]) and tf.executing_eagerly():
            self._example = rows, row_mask
        spec = tf.nest.map_structure(lambda v: tf.TensorSpec([None, *v.shape[1:]], v.dtype), rows)
        # All batches of ctl.data.distribute are full; the rows of other batches are not known.
        full = isinstance(batch, MaskedBatch)
        if tf.executing_eagerly():
            self._build(spec, full=full)
            return
        # Outside of the user's function. Not by tf.init_scope, which stops the tapes of loss_fn.
        with futures.ThreadPoolExecutor(1) as thread:
            thread.submit(self._build, spec, full=full).result()

    def results(self) -> dict[str, tf.Tensor]:
        """Returns the mean of the steps' losses and the metrics since the last call; resets them.

        Returns:
            name -> scalar tensor: "loss", the metrics by name, and "skipped_steps", the number of all
            updates that were not applied. In "loss" a partial batch counts like a full one.
        """
        step = self.built()
        self._report_non_finite(step)
        step.check_late()  # of a step in a function of the user's own
        values = tf.nest.map_structure(tf.convert_to_tensor, step.results.read())
        step.results.reset()
        return values

    def state(self) -> dict[str, Any]:
        """Returns what the next step depends on, for `tf.train.Checkpoint(**step.state())`."""
        return self.built().checkpoint_items()

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Gives the model the averaged weights of `ema_decay` within a `with` block."""
        return self.built().evaluating()

    def evaluate(
        self,
        batches: Iterable[Nest],
        metrics: Mapping[str, tf_keras.metrics.Metric],
        weighted_metrics: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Evaluates distributed batches; `ctl.evaluate` calls it."""
        step, key = self.built(), (*metrics, *map(id, tf.nest.flatten(metrics)))
        # As a text, because tf.nest sorts the keys of attributes.
        key = *key, str(weighted_metrics and [*weighted_metrics])
        if key not in self._evaluations:
            with build.build_scope(self.options, self.strategy), _report_errors():
                evaluation = Evaluation(
                    step,
                    metric_results.prepare(metrics, weighted_metrics),
                    global_batch_size=self.global_batch_size,
                )

            def run(batch: Nest) -> None:
                distribution.check_distributed(batch, self.strategy)
                run = functools.partial(
                    evaluation.run, equal=distribution.has_equal_shares(batch, self.strategy)
                )
                self.strategy.run(lambda element: run(*unpack(element)), args=(batch,))
                evaluation.count_batch()

            self._evaluations[key] = evaluation, traced(run, reduce_retracing=True), dict(metrics)
        evaluation, run_traced, _ = self._evaluations[key]
        metric_results.weight(evaluation.metrics, weighted_metrics)  # for another trace
        evaluation.reset()
        with step.trace_scope(), name_arguments(), step.evaluating():
            for batch in batches:
                run_traced(batch)
        return evaluation.results()

    def _first_batch(self, part: float = 0.0) -> tuple[Any, Any]:
        """Returns the batch of `build`; raises ValueError for a later one, like data that has ended."""
        if part or self._example is None:
            raise ValueError("There is no such batch.")
        return self._example

    def _build(self, spec: Nest, *, full: bool) -> None:
        with build.build_scope(self.options, self.strategy):
            self._build_in_scope(spec, full=full)

    def _build_in_scope(self, spec: Nest, *, full: bool) -> None:
        precisions.check_model(self.model, self.options.precision)
        models = [adapt(model) for model in (self.model, *self.models)]
        check_scope((v for m in models if m.built for v in variables_of(m)), self.strategy)
        with _report_errors():
            step, check_losses = build.build_step(
                self,
                self.options,
                layout=Layout(self.global_batch_size, self.strategy.num_replicas_in_sync),
                data=TrainingData(
                    spec, full_batches=full, has_one_shape=True, supports_chunks=False
                ),
                hooks=_Hooks(self),
                loss_code=self.loss_fn,
                first_batch=self._first_batch,
                is_default=self._is_default,
                function=self._minimize_each if self.updates else None,
                own_replica_step=bool(self.updates),
                transform=(lambda: self.transform_gradients) if self.transform_gradients else None,
            )
        build.compare_workers("data", self.strategy, self.descriptions)
        step.update.untrained.elsewhere = self.models
        check_losses()
        step.prepare()
        for each, optimizer in self.updates.values():  # a checkpoint holds their slot variables
            optimizer.build(pkgutil.resolve_name(_MINIMIZE % "variables_in")(each))
        self._built = step

    def built(self) -> BuiltStep:
        """Returns the built step, for the other packages of ctl."""
        if not self._built:
            raise UsageError(
                "The step is not built: call step.build(batch) or a first step before."
            )
        return self._built

    def _run(self, batch: Nest, when: tf.Tensor | None = None) -> StepResult:
        """Runs a step on every replica; call it while tracing, in a cross-replica context."""
        # Checked in each trace: the type and the structure of a batch decide which trace it gets.
        distribution.check_distributed(batch, self.strategy, most=self.global_batch_size)
        if self.built().plan.full_batches and not isinstance(batch, MaskedBatch):
            raise UsageError(
                "The step was built with a batch of ctl.data.distribute, whose batches are full, and "
                "got a batch of another dataset: make a second step for it."
            )
        if any(isinstance(v, tf.distribute.DistributedValues) for v in tf.nest.flatten(when)):
            raise UsageError(
                "when has a value for each replica, but must be one for all: compute it from "
                "step.global_step or the loss of a step."
            )
        equal = distribution.has_equal_shares(batch, self.strategy)
        other = None if equal else first_rows(unpack(batch)[0], self.strategy)
        run = functools.partial(self._run_replica, equal=equal, other=other)
        # Without a strategy TensorFlow is always in a replica context, also in the user's own `run`.
        is_default = (
            self.strategy is tf.distribute.get_strategy() and not tf.distribute.has_strategy()
        )
        with precisions.scope(self.options.precision):
            result = run(batch, when) if is_default else self.strategy.run(run, args=(batch, when))
        scalars = result._replace(outputs=None)
        first = lambda value: self.strategy.experimental_local_results(value)[0]  # noqa: E731
        return tf.nest.map_structure(first, scalars)._replace(outputs=result.outputs)

    def _run_replica(
        self, element: Nest, when: tf.Tensor | None = None, *, equal: bool, other: Any = None
    ) -> StepResult:
        batch, row_mask = unpack(element)
        compute = functools.partial(self._compute, equal=equal, other=other)
        with _report_errors():
            compute = xla.jit(compute) if self.built().plan.xla == "step" else compute
            result = compute(batch, row_mask, when)
        # A step that fails is not counted.
        with tf.control_dependencies([result.loss]):
            self.global_step.assign_add(1)
        return result

    def _compute(
        self, batch: Batch, row_mask: tf.Tensor | None, when: tf.Tensor | None, **shares: Any
    ) -> StepResult:
        result = self.built().run(batch, row_mask, **shares, details=True, when=when)
        outputs = None
        if self._returns_outputs:
            from ctl.built.outputs import concatenate

            outputs = concatenate(
                [each.outputs for each in result.micro_batches],
                [row_count(each.batch) for each in result.micro_batches],
                "The model" if self._is_default else name_function(self.forward),
            )
        losses = dict(zip(self.updates, result.losses, strict=False))
        return StepResult(result.loss, tf.convert_to_tensor(result.applied), outputs, losses)

    def _minimize_each(self, batch: Batch, when: Any = None) -> UpdateResult:
        """Computes and applies the update of each optimizer, by one forward pass."""
        step = self.built()
        result = pkgutil.resolve_name(_MINIMIZE % "minimize")(
            step,
            batch,
            self.loss_fn,
            self.updates,
            None,
            when if isinstance(when, Mapping) else dict.fromkeys(self.updates, when),
            forward=functools.partial(step.hooks.forward, training=True),
        )
        step.results.update_metrics(result.micro_batches, step.hooks.update_metrics)
        return dataclasses.replace(result, loss=tf.add_n(result.losses))

    def _describe(self, batch: Nest) -> None:
        """Records the description of a batch's data, which checkpoints hold."""
        description = getattr(type(batch), "description", "")
        if isinstance(batch, MaskedBatch) and description not in ("", *self.descriptions):
            self.descriptions.append(description)
            self._read = getattr(type(batch), "read", None)

    def _read_again(self, batch: Any) -> Any:
        """Returns the global batch of a step that failed, and the indexes of its examples or None."""
        if self._read:
            return self._read(int(self.global_step.numpy()))
        values = self.strategy.experimental_local_results
        return tf.nest.map_structure(lambda v: tf.concat(values(v), 0), unpack(batch)[0]), None

    def _report_non_finite(self, step: BuiltStep, last: Nest = None) -> None:
        """Prints a line if steps were not finite, with the examples that make the first one so.

        Args:
            step: the built step.
            last: the batch of the last step, if it is known.
        """
        recorder = step.update.recorder
        report = recorder.take() if recorder and tf.executing_eagerly() else None
        if report is None:
            return
        rows: list[int] = []
        indexes = None
        try:
            if not self._read and last is not None and report.step == int(self.global_step) - 1:
                batch, indexes = self._read_again(last)
            else:
                batch, indexes = self._read(report.step)
            rows = pkgutil.resolve_name(_FIND_ROWS)(step, batch)
        except NegativeWeight:
            raise
        except Exception:  # the batch cannot be read again, or its code not run
            _LOG.debug("The rows of step %d are not known.", report.step, exc_info=True)
        _LOG.warning("%s", NonFiniteStep(report, indexes if rows else None, rows).what)

    def _check_inside(self, is_eager: bool) -> None:
        """Raises UsageError if a step inside of the user's strategy.run would not be right."""
        floatx = precisions.of(self.options.precision).floatx
        if not self._built:
            raise UsageError(
                "The step is called inside of strategy.run before it is built: call "
                "step.build(batch) before, with a batch of the dataset."
            )
        if is_eager:
            raise UsageError(
                "strategy.run is called outside of a tf.function, so that the replicas compute one "
                "after the other: wrap it, or call the step itself."
            )
        # The replicas are traced in turns, so the step cannot set it for itself.
        if tf_keras.backend.floatx() != floatx:
            raise UsageError(
                f"Inside of your own strategy.run, losses of tf_keras compute in floatx, which is "
                f"{tf_keras.backend.floatx()}: call tf_keras.backend.set_floatx({floatx!r}), or call "
                "the step outside of strategy.run."
            )
        self._check_constant()

    def _report_unread(self) -> None:
        """Prints a line if the checks of the code would need the batches of a function of the user."""
        if self.built().repeated and not self._reported_unread:
            self._reported_unread = True
            _LOG.warning(
                "ctl.Step cannot read the batches of your own tf.function: its search for losses that "
                "combine rows has compared only %s. Compare more with "
                "ctl.testing.check_loop_equivalence.",
                "an earlier batch"
                if self._example or self._calls
                else "rows that it made up, for which step.build(batch) can give it a batch",
            )

    def _check_constant(self) -> None:
        """Raises UsageError if the user's own function would keep a trace that must change later."""
        if self.built().changes():
            raise UsageError(
                "optimizer_groups with frozen_until changes the step at a step that your tf.function "
                "does not know: call the step outside of a tf.function."
            )


class _Hooks:
    """The functions of a step by the names of a trainer's methods."""

    def __init__(self, step: Step):
        self._step = step

    @property
    def per_example_loss(self) -> Callable[[Batch, Nest], tf.Tensor]:
        return self._step.loss_fn

    def preprocess(self, batch: Batch) -> Batch:
        return batch

    def forward(self, batch: Batch, training: bool) -> Nest:
        return convert(self._step.forward)(batch, training)

    def sample_weight(self, batch: Batch, training: bool) -> tf.Tensor | None:
        return convert(self._step.sample_weight)(batch, training)

    def denominator(self, batch: Batch) -> Denominator:
        return convert(self._step.denominator)(batch)

    def update_metrics(
        self, metrics: Metrics, batch: Batch, outputs: Nest, weights: tf.Tensor | None
    ) -> None:
        sample_weight = functools.partial(self.sample_weight, batch)
        metric_updates.update_by_name(metrics, batch, outputs, weights, sample_weight)

    def regularization_losses(self) -> Sequence[tf.Tensor]:
        return self._step.model.losses

    def build_parts(self) -> Sequence[Part]:
        return self._step.parts


@contextlib.contextmanager
def _report_errors() -> Iterator[None]:
    """Names what a user passed to a step in the errors of the code that runs inside."""
    with name_arguments(), explained():
        yield


def _check_arguments(strategy: Any, model: Any, optimizer: Any, loss_fn: Any, loss: Any) -> None:
    """Raises a UsageError if an argument of a step has another type, such as of another place."""
    if not isinstance(strategy, tf.distribute.Strategy):
        raise UsageError(
            f"strategy is {type_name(strategy)}, but must be a tf.distribute.Strategy."
        )
    if not callable(loss_fn) or loss not in ("rows", "mean"):
        raise UsageError(
            f"loss_fn is {type_name(loss_fn)}, but must be a function, such as lambda batch, "
            f'outputs: cross_entropy(batch["label"], outputs); loss is {loss!r}, "rows" or "mean".'
        )
    if not callable(model) or is_layer(optimizer):
        raise UsageError(
            f"model is {type_name(model)} and optimizer is {type_name(optimizer)}: pass a tf_keras "
            "model, then a tf_keras optimizer, or functions that make them."
        )


def _check_optimizers(optimizers: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises a UsageError unless there is a pair for each loss."""
    pairs = [isinstance(each, tuple) and len(each) == 2 for each in optimizers.values()]
    if not pairs or not all(pairs) or "loss_weights" in options:
        raise UsageError(
            "Several optimizers are a dict with a pair for each loss, such as "
            '{"actor": (actor, Adam()), "critic": (critic, Adam())}, and no loss_weights: scale '
            "the losses in loss_fn."
        )


def _make_options(
    model: tf_keras.Model, *, precision: str | None, on_non_finite: str, **options: Any
) -> TrainerOptions:
    """Returns the options of a step.

    Raises:
        UsageError: an option does not exist, or has no effect in a loop of one's own.
    """
    fields = inspect.signature(TrainerOptions).parameters.keys() - {*_OF_TRAINERS}
    known = fields | inspect.signature(Step).parameters.keys() - {"options"}
    for name in options:
        if name in _OF_TRAINERS:
            raise UsageError(
                f"{name} is an option of ctl.StandardTrainer: ctl.Step does not read it."
            )
        if name not in known:
            former = {"gradient_accumulation_steps": "micro_batches", "fused_attention": "kernels"}
            raise UsageError(
                f"ctl.Step has no argument {name!r}{did_you_mean(name, known, former)}"
            )
    if on_non_finite not in ("skip", "ignore"):
        raise UsageError(
            f"on_non_finite is {on_non_finite!r}, but must be 'skip' or 'ignore': the loop is yours."
        )
    if options.get("xla") == "loop":
        raise UsageError(
            "xla='loop' compiles ctl's own loop: choose 'step', 'gradients' or 'auto'."
        )
    if precision is None:
        # A function builds the model later, under the policy that the user has set.
        precision = precisions.of_model(model if is_layer(model) else None)
    return TrainerOptions(precision=precision, on_non_finite=on_non_finite, **options)
