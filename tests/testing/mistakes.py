"""Trainers and loops that each have one planted mistake, and the cause that must be reported."""

import dataclasses
import functools

import tensorflow as tf
import tf_keras

import ctl
from ctl.testing.diagnosis import causes
from tests.testing import gallery, loop_gallery
from tests.testing.gallery import CLASSES, FEATURES, MEAN, SUM, Right, all_reduce

layers = tf_keras.layers


class ReducedTwice:
    """Gradients are summed by all_reduce, and again by the optimizer."""

    def apply_summed(self, gradients, variables):
        # By default apply_gradients sums over the replicas again.
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))


class LocalMean:
    """The loss is the mean of the local batch."""

    def share_of_loss(self, batch, outputs):
        return tf.reduce_mean(self.per_example_loss(batch, outputs))


class Averaged:
    """Shares of the loss are averaged over the replicas."""

    def apply(self, gradients, variables):
        self.apply_summed(all_reduce(MEAN, gradients), variables)


class MeanOfMeans:
    """The loss is a mean of the replicas' means."""

    def share_of_loss(self, batch, outputs):
        losses = self.per_example_loss(batch, outputs)
        total, rows = tf.reduce_sum(self.masked(batch, losses)), self.count_rows(batch, losses)
        return tf.math.divide_no_nan(total, rows) / self.strategy.num_replicas_in_sync


class PaddingCounted:
    """Padding counts in the loss."""

    def masked(self, batch, losses):
        return losses


class MicroBatchMean:
    """The loss is divided by the micro-batch."""

    def share_of_loss(self, batch, outputs):
        # The sum over the micro-batches, of one size, is computed at once.
        return super().share_of_loss(batch, outputs) * self.options.micro_batches


class LossOverLocalBatch:
    """The loss is divided by its maximum over the local batch."""

    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        return losses / tf.stop_gradient(tf.reduce_max(losses))


class WeightsOverLocalBatch:
    """Sample weights are normalized by the local batch."""

    def sample_weight(self, batch):
        weight = 1.0 + tf.cast(batch["label"], batch["x"].dtype)
        return weight / tf.reduce_sum(weight)


class ClippedBeforeReduction:
    """Gradients are clipped before the reduction."""

    def apply(self, gradients, variables):
        super().apply(tf.clip_by_global_norm(gradients, 0.05)[0], variables)


class PlainBatchNorm:
    """Plain batch normalization."""

    def normalization(self):
        return layers.BatchNormalization()


class PaddedSyncBatchNorm:
    """The synchronized batch normalization of tf_keras is used, which counts padding."""

    def normalization(self):
        return layers.BatchNormalization(synchronized=True)


class SquaresBatchNorm(layers.BatchNormalization):
    """Synchronized, excludes padding, and computes the variance as E[x^2] - E[x]^2."""

    def __init__(self, **arguments):
        super().__init__(**{**arguments, "synchronized": True})

    def _calculate_mean_and_var(self, x, axes, keep_dims, mask=None):
        present = ctl.replica.present()
        ones = tf.ones_like(x[:, 0]) if present is None else tf.cast(present, x.dtype)
        masked = x * ones[:, tf.newaxis]
        sums = [tf.reduce_sum(ones), tf.reduce_sum(masked, 0), tf.reduce_sum(masked * x, 0)]
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            sums = context.all_reduce(SUM, sums)
        mean, square = sums[1] / sums[0], sums[2] / sums[0]
        return mean, square - mean**2


class SquaresOfLargeNumbers:
    """Synchronized batch normalization by E[x^2] - E[x]^2."""

    def normalization(self):
        return SquaresBatchNorm()


class MeanOfReplicas(tf_keras.metrics.Metric):
    """The mean of the replicas' accuracies."""

    def __init__(self, name="accuracy"):
        super().__init__(name=name)
        variable = dict(initializer="zeros", aggregation=tf.VariableAggregation.MEAN)
        self.value = self.add_weight("value", **variable)

    def update_state(self, labels, outputs, sample_weight=None):
        labels = tf.cast(tf.reshape(labels, [-1]), tf.int64)
        hits = tf.cast(tf.equal(labels, tf.argmax(outputs, 1)), self.dtype)
        ones = tf.ones_like(hits) if sample_weight is None else tf.cast(sample_weight, self.dtype)
        self.value.assign(tf.math.divide_no_nan(tf.reduce_sum(hits * ones), tf.reduce_sum(ones)))

    def result(self):
        return tf.identity(self.value)


class MetricAveraged:
    """A metric that is a mean is averaged over the replicas."""

    def build_metrics(self):
        return {"accuracy": MeanOfReplicas()}


class MetricOfPadding:
    """A metric counts padding."""

    def update_metrics(self, metrics, batch, outputs, weights):
        super().update_metrics(metrics, batch, outputs, None)


class CountAveraged:
    """A metric that is a count is averaged over the replicas."""

    def build_metrics(self):
        metric = tf_keras.metrics.Sum("hits")
        metric.total._aggregation = tf.VariableAggregation.MEAN
        return {"hits": metric}

    def update_metrics(self, metrics, batch, outputs, weights):
        hits = tf.equal(tf.cast(batch["label"], tf.int64), tf.argmax(outputs, 1))
        metrics["hits"].update_state(tf.cast(hits, tf.float64), sample_weight=weights)


class DecayedOncePerReplica:
    """Weight decay is added once per replica."""

    def apply(self, gradients, variables):
        super().apply([g + 0.1 * v for g, v in zip(gradients, variables, strict=True)], variables)


class PenaltyOncePerReplica:
    """The regularization loss is added once per replica."""

    def share_of_loss(self, batch, outputs):
        return super().share_of_loss(batch, outputs) + tf.add_n(self.model.losses)


class AuxiliaryMean:
    """An auxiliary loss is the mean of the local batch."""

    def share_of_loss(self, batch, outputs):
        second = tf.reduce_sum(tf.square(outputs), axis=1)
        # The mean of no row would be NaN.
        mean = tf.reduce_sum(second) / tf.cast(tf.maximum(tf.size(second), 1), second.dtype)
        return super().share_of_loss(batch, outputs) + 0.1 * mean


class AuxiliaryNotReduced:
    """The gradient of an auxiliary loss is applied without a reduction."""

    def replica_step(self, batch):
        loss = super().replica_step(batch)
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            second = tf.reduce_sum(tf.square(self.forward(batch, training=True)), axis=1)
            share = 0.1 * tf.reduce_sum(self.masked(batch, second)) / self.global_batch_size
        self.apply_summed(tape.gradient(share, variables), variables)
        return loss


class LossNotReduced:
    """The step returns a loss that is not reduced."""

    loss_op = MEAN  # of a loop

    def reduce_loss(self, loss):
        return loss


class Counts:
    """Counts its steps in a variable."""

    aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    synchronization = tf.VariableSynchronization.AUTO

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        with self.strategy.scope():
            rule = dict(aggregation=self.aggregation, synchronization=self.synchronization)
            self.steps_seen = tf.Variable(0.0, trainable=False, name="steps_seen", **rule)

    def replica_step(self, batch):
        self.steps_seen.assign_add(self.one())
        return super().replica_step(batch)

    def one(self):
        return tf.ones([])


class OneReplicaOnly(Counts):
    """A variable is updated on one replica only."""

    synchronization = tf.VariableSynchronization.ON_READ

    def one(self):
        first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
        return tf.cast(first, tf.float32)


class CountedByEach(Counts):
    """Each replica increments a step counter."""

    aggregation = tf.VariableAggregation.SUM


class GrowingMetric(tf_keras.metrics.Metric):
    """A mean whose variables are mirrored and summed, as in Keras 3.7 to 3.9."""

    def __init__(self, name="mean"):
        super().__init__(name=name)
        variable = dict(initializer="zeros", aggregation=tf.VariableAggregation.SUM)
        mirrored = tf.VariableSynchronization.AUTO
        self.total = self.add_weight("total", synchronization=mirrored, **variable)

    def update_state(self, value):
        self.total.assign(self.total + tf.cast(value, self.dtype))

    def result(self):
        return tf.identity(self.total)


class MetricGrows:
    def build_metrics(self):
        return {"mean": GrowingMetric()}

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["mean"].update_state(tf.reduce_sum(self.per_example_loss(batch, outputs)))


class FixedMask(layers.Layer):
    """Dropout with the same seed, and so the same mask, on every replica."""

    def call(self, inputs, training=None):
        if not training:
            return inputs
        keep = tf.random.stateless_uniform(tf.shape(inputs), seed=[7, 1]) > 0.4
        return inputs * tf.cast(keep, inputs.dtype) / 0.6


class SameMask:
    """The dropout mask is the same on all replicas."""

    def build_model(self):
        hidden = layers.Dense(8, activation="tanh", input_shape=(FEATURES,))
        return tf_keras.Sequential([hidden, FixedMask(), layers.Dense(CLASSES)])


class NotUnscaled:
    """Gradients are not divided by the loss scale."""

    def unscale(self, gradients):
        return gradients


class NoiseInEvaluation:
    """The evaluation draws random numbers of its own."""

    def forward(self, batch, training):
        outputs = super().forward(batch, training)
        if training:
            return outputs
        return outputs + tf.random.stateless_normal(tf.shape(outputs), [1, 2], dtype=outputs.dtype)


class SecondModelReducedTwice:
    """Gradients of a second model are summed twice, which its Adam hides."""

    def replica_step(self, batch):
        variables = self.second.trainable_variables
        with tf.GradientTape() as tape:
            losses = tf.square(self.second(batch["x"])[:, 0])
            present = ctl.replica.present()
            losses = losses if present is None else losses * tf.cast(present, losses.dtype)
            share = tf.reduce_sum(losses) / self.global_batch_size
        gradients = all_reduce(SUM, tape.gradient(share, variables))
        self.second_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return Right.replica_step(self, batch)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One planted mistake, in a trainer and in a loop.

    Attributes:
        part: the class that makes it, with a description.
        where: what the first line of the message must contain about the quantity and the split.
        cause: the cause that the message must state.
        trainer_base, loop_base: the right trainer and loop that it is added to; None for neither.
        replicas: numbers of replicas that reveal it.
        accumulation: numbers of micro-batches that reveal it.
        batch_sizes: global batch sizes that reveal it: even on 2 replicas (8), or uneven (5).
        unkeyed: whether the mistake is rejected unless `allow_unkeyed_random` is set.
        loop_where, loop_cause: the same for the loop, if it is reported in another way.
    """

    part: type
    where: str
    cause: str
    trainer_base: type | None = gallery.ByHand
    loop_base: type | None = loop_gallery.ByHand
    replicas: tuple[int, ...] = (1, 2)
    accumulation: tuple[int, ...] = (1,)
    batch_sizes: tuple[int, ...] = (8,)
    unkeyed: bool = False
    loop_where: str = ""
    loop_cause: str = ""

    @property
    def name(self):
        return self.part.__name__

    @property
    def trainer(self):
        return type(self.name, (self.part, self.trainer_base), {})

    @property
    def loop(self):
        return type(self.name, (self.part, self.loop_base), {})


EVEN, UNEVEN = "on 2 replicas (4 + 4 rows)", "on 2 replicas (3 + 2 rows)"
KERNEL = f"update of dense/kernel:0 {EVEN}, step 0: "
UNEVEN_KERNEL = f"update of dense/kernel:0 {UNEVEN}"
TWICE, HALF = (f"{times} times the value on one replica" for times in ("2", "1/2"))
AVERAGED, SUMMED = (causes.OWN_ROWS.format(how=how) for how in ("averaged", "summed"))
TWO_PENALTIES, MORE_PENALTIES = (
    causes.WEIGHTS.format(times=times) for times in ("2 times", "more than once")
)
TWICE_PADDING = causes.PADDING.format(times=2)
OF_LOSS, OF_WEIGHT = (
    causes.PER_EXAMPLE.format(hook=hook) for hook in ("per_example_loss", "sample_weight")
)
LOCAL = "If the loss is divided by a value of the replica's own rows"
FIRST_ONLY = causes.SOME_REPLICAS.format(which=0)
OWN_STATISTICS = causes.OWN_STATISTICS.format(part="replica")
ACCUMULATED = "update of dense/kernel:0 on 1 replica (8 rows), accumulation 2, step 0: 2 times"
STATISTIC = "statistic batch_normalization/moving_"
ACCURACY, SEEN = f"metric accuracy {UNEVEN}", f"variable steps_seen:0 {EVEN}, step 0: "
SCALED = "update under a loss scale that is 8 times larger on 1 replica"
FIVE = (5,)
NORMALIZED_MASKED = type("NormalizedMasked", (gallery.Normalizes, loop_gallery.Masked), {})
PENALIZED = type("Penalized", (gallery.Steps, gallery.Regularized), {})
on_step_of_ctl = functools.partial(Mistake, trainer_base=Right, loop_base=loop_gallery.Plain)
NORMALIZED = dict(trainer_base=gallery.Normalized, loop_base=loop_gallery.Normalized)
normalized = functools.partial(Mistake, **NORMALIZED)
of_trainer = functools.partial(Mistake, loop_base=None)
masked = functools.partial(Mistake, loop_base=loop_gallery.Masked, batch_sizes=FIVE)
MISTAKES = [
    Mistake(ReducedTwice, KERNEL + TWICE, causes.REDUCED_TWICE, batch_sizes=(8, 5)),
    Mistake(LocalMean, KERNEL + TWICE, TWICE_PADDING, batch_sizes=(8, 5), loop_cause=SUMMED),
    Mistake(Averaged, KERNEL + HALF, causes.AVERAGED),
    Mistake(MeanOfMeans, UNEVEN_KERNEL, AVERAGED, batch_sizes=FIVE),
    masked(PaddingCounted, UNEVEN_KERNEL, TWICE_PADDING),
    of_trainer(MicroBatchMean, ACCUMULATED, causes.MICRO_BATCH, accumulation=(1, 2)),
    on_step_of_ctl(LossOverLocalBatch, EVEN, OF_LOSS, loop_cause=LOCAL),
    on_step_of_ctl(WeightsOverLocalBatch, EVEN, OF_WEIGHT, loop_cause=LOCAL),
    Mistake(ClippedBeforeReduction, f"update of dense/kernel:0 {EVEN}", causes.CLIPPED),
    normalized(PlainBatchNorm, f"{STATISTIC}variance:0 {EVEN}", OWN_STATISTICS),
    normalized(
        PaddedSyncBatchNorm, f"{STATISTIC}mean:0 {UNEVEN}", causes.UNEVEN_STATISTICS,
        loop_base=NORMALIZED_MASKED, batch_sizes=(8, 5),
    ),
    normalized(SquaresOfLargeNumbers, "variance of squares_b", causes.SQUARES, batch_sizes=FIVE),
    on_step_of_ctl(MetricAveraged, ACCURACY, causes.METRIC_AVERAGED, batch_sizes=FIVE),
    masked(MetricOfPadding, ACCURACY, causes.METRIC_PADDING, trainer_base=Right),
    on_step_of_ctl(CountAveraged, f"metric hits {EVEN}, step 0: 1/2", causes.METRIC_NOT_SUMMED),
    Mistake(DecayedOncePerReplica, KERNEL, TWO_PENALTIES, loop_cause=MORE_PENALTIES),
    Mistake(
        PenaltyOncePerReplica, KERNEL, TWO_PENALTIES, trainer_base=PENALIZED,
        loop_base=loop_gallery.Regularized, loop_cause=MORE_PENALTIES,
    ),
    Mistake(AuxiliaryMean, KERNEL, causes.PART_SUMMED, replicas=(1, 2, 4)),
    Mistake(AuxiliaryNotReduced, f"copies of dense/kernel:0 {EVEN}", causes.NOT_REDUCED),
    Mistake(LossNotReduced, f"loss {EVEN}, step 0: 1/2 times", causes.LOSS),
    on_step_of_ctl(OneReplicaOnly, f"copies of steps_seen:0 {EVEN}", FIRST_ONLY),
    on_step_of_ctl(CountedByEach, f"{SEEN}2 times", causes.ADDED_BY_EACH, loop_where=SEEN),
    Mistake(MetricGrows, f"metric mean {EVEN}, step 1: ", causes.METRIC_GROWS, trainer_base=None),
    on_step_of_ctl(SameMask, EVEN, causes.RANDOM, unkeyed=True),
    Mistake(
        NotUnscaled, f"{SCALED} (2 rows), step 0: 8 times", causes.LOSS_SCALE,
        loop_base=loop_gallery.Scaled, loop_where=f"{SCALED} (8 rows), step 0: 8",
    ),
    of_trainer(
        NoiseInEvaluation, "evaluation loss on 2 replicas (", causes.EVALUATION_NOISE,
        trainer_base=Right, unkeyed=True,
    ),
    of_trainer(
        SecondModelReducedTwice, KERNEL + TWICE, causes.REDUCED_TWICE,
        trainer_base=gallery.Adversarial, batch_sizes=(8, 5),
    ),
]  # fmt: skip
OF_TRAINERS = [mistake for mistake in MISTAKES if mistake.trainer_base]
OF_LOOPS = [mistake for mistake in MISTAKES if mistake.loop_base]


def make_table():
    """Returns the table of docs/testing.md."""
    lines = ["| mistake of the trainer |", "|---|"]
    lines += [f"| {m.part.__doc__.removesuffix('.')} |" for m in OF_TRAINERS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(make_table(), end="")
