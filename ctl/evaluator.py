"""Evaluates a trainer's model, or that of a step, on every example of the evaluation data once."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import itertools
import logging
import pkgutil
from typing import Any

import numpy as np
import orbit
import tensorflow as tf
import tf_keras

from ctl.built import metrics
from ctl.built.built_step import BuiltStep
from ctl.built.evaluation import Evaluation, check_splits
from ctl.built.inner_loop import pipeline_of, step_of
from ctl.data.autograph import convert, traced
from ctl.data.input_pipeline import InputPipeline
from ctl.data.layout import Layout
from ctl.data.source import Arrays, Data, GlobalBatches, Nest, Source
from ctl.errors import UsageError, name_arguments
from ctl.hardware import strategies
from ctl.hardware.collectives import ProcessGroup
from ctl.step import Step
from ctl.trainer import StandardTrainer
from ctl.update.microbatches import unpack

_LOG = logging.getLogger("ctl")
_MOST_SEARCHED = 100  # batches, for an example that is not finite
_FIND = "ctl.built.bad_rows:find_evaluated"  # imported for a loss that is not finite
_COLLECTED = "ctl.built.collected_rows:%s"  # imported for a trainer that collects outputs
STEPS_BETWEEN_CHECKS = 20  # after which an evaluation checks whether to stop


def _never() -> bool:
    return False


class Interrupted(Exception):
    """An evaluation was stopped before its end."""


class StandardEvaluator(orbit.StandardEvaluator):
    """Evaluates a trainer's model on the data of its `build_dataset("eval", ...)`.

        evaluator = ctl.StandardEvaluator(trainer)
        evaluator.evaluate(tf.constant(-1))    # {"loss": ..., "accuracy": ..., "examples": 10000}

    With several `splits`, the outputs of each are under its name: {"eval": {...}, "test": {...}}.

    The loss is the mean of `per_example_loss` over the complete dataset, weighted by what
    `sample_weight` returns with `training=False`, without regularization. With `ema_decay` the averaged
    weights are evaluated. The loss does not depend on how the dataset is divided into batches and
    replicas.

    Args:
        trainer: provides the model, the loss, the metrics and the data.
        global_batch_size: examples per step, over all replicas; the trainer's by default.
        splits: the splits of the data to evaluate, at least one.

    Attributes:
        strategy: the trainer's strategy.
        metrics: name -> metric.
    """

    def __init__(
        self,
        trainer: StandardTrainer,
        *,
        global_batch_size: int | None = None,
        splits: Sequence[str] = ("eval",),
    ):
        super().__init__(eval_dataset=None)
        self._loop: Any = None  # the result of `create_eval_loop_fn`
        # Split -> its iterator after a complete evaluation, at the first batch again.
        self._iterators: dict[str, Any] = {}
        self.splits = tuple(splits)
        self._own_dataset: Any = None
        self._dataset: tuple[str, Any] = ("", None)  # the last split that was opened, and its data
        self._collected: Any = None  # the rows of the last evaluation, if the trainer collects any
        # Decided by the class, because tracing the method would slow down every other evaluation.
        self._collects = type(trainer).collect_outputs is not StandardTrainer.collect_outputs
        self.trainer = trainer
        self.strategy = trainer.strategy
        self.global_batch_size = global_batch_size or trainer.global_batch_size
        with StandardTrainer.build_scope(trainer):
            self.metrics = metrics.prepare(trainer.build_metrics(), trainer.weighted_metrics)
            self._sums = Evaluation(
                step_of(trainer),
                self.metrics,
                global_batch_size=self.global_batch_size,
                collect=trainer.collect_outputs if self._collects else None,
            )

    @property
    def eval_dataset(self) -> Any:
        """The distributed evaluation data; set it to evaluate batches of your own."""
        return self._open(self.splits[0])

    @eval_dataset.setter
    def eval_dataset(self, dataset: Any) -> None:
        self._own_dataset = dataset
        self._iterators = {}

    def _open(self, split: str) -> Any:
        if self._own_dataset is not None:
            return self._own_dataset
        if self._dataset[0] != split:  # drops the last split's dataset
            pipeline = pipeline_of(self.trainer)
            self._dataset = split, pipeline.evaluation_dataset(self.global_batch_size, split)
        return self._dataset[1]

    @property
    def has_known_names(self) -> bool:
        """Whether all outputs are the loss, `metrics` and the number of examples."""
        return not self._collects and type(self).eval_end is StandardEvaluator.eval_end

    def check_data(self) -> None:
        """Checks the evaluation data without reading it, so that mistakes are reported before training.

        Raises:
            UsageError: the data never ends, or the model or the loss does not accept its features.
        """
        check_splits(
            pipeline_of(self.trainer),
            self.splits,
            global_batch_size=self.global_batch_size,
            strategy=self.strategy,
            step=self._sums.run,
        )

    def evaluate(
        self,
        num_steps: tf.Tensor,
        *,
        processes: ProcessGroup | None = None,
        stop: Callable[[], bool] = _never,
    ) -> dict[str, Any]:
        """Evaluates batches.

        Args:
            num_steps: scalar, the number of batches; -1 for the complete dataset.
            processes: the processes that receive what the chief among them computes in
                `compute_metrics`; by default each process computes it.
            stop: called every `STEPS_BETWEEN_CHECKS` steps; if it returns True, the evaluation raises
                `Interrupted`. It may be a collective: every process calls it after the same steps.

        Returns:
            The outputs of `eval_end`; with several splits, a dict of split -> its outputs.

        Raises:
            UsageError: the data is corrupt or empty.
            Interrupted: `stop` returned True.
        """
        splits = self.splits if self._own_dataset is None else self.splits[:1]
        step = step_of(self.trainer)
        with step.trace_scope(), step.evaluating():
            outputs = {
                split: self._evaluate_split(split, num_steps, processes or ProcessGroup(), stop)
                for split in splits
            }
        return outputs if len(splits) > 1 else outputs[splits[0]]

    def _evaluate_split(
        self, split: str, num_steps: tf.Tensor, processes: ProcessGroup, stop: Callable[[], bool]
    ) -> Any:
        pipeline, steps = pipeline_of(self.trainer), None
        is_own = self._own_dataset is not None
        data = None if is_own else pipeline.evaluation_data(split)
        if data is not None and (data.source is not None or int(num_steps) < 0):
            steps = pipeline.evaluation_steps(self.global_batch_size, split)
        if steps is not None and not 0 <= int(num_steps) <= steps:
            num_steps = tf.constant(steps)

        def find_indexes() -> range | None:
            examples = int(self._sums.examples.numpy())
            # The replicas, or some of them, may have counted their rows of the batch that failed.
            end = examples - examples % self.global_batch_size + self.global_batch_size
            return None if is_own else range(max(0, end - 2 * self.global_batch_size), end)

        with pipeline.report_errors("evaluation", split, find_indexes):
            # As in Orbit's own `evaluate`, with arguments for what differs between evaluations.
            if self._collects:
                make = pkgutil.resolve_name(_COLLECTED % "CollectedRows")
                self._collected = make(self.trainer.collect_limit_mib, processes)
            own: Any = self  # a subclass may return a state for Orbit's `eval_reduce`
            state = own.eval_begin()
            if self._loop is None:
                self._loop = self.create_eval_loop_fn(state is not None)
            iterator = self._iterators.pop(split, None)
            if iterator is None:
                iterator = tf.nest.map_structure(iter, self._open(split))
            state = self._run_loop(iterator, int(num_steps), state, stop)
            outputs = own.eval_end(*(() if state is None else (state,)))
        if not is_own:
            step, size = step_of(self.trainer), self.global_batch_size
            _report_non_finite(step, outputs, pipeline, size, split, steps=int(num_steps))
        # TensorFlow takes milliseconds to make an iterator. It reads ahead, and only examples in memory
        # are sure to be the same in the next evaluation. A subclass may read others than it holds.
        if data is not None and int(num_steps) == steps and type(data.source) is Arrays:
            self._iterators[split] = iterator
        return outputs

    def _run_loop(self, iterator: Any, steps: int, state: Any, stop: Callable[[], bool]) -> Any:
        """Runs the loop in parts, between which it can be stopped; returns its state."""
        result, reduce = state, self.eval_reduce
        if state is None and self._collects:
            result, reduce = self._collected, type(self._collected).add
        # Up to the end of the data, which is -1 step, or with a user's own reduction, it is one part.
        is_whole = steps < 0 or (steps > 0 and state is not None)
        size = steps if is_whole else STEPS_BETWEEN_CHECKS
        for done in range(0, steps, size):
            if done and stop():
                raise Interrupted
            count = tf.constant(min(size, steps - done))
            result = self._loop(iterator, count, state=result, reduce_fn=reduce)
        return None if state is None else result

    def create_eval_loop_fn(self, has_state: bool) -> Any:
        """Returns Orbit's loop over batches."""
        # As in Orbit, except that AutoGraph converts an overridden `eval_step`, but not ctl's.
        step = traced(lambda iterator: convert(self.eval_step)(iterator))
        if strategies.spec_of(self.strategy).coordinated:
            return _coordinated_loop(step)
        return orbit.utils.create_loop_fn(step)

    def eval_begin(self) -> None:
        """Resets the sums and the metrics."""
        self._sums.reset()

    def eval_step(self, iterator: Any) -> Any:
        """Runs one step on every replica; Orbit calls it in its loop.

        Returns:
            The values that `collect_outputs` returned for the rows of the global batch; else None.
        """
        batch, row_mask = unpack(next(iterator))
        if strategies.spec_of(self.strategy).coordinated:  # the coordinator evaluates by itself
            rows = self._sums.run(batch, row_mask)
        else:
            # TensorFlow may divide a dataset of the user unequally among the workers.
            equal = not (
                self._own_dataset is not None and strategies.spec_of(self.strategy).multi_process
            )
            run = functools.partial(self._sums.run, equal=equal)
            rows = self.strategy.run(run, args=(batch, row_mask))
        self._sums.count_batch()
        if not self._collects:
            return None
        # Each replica has the rows of all replicas.
        return tf.nest.map_structure(lambda v: self.strategy.experimental_local_results(v)[0], rows)

    def eval_end(self) -> dict[str, Any]:
        """Returns the loss (if the trainer defines one), the metrics and the number of examples."""
        results = self._sums.results()
        examples = results.pop("examples")
        return {**results, **self._compute_metrics(results), "examples": examples}

    def _compute_metrics(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the trainer's metrics of all examples, which the chief computes."""
        if not self._collects:
            return {}
        compute = pkgutil.resolve_name(_COLLECTED % "compute")
        computed = compute(self.trainer.compute_metrics, self._collected)
        clash = sorted(computed.keys() & {*results, "examples"})
        if clash:
            raise UsageError(
                f"compute_metrics returned {clash[0]!r}, which the evaluation has already: choose "
                "another name."
            )
        return computed


def _coordinated_loop(step: Callable[[Any], Any]) -> Any:
    """Returns a loop without Orbit's `async_scope`, whose end would wait for lost workers."""

    def loop(iterator: Any, num_steps: tf.Tensor, *, state: Any, reduce_fn: Any) -> Any:
        done, total = 0, int(num_steps)
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            while done != total:
                outputs = step(iterator)
                if state is not None:
                    state = reduce_fn(state, outputs)
                done += 1
        return state

    return loop


def _report_non_finite(
    step: BuiltStep,
    results: Nest,
    pipeline: InputPipeline,
    batch_size: int,
    split: str = "eval",
    *,
    steps: int,
) -> None:
    """Prints the first example that makes the loss of an evaluation not finite.

    Args:
        step: computes the losses.
        results: those of the evaluation.
        pipeline: reads the first batches again.
        batch_size: the number of rows of a global batch.
        split: the split that was evaluated.
        steps: the number of batches that were evaluated; negative for all.
    """
    loss = results.get("loss") if isinstance(results, Mapping) else None
    is_number = isinstance(loss, float | np.ndarray | np.floating | tf.Tensor)
    if not is_number or np.isfinite(np.asarray(loss)).all():  # others are the user's own
        return
    batches = pipeline.evaluation_data(split).evaluation(Layout(batch_size, 1), prefetch=0)
    count = min(steps, _MOST_SEARCHED) if steps >= 0 else _MOST_SEARCHED
    first = pkgutil.resolve_name(_FIND)(step, itertools.islice(batches, count))
    place = "" if first is None else f": the features or the loss of example {first} are not finite"
    _LOG.warning("The loss of the evaluation of %s is not finite%s.", split, place)


def evaluate(
    step: Step,
    data: Data | Any,
    metrics: Mapping[str, tf_keras.metrics.Metric] | None = None,
    *,
    weighted_metrics: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Evaluates the model of a step on every example of a dataset, once.

    The loss is the weighted mean of the loss function over the dataset, without regularization. It does
    not depend on how the dataset is divided into batches and replicas. With `ema_decay` the averaged
    weights are evaluated.

        ctl.evaluate(step, source, {"accuracy": accuracy})      # {"loss": ..., "accuracy": ..., ...}

    Args:
        step: the step, after `build`.
        data: a `ctl.data.Source`, a `tf.data.Dataset` of single examples, `ctl.data.GlobalBatches`, or a
            finite distributed dataset.
        metrics: name -> metric, made in the strategy's scope. Pass the same objects in each call: the
            evaluation of other objects is traced again.
        weighted_metrics: the names of the metrics that are weighted by the weights of the losses.

    Returns:
        "loss", the metrics by name, and "examples", the number of examples: numbers, and a list of a
        metric with several values.

    Raises:
        UsageError: there are no examples.
    """
    batches: Nest = data
    errors: Any = contextlib.nullcontext()
    if isinstance(data, Source | tf.data.Dataset | GlobalBatches | Mapping | tuple):
        pipeline = InputPipeline(
            lambda split, context: data, strategy=step.strategy, seed=step.options.seed, prefetch=-1
        )
        with name_arguments():
            steps = pipeline.evaluation_steps(step.global_batch_size)
            # The batches of a source have no end.
            batches = itertools.islice(pipeline.evaluation_dataset(step.global_batch_size), steps)
        errors = pipeline.report_errors("evaluation", "eval", lambda: None)
    with errors:
        results = step.evaluate(batches, metrics or {}, weighted_metrics)
    if batches is not data:
        with step.averaged_weights():
            _report_non_finite(
                step.built(), results, pipeline, step.global_batch_size, steps=steps or -1
            )
    return {name: value.numpy().tolist() for name, value in results.items()}
