"""A trainer's options -> the update that its step computes and applies."""

from collections.abc import Callable, Sequence
import logging
from typing import Any, NamedTuple

import tensorflow as tf
import tf_keras

from ctl.configs import compatibility
from ctl.configs.options import TrainerOptions
from ctl.data.layout import Layout
from ctl.errors import UsageError
from ctl.hardware import strategies
from ctl.replica import gradients, model_building, precision, row_mask
from ctl.replica import xla as replica_compile
from ctl.replica.loss_spikes import LossSpikes
from ctl.replica.non_finite import LOSS, SPIKE, NonFiniteRecorder
from ctl.replica.norms import Norms
from ctl.replica.step import Losses, Result, Step

_LOG = logging.getLogger("ctl")


class Update:
    """Computes and applies the one update that a global batch defines.

        update = Update(options, model=model, layout=layout)
        result = update(batch, losses, weight=None, variables=variables, optimizer=optimizer,
                        regularization=lambda: model.losses)     # in a replica context

    Attributes:
        choice: the options that bear on each other.
        xla: what XLA compiles, never "auto".
        xla_why: why, in a few words.
        skipped_steps: int64 variable: updates left out because they overflowed.
        spikes: the last losses, which tell a spike.
        non_finite: what notes the steps that are left out; None if nobody looks.
        norms: of gradients, parameters and updates, or None if not asked for.
    """

    def __init__(
        self,
        options: TrainerOptions,
        *,
        model: tf_keras.Model,
        layout: Layout,
        full: bool,
        chunks: bool = True,
        strings: bool = False,
    ):
        """Checks what bears on each other; call it under the strategy's scope.

        Args:
            options: the trainer's.
            model: the built model.
            layout: how a global batch falls to the replicas.
            full: whether every batch is a full one.
            chunks: whether many batches may travel at once, to steps that ctl alone calls.
            strings: whether a batch holds strings.

        Raises:
            UsageError: a combination cannot be right.
        """
        count = options.gradient_accumulation_steps
        if count > layout.rows_per_replica:
            raise UsageError(
                f"gradient_accumulation_steps is {count}, and a replica has "
                f"{layout.rows_per_replica} rows a batch: want at most that."
            )
        if options.logical_shards and not full:
            raise UsageError(
                "logical_shards wants full batches, of one known size: batch with "
                "drop_remainder=True, or let ctl batch single examples."
            )
        self.choice, self.xla_why = _choose_xla(
            options, model=model, layout=layout, chunks=chunks, strings=strings
        )
        self.xla = self.choice.xla
        floatx = tf.as_dtype(precision.of(options.precision).floatx)
        self._needs_scale = options.precision == "float16"
        self._model = model
        self.skipped_steps = counter("skipped_steps")
        # Workers of parameter servers step by themselves: nobody decides for all of them.
        together = self.choice.strategy != "parameter_server"
        if not together:
            _refuse_common_decisions(options)
        if options.on_non_finite == "skip" and self.choice.strategy == "tpu":
            raise UsageError(
                "on_non_finite=skip applies an update under a condition of all replicas, which "
                "TensorFlow refuses on a TPU: choose rollback, stop or ignore."
            )
        # Always there, since it is in every checkpoint: a run may begin to ask later.
        self.spikes = LossSpikes(options.loss_spike, dtype=floatx)
        looks = options.on_non_finite != "ignore" and together
        self.non_finite = NonFiniteRecorder() if looks else None
        self._skips = looks and options.on_non_finite == "skip"
        self.norms = Norms(floatx) if options.norms else None
        self._unused: list[str] = []
        self._step = Step(
            global_batch_size=layout.global_batch_size,
            micro_batches=options.gradient_accumulation_steps,
            clip=options.clip,
            dtype=floatx,
            reduce_dtype=tf.bfloat16 if options.all_reduce_dtype else None,
            shards=options.logical_shards,
            jit=self.xla == "gradients",
        )

    def __call__(
        self,
        batch: dict[str, tf.Tensor],
        losses: Losses,
        *,
        weight: tf.Tensor | None,
        variables: Sequence[tf.Variable],
        optimizer: Any,
        regularization: Callable[[], Sequence[tf.Tensor]],
    ) -> Result:
        """Applies the update, on every replica alike.

        Args:
            batch: this replica's rows, preprocessed.
            losses: a micro-batch -> [rows] losses, not reduced, and anything to hand along.
            weight: [rows] sample weights, or None for 1.
            variables: what to train.
            optimizer: a tf_keras optimizer; in a LossScaleOptimizer, steps that overflow are
                left out.
            regularization: gives the scalars to add once.

        Returns:
            What the step came to.
        """
        scaled = precision.has_loss_scale(optimizer)
        if self._needs_scale and not scaled:
            raise UsageError(
                "Under float16 every optimizer needs a loss scale: give minimize one in a "
                "tf_keras.mixed_precision.LossScaleOptimizer."
            )
        gated = scaled or self._skips
        state = _State(self._model) if gated else None
        result = self._step.global_gradients(
            batch,
            losses,
            variables=variables,
            weight=weight,
            regularization=regularization,
            loss_scale=optimizer.loss_scale if scaled else None,
        )
        self._warn_unused(result.gradients, variables)
        before = self.norms.before(variables) if self.norms else []
        verdict = self._judge(result, variables)
        if state:
            state.put_back_unless(verdict.right)
            self._apply_if_right(result, verdict, variables, optimizer)
        else:
            gradients.apply(optimizer, result.gradients, variables)
            self._note_unless_right(verdict)
        if self.norms:
            applied = verdict.right if gated else tf.constant(True)
            self.norms.update(result.unclipped, before, variables, finite=applied)
        return result

    def _judge(self, result: Result, variables: Sequence[tf.Variable]) -> "_Verdict":
        names = [LOSS, *(variable.name for variable in variables)]
        if not self.spikes.factor:
            return _Verdict(result.finite, result.flags, names)
        usual = tf.logical_not(self.spikes.seen(result.loss))
        flags = tf.concat([result.flags[:1], [usual], result.flags[1:]], axis=0)
        return _Verdict(tf.logical_and(result.finite, usual), flags, [LOSS, SPIKE, *names[1:]])

    def _note_unless_right(self, verdict: "_Verdict") -> None:
        """Where the run is to stop, an update need not wait for the look at all gradients."""
        noted = self.non_finite
        if noted:
            position = noted.position(verdict.names)
            serious = tf.constant(True)
            gradients.unless(
                verdict.right,
                (_global_step(), verdict.flags),
                lambda step, flags: noted.note(step, position, flags, serious=serious),
            )

    def _apply_if_right(
        self,
        result: Result,
        verdict: "_Verdict",
        variables: Sequence[tf.Variable],
        optimizer: Any,
    ) -> None:
        scaled = precision.has_loss_scale(optimizer)
        noted, position = self.non_finite, 0
        if noted:
            position = noted.position(verdict.names)
        # An overflow that a smaller loss scale mends is nothing to tell; a spike is.
        mended = (optimizer.loss_scale > 1 if optimizer.dynamic else True) if scaled else False
        serious = tf.logical_or(result.finite, tf.logical_not(mended))

        def skip(step: tf.Tensor, flags: tf.Tensor, serious: tf.Tensor) -> None:
            self.skipped_steps.assign_add(1)
            if noted:
                noted.note(step, position, flags, serious=serious)

        def decided(overflow: Any) -> None:
            if scaled:
                precision.update_loss_scale(optimizer, overflow)

        gradients.apply_if(
            verdict.right,
            # Not the LossScaleOptimizer's own apply_gradients, which counts a skipped step in
            # `iterations`, and so moves schedules and Adam's bias correction.
            optimizer.inner_optimizer if scaled else optimizer,
            result.gradients,
            variables,
            overflow=tf.where(result.finite, 0.0, float("inf")),
            told=(_global_step(), verdict.flags, serious),
            otherwise=skip,
            decided=decided,
        )

    def _warn_unused(
        self, found: Sequence[gradients.Gradient], variables: Sequence[tf.Variable]
    ) -> None:
        names = [v.name for g, v in zip(found, variables, strict=True) if g is None]
        if names and names != self._unused:
            self._unused = names
            _LOG.warning("The loss does not depend on %s: left as it is.", ", ".join(names))


class _Verdict(NamedTuple):
    """What is thought of a step: whether it is right, and which of the named things are."""

    right: tf.Tensor
    flags: tf.Tensor
    names: list[str]


def _refuse_common_decisions(options: TrainerOptions) -> None:
    """Refuses what is decided for all replicas at once."""
    if options.on_non_finite in ("skip", "rollback"):
        raise UsageError(
            f"on_non_finite={options.on_non_finite} is decided for all replicas at once, and workers "
            "of parameter servers step by themselves: choose stop or ignore."
        )
    if options.loss_spike:
        raise UsageError(
            "loss_spike is told by the losses in their order, and workers of parameter servers step "
            "by themselves: set it to 0."
        )


def _global_step() -> tf.Tensor:
    whole = row_mask.current()
    return tf.cast(whole.step if whole else 0, tf.int64)


class _State:
    """What the forward pass of a step changes of a model: moving statistics.

    A step that is left out leaves them out too: those of a batch that is not finite are not.
    """

    def __init__(self, model: tf_keras.Model):
        """Copies them; call it in a replica context, before the forward pass."""
        # A layer can change no other variable in a replica context.
        self._variables = [
            v
            for v in model.non_trainable_variables
            if v.synchronization == tf.VariableSynchronization.ON_READ
            or v.aggregation != tf.VariableAggregation.NONE
        ]
        self._before = [tf.identity(variable) for variable in self._variables]

    def put_back_unless(self, finite: tf.Tensor) -> None:
        """Undoes the changes of a step that is left out."""
        for variable, before in zip(self._variables, self._before, strict=True):
            variable.assign(tf.where(finite, tf.convert_to_tensor(variable), before))


def counter(name: str) -> tf.Variable:
    """An int64 variable that all replicas count alike; call it under the strategy's scope."""
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return tf.Variable(0, dtype=tf.int64, trainable=False, name=name, aggregation=first)


def _choose_xla(
    options: TrainerOptions,
    *,
    model: tf_keras.Model,
    layout: Layout,
    chunks: bool,
    strings: bool,
) -> tuple[compatibility.Choice, str]:
    """The options that bear on each other, checked, with what `xla` comes to, and why to that."""
    sync = model_building.has_sync_batch_norm(model)
    gpu = bool(tf.config.list_logical_devices("GPU"))
    mode, why = replica_compile.choose(
        options.xla,
        gpu=gpu,
        replicas=layout.replicas,
        sync_batch_norm=sync,
        shards=bool(options.logical_shards),
        chunks=chunks,
        strings=strings,
        strategy=strategies.strategy_name(tf.distribute.get_strategy()),
    )
    if strings and mode in ("loop", "step"):
        raise UsageError(
            f"runtime.xla={mode} compiles the whole step, and XLA takes no strings: leave them out "
            "of the batch, or choose runtime.xla=off."
        )
    choice = compatibility.Choice(
        replicas=layout.replicas,
        precision=options.precision,
        xla=mode,
        sync_batch_norm=sync,
        micro_batches=options.gradient_accumulation_steps,
        per_micro_batch=options.model.get("sync_batch_norm") == "per_micro_batch",
        shards=options.logical_shards,
        reduce_dtype=options.all_reduce_dtype,
        batch=layout.global_batch_size,
        strategy=strategies.strategy_name(tf.distribute.get_strategy()),
    )
    compatibility.check(choice)
    if mode == "autocluster":
        replica_compile.enable_autoclustering(gpu=gpu)
    return choice, why
