"""One replica's step: the rows of its batch, the user's code, and the results."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
from typing import Any

import tensorflow as tf

from ctl.data.autograph import convert
from ctl.replica.arithmetic import row_mask
from ctl.replica.arithmetic.snapshot import Snapshot
from ctl.replica.arithmetic.trace import Trace
from ctl.replica.step import observers, preparations
from ctl.replica.step.attributes import Attributes
from ctl.replica.step.empty_batches import pad_rows
from ctl.replica.step.loop_results import LoopResults
from ctl.replica.step.microbatches import Batch, hide_rows, row_count
from ctl.replica.step.plan import Plan
from ctl.replica.step.update import Update, UpdateResult
from ctl.replica.updates.part import Part


class ReplicaStep:
    """Runs the user's code of a step on one replica, with everything that it needs around it.

    It knows the rows of a batch, models, optimizers and the plan, and neither data nor a loop. Create it
    in the strategy's scope, once the model is built.

        step = ReplicaStep(plan, attributes, preprocess=..., function=..., ...)
        loss = strategy.run(step.run, args=(batch, mask))

    Args:
        plan: the resolved options.
        attributes: the models, optimizers, metrics and variables that the code of a step uses.
        preprocess: prepares one replica's batch, and keeps its number of rows.
        function: the user's function, which computes and applies the updates of one replica's prepared
            batch by `update`, and returns the loss of the global batch, a scalar, or an `UpdateResult`.
        global_step: scalar int64, the number of consumed batches.
        first_batch: returns the first batch of a replica and its row mask, for the checks of the code.
        parts: what the options add to the step.

    Attributes:
        first_batch: as the argument.
        update: computes and applies one update.
        results: the mean loss of an inner loop, and its other results.
        parts: the same as the argument.
    """

    def __init__(
        self,
        plan: Plan,
        attributes: Attributes,
        *,
        preprocess: Callable[[Batch], Batch],
        function: Callable[[Batch], tf.Tensor],
        global_step: tf.Variable,
        first_batch: Callable[[], Any],
        parts: Sequence[Part] = (),
    ):
        self.plan = plan
        self.attributes = attributes
        self.parts = parts
        self.update = Update(plan, global_step, attributes.assignable, parts)
        self.results = LoopResults(plan, self.update, attributes)
        self._preprocess = preprocess
        self._function = function
        self._global_step = global_step
        self.first_batch = first_batch
        model = attributes.model
        for part in parts:
            part.create(plan, model)
        # The step is traced later, so it draws by row from the first step on.
        preparations.prepare(model, plan.options.seed)

    @contextlib.contextmanager
    def rows(
        self,
        batch: Batch,
        mask: tf.Tensor | None,
        *,
        existing: int | tf.Tensor | None = None,
        earlier: Callable[[], tf.Tensor] | None = None,
    ) -> Iterator[row_mask.Rows]:
        """Sets the rows of one replica in a `with` block; enter it in a replica context.

        Args:
            batch: this replica's rows.
            mask: [rows] mask of the rows that exist; None if all exist.
            existing: the number of rows that the input pipeline gave this replica; all by default.
            earlier: in an evaluation, the number of rows in the earlier global batches.

        Raises:
            UsageError: the code inside draws random numbers that depend on how the batch is split.
        """
        # Data has float32 masks in every precision, which a metric in float64 cannot always use.
        mask = None if mask is None else tf.cast(mask, self.plan.dtype)
        count, options = row_count(batch), self.plan.options
        first_row, _ = row_mask.row_range(count if existing is None else existing)
        # Random layers are keyed by the consumed batches, not by `iterations`: a batch after a skipped
        # one draws the same numbers whether or not the update was skipped.
        with (
            row_mask.examples(
                mask,
                first_row=tf.cast(first_row, tf.int64),
                step=self._global_step.read_value(),
                count=count,
                seed=options.seed,
                allow_unkeyed=options.allow_unkeyed_random,
                earlier=earlier,
                compiled=self.plan.compiles_update,
                kernels=options.fused_attention == "auto",
                parts=1 if earlier else self.plan.parts_per_replica,
                normalizes_parts=self.plan.per_micro_batch,
                trace=Trace((batch, mask)),
            ) as rows,
            observers.observe(self, rows),
        ):
            yield rows

    def run(self, batch: Batch, mask: tf.Tensor | None, *, equal: bool = True) -> Any:
        """Runs one replica's step; call it in a replica context.

        A skipped step leaves no trace in the loss, metrics, and variables that the user's code assigns.

        Args:
            batch: this replica's rows.
            mask: [rows] mask of the rows that exist; None if all exist.
            equal: whether all replicas are known to have the same number of rows. Otherwise their
                static numbers are not used: each replica would compute its own positions from them.

        Returns:
            The result of `function`.
        """
        if not equal:
            batch, mask = hide_rows((batch, mask))
        existing = row_count(batch)
        if self.plan.layout.replicas * self.plan.parts > 1:
            batch, mask = pad_rows(batch, mask, existing, least=self.plan.parts_per_replica)
        with self.rows(batch, mask, existing=existing) as rows:
            # The forward pass runs before anything is known of the gradients, so its assignments can
            # only be undone.
            once, summed, _ = self.attributes.assignable()
            snapshot = Snapshot([*once, *summed] if self.results.may_skip() else [])
            # As `compute`, whose frame would be one more between the loop and the user's code.
            result = convert(self._function)(self._preprocess(batch))
            loss = result.loss if isinstance(result, UpdateResult) else result
            # Decided while tracing: a step that can never be skipped has no ops for it.
            applied: tf.Tensor | bool = True
            if rows.trace.applied:
                # The user's code may compute several updates, with one entry each.
                applied = tf.reduce_all(rows.trace.applied)
                snapshot.restore_unless(applied)
            self.results.update(loss, applied)
            rows.trace.results = [result]
            own, used = self.attributes.optimizer, self.update.optimizers
            # The user's code may leave the trainer's optimizer unused, so that it counts nothing.
            optimizer = own if id(own) in used else next(iter(used.values()), own)
            for part in self.parts:
                part.end_step(optimizer, applied)
        return result

    def compute(self, batch: Batch) -> Any:
        """Runs the user's code of a step on the rows of a replica."""
        return convert(self._function)(self._preprocess(batch))

    def changes(self) -> list[int]:
        """Returns the steps from which on the step is another one, in order."""
        return sorted({step for part in self.parts for step in part.changes()})

    def begin(self, step: int) -> None:
        """Prepares the steps from one on, up to the next of `changes`."""
        for part in self.parts:
            part.begin(step)

    def split(self, first: int, count: int) -> Iterator[int]:
        """Splits steps where the step becomes another one, such as where layers are unfrozen.

        Args:
            first: the first step.
            count: the number of steps.

        Yields:
            The number of steps of each share, once the step is prepared for it.
        """
        ends = [step for step in self.changes() if first < step < first + count]
        for end in (*ends, first + count):
            self.begin(first)
            yield end - first
            first = end

    def add_models(self) -> None:
        """Prepares the models and optimizers that `attributes` holds besides the first ones.

        Raises UsageError if a pattern of the options has no effect on any of them.
        """
        self.attributes.key_new_models(self.plan.options.seed)
        models = self.attributes.named_models() if self.parts else {}
        for part in self.parts:
            part.add_models(models)
        for optimizer in self.attributes.optimizers() if self.parts else ():
            self.configure(optimizer, models)

    def configure(self, optimizer: Any, models: Mapping[str, Any] | None = None) -> None:
        """Prepares an optimizer, also one that `attributes` does not hold."""
        if self.parts and models is None:
            models = self.attributes.named_models()
        for part in self.parts:
            part.configure(optimizer, models or {})

    def check_complete(self, *, copies: bool) -> None:
        """Raises UsageError if a part lacks what the steps have created or trained.

        Args:
            copies: whether to check that the replicas hold the same values, too.
        """
        if self.parts:
            models, trained = self.attributes.named_models(), self.update.variables.values()
            for part in self.parts:
                part.check(models, trained)
        if copies:
            items = self.checkpoint_items()
            for observer in observers.load():
                observer.check_variables(items)

    def check_ready(self) -> None:
        """Raises UsageError if the models must not be trained or saved now."""
        for part in self.parts:
            part.check_ready()

    def notes(self) -> list[str]:
        """Returns lines for the user after the first loop."""
        return [line for part in self.parts for line in part.notes()]

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Sets the weights that are evaluated, such as averaged ones, within a `with` block."""
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.evaluating())
            yield

    def finish(self) -> None:
        """Sets the weights that are evaluated for good, in models that are not trained any more."""
        for part in self.parts:
            part.finish()

    def restart(self, *, keep: Collection[int] = ()) -> None:
        """Sets the state of the parts to its first values, except for some variables.

        Args:
            keep: the ids of the variables that keep their values.
        """
        for part in self.parts:
            part.restart(keep=keep)

    def describe(self) -> dict[str, str]:
        """Returns what a user must know of the updates: name of a row of `ctl explain` -> its text."""
        models, replicas = self.attributes.models(), self.plan.layout.replicas
        rows = (part.describe(models, replicas) for part in self.parts)
        return {name: text for row in rows for name, text in row.items()}

    def checkpoint_items(self) -> dict[str, Any]:
        """Returns every model, optimizer and variable, by its name in a checkpoint."""
        self.add_models()
        items = self.attributes.checkpoint_items()
        own: dict[str, Any] = {"spikes": self.update.loss_spikes}
        for part in self.parts:
            own |= part.state()
        # The names in every checkpoint, unless a subclass has an attribute of the same name.
        return items | {f"ctl_{k}" if k in items else k: state for k, state in own.items()}
