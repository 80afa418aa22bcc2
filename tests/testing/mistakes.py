"""Trainers that each have one planted mistake, and the cause that the test kit must report."""

import dataclasses
import re

import tensorflow as tf
import tf_keras

import ctl
from ctl.testing.diagnosis import causes
from tests.testing import gallery
from tests.testing.gallery import MEAN, SUM, ByHand, Dropping, Normalized, Regularized, Right

layers = tf_keras.layers


class ReducedTwice(ByHand):
    def apply(self, gradients, variables):
        # By default apply_gradients sums over the replicas again.
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))


class LocalMean(ByHand):
    def share_of_loss(self, batch, outputs):
        return tf.reduce_mean(self.per_example_loss(batch, outputs))


class Averaged(ByHand):
    def all_reduce(self, values):
        return tf.distribute.get_replica_context().all_reduce(MEAN, values)


class MeanOfMeans(ByHand):
    def share_of_loss(self, batch, outputs):
        losses = self.per_example_loss(batch, outputs)
        mean = tf.math.divide_no_nan(tf.reduce_sum(self.masked(losses)), self.count_rows(losses))
        return mean / self.strategy.num_replicas_in_sync


class PaddingCounted(ByHand):
    def masked(self, losses):
        return losses


class MicroBatchMean(ByHand):
    def replica_step(self, batch):
        parts = self.options.gradient_accumulation_steps
        variables = self.model.trainable_variables
        cut = {name: tf.split(value, self.sizes(value, parts)) for name, value in batch.items()}
        present = ctl.replica.present()
        masks = [None] * parts
        if present is not None:
            masks = tf.split(present, self.sizes(present, parts))
        total, value = [tf.zeros_like(v) for v in variables], 0.0
        for i in range(parts):
            part = {name: values[i] for name, values in cut.items()}
            with tf.GradientTape() as tape:
                losses = self.per_example_loss(part, self.forward(part, training=True))
                if masks[i] is not None:
                    losses *= tf.cast(masks[i], losses.dtype)
                # Rows of a micro-batch on all replicas.
                rows = tf.cast(self.global_batch_size, losses.dtype) / parts
                loss = tf.reduce_sum(losses) / rows
            gradients = tape.gradient(loss, variables)
            total = [a + b for a, b in zip(total, gradients, strict=True)]
            value += loss
        self.apply(self.all_reduce(total), variables)
        return self.all_reduce([value])[0] / parts

    def sizes(self, value, parts):
        rows = value.shape[0]
        return [rows * (i + 1) // parts - rows * i // parts for i in range(parts)]


class LossOverLocalBatch(Right):
    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        return losses / tf.stop_gradient(tf.reduce_max(losses))


class WeightsOverLocalBatch(Right):
    def sample_weight(self, batch):
        weight = 1.0 + tf.cast(batch["label"], tf.float32)
        return weight / tf.reduce_sum(weight)


class ClippedBeforeReduction(ByHand):
    def all_reduce(self, values):
        if len(values) > 1:
            values = tf.clip_by_global_norm(values, 0.05)[0]
        return super().all_reduce(values)


class PlainBatchNorm(Normalized):
    def normalization(self):
        return layers.BatchNormalization()


class PaddedSyncBatchNorm(Normalized):
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


class SquaresOfLargeNumbers(Normalized):
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


class MetricAveraged(Right):
    def build_metrics(self):
        return {"accuracy": MeanOfReplicas()}


class MetricOfPadding(Right):
    def update_metrics(self, metrics, batch, outputs, weights):
        super().update_metrics(metrics, batch, outputs, None)


class CountAveraged(Right):
    def build_metrics(self):
        metric = tf_keras.metrics.Sum("hits")
        metric.total._aggregation = tf.VariableAggregation.MEAN
        return {"hits": metric}

    def update_metrics(self, metrics, batch, outputs, weights):
        hits = tf.equal(tf.cast(batch["label"], tf.int64), tf.argmax(outputs, 1))
        metrics["hits"].update_state(tf.cast(hits, tf.float64), sample_weight=weights)


class DecayedOncePerReplica(ByHand):
    def all_reduce(self, values):
        if len(values) > 1:
            pairs = zip(values, self.model.trainable_variables, strict=True)
            values = [g + 0.1 * v for g, v in pairs]
        return super().all_reduce(values)


class PenaltyOncePerReplica(Regularized, ByHand):
    def share_of_loss(self, batch, outputs):
        return super().share_of_loss(batch, outputs) + tf.add_n(self.model.losses)


class AuxiliaryMean(ByHand):
    def share_of_loss(self, batch, outputs):
        second = tf.reduce_sum(tf.square(outputs), axis=1)
        return super().share_of_loss(batch, outputs) + 0.1 * tf.reduce_mean(second)


class AuxiliaryNotReduced(ByHand):
    def replica_step(self, batch):
        loss = super().replica_step(batch)
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            outputs = self.forward(batch, training=True)
            second = self.masked(tf.reduce_sum(tf.square(outputs), axis=1))
            share = 0.1 * tf.reduce_sum(second) / self.global_batch_size
        self.apply(tape.gradient(share, variables), variables)
        return loss


class LossNotReduced(ByHand):
    def all_reduce(self, values):
        return values if len(values) == 1 else super().all_reduce(values)


class OneReplicaOnly(Right):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.strategy.scope():
            self.steps_seen = tf.Variable(
                0.0,
                trainable=False,
                name="steps_seen",
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    def replica_step(self, batch):
        first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
        self.steps_seen.assign_add(tf.cast(first, tf.float32))
        return super().replica_step(batch)


class CountedByEach(Right):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.strategy.scope():
            aggregation = tf.VariableAggregation.SUM
            self.steps_seen = tf.Variable(
                0.0, trainable=False, name="steps_seen", aggregation=aggregation
            )

    def replica_step(self, batch):
        self.steps_seen.assign_add(tf.ones([]))
        return super().replica_step(batch)


class LocalMask(layers.Layer):
    """Dropout with the same seed, and so the same mask, on every replica."""

    def call(self, inputs, training=None):
        if not training:
            return inputs
        step = tf.cast(ctl.replica.arithmetic.row_mask.current().step, tf.int32)
        keep = tf.random.stateless_uniform(tf.shape(inputs), seed=[7, step]) > 0.4
        return inputs * tf.cast(keep, inputs.dtype) / 0.6


class SameMask(Dropping):
    def build_model(self):
        return tf_keras.Sequential(
            [
                layers.Dense(8, activation="tanh", input_shape=(gallery.FEATURES,)),
                LocalMask(),
                layers.Dense(gallery.CLASSES),
            ]
        )


class NotUnscaled(ByHand):
    def apply(self, gradients, variables):
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        optimizer.apply_gradients(
            zip(gradients, variables, strict=True), experimental_aggregate_gradients=False
        )


class NoiseInEvaluation(Right):
    def forward(self, batch, training):
        outputs = super().forward(batch, training)
        if training:
            return outputs
        return outputs + tf.random.stateless_normal(tf.shape(outputs), [1, 2], dtype=outputs.dtype)


class SecondModelReducedTwice(gallery.Adversarial):
    """Adam is the optimizer of the second model, and hides the factor."""

    def replica_step(self, batch):
        variables = self.second.trainable_variables
        with tf.GradientTape() as tape:
            losses = tf.square(self.second(batch["x"])[:, 0])
            present = ctl.replica.present()
            losses = losses if present is None else losses * tf.cast(present, losses.dtype)
            share = tf.reduce_sum(losses) / self.global_batch_size
        gradients = tf.distribute.get_replica_context().all_reduce(
            SUM, tape.gradient(share, variables)
        )
        self.second_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return Right.replica_step(self, batch)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One planted mistake.

    Attributes:
        trainer: the trainer that makes it.
        what: short description.
        where: what the first line of the message must contain about the quantity and the split.
        cause: the cause that the message must state.
        replicas: numbers of replicas that reveal it.
        accumulation: numbers of micro-batches that reveal it.
        unkeyed: whether the mistake is rejected unless `allow_unkeyed_random` is set.
        batch_sizes: global batch sizes that reveal it: even on 2 replicas (8), or uneven (5).
    """

    trainer: type
    what: str
    where: str
    cause: str
    replicas: tuple[int, ...] = (1, 2)
    accumulation: tuple[int, ...] = (1,)
    batch_sizes: tuple[int, ...] = (8,)
    unkeyed: bool = False


KERNEL = "update of dense/kernel:0 on 2 replicas (4 + 4 rows), accumulation 1, step 0: "
MISTAKES = [
    Mistake(
        ReducedTwice,
        "gradients are summed by all_reduce, and again by the optimizer",
        f"{KERNEL}2 times the value on one replica",
        causes.REDUCED_TWICE,
    ),
    Mistake(
        LocalMean,
        "the loss is the mean of the local batch",
        f"{KERNEL}2 times the value on one replica",
        causes.PADDING_MEAN.format(times=2),
        batch_sizes=(8, 5),
    ),
    Mistake(
        Averaged,
        "shares of the loss are averaged over the replicas",
        f"{KERNEL}1/2 times the value on one replica",
        causes.AVERAGED,
    ),
    Mistake(
        MeanOfMeans,
        "the loss is a mean of the replicas' means",
        "update of dense/kernel:0 on 2 replicas (3 + 2 rows)",
        causes.OWN_ROWS.format(how="averaged"),
        batch_sizes=(5,),
    ),
    Mistake(
        PaddingCounted,
        "padding counts in the loss",
        "update of dense/kernel:0 on 2 replicas (3 + 2 rows)",
        causes.PADDING.format(times=2),
        batch_sizes=(5,),
    ),
    Mistake(
        MicroBatchMean,
        "the loss is divided by the micro-batch",
        "update of dense/kernel:0 on 1 replica (8 rows), accumulation 2, step 0: 2 times",
        causes.MICRO_BATCH,
        accumulation=(1, 2),
    ),
    Mistake(
        LossOverLocalBatch,
        "the loss is divided by its maximum over the local batch",
        "on 2 replicas (4 + 4 rows)",
        causes.PER_EXAMPLE.format(hook="per_example_loss"),
    ),
    Mistake(
        WeightsOverLocalBatch,
        "sample weights are normalized by the local batch",
        "on 2 replicas (4 + 4 rows)",
        causes.PER_EXAMPLE.format(hook="sample_weight"),
    ),
    Mistake(
        ClippedBeforeReduction,
        "gradients are clipped before the reduction",
        "update of dense/kernel:0 on 2 replicas (4 + 4 rows)",
        "Gradients are clipped before they are summed over the replicas: every update has the norm 0.05",
    ),
    Mistake(
        PlainBatchNorm,
        "plain batch normalization",
        "statistic batch_normalization/moving_variance:0 on 2 replicas (4 + 4 rows)",
        causes.OWN_STATISTICS,
    ),
    Mistake(
        PaddedSyncBatchNorm,
        "tf_keras' synchronized batch normalization, which counts padding",
        "statistic batch_normalization/moving_mean:0 on 2 replicas (3 + 2 rows)",
        causes.PADDED_STATISTICS,
        batch_sizes=(8, 5),
    ),
    Mistake(
        SquaresOfLargeNumbers,
        "synchronized batch normalization by E[x^2] - E[x]^2",
        "variance of squares_batch_norm",
        causes.SQUARES,
        batch_sizes=(5,),
    ),
    Mistake(
        MetricAveraged,
        "a metric that is a mean is averaged over the replicas",
        "metric accuracy on 2 replicas (3 + 2 rows)",
        causes.METRIC_AVERAGED,
        batch_sizes=(5,),
    ),
    Mistake(
        MetricOfPadding,
        "a metric counts padding",
        "metric accuracy on 2 replicas (3 + 2 rows)",
        causes.METRIC_PADDING,
        batch_sizes=(5,),
    ),
    Mistake(
        CountAveraged,
        "a metric that is a count is averaged over the replicas",
        "metric hits on 2 replicas (4 + 4 rows), accumulation 1, step 0: 1/2 times",
        causes.METRIC_NOT_SUMMED,
    ),
    Mistake(
        DecayedOncePerReplica,
        "weight decay is added once per replica",
        "update of dense/kernel:0 on 2 replicas (4 + 4 rows)",
        causes.DECAY.format(times=2),
    ),
    Mistake(
        PenaltyOncePerReplica,
        "the regularization loss is added once per replica",
        "update of dense/kernel:0 on 2 replicas (4 + 4 rows)",
        causes.PENALTY.format(times=2),
    ),
    Mistake(
        AuxiliaryMean,
        "an auxiliary loss is the mean of the local batch",
        "update of dense/kernel:0 on 2 replicas (4 + 4 rows)",
        causes.PART_SUMMED,
        replicas=(1, 2, 4),
    ),
    Mistake(
        AuxiliaryNotReduced,
        "the gradient of an auxiliary loss is applied without a reduction",
        "copies of dense/kernel:0 on 2 replicas (4 + 4 rows)",
        causes.NOT_REDUCED,
    ),
    Mistake(
        LossNotReduced,
        "replica_step returns a loss that is not reduced",
        "loss on 2 replicas (4 + 4 rows), accumulation 1, step 0: 1/2 times",
        causes.OWN_SHARE,
    ),
    Mistake(
        OneReplicaOnly,
        "a variable is updated on one replica only",
        "copies of steps_seen:0 on 2 replicas (4 + 4 rows)",
        causes.SOME_REPLICAS.format(which=0),
    ),
    Mistake(
        CountedByEach,
        "each replica increments a step counter",
        "variable steps_seen:0 on 2 replicas (4 + 4 rows), accumulation 1, step 0: 2 times",
        causes.ADDED_BY_EACH,
    ),
    Mistake(
        SameMask,
        "the dropout mask is the same on all replicas",
        "on 2 replicas (4 + 4 rows)",
        causes.SAME_NUMBERS,
        unkeyed=True,
    ),
    Mistake(
        NotUnscaled,
        "gradients are not divided by the loss scale",
        "update under the loss scale 8 on 1 replica (2 rows), accumulation 1, step 0: 8 times",
        causes.LOSS_SCALE,
    ),
    Mistake(
        NoiseInEvaluation,
        "the evaluation draws random numbers of its own",
        "evaluation loss on 2 replicas (",
        causes.EVALUATION_NOISE,
        unkeyed=True,
    ),
    Mistake(
        SecondModelReducedTwice,
        "gradients of a second model are summed twice, which its Adam hides",
        f"{KERNEL}2 times the value on one replica",
        causes.ALL_UPDATES.format(
            variables="dense/kernel:0, dense/bias:0",
            how="summed over the replicas 2 times, or are those of a local mean",
        ),
    ),
]


def make_table():
    """Returns the table at the end of docs/testing.md, with the first clause of each cause."""
    causes = [re.split(r"[:.] ", m.cause)[0].rstrip(".") for m in MISTAKES]
    lines = ["| mistake of the trainer | reported cause |", "|---|---|"]
    lines += [f"| {m.what} | {cause} |" for m, cause in zip(MISTAKES, causes, strict=True)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(make_table(), end="")
