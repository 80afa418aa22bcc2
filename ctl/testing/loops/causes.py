"""Texts of causes for loops that are not ctl's, and reasons why a loop cannot be compared."""

from ctl.testing.diagnosis import causes

NOT_REDUCED = (
    "Each replica applies its own gradient: sum the gradients over the replicas by all_reduce before "
    "the optimizer applies them, or let apply_gradients do it (without "
    "experimental_aggregate_gradients=False)."
)
OWN_STATISTICS = (
    "Each replica normalizes by the statistics of its own rows: use synchronized batch normalization "
    "(tf_keras.layers.BatchNormalization(synchronized=True) if all replicas always have the same "
    "number of rows, else ctl.SyncBatchNormalization)."
)
UNEVEN_STATISTICS = (
    "The statistics are right only if all replicas have the same number of rows: exclude padding rows, "
    "sum the sums and the counts over the replicas, and divide after that."
)
SQUARES = (
    "The variance is computed as E[x^2] - E[x]^2, which in float32 loses all digits for values near "
    "3000 with a standard deviation of 0.3: use the mean of (x - mean)^2."
)
LOCAL_VALUE = (
    "The rows of a replica count {times} times as much as on one replica, the same for all rows of a "
    "replica: their losses or weights are divided by a value of the replica's own rows, such as their "
    "maximum or the sum of their weights: reduce this value over the replicas first."
)
WEIGHTS = (
    "The rows count as they should, but a multiple of the weights is added more than once, such as "
    "weight decay or an L2 penalty that each replica adds before the gradients are summed: add it to "
    "the summed gradients, or divide it by num_replicas_in_sync."
)
PART_SUMMED = (
    "One term of the loss counts once per replica, such as a penalty, or a mean over the replica's own "
    "rows: divide penalties by num_replicas_in_sync (tf.nn.scale_regularization_loss), and sums over "
    "rows by the number of rows of the global batch."
)
ALL_UPDATES = (
    "Every update of {variables} has this factor, so its gradients are {how}: sum the replicas' "
    "gradients once, of a loss that is divided by the number of rows of the global batch."
)
OWN_SHARE = (
    "The updates are right, but the step returns one replica's share of the loss, or their mean: the "
    "shares are divided by the rows of the global batch already, so sum them."
)
LOSS_ONLY = (
    "The updates are right, but the loss that the step returns is not that of the global batch: return "
    "the sum of the replicas' losses, each divided by the rows of the global batch."
)
METRIC = (
    "The metric depends on the split: keep sums and counts in variables with aggregation SUM, without "
    "padding rows, and divide in result()."
)
METRIC_PADDING = "The metric counts padding rows: pass the mask to update_state as sample_weight."
METRIC_GROWS = (
    "Every step sums the variable over the replicas again, so it grows by a factor of their number "
    "and becomes inf, and the metric NaN: assign to it with synchronization ON_READ, or use "
    "assign_add of the replica's own part. Keras 3.7 to 3.9 have this mistake in all metrics, the loss "
    "of fit included."
)
LOSS_SCALE = (
    "The update depends on the loss scale: divide the summed gradients by the scale "
    "(get_unscaled_gradients in tf_keras) before they are applied."
)
SAME_NUMBERS = (
    "All replicas draw the same random numbers, so that rows of different replicas get the same "
    "dropout mask: use another seed, or another counter, on each replica."
)
EVALUATION_NOISE = (
    "The step changes no weight, so it is an evaluation, but its result depends on random numbers or "
    "on the order of the rows: call the model with training=False, and draw no random numbers."
)
UNKNOWN = (
    f"{causes.UNKNOWN} Give the optimizers in `variables` too if they are missing there: an update by "
    "Adam does not show how the gradient is wrong."
)

# Why a loop cannot be compared.
RANDOM = (
    "on one replica already, another random seed changes the result by a factor of up to {noise:.2g} of "
    "its size: the loop draws random numbers, such as dropout, and several replicas draw them in "
    "another order. Build the loop without them for this test (Dropout(0.0))"
)
ORDER = (
    "on one replica already, another order of the rows in the global batch changes the result by up to "
    "{noise:.2g} of its size: the loop draws random numbers with a fixed seed, or "
    "depends on a row's position in the batch"
)
NARROW = (
    "a layer computes in {dtype}, whose rounding errors are as large as the effect of a mistake: set "
    "the policy to float32 or float64 for this test"
)

_REPLACED = {
    causes.NOT_REDUCED: NOT_REDUCED,
    causes.OWN_SHARE: OWN_SHARE,
    causes.LOSS_ONLY: LOSS_ONLY,
    causes.PART_SUMMED: PART_SUMMED,
}


def for_loops(text: str) -> str:
    """Returns the text for a loop that is not ctl's."""
    return _REPLACED.get(text, text).replace("ctl.replica.present()", "the mask of rows")
