"""The step of a trainer or a `ctl.Step`: the rows of a batch, the user's code, and the results."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
import functools
import inspect
import logging
import types
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.built import observers, preparations
from ctl.built.attributes import Attributes, freezing
from ctl.built.explanations import explained
from ctl.built.hooks import names_of_attributes
from ctl.built.loop_results import LoopResults
from ctl.built.state import Trackable, assignable, checkpoint_items
from ctl.data.autograph import convert
from ctl.errors import LateUsageError, UsageError
from ctl.keras import precision
from ctl.keras.models import inner
from ctl.keras.precision import Optimizer
from ctl.rows import row_mask
from ctl.rows.trace import Trace
from ctl.update import loss
from ctl.update.empty_batches import pad_rows
from ctl.update.gradients import optimizers_of
from ctl.update.microbatches import Batch, Target, hide_rows, row_count
from ctl.update.part import Part, restored_variables
from ctl.update.plan import Plan
from ctl.update.preprocessing import Hooks, call_sample_weight, preprocess
from ctl.update.snapshot import Snapshot
from ctl.update.update import Update, UpdateResult

_LOG = logging.getLogger("ctl")
# Functions that a trace contains, of a trainer or of a `ctl.Step`, whoever sets them on the object.
_FUNCTIONS = (
    "loss_fn", "preprocess", "forward", "per_example_loss", "sample_weight", "regularization_losses",
    "update_metrics", "transform_gradients", "denominator",
)  # fmt: skip
_STEPS = ("replica_step", "train_step")
_UNSAVED = (
    "%s assigns a variable that the trainer or ctl.Step does not hold: it is in no checkpoint, and a "
    "skipped step does not restore it. Make it an attribute of the trainer or step, of a layer or of a "
    "tf.Module that it holds."
)

_OWN_UPDATE = (
    "train_step updates the model itself, and only `ctl check` tests whether that update depends on how "
    "the batch is split: call super().train_step(iterator), whose replica_step calls self.minimize."
)
_MOST_CONSTANTS = 1_000  # of a list, which are compared before each step


class BuiltStep:
    """Runs the user's code of a step on one replica, with everything that it needs around it.

    It knows the rows of a batch, models, optimizers and the plan, and neither data nor a loop. Create it
    in the strategy's scope, once the model is built. A loop traces `run`:

        step = BuiltStep(plan, attributes, hooks, ...)
        step.prepare()
        for count in step.split(100):
            if step.must_trace():
                steps = tf.function(...)        # calls strategy.run(step.run, args=(batch, mask))
            steps(count)
            step.note_trace()
        step.finish_loop()

    Args:
        plan: the resolved options.
        attributes: the models, optimizers, metrics and variables that the code of a step uses.
        hooks: the user's functions.
        function: computes and applies the updates of one replica's prepared batch by `update`, and
            returns the loss of the global batch, a scalar; `update_model` by default.
        global_step: scalar int64, the number of consumed batches.
        first_batch: returns the next batch of a replica and its row mask, for the checks of the code;
            with a number from 0 to 1, a batch of that part of the epoch, if it can be read.
        parts: what the options add to the step.

    Attributes:
        hooks: as the argument.
        first_batch: as the argument; the inner loop of a trainer sets it.
        update: computes and applies one update.
        results: the mean loss of an inner loop, and its other results.
        parts: the same as the argument.
        checks_copies: whether the first steps end with a comparison of the replicas' variables.
        is_unfinished: whether `finish_loop` was not called since the last trace.
        late: checks of the last trace that read the function around the step, when it is complete.
        repeated: checks of the last trace that are repeated for the batches of steps 1, 2, 4, ...
    """

    def __init__(
        self,
        plan: Plan,
        attributes: Attributes,
        hooks: Hooks,
        *,
        function: Callable[[Batch], tf.Tensor] | None,
        global_step: tf.Variable,
        first_batch: Callable[..., Any] | None,
        parts: Sequence[Part] = (),
    ):
        self.plan = plan
        self.attributes = attributes
        self.hooks = hooks
        self.parts = parts
        held = functools.partial(assignable, attributes)
        self.update = Update(plan, global_step, held, parts, attributes.models)
        self.results = LoopResults(plan, self.update, attributes)
        self._function = function or self.update_model
        self._global_step = global_step
        self.first_batch: Any = first_batch
        self.checks_copies = plan.layout.replicas > 1
        self.is_unfinished = self._is_evaluating = False
        self.transforms = False  # whether the user has a transform_gradients
        self.late: list[Callable[[], object]] = []
        self.repeated: list[Callable[[Sequence[Callable[[], Any]]], object]] = []
        # What the trace depends on. Tuples, because the models in lists are searched for further models.
        self._layers: tuple[tf_keras.layers.Layer, ...] = ()
        self._optimizers: tuple[Optimizer, ...] = ()
        self._regularizers: list[tuple[dict[str, Any], str, Any]] = []
        self._state: object = None
        self.outer: Any = None  # the numbers around the user's functions, which a check notes
        model = self._model = attributes.model
        for part in parts:
            part.create(plan, model)
        # The step is traced later, so it draws by row from the first step on.
        preparations.prepare(model, plan.options.seed)
        # A trainer may have another attribute called parts.
        kept = ("strategy", "options", *(() if hooks is attributes.owner else ("parts",)))
        self._kept = {name: getattr(attributes.owner, name) for name in kept}
        # Attributes that the trace contains as constants; those that no hook names may count loops.
        methods = (*_FUNCTIONS, *_STEPS)
        self._names = sorted(names_of_attributes(type(attributes.owner), methods))

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
                kernels=options.kernels == "auto",
                micro_batches=1 if earlier else self.plan.micro_batches,
                normalizes_micro_batches=self.plan.per_micro_batch,
                trace=Trace((batch, mask)),
            ) as rows,
            observers.observe(self, rows),
        ):
            yield rows

    def run(
        self,
        batch: Batch,
        mask: tf.Tensor | None,
        *,
        equal: bool = True,
        other: Any = None,
        details: bool = False,
        when: tf.Tensor | None = None,
    ) -> tf.Tensor | UpdateResult:
        """Runs one replica's step; call it in a replica context.

        A skipped step leaves no trace in the loss, metrics, and variables that the user's code assigns.

        Args:
            batch: this replica's rows.
            mask: [rows] mask of the rows that exist; None if all exist.
            equal: whether all replicas are known to have the same number of rows. Otherwise their
                static numbers are not used: each replica would compute its own positions from them.
            other: as for `pad_rows`.
            details: whether to return the `UpdateResult` of `update_model`.
            when: the argument of `update_model`, if that is the function of the step.

        Returns:
            The loss of the global batch, or the `UpdateResult`.
        """
        if not equal:
            batch, mask = hide_rows((batch, mask))
        existing = row_count(batch)
        if self.plan.is_split:
            batch, mask = pad_rows(
                batch, mask, existing, least=self.plan.micro_batches, other=other
            )
        with self.rows(batch, mask, existing=existing) as rows:
            # The forward pass runs before anything is known of the gradients, so its assignments can
            # only be undone.
            once, summed, _ = assignable(self.attributes)
            may_skip = when is not None or self.results.may_skip()
            restored = [*once, *summed, *restored_variables(self.parts)]
            snapshot = Snapshot(restored if may_skip else [])
            # As `compute`, whose frame would be one more between the loop and the user's code.
            with tf.GradientTape() as tape:
                prepared = preprocess(self.hooks, batch)
            self.update.untrained.warn_of_hook("preprocess", tape, prepared)
            result = convert(self._function)(prepared, *([] if when is None else [when]))
            self.update.untrained.warn(self.update.variables.values())
            is_result = isinstance(result, UpdateResult)
            loss, wanted_by = (result.loss, result.when) if is_result else (result, None)
            # Decided while tracing: a step that can never be skipped has no ops for it.
            applied: tf.Tensor | bool = True
            rows.trace.applied += [] if wanted_by is None else [wanted_by]
            if rows.trace.applied:
                # The user's code may compute several updates, with one entry each.
                applied = tf.reduce_all(rows.trace.applied)
                snapshot.restore_unless(applied)
            wanted = [each for each in rows.trace.wanted if each is not None]
            if wanted and len(wanted) == len(rows.trace.wanted):  # a step without any update
                applied = tf.logical_and(applied, tf.reduce_any(wanted))
            self.results.update(loss, applied)
            rows.trace.results = [result]
            own, used = self.attributes.optimizer, self.update.optimizers
            # The user's code may leave the trainer's optimizer unused, so that it counts nothing.
            optimizer = own if id(own) in used else next(iter(used.values()), own)
            with row_mask.of_update("end"):
                for part in self.parts:
                    part.end_step(optimizer, applied)
        return result if details else loss

    def compute(self, batch: Batch) -> tf.Tensor | UpdateResult:
        """Runs the user's code of a step on the rows of a replica."""
        return convert(self._function)(preprocess(self.hooks, batch))

    def update_model(self, batch: Batch, when: tf.Tensor | None = None) -> UpdateResult:
        """Computes and applies the update of the first model, if `when` holds; updates its metrics."""
        hooks, attributes = self.hooks, self.attributes
        variables = attributes.trained_variables()
        result = self.update(
            batch,
            hooks.per_example_loss,
            forward=functools.partial(hooks.forward, training=True),
            sample_weight=self.sample_weight(batch, variables),
            targets=[Target(variables, attributes.optimizer, hooks.regularization_losses, when)],
            denominator=convert(hooks.denominator)(batch),
        )
        self.results.update_metrics(result.micro_batches, hooks.update_metrics)
        return result

    def sample_weight(
        self, batch: Batch, variables: Sequence[tf.Variable] | None
    ) -> loss.SampleWeight:
        """Calls the user's `sample_weight`.

        Args:
            batch: this replica's rows, preprocessed.
            variables: what the update trains; None if the user has chosen it, so that another update
                may train what the weights depend on.
        """
        rows = row_mask.current()
        if variables is None or (rows and rows.trace.losses_only):
            return call_sample_weight(self.hooks, batch, training=True)
        with tf.GradientTape() as tape:
            weights = call_sample_weight(self.hooks, batch, training=True)
        self.update.untrained.warn_of_hook("sample_weight", tape, weights)
        return weights

    def functions(self) -> list[Any]:
        """Returns the functions of the user, and other attributes that they read."""
        owner = self.attributes.owner
        functions = [getattr(owner, name, None) for name in (*_FUNCTIONS, *_STEPS)]
        return functions + [inspect.getattr_static(owner, name, None) for name in self._names]

    # Around the steps of a loop.

    def prepare(self) -> None:
        """Prepares the models and optimizers that were added since the last loop.

        Raises UsageError if the models must not be trained now, or a pattern of the options has no
        effect on any of them.
        """
        self.check_ready()
        self.add_models()

    def changes(self) -> list[int]:
        """Returns the steps from which on the step is another one, in order."""
        return sorted({step for part in self.parts for step in part.changes()})

    def begin(self, step: int) -> None:
        """Prepares the steps from one on, up to the next of `changes`."""
        for part in self.parts:
            part.begin(step)

    def split(self, count: int) -> Iterator[int]:
        """Splits the next steps where the step becomes another one by a part.

        Args:
            count: the number of steps.

        Yields:
            The number of steps of each share, once the step is prepared for it.
        """
        changes = self.changes()
        # The variable is not read without need: a loop of the user calls this for each step.
        first = int(self._global_step.numpy()) if changes else 0
        ends = [step for step in changes if first < step < first + count]
        for end in (*ends, first + count):
            self.begin(first)
            yield end - first
            first = end

    def must_trace(self, *, search: bool = False) -> bool:
        """Returns whether the last trace would compute something else by now.

        A trace contains the variables that were trainable, so that freezing a layer would have no
        effect; and it measures, or not.

        Args:
            search: whether to search for further layers and optimizers, which takes as long as a small
                step.

        Raises:
            UsageError: a variable is trainable that the optimizer does not know.
        """
        self._check_replaced()
        if search:
            self._search()
        state = None if self._state is None else self._read_state()
        if state is not None and state == self._state:
            return False
        if self.outer:
            self.outer.name_changed()
        # A user's own step may pass other variables, or another optimizer.
        if not (self.plan.own_replica_step or self.plan.own_train_step):
            self.attributes.check_slot_variables()
        self.note_trace()
        self.repeated.clear()  # they belong to the last trace
        self.late.clear()
        self.is_unfinished = True
        return True

    def finish_loop(self) -> None:
        """Checks what the first steps after a trace have created or trained.

        Raises:
            UsageError: a part lacks it, or the replicas hold different values after the first steps.
        """
        if self.parts:
            models, trained = self.attributes.named_models(), self.update.variables.values()
            for part in self.parts:
                part.check(models, trained)
        if self.checks_copies:
            items = self.checkpoint_items()
            for observer in observers.load(split=self.plan.is_split):
                observer.check_variables(items)
        for place in self.update.unsaved:
            _LOG.warning(_UNSAVED, place)
        self.check_late()
        if self.is_unfinished and self.plan.own_train_step and not self.update.variables:
            _LOG.warning(_OWN_UPDATE)
        self.update.unsaved.clear()  # a later trace lists its own
        self.checks_copies = self.is_unfinished = False

    def check_late(self) -> None:
        """Runs the checks of the last trace that read the function around the step."""
        while self.late:
            observers.checked(self.late.pop(0))

    def repeat_checks(self, batches: Sequence[Callable[[], Any]]) -> None:
        """Repeats the checks of the code for other batches.

        Args:
            batches: return batches as `first_batch` does.

        Raises:
            LateUsageError: a check failed.
        """
        try:
            for check in self.repeated if batches else ():
                observers.checked(check, batches)
        except UsageError as error:
            raise LateUsageError(str(error)) from error

    @contextlib.contextmanager
    def trace_scope(self) -> Iterator[None]:
        """Sets the precision of the options for the code that is traced inside, and explains its errors.

        Layers that a first call creates, and losses such as Huber's, read the global precision.
        """
        with precision.scope(self.plan.options.precision), explained():
            yield

    def _search(self) -> None:
        self._layers = tuple(self.attributes.layers())
        # By name, because a loop of the user reads the values for each step.
        own = [inner(layer) for layer in self._layers]
        self._numbers = [(vars(layer), tuple(_numbers(layer))) for layer in own]
        self._regularizers = [
            (values, name, values[name])
            for values, names in self._numbers
            for name in names
            if name.endswith("_regularizer") and name != "activity_regularizer"
        ]
        held = [value for _, _, value in self._regularizers]
        held += [v for layer in self._layers for v in _penalties(layer)]
        self._numbers += [(vars(v), tuple(vars(v))) for v in held if getattr(v, "__dict__", None)]
        self._optimizers = tuple(self.attributes.optimizers())

    def note_trace(self) -> None:
        """Notes what the trace depends on; call it after its steps, and before code of the user.

        A trace may build further layers, and the step of a GAN may freeze and unfreeze a model in it.
        """
        self._search()
        self._state = self._read_state()

    def _read_state(self) -> object:
        """Returns what a trace depends on, besides its batch and its variables."""
        # A layer that gets another layer is noticed, too.
        layers = [
            (
                freezing(layer),
                [_size(each) for each in layer._self_tracked_trackables],
                _penalties(layer),
            )
            for layer in self._layers
        ]
        optimizers = [each for o in self._optimizers for each in optimizers_of(o)]
        rates = [each._learning_rate for each in optimizers]
        rates = [rate for rate in rates if not isinstance(rate, tf.Variable)]  # schedules
        # Such as momentum and the rate of dropout, which are constants of the trace.
        # The length shows an attribute that hides one of the class.
        numbers: list[Any] = [
            [len(values), *map(_constant, map(values.get, names))]
            for values, names in self._numbers
        ]
        numbers += [_numbers(each) for each in optimizers]
        owner = self.attributes.owner
        own = [getattr(owner, name, None) for name in _FUNCTIONS]
        # Without properties, which may compute anything.
        own += [_constants(inspect.getattr_static(owner, name, None)) for name in self._names]
        own += self.outer.values() if self.outer else []
        used = (
            self._optimizers,
            self.attributes.optimizer,
            rates,
            numbers,
            self.results.measures_waiting,
        )
        return layers, used, own, {**self.attributes.metrics}

    def _check_replaced(self) -> None:
        """Raises UsageError if an object was replaced by one that the built step cannot use."""
        owner, optimizer = self.attributes.owner, precision.inner(self.attributes.optimizer)
        if owner.global_batch_size != self.plan.layout.global_batch_size:
            raise UsageError(
                f"global_batch_size was {self.plan.layout.global_batch_size} when the step was built, "
                f"and is {owner.global_batch_size} now: make a new trainer or ctl.Step."
            )
        for name, kept in self._kept.items():
            value = getattr(owner, name)
            if value is not kept and value != kept:
                raise UsageError(
                    f"{name} was replaced after the step was built: make a new trainer or ctl.Step."
                )
        for values, name, value in self._regularizers:
            if values[name] is not value:
                raise UsageError(
                    f"{name} of a layer was replaced after a step, but Keras reads it when it makes the "
                    f"weights: set its numbers, such as layer.{name}.l2, or make a new model."
                )
        if self._state is not None and inner(self.attributes.model) is not inner(self._model):
            raise UsageError(
                "The model was replaced after a step, but the optimizer has slot variables for the "
                "first one: assign weights (set_weights), or make a new trainer or ctl.Step."
            )
        if vars(owner).get("transform_gradients") and not self.transforms:
            raise UsageError(
                "transform_gradients was set after the step was built: make a new trainer or ctl.Step "
                "with it."
            )
        schedule = tf_keras.optimizers.schedules.LearningRateSchedule
        is_schedule = isinstance(getattr(optimizer, "_learning_rate", None), schedule)
        if is_schedule and not hasattr(optimizer, "_current_learning_rate"):
            raise UsageError(
                "learning_rate of the optimizer was set to a schedule after the optimizer was made: "
                "pass the schedule to its constructor, or set numbers."
            )

    # Models, checkpoints and descriptions.

    def add_models(self) -> None:
        """Prepares the models and optimizers that `attributes` holds besides the first ones.

        Raises UsageError if a pattern of the options has no effect on any of them.
        """
        self.attributes.key_new_models(self.plan.options.seed)
        self.attributes.add_held()
        models = self.attributes.named_models() if self.parts else {}
        for part in self.parts:
            part.add_models(models)
        for optimizer in self.attributes.optimizers() if self.parts else ():
            self.configure(optimizer, models)

    def configure(
        self, optimizer: Optimizer, models: Mapping[str, tf_keras.Model] | None = None
    ) -> None:
        """Prepares an optimizer, also one that `attributes` does not hold."""
        if self.parts and models is None:
            models = self.attributes.named_models()
        for part in self.parts:
            part.configure(optimizer, models or {})

    def check_ready(self) -> None:
        """Raises UsageError within `evaluating`, whose weights must not be trained or saved."""
        if self._is_evaluating and any(part.evaluated for part in self.parts):
            raise UsageError(
                "The model has the averaged weights within trainer.averaged_weights(): train and save "
                "outside of it."
            )

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Sets the weights that are evaluated, such as averaged ones, within a `with` block."""
        if self._is_evaluating:  # a block inside of another one
            yield
            return
        self.exchange()
        self._is_evaluating = True
        try:
            yield
        finally:
            self.exchange()
            self._is_evaluating = False

    def finish(self) -> None:
        """Sets the weights that are evaluated, for models that are not trained or saved any more."""
        self.exchange()
        self._is_evaluating = True

    def exchange(self) -> None:
        """Exchanges the weights with those that are evaluated."""
        for part in self.parts:
            part.exchange()

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

    def checkpoint_items(self) -> dict[str, Trackable]:
        """Returns every model, optimizer and variable, by its name in a checkpoint."""
        self.add_models()
        items = checkpoint_items(self.attributes.owner)
        own: dict[str, Trackable] = {"spikes": self.update.loss_spikes}
        for part in self.parts:
            state = part.state()
            if again := own.keys() & state.keys():
                raise UsageError(
                    f"{part.name} has a state named {min(again)!r}, as another part of the update has: "
                    "return another name in its state()."
                )
            own |= state
        # The names in every checkpoint, unless a subclass has an attribute of the same name.
        return items | {f"ctl_{k}" if k in items else k: state for k, state in own.items()}


def _numbers(value: object) -> dict[str, Any]:
    """Returns the public attributes of a layer or an optimizer that are numbers or functions."""
    return {
        name: each
        for name, each in vars(value).items()
        if name[0] != "_" and (isinstance(each, bool | int | float | None) or callable(each))
    }


def _constant(value: object) -> object:
    """Returns a number, a text or a function, which a trace contains; None for anything else."""
    return value if isinstance(value, bool | int | float | str) or callable(value) else None


def _penalties(layer: Any) -> list[Any]:
    """Returns what computes the penalties of a layer, with the regularizers of weights of Keras 3."""
    functions = [each.func for each in layer._callable_losses]  # add_loss
    return [getattr(layer, "activity_regularizer", None), *functions]


def _constants(value: object) -> list[bool | float | str | None]:
    """Returns a number or text, which a trace contains, or those in a list, dict or namespace."""
    held = vars(value) if isinstance(value, types.SimpleNamespace) else value
    held = [*held.values()] if isinstance(held, dict) else held
    held = held[:_MOST_CONSTANTS] if isinstance(held, list | tuple) else [held]
    return [each if isinstance(each, bool | int | float | str) else None for each in held]


def _size(tracked: object) -> int:
    """Counts the layers of an attribute that is a list or dict, to which a user may append."""
    return len(tracked) if isinstance(tracked, list | dict) else 1
