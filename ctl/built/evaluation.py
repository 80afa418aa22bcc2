"""The sums of an evaluation on one replica, the means over the dataset, and checks of the data."""

from collections.abc import Callable, Iterable, Mapping
import logging
import pkgutil
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.built import metrics
from ctl.built.built_step import BuiltStep
from ctl.built.metrics import check_names
from ctl.built.state import assignable, state_of
from ctl.configs.error_location import error_location
from ctl.data.autograph import convert, traced
from ctl.data.features import flatten_features
from ctl.data.input_pipeline import InputPipeline
from ctl.data.source import Batch, Nest
from ctl.errors import UsageError
from ctl.hardware import strategies
from ctl.keras import precision
from ctl.update import loss
from ctl.update.empty_batches import pad_rows, zero_outputs, zero_without_rows
from ctl.update.microbatches import hide_rows, row_count
from ctl.update.non_finite import counter
from ctl.update.preprocessing import call_sample_weight, preprocess
from ctl.update.snapshot import Snapshot

LossFn = Callable[[Batch, Nest], tf.Tensor]
_LOG = logging.getLogger("ctl")
_GATHER = "ctl.built.collected_rows:gather"  # imported for a trainer that collects outputs
_RESTORED = (
    "The evaluation assigns %s, which has its old value again afterwards: use a metric of build_metrics "
    "for a value that is to be reported."
)


class Evaluation:
    """Adds the rows of one replica to the sums of an evaluation; create it in the strategy's scope.

        evaluation = Evaluation(step, metrics, global_batch_size=64)
        evaluation.reset()
        strategy.run(evaluation.run, args=(batch, row_mask))
        evaluation.results()                        # {"loss": ..., "accuracy": ..., "examples": 64}

    Args:
        step: the training step, with the user's functions, the rows, the precision and the seed.
        metrics: name -> metric.
        global_batch_size: examples per step, over all replicas.
        collect: (batch, outputs) -> values to collect; None to collect nothing.

    Attributes:
        metrics: name -> metric.
        examples: int64 variable, the number of examples so far.
    """

    def __init__(
        self,
        step: BuiltStep,
        metrics: dict[str, tf_keras.metrics.Metric],
        *,
        global_batch_size: int,
        collect: Callable[[Batch, Nest], Mapping[str, tf.Tensor]] | None = None,
    ):
        check_names(metrics, step.plan)
        self.metrics = metrics
        self.examples = _accumulator("examples", tf.int64)
        self._factors = step.plan.options.loss_weights or loss.SINGLE
        self._loss_sums = {k: _accumulator("loss_sum", tf.float64) for k in self._factors}
        self._weight_sums = {k: _accumulator("weight_sum", tf.float64) for k in self._factors}
        self._batches = counter("batches")
        self._step = step
        self._global_batch_size = global_batch_size
        self._collect = collect
        # Whether the evaluation draws random numbers: without them, batches need not be counted.
        self._draws = False
        self._warned: set[int] = set()
        # The values that the metrics of layers have in the training loop, on each replica.
        self._of_training: list[tuple[tf.Variable, np.ndarray]] = []

    def reset(self) -> None:
        """Resets the sums and the metrics."""
        sums = (*self._loss_sums.values(), *self._weight_sums.values())
        for variable in (*sums, self.examples, self._batches):
            variable.assign(tf.zeros_like(variable))
        self._restore_layer_metrics()  # after an evaluation that was interrupted
        of_layers = self._step.attributes.layer_metrics(self.metrics).values()
        copies = [c for m in of_layers for v in m.variables for c in getattr(v, "values", (v,))]
        self._of_training = [(copy, copy.numpy()) for copy in copies]
        for metric in (*self.metrics.values(), *of_layers):
            metric.reset_state()

    def run(self, batch: Batch, row_mask: tf.Tensor | None, *, equal: bool = True) -> Nest:
        """Evaluates one replica's rows; call it in a replica context.

        Args:
            batch: this replica's rows.
            row_mask: [rows] mask of the rows that exist; None if all exist.
            equal: as for `BuiltStep.run`.

        Returns:
            The values that `collect` returned for the rows of the global batch; else None.
        """
        batch, row_mask = (batch, row_mask) if equal else hide_rows((batch, row_mask))
        existing, hooks = row_count(batch), self._step.hooks
        if self._step.plan.layout.replicas > 1:
            batch, row_mask = pad_rows(batch, row_mask, existing, least=1)
        counted = lambda: self._batches.read_value() * self._global_batch_size  # noqa: E731
        with self._step.rows(batch, row_mask, existing=existing, earlier=counted) as rows:
            state = Snapshot(self._state())
            row_mask = rows.row_mask  # of floats, whereas a user's own mask may be of bools
            batch = preprocess(hooks, batch)
            outputs = precision.cast_to_float32(convert(hooks.forward)(batch, training=False))
            outputs = zero_outputs(outputs, row_mask, row_count(batch))
            if self._step.plan.has_loss:
                self._add_loss(batch, outputs, row_mask)
            self._check_assignments(state)
            earlier = state.assigned()
            metrics.call(hooks.update_metrics, self.metrics, batch, outputs, row_mask)
            collected = None
            if self._collect:
                values = convert(self._collect)(batch, outputs)
                collected = pkgutil.resolve_name(_GATHER)(values, row_count(batch))
            rows.trace.results = [collected]
            for key in state.assigned().keys() - earlier.keys() - self._warned:
                self._warned.add(key)
                _LOG.warning(_RESTORED, state.assigned()[key])
            # A training step must not depend on whether, and on what, the model was evaluated.
            state.restore()
            self._draws = self._draws or bool(rows.calls)
        count = row_count(batch) if row_mask is None else tf.reduce_sum(row_mask)
        self.examples.assign_add(tf.cast(count, tf.int64))
        return collected

    def count_batch(self) -> None:
        """Counts a global batch, by which random numbers are keyed; call it after `run`."""
        if self._draws:
            self._batches.assign_add(1)

    def results(self) -> dict[str, tf.Tensor]:
        """Returns the loss, if there is a loss function, the metrics and the number of examples.

        Raises:
            UsageError: there was no example.
        """
        if int(self.examples.numpy()) == 0:
            raise UsageError("The evaluation dataset is empty: at least one example is required.")
        of_layers = self._step.attributes.layer_metrics(self.metrics)
        results = metrics.results(self.metrics) | metrics.results(of_layers)
        self._restore_layer_metrics()
        if self._step.plan.has_loss:
            means = {
                name: tf.math.divide_no_nan(total, self._weight_sums[name].read_value())
                for name, total in self._loss_sums.items()
            }
            named = {f"{name}_loss": mean for name, mean in means.items() if name}
            results = {"loss": loss.weighted_sum(means, self._factors), **named, **results}
        return {**results, "examples": self.examples.read_value()}

    def _add_loss(self, batch: Batch, outputs: Nest, row_mask: tf.Tensor | None) -> None:
        losses = loss.compute(self._step.hooks.per_example_loss, batch, outputs, self._factors)
        sample_weight = call_sample_weight(self._step.hooks, batch, training=False)
        weights = loss.weights_by_name(sample_weight, losses, row_mask, tf.float64)
        rows, one = row_count(batch), tf.ones([], tf.float64)
        denominator = convert(self._step.hooks.denominator)(batch)
        numbers = loss.denominator_numbers(
            denominator, weights, row_mask, rows, tf.float64, training=False
        )
        for name, own in weights.items():
            per_example = tf.cast(losses[name], tf.float64)
            [per_example] = zero_without_rows([per_example], row_mask, rows)
            # The sum of the losses: the division by the weight of the dataset comes at the end.
            self._loss_sums[name].assign_add(loss.contribution(per_example, own, one, rows=rows))
            own = numbers[name]
            weight = tf.cast(rows, tf.float64) if own is None else tf.reduce_sum(own)
            self._weight_sums[name].assign_add(weight)

    def _restore_layer_metrics(self) -> None:
        for copy, value in self._of_training:
            copy.assign(value)
        self._of_training = []

    def _state(self) -> list[tf.Variable]:
        """Returns the variables that an evaluation leaves as they are."""
        own = {id(v) for metric in self.metrics.values() for v in metric.variables}
        return [v for v in state_of(self._step.attributes) if id(v) not in own]

    def _check_assignments(self, state: Snapshot) -> None:
        """Raises UsageError if the code of the user has assigned a variable that is not restored."""
        held = assignable(self._step.attributes)
        own = [v for metric in self.metrics.values() for v in metric.variables]
        # With several replicas, the code of the others is traced in between.
        own += [*self._loss_sums.values(), *self._weight_sums.values(), self.examples]
        places = state.places_of_others([*held.once, *held.summed, *own])
        if places:
            raise UsageError(
                f"{places[0]} assigns a variable in an evaluation, which cannot restore it: make it an "
                "attribute of the trainer, of a layer or of a tf.Module that the trainer holds."
            )


def _accumulator(name: str, dtype: tf.DType) -> tf.Variable:
    """Creates a variable whose value is the sum of the replicas' own values."""
    return tf.Variable(
        tf.zeros([], dtype),
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def check_splits(
    pipeline: InputPipeline,
    splits: Iterable[str],
    *,
    global_batch_size: int,
    strategy: tf.distribute.Strategy,
    step: Callable[[Batch, tf.Tensor | None], Nest],
) -> None:
    """Checks the data of an evaluation before training, without reading it.

    Args:
        pipeline: the data.
        splits: the splits to evaluate.
        global_batch_size: examples per step of the evaluation.
        strategy: the strategy of the evaluation.
        step: evaluates one replica's `(batch, row_mask)`.

    Raises:
        UsageError: a split never ends, or the model or the loss does not accept its features.
    """
    training = pipeline.element_spec()
    for split in splits:
        pipeline.evaluation_steps(global_batch_size, split)
        evaluation = pipeline.element_spec(split)
        # The first step of the training traces the same code with the same features.
        if evaluation == training or strategies.spec_of(strategy).coordinated:
            continue
        rows = pipeline.layout(global_batch_size).rows_per_replica
        spec = tf.nest.map_structure(
            lambda s, rows=rows: tf.TensorSpec([rows, *s.shape[1:]], s.dtype), evaluation
        )
        function = traced(lambda batch: strategy.run(step, (batch, None)))
        try:
            function.get_concrete_function(spec)  # traces the step and does not run it
        except Exception as error:
            kind = "evaluation" if split == "eval" else repr(split)
            raise UsageError(
                f"The {kind} examples are not like the training examples ("
                f"{_describe_differences(evaluation, training)}) and cannot be evaluated: "
                f"{error_location(error)}"
            ) from error


def _describe_differences(evaluation: dict[str, Any], training: dict[str, Any]) -> str:
    """Lists the features whose specs differ."""

    def show(spec: Nest) -> str:
        if not isinstance(spec, tf.TensorSpec):
            return "missing" if spec is None else str(spec)
        return f"{spec.dtype.name} {spec.shape[1:]}"

    evaluation, training = flatten_features(evaluation), flatten_features(training)
    return "; ".join(
        f"{name} is {show(evaluation.get(name))} instead of {show(training.get(name))}"
        for name in sorted(evaluation.keys() | training.keys())
        if evaluation.get(name) != training.get(name)
    )
