"""The planted mistakes of `tests.testing.mistakes` as loops in plain TensorFlow."""

import dataclasses

import tensorflow as tf
import tf_keras

from ctl.testing.diagnosis import causes
from ctl.testing.loops import causes as loop_causes
from tests.testing.loops.right_loops import (
    CLASSES,
    FEATURES,
    MEAN,
    SUM,
    ByHand,
    Masked,
    Normalized,
    Penalized,
    Plain,
    Scaled,
    SynchronizedNorm,
    TwoModels,
    all_reduce,
)

layers = tf_keras.layers


class ReducedTwice(ByHand):
    def apply_summed(self, gradients, variables):
        # By default apply_gradients sums over the replicas again.
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))


class LocalMean(Plain):
    def share_of_loss(self, batch, outputs):
        return tf.reduce_mean(self.losses(batch, outputs))


class Averaged(ByHand):
    def apply(self, gradients, variables):
        self.apply_summed(all_reduce(MEAN, gradients), variables)


class MeanOfMeans(Plain):
    def share_of_loss(self, batch, outputs):
        losses = self.losses(batch, outputs)
        rows = tf.cast(tf.size(losses), losses.dtype)
        mean = tf.math.divide_no_nan(tf.reduce_sum(losses), rows)
        return mean / self.strategy.num_replicas_in_sync


class PaddingCounted(Masked):
    def losses(self, batch, outputs):
        return Plain.losses(self, batch, outputs)


class MicroBatchMean(Plain):
    """Averages the means of two micro-batches."""

    def share_of_loss(self, batch, outputs):
        losses = self.losses(batch, outputs)
        rows = tf.size(losses)
        first, second = losses[: rows // 2], losses[rows // 2 :]
        means = [
            tf.math.divide_no_nan(tf.reduce_sum(part), tf.cast(tf.size(part), losses.dtype))
            for part in (first, second)
        ]
        share = tf.cast(rows, losses.dtype) / self.global_batch_size
        return share * tf.add_n(means) / 2


class LossOverLocalBatch(Plain):
    def losses(self, batch, outputs):
        losses = super().losses(batch, outputs)
        return losses / tf.stop_gradient(tf.reduce_max(losses))


class WeightsOverLocalBatch(Plain):
    def losses(self, batch, outputs):
        losses = super().losses(batch, outputs)
        weights = 1.0 + tf.cast(batch["label"], losses.dtype)
        return losses * weights / tf.reduce_sum(weights)


class ClippedBeforeReduction(ByHand):
    def apply(self, gradients, variables):
        super().apply(tf.clip_by_global_norm(gradients, 0.05)[0], variables)


class PlainBatchNorm(Normalized):
    def build_normalization(self):
        return layers.BatchNormalization()


class PaddedSyncBatchNorm(Normalized, Masked):
    def build_normalization(self):
        return layers.BatchNormalization(synchronized=True)


class SquaresBatchNorm(SynchronizedNorm):
    def moments(self, x):
        rows = all_reduce(SUM, tf.cast(tf.shape(x)[0], x.dtype))
        mean = all_reduce(SUM, tf.reduce_sum(x, 0)) / rows
        square = all_reduce(SUM, tf.reduce_sum(tf.square(x), 0)) / rows
        return mean, square - mean**2


class SquaresOfLargeNumbers(Normalized):
    def build_normalization(self):
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
        rows = tf.cast(tf.size(hits), self.dtype)
        self.value.assign(tf.math.divide_no_nan(tf.reduce_sum(hits), rows))

    def result(self):
        return tf.identity(self.value)


class MetricAveraged(Plain):
    def build_metric(self):
        return MeanOfReplicas()


class MetricOfPadding(Masked):
    def update_metric(self, batch, outputs):
        self.accuracy.update_state(batch["label"], outputs)


class CountAveraged(Plain):
    def build_metric(self):
        metric = tf_keras.metrics.Sum("hits")
        metric.total._aggregation = tf.VariableAggregation.MEAN
        return metric

    def update_metric(self, batch, outputs):
        hits = tf.equal(tf.cast(batch["label"], tf.int64), tf.argmax(outputs, 1))
        self.accuracy.update_state(tf.cast(hits, tf.float64))


class DecayedOncePerReplica(ByHand):
    def apply(self, gradients, variables):
        super().apply([g + 0.1 * v for g, v in zip(gradients, variables, strict=True)], variables)


class PenaltyOncePerReplica(Penalized):
    def share_of_loss(self, batch, outputs):
        return Plain.share_of_loss(self, batch, outputs) + tf.add_n(self.model.losses)


class AuxiliaryMean(Plain):
    def share_of_loss(self, batch, outputs):
        second = tf.reduce_sum(tf.square(outputs), axis=1)
        # The mean of no row would be NaN.
        mean = tf.reduce_sum(second) / tf.cast(tf.maximum(tf.size(second), 1), second.dtype)
        return super().share_of_loss(batch, outputs) + 0.1 * mean


class AuxiliaryNotReduced(TwoModels):
    def apply_second(self, gradients, variables):
        self.second_optimizer.apply_gradients(
            zip(gradients, variables, strict=True), experimental_aggregate_gradients=False
        )


class LossNotReduced(Plain):
    def distributed_step(self, batch):
        losses = self.strategy.run(self.replica_step, args=(batch,))
        return self.strategy.reduce(MEAN, losses, axis=None)


class Counting(Plain):
    """Counts its steps in a variable."""

    aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    synchronization = tf.VariableSynchronization.AUTO

    def __init__(self, strategy, global_batch_size):
        super().__init__(strategy, global_batch_size)
        with strategy.scope():
            self.steps_seen = tf.Variable(
                0.0,
                trainable=False,
                name="steps_seen",
                aggregation=self.aggregation,
                synchronization=self.synchronization,
            )

    @property
    def variables(self):
        return [*super().variables, self.steps_seen]

    def replica_step(self, batch):
        self.count()
        return super().replica_step(batch)

    def count(self):
        self.steps_seen.assign_add(tf.ones([]))


class OneReplicaOnly(Counting):
    synchronization = tf.VariableSynchronization.ON_READ

    def count(self):
        first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
        self.steps_seen.assign_add(tf.cast(first, tf.float32))


class CountedByEach(Counting):
    aggregation = tf.VariableAggregation.SUM


class GrowingMetric(tf_keras.metrics.Metric):
    """A mean whose variables are mirrored and summed, as in Keras 3.7 to 3.9."""

    def __init__(self, name="mean"):
        super().__init__(name=name)
        variable = dict(
            initializer="zeros",
            aggregation=tf.VariableAggregation.SUM,
            synchronization=tf.VariableSynchronization.AUTO,
        )
        self.total = self.add_weight("total", **variable)

    def update_state(self, value):
        self.total.assign(self.total + tf.cast(value, self.dtype))

    def result(self):
        return tf.identity(self.total)


class MetricGrows(Plain):
    def build_metric(self):
        return GrowingMetric()

    def update_metric(self, batch, outputs):
        self.accuracy.update_state(tf.reduce_sum(self.losses(batch, outputs)))


class FixedMask(layers.Layer):
    """Dropout with the same seed, and so the same mask, on every replica."""

    def call(self, inputs, training=None):
        if not training:
            return inputs
        keep = tf.random.stateless_uniform(tf.shape(inputs), seed=[7, 1]) > 0.4
        return inputs * tf.cast(keep, inputs.dtype) / 0.6


class SameMask(Plain):
    def build_model(self):
        hidden = layers.Dense(8, activation="tanh", input_shape=(FEATURES,))
        return tf_keras.Sequential([hidden, FixedMask(), layers.Dense(CLASSES)])


class NotUnscaled(Scaled):
    def unscale(self, gradients):
        return gradients


class NoiseInEvaluation(Plain):
    """The step of an evaluation."""

    def replica_step(self, batch):
        outputs = self.model(batch["x"], training=False)
        outputs += tf.random.normal(tf.shape(outputs), dtype=outputs.dtype)
        self.update_metric(batch, outputs)
        return self.share_of_loss(batch, outputs)


class SecondModelReducedTwice(TwoModels):
    """Adam is the optimizer of the second model, and hides the factor."""

    def apply_second(self, gradients, variables):
        super().apply_second(all_reduce(SUM, gradients), variables)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One planted mistake.

    Attributes:
        loop: the loop that makes it.
        where: what the first line of the message must contain about the quantity and the split.
        cause: the cause that the message must state.
        replicas: numbers of replicas that reveal it.
    """

    loop: type
    where: str
    cause: str
    replicas: tuple[int, ...] = (2,)


KERNEL = "update of dense/kernel:0 on 2 replicas (4 + 4 rows), step 0: "
UNEVEN = "update of dense/kernel:0 on 2 replicas (3 + 2 rows), step 0: "
MISTAKES = [
    Mistake(ReducedTwice, f"{KERNEL}2 times the value on one replica", causes.REDUCED_TWICE),
    Mistake(
        LocalMean,
        f"{KERNEL}2 times the value on one replica",
        causes.OWN_ROWS.format(how="summed"),
    ),
    Mistake(Averaged, f"{KERNEL}1/2 times the value on one replica", causes.AVERAGED),
    Mistake(MeanOfMeans, UNEVEN, causes.OWN_ROWS.format(how="averaged")),
    Mistake(PaddingCounted, UNEVEN, loop_causes.for_loops(causes.PADDING.format(times=2))),
    Mistake(MicroBatchMean, UNEVEN, "the denominator of the loss depends on the split"),
    Mistake(LossOverLocalBatch, KERNEL, "divided by a value of the replica's own rows"),
    Mistake(WeightsOverLocalBatch, KERNEL, "divided by a value of the replica's own rows"),
    Mistake(
        ClippedBeforeReduction,
        KERNEL,
        "Gradients are clipped before they are summed over the replicas: every update has the norm 0.05",
    ),
    Mistake(
        PlainBatchNorm,
        "statistic batch_normalization/moving_variance:0 on 2 replicas (4 + 4 rows)",
        loop_causes.OWN_STATISTICS,
    ),
    Mistake(
        PaddedSyncBatchNorm,
        "statistic batch_normalization/moving_mean:0 on 2 replicas (3 + 2 rows)",
        loop_causes.UNEVEN_STATISTICS,
    ),
    Mistake(SquaresOfLargeNumbers, "variance of squares_batch_norm", loop_causes.SQUARES),
    Mistake(MetricAveraged, "metric accuracy on 2 replicas (3 + 2 rows)", causes.METRIC_AVERAGED),
    Mistake(
        MetricOfPadding, "metric accuracy on 2 replicas (3 + 2 rows)", loop_causes.METRIC_PADDING
    ),
    Mistake(
        CountAveraged,
        "metric hits on 2 replicas (4 + 4 rows), step 0: 1/2 times",
        causes.METRIC_NOT_SUMMED,
    ),
    Mistake(DecayedOncePerReplica, KERNEL, loop_causes.WEIGHTS),
    Mistake(PenaltyOncePerReplica, KERNEL, loop_causes.WEIGHTS),
    Mistake(AuxiliaryMean, KERNEL, loop_causes.PART_SUMMED, replicas=(2, 4)),
    Mistake(
        AuxiliaryNotReduced,
        "copies of dense/kernel:0 on 2 replicas (4 + 4 rows)",
        loop_causes.NOT_REDUCED,
    ),
    Mistake(
        LossNotReduced,
        "loss on 2 replicas (4 + 4 rows), step 0: 1/2 times",
        loop_causes.OWN_SHARE,
    ),
    Mistake(
        OneReplicaOnly,
        "copies of steps_seen:0 on 2 replicas (4 + 4 rows)",
        causes.SOME_REPLICAS.format(which=0),
    ),
    Mistake(
        CountedByEach,
        "variable steps_seen:0 on 2 replicas (4 + 4 rows), step 0: ",
        causes.ADDED_BY_EACH,
    ),
    Mistake(
        MetricGrows,
        "metric mean on 2 replicas (4 + 4 rows), step 1: ",
        loop_causes.METRIC_GROWS,
    ),
    Mistake(SameMask, "on 2 replicas (4 + 4 rows)", loop_causes.SAME_NUMBERS),
    Mistake(
        NotUnscaled,
        "update under a loss scale that is 8 times larger on 1 replica (8 rows), step 0: 8 times",
        loop_causes.LOSS_SCALE,
    ),
    Mistake(NoiseInEvaluation, "loss on 2 replicas (", loop_causes.EVALUATION_NOISE),
    Mistake(
        SecondModelReducedTwice,
        f"{KERNEL}2 times the value on one replica",
        loop_causes.ALL_UPDATES.format(
            variables="dense/kernel:0, dense/bias:0",
            how="summed over the replicas 2 times, or are those of a local mean",
        ),
    ),
]
