"""StandardTrainer: subclass it with a model, data and a loss, and override as much more as you need."""

import abc
from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import pkgutil
from typing import Any

import numpy as np
import orbit
import tensorflow as tf
import tf_keras

from ctl.built.build import build_scope, build_trainer
from ctl.built.metric_updates import update_by_name
from ctl.built.state import Trackable
from ctl.compile import xla
from ctl.configs.options import TrainerOptions
from ctl.data.autograph import convert
from ctl.data.source import Batch, Data, Nest
from ctl.errors import UsageError
from ctl.hardware import garbage, strategies
from ctl.keras import precision
from ctl.keras.precision import Optimizer
from ctl.update.gradients import Gradient
from ctl.update.microbatches import unpack
from ctl.update.non_finite import NonFiniteReport
from ctl.update.part import Part
from ctl.update.preprocessing import call_model, call_sample_weight, uint8_images

_MINIMIZE = "ctl.built.minimizing:minimize"  # imported for a replica_step of a user


class StandardTrainer(orbit.StandardTrainer, metaclass=abc.ABCMeta):
    """Trains a model by a step whose update is a function of the global batch alone.

        class Digits(ctl.StandardTrainer):
            def build_model(self):
                return tf_keras.Sequential([tf_keras.layers.Flatten(), tf_keras.layers.Dense(10)])

            def build_dataset(self, split, input_context):
                return ctl.data.idx("experiments/data/mnist", split)

            def per_example_loss(self, batch, outputs):
                return tf_keras.losses.sparse_categorical_crossentropy(
                    batch["label"], outputs, from_logits=True)

        trainer = Digits(global_batch_size=64, optimizer=lambda: tf_keras.optimizers.Adam(1e-3))
        trainer.train(tf.constant(1000))

    The methods to override come first, from small to large; each is given what the ones before it
    returned. A batch is a dict of tensors of shape [rows, ...].

    Args:
        global_batch_size: examples per update, over all replicas and micro-batches.
        optimizer: an optimizer made in the strategy's scope, or a function that makes one. It may be
            omitted if the class overrides `build_optimizer`.
        strategy: the strategy whose replicas compute a step; the current strategy by default.
        options: all other options, which are frozen.

    Attributes:
        model: the result of `build_model`.
        optimizer: the tf_keras optimizer; its `iterations` counts the applied updates.
        metrics: name -> metric of the training loop.
        collect_limit_mib: MiB of the memory of the host that the values of `collect_outputs` may use; a
            subclass may set another limit.
        export_formats: the formats of an exported model, names in `ctl/loop/exports.py`; a
            subclass may choose others.
        weighted_metrics: the names of the metrics that are weighted by `sample_weight`; a subclass may
            name some, or () for none.
        global_step: int64 variable, the number of consumed batches, which is the position in the data.
        skipped_steps: int64 variable, the number of updates that were not applied.
        non_finite_report: the steps of the last loop that were not finite; None if all were.

    Raises:
        UsageError: the options cannot compute the right update with this model, data or strategy.
    """

    collect_limit_mib = 1024.0
    export_formats: Sequence[str] = ("saved_model", "keras")
    weighted_metrics: Sequence[str] | None = None
    model: tf_keras.Model
    optimizer: Optimizer
    metrics: dict[str, tf_keras.metrics.Metric]
    global_step: tf.Variable
    skipped_steps: tf.Variable
    non_finite_report: NonFiniteReport | None
    _train_loop_fn: Any  # of Orbit's class, which has no type hints
    _train_iter: Any

    def __init__(
        self,
        *,
        global_batch_size: int,
        optimizer: Optimizer | Callable[[], Optimizer] | None = None,
        strategy: tf.distribute.Strategy | None = None,
        options: TrainerOptions | None = None,
    ):
        super().__init__(train_dataset=None)
        self.strategy = strategy or tf.distribute.get_strategy()
        self.global_batch_size = global_batch_size
        self.options = options or TrainerOptions()
        self.non_finite_report = None
        # The only private attribute, so that the private attributes of a subclass do not collide.
        self._ctl_loop = build_trainer(self, optimizer, StandardTrainer)

    # What a subclass must define.

    @abc.abstractmethod
    def build_model(self) -> tf_keras.Model:
        """Builds the model; called once, in `build_scope`.

        def build_model(self):
            return tf_keras.Sequential([tf_keras.layers.Flatten(), tf_keras.layers.Dense(10)])
        """

    @abc.abstractmethod
    def build_dataset(self, split: str, input_context: tf.distribute.InputContext) -> Data:
        """Builds the examples of a split.

            def build_dataset(self, split, input_context):
                images, labels = read(split)
                return ctl.data.arrays({"image": images, "label": labels})

        Args:
            split: "train", or one of `eval.splits`, which is "eval" by default.
            input_context: the input pipeline of `ctl.data.PerReplica` data. For all other data it
                describes a single pipeline, since every pipeline reads ALL examples: ctl selects the
                rows of each replica.

        Returns:
            A `ctl.data.Source`; a `tf.data.Dataset` of single examples, in the same order in every
            run; or `ctl.data.GlobalBatches` or `ctl.data.PerReplica`. The elements of a dataset are
            dicts; `(x, y)` and `(x, y, w)` are read as {"x": x, "label": y, "weight": w}, where y may be
            a dict of targets, and x one of features; of these, "weight" becomes "x/weight".
        """

    def per_example_loss(self, batch: Batch, outputs: Nest) -> tf.Tensor | Mapping[str, tf.Tensor]:
        """Computes the loss of each example; not needed if `replica_step` is overridden.

            def per_example_loss(self, batch, outputs):
                return tf.square(batch["label"] - outputs[:, 0])

        Args:
            batch: what `preprocess` returned, [rows, ...] each.
            outputs: what `forward` returned.

        Returns:
            [rows] losses, not reduced: ctl divides once, by the weight of the global batch. Losses of
            tokens or pixels, [rows, ...], require weights of the same shape from `sample_weight`. A
            loss that compares rows reads the rows of the global batch by `ctl.replica.all_gather`.
            Several losses are a dict of name -> losses: `loss_weights` has the factor of each in the
            sum that is minimized, and each is reported as NAME_loss.
        """
        raise UsageError(f"{type(self).__name__} does not define per_example_loss.")

    # What a subclass may override, from small to large.

    def preprocess(self, batch: Batch) -> Batch:
        """Prepares a batch on the device, so that uint8 is sent there instead of floats.

            def preprocess(self, batch):
                return {**batch, "image": tf.cast(batch["image"], self.compute_dtype) / 127.5 - 1}

        By default, uint8 features with three or more axes are images and are scaled to [0, 1]. Labels
        and weights are unchanged.
        """
        images = uint8_images(batch)
        return {**batch, **{k: tf.cast(batch[k], self.compute_dtype) / 255 for k in images}}

    def forward(self, batch: Batch, training: bool) -> Nest:
        """Computes the model's outputs.

            def forward(self, batch, training):
                return self.model(batch["image"], training=training)

        By default the model is called with the one feature that is neither `label` nor `weight`, or
        with a dict of them if there are several. A functional model gets those that it has inputs for.
        """
        return call_model(self.model, batch, training=training)

    def sample_weight(
        self, batch: Batch, training: bool = True
    ) -> tf.Tensor | Mapping[str, tf.Tensor | None] | None:
        """Returns the weights of the losses, in their shape; `batch["weight"]` by default.

            def sample_weight(self, batch, training=True):
                return tf.where(batch["label"] == 0, 2.0, 1.0) if training else None

        Data with a weight and no label is rejected, unless this method or `preprocess` is overridden.

        The loss of the global batch is sum(weights x losses) / sum(weights). So if the weight of an
        example is its number of tokens, its loss must be the mean over its tokens, not the sum.

        Args:
            batch: what `preprocess` returned.
            training: False in an evaluation, in which weights of classes should not count. An
                override without this argument weights training and evaluation alike.

        Returns:
            [rows] weights, or [rows, ...] for losses of that shape; None for 1. Of several losses it is
            a dict of name -> weights, or the weights of each.
        """
        return batch.get("weight")

    def denominator(self, batch: Batch) -> str | tf.Tensor | Mapping[str, str | tf.Tensor]:
        """Returns what the weighted sum of the losses of the global batch is divided by.

            def denominator(self, batch):
                return tf.reduce_sum(batch["positive"], axis=1)  # of each image

        Args:
            batch: what `preprocess` returned.

        Returns:
            "weights" for the sum of the weights; "batch" for the number of rows; "none" for no division,
            in which case an evaluation reports the loss per row; or [rows, ...] numbers, whose sum over
            the rows of all replicas and micro-batches is the denominator: if it is 0, the loss is 0.
            Of several losses it may be a dict of name -> one of these.
        """
        return "weights"

    def regularization_losses(self) -> Sequence[tf.Tensor]:
        """Returns scalars that depend on the variables alone; they are added once per update.

        def regularization_losses(self):
            return [1e-4 * tf.nn.l2_loss(v) for v in self.model.trainable_variables if v.shape.rank > 1]
        """
        return self.model.losses

    def build_optimizer(self, optimizer: Optimizer | Callable[[], Optimizer] | None) -> Optimizer:
        """Returns the optimizer; called in `build_scope`, after `build_model`.

            def build_optimizer(self, optimizer):
                return MyWrapper(optimizer())

        Args:
            optimizer: the constructor's argument. In an experiment it is a function that makes the
                optimizer of the config's section `optimizer`.

        Returns:
            A tf_keras optimizer. By default `optimizer()`, or `optimizer` itself if it is one.
        """
        if optimizer is None:
            raise UsageError(
                "The trainer has no optimizer: pass its constructor optimizer=..., or override "
                "build_optimizer."
            )
        return optimizer() if callable(optimizer) else optimizer

    def build_parts(self) -> Sequence[Part]:
        """Builds parts of your own of the update; called in `build_scope`, after `build_optimizer`.

        def build_parts(self):
            return [MyPart()]
        """
        return []

    def transform_gradients(
        self, gradients: list[Gradient], variables: list[tf.Variable]
    ) -> Sequence[Gradient]:
        """Changes the gradients of the global batch before they are clipped; called once per update.

            def transform_gradients(self, gradients, variables):
                return [None if g is None else tf.sign(g) for g in gradients]  # without embeddings

        The random numbers of `ctl.random` in it are the same on every replica.

        Args:
            gradients: tensors, unscaled; for a variable of which the loss reads some rows, such as that
                of an embedding, `tf.IndexedSlices` of the rows that are not zero, in their order; None
                for a variable that has none.
            variables: the variables, in the same order.

        Returns:
            The new gradients, in the same order. A variable whose gradient is None stays unchanged.
        """
        return gradients

    def build_metrics(self) -> dict[str, tf_keras.metrics.Metric]:
        """Builds the metrics by name; called in `build_scope`, for training and for evaluation.

            def build_metrics(self):
                return {"accuracy": tf_keras.metrics.SparseCategoricalAccuracy()}

        Every row counts once, with all its tokens, but in the metrics that the attribute
        `weighted_metrics` names the weights of the loss count, as in Keras:

            weighted_metrics = ["accuracy"]
        """
        return {}

    def build_actions(self) -> Sequence[Callable[[Any], Any]]:
        """Builds the actions to run after loops and evaluations: `ctl.Action`s or Orbit's.

        def build_actions(self):
            return [ctl.as_action(lambda outputs: print(outputs["loss"]), at="train")]
        """
        return []

    def update_metrics(
        self,
        metrics: Mapping[str, tf_keras.metrics.Metric],
        batch: Batch,
        outputs: Nest,
        weights: tf.Tensor | None,
    ) -> None:
        """Updates the metrics with one replica's batch, or with one of its micro-batches.

            def update_metrics(self, metrics, batch, outputs, weights):
                ctl.replica.update_metric(metrics["accuracy"], batch["label"], outputs["class"], weights)

        By default every metric compares `batch["label"]` with the outputs, of any shapes that
        tf_keras' `compile` accepts. If both are dicts, the metric "age" or "age_error" compares the
        label "age" with the output "age". An override calls `ctl.replica.update_metric`, which removes
        padding, or the metric's own `update_state`.

        Args:
            metrics: what `build_metrics` returned.
            batch: what `preprocess` returned.
            outputs: what `forward` returned.
            weights: [rows], 1 for a row that exists and 0 for padding; None if all exist. It does not
                contain the loss' sample weights: multiply it by them to weight the metrics as well, or
                name the metrics in `weighted_metrics`, which this method weights by default.
        """
        sample_weight = functools.partial(call_sample_weight, self, batch)
        update_by_name(metrics, batch, outputs, weights, sample_weight)

    def collect_outputs(self, batch: Batch, outputs: Nest) -> dict[str, tf.Tensor]:
        """Returns the values that an evaluation collects for `compute_metrics`; none by default.

            def collect_outputs(self, batch, outputs):
                return {"label": batch["label"], "score": outputs[:, 0]}

        Args:
            batch: what `preprocess` returned.
            outputs: what `forward` returned.

        Returns:
            name -> [rows, ...] floats, integers or bools. Return scores and not images: the values
            of all examples are in the memory of the host (`collect_limit_mib`).
        """
        return {}

    def compute_metrics(self, collected: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        """Computes metrics that are not sums over batches; called once per evaluation.

            def compute_metrics(self, collected):
                return {"auc": sklearn.metrics.roc_auc_score(collected["label"], collected["score"])}

        Args:
            collected: what `collect_outputs` returned, [examples, ...]: every example once, in the
                order of the data.

        Returns:
            name -> number, which the evaluation returns like those of `build_metrics`.
        """
        return {}

    def serve(self, features: Batch) -> Nest:
        """Computes the outputs of an exported model; `ctl.load` calls it, too.

            def serve(self, features):
                return tf.nn.softmax(super().serve(features))

        By default `preprocess` and then `forward`, as in an evaluation.

        Args:
            features: [rows, ...] raw features, as `build_dataset` gives them. A label or weight that
                `preprocess` reads is 0 and must not change the outputs.

        Returns:
            A tensor, or a dict or sequence of tensors, [rows, ...] each.
        """
        return convert(self.forward)(convert(self.preprocess)(features), training=False)

    def export_signatures(self) -> dict[str, Callable[[Batch], Nest]]:
        """Returns the signatures of an exported model: name -> function of the raw features.

        def export_signatures(self):
            return {"serving_default": self.serve, "logits": super().serve}
        """
        return {"serving_default": self.serve}

    def replica_step(self, batch: Batch) -> tf.Tensor:
        """Computes one replica's step; an override calls `minimize` for each update, as in a GAN.

            def replica_step(self, batch):
                image, label = ctl.random.mixup(batch["image"], batch["label"])
                return super().replica_step({**batch, "image": image, "label": label})

        Args:
            batch: this replica's rows, preprocessed.

        Returns:
            The loss of the global batch, a scalar, the same on every replica.
        """
        return self._ctl_loop.step.update_model(batch).loss

    # What a subclass seldom overrides.

    def minimize(
        self,
        batch: Batch,
        loss_fn: Callable[[Batch], tf.Tensor],
        *,
        variables: Sequence[tf.Variable] | None = None,
        optimizer: Optimizer | None = None,
        regularization: Callable[[], Sequence[tf.Tensor]] | None = None,
        denominator: str | tf.Tensor | None = None,
        when: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Computes and applies the one update that the global batch defines.

        Call it in `replica_step`, on every replica.

        Args:
            batch: this replica's rows, preprocessed.
            loss_fn: micro-batch -> [rows] losses, not reduced, as for `per_example_loss`.
            variables: the variables to train; by default the model's trainable variables, and those of
                this trainer that `per_example_loss` reads.
            optimizer: the trainer's by default. Under float16 it must be a LossScaleOptimizer.
            regularization: returns scalars to add once. By default, the penalties of the layers that
                hold `variables`, of any model; `regularization_losses` if it is overridden, or if
                `variables` is None.
            denominator: what the loss is divided by; by default, what the method `denominator` returns.
            when: scalar tensor of bools, the same on every replica, such as `self.global_step % 5 == 0`.
                Where it is False, the update is computed and leaves nothing behind: no weight, slot,
                moving statistic or count of the optimizer changes. Always applied by default.

        Returns:
            The loss of the global batch, the same on every replica.
        """
        minimize = pkgutil.resolve_name(_MINIMIZE)
        updates, conditions = {"": (variables, optimizer)}, {"": when}
        step = self._ctl_loop.step
        return minimize(step, batch, loss_fn, updates, denominator, conditions, regularization).loss

    def minimize_each(
        self,
        batch: Batch,
        loss_fn: Callable[[Batch], Mapping[str, tf.Tensor]],
        updates: Mapping[str, tuple[Sequence[tf.Variable], Optimizer]],
        *,
        denominator: str | tf.Tensor | Mapping[str, str | tf.Tensor] | None = None,
        when: Mapping[str, tf.Tensor] | tf.Tensor | None = None,
    ) -> dict[str, tf.Tensor]:
        """Minimizes several losses of one forward pass, each by its own variables and optimizer.

            losses = self.minimize_each(batch, self.losses, {
                "actor": (self.actor.trainable_variables, self.actor_optimizer),
                "critic": (self.critic.trainable_variables, self.critic_optimizer)})

        All gradients are those of the weights before the first update, and are reduced together. Each
        update is checked, clipped and applied, or skipped, by itself. Call it in `replica_step`.

        Args:
            batch: this replica's rows, preprocessed.
            loss_fn: micro-batch -> a dict of name -> [rows] losses, not reduced.
            updates: name of a loss -> the variables that it trains, and their optimizer. The penalties
                of their layers are added, as by `minimize`.
            denominator: as for `minimize`, or a dict of name -> one.
            when: as for `minimize`, or a dict with the condition of some of the updates.

        Returns:
            name -> the loss of the global batch, the same on every replica.
        """
        minimize = pkgutil.resolve_name(_MINIMIZE)
        conditions = when if isinstance(when, Mapping) else dict.fromkeys(updates, when)
        step = self._ctl_loop.step
        result = minimize(step, batch, loss_fn, updates, denominator, conditions)
        return dict(zip(updates, result.losses, strict=True))

    def train_step(self, iterator: Any) -> None:
        """Runs one step on every replica; `iterator` yields batches, or `(batch, row_mask)`."""
        inner_loop = self._ctl_loop
        batch, row_mask = unpack(inner_loop.step.results.input_wait.next(iterator))
        # TensorFlow may divide a dataset of the user unequally among the workers.
        is_multi_process = strategies.spec_of(self.strategy).multi_process
        equal = not (inner_loop.own_dataset and is_multi_process)
        step: Callable[..., tf.Tensor] = functools.partial(inner_loop.step.run, equal=equal)
        step = xla.jit(step) if inner_loop.plan.xla == "step" else step
        loss = self.strategy.run(step, args=(batch, row_mask))
        # A step that fails is not counted.
        with tf.control_dependencies(list(self.strategy.experimental_local_results(loss))):
            self.global_step.assign_add(1)

    def train(self, num_steps: tf.Tensor) -> dict[str, Any] | None:
        """Trains `num_steps` (scalar int32) steps and returns what `train_loop_end` returns.

        Raises:
            UsageError: the data is corrupt or has ended, or a step does not fit into memory.
            NonFiniteStep: a step was not finite, and the options do not say to skip it.
        """
        inner_loop = self._ctl_loop
        inner_loop.prepare(int(num_steps))
        waiting = inner_loop.step.results.reduction_wait.active()
        with inner_loop.step.trace_scope(), inner_loop.report_errors(), waiting:
            # As in Orbit's own `train`, except that the user may freeze layers in `train_loop_begin`.
            self.train_loop_begin()
            for steps in inner_loop.step.split(int(num_steps)):
                inner_loop.retrace_if_changed()
                if self._train_iter is None:
                    self._train_iter = tf.nest.map_structure(iter, self.train_dataset)
                if self._train_loop_fn is None:
                    self._train_loop_fn = self.create_train_loop_fn()
                    # Traced before its first call, so that the pause ends before the steps begin.
                    if isinstance(self._train_loop_fn, tf.types.experimental.PolymorphicFunction):
                        with garbage.pause_collection():
                            self._train_loop_fn.get_concrete_function(
                                self._train_iter, tf.constant(steps)
                            )
                self._train_loop_fn(self._train_iter, tf.constant(steps))
                inner_loop.step.note_trace()
            outputs = self.train_loop_end()
        self.non_finite_report = inner_loop.finish_loop()
        return outputs

    def train_loop_begin(self) -> None:
        """Resets the loss and the metrics of the loop."""
        self._ctl_loop.step.results.reset()

    def train_loop_end(self) -> dict[str, Any]:
        """Returns the mean loss, the metrics, and the other results that the options ask for."""
        return self._ctl_loop.step.results.read()

    def create_train_loop_fn(self) -> Any:
        """Returns the inner loop: Orbit's, one XLA program, or the one of a coordinator."""
        if strategies.spec_of(self.strategy).coordinated:
            from ctl.hardware.coordinator import CoordinatedLoop

            return CoordinatedLoop(super().create_train_loop_fn(), strategy=self.strategy)
        return self._ctl_loop.compiled_loop or super().create_train_loop_fn()

    @property
    def train_dataset(self) -> Any:
        """The distributed training data; set it to train on batches of your own."""
        return self._train_dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Any) -> None:
        self._ctl_loop.use_own_dataset()
        # Orbit's attributes: the next loop makes an iterator of the new data.
        self._train_dataset, self._train_iter = dataset, None

    def checkpoint_items(self) -> dict[str, Trackable]:
        """Returns the items of a checkpoint: every model, optimizer and variable, even in lists."""
        return self._ctl_loop.step.checkpoint_items()

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Gives the model the averaged weights within a `with` block, to evaluate or export them.

        Without `ema_decay` it has no effect. The evaluator uses it by itself.
        """
        return self._ctl_loop.step.evaluating()

    def build_scope(self) -> contextlib.AbstractContextManager[None]:
        """Returns the strategy's scope with the options' seed and precision, to build more models."""
        return build_scope(self.options, self.strategy)

    @property
    def compute_dtype(self) -> tf.DType:
        """The dtype that layers compute in."""
        return tf.as_dtype(precision.of(self.options.precision).compute)

    @property
    def variable_dtype(self) -> tf.DType:
        """The dtype of the variables."""
        return tf.as_dtype(precision.of(self.options.precision).floatx)
