"""The text of each known cause: what is wrong and how to fix it."""

UNKNOWN = (
    "The cause is none of the known mistakes: look for a computation that depends on the rows of one "
    "replica, or on the number of replicas. A loop must also have its optimizers in `variables`: an "
    "update by Adam does not show how the gradient is wrong."
)
OPTIMIZER = (
    "There was no difference under plain SGD, so the optimizer, or what it receives in addition to "
    "the gradients, depends on the replicas."
)

# The loss and its gradient.
REDUCED_TWICE = (
    "The gradients are summed over the replicas twice: call apply_gradients with "
    "experimental_aggregate_gradients=False."
)
# Even splits show no difference between these two.
MEANS_OR_TWICE = (
    "The replicas' gradients are summed, but the loss of each is divided by the rows of one replica; or "
    "they are summed twice. Divide the sum of the losses by the rows of the global batch. If the loss "
    "is divided so already, call apply_gradients with experimental_aggregate_gradients=False."
)
AVERAGED = (
    "Each replica's share of the global loss is averaged over the replicas, or divided by their "
    "number. The shares are divided by the size of the global batch already: sum them."
)
OWN_ROWS = (
    "Each replica divides its loss by the number of its own rows, and the replicas' means are {how}: "
    "divide by the number of rows of the global batch, and sum over the replicas."
)
PADDING = (
    "Padding rows count in the loss: the last row counts {times} times as much as the others. Multiply "
    "the losses by the mask of rows, ctl.replica.present(), and divide by the rows of the global batch."
)
MICRO_BATCH = (
    "The loss of each micro-batch is divided by the rows of that micro-batch: divide by the number of "
    "rows of the global batch, and sum over the micro-batches."
)
DENOMINATOR = (
    "The rows count {times} times as much as on one replica. If the loss is divided by a value of the "
    "replica's own rows, divide by the rows of the global batch, or first reduce that value."
)
PYTHON = (
    "The update changes if the replicas exchange their rows. Code in Python runs once for each replica, "
    "while the step is traced, and the replicas are threads that share its objects: use a tf.Variable, "
    "such as the iterations of the optimizer, in place of a counter, and local variables in place of "
    "attributes that hold tensors. Do not use the number of the replica."
)
_THREADS = (
    "The replicas are threads with one set of Python objects, so an attribute, a list or a dict may "
    "hold the tensor of another replica: keep tensors in local variables, and return them."
)
SHARED = f"{{place}} reads on one replica what another one has computed. {_THREADS}"
ONE_TENSOR = f"One tensor is given where each replica must give its own. {_THREADS}"
REJECTED = (
    "A check of ctl rejects this split, because its update may not be the one of one replica."
)
CLIPPED = (
    "Gradients are clipped before they are summed over the replicas: if all gradients are tiny, so that "
    "no clip changes them, the update is that of one replica. Clip the summed gradients."
)
WEIGHTS = (
    "The rows count as they should, but a penalty or a weight decay counts {times}: each replica adds "
    "it. Add it to the summed gradients, or divide it by num_replicas_in_sync."
)
PART_SUMMED = (
    "One term of the loss counts once per replica, such as a penalty, or a mean over the replica's own "
    "rows: divide penalties by num_replicas_in_sync, and sums by the rows of the global batch."
)
PER_EXAMPLE = (
    "{hook} returns values that depend on the other rows of the replica: return one value per row, "
    "from that row alone. A loss over pairs compares each row with ctl.replica.all_gather(values)."
)
LOSS = (
    "The updates are the same on the splits that were compared, but the step returns one replica's "
    "share of the loss, or a mean of them: "
    "return the sum of the replicas' losses, each divided by the rows of the global batch."
)
LOSS_SCALE = (
    "The update depends on the loss scale: divide the summed gradients by it before they are applied "
    "(get_unscaled_gradients in tf_keras), or call minimize of ctl, which does it."
)

# Normalization and random layers.
OWN_STATISTICS = (
    "Each {part} normalizes by the statistics of its own rows: use ctl.SyncBatchNormalization, in a ctl "
    "trainer by options.model={{'sync_batch_norm': True}}, with micro_batches=1."
)
UNEVEN_STATISTICS = (
    "The statistics are right only if all replicas have the same number of rows: exclude padding rows, "
    "sum the sums and the counts, and then divide, as ctl.SyncBatchNormalization does."
)
SQUARES = (
    "The variance is computed as E[x^2] - E[x]^2, which in float32 loses all digits for values near "
    "3000 with a standard deviation of 0.3: use the mean of (x - mean)^2."
)
RANDOM = (
    "The random numbers of a row depend on the replica that holds it, or all replicas draw the same: "
    "draw them with ctl.random, which keys them by the row of the global batch."
)
EVALUATION_NOISE = (
    "An evaluation, or a step that changes no weight, depends on random numbers, or on the replica or "
    "place of a row: call the model with training=False, and draw random numbers by ctl.random only."
)

# Metrics and other variables.
METRIC_AVERAGED = (
    "Each replica computes the metric of its own rows, and these values are averaged: keep sums and "
    "counts in variables with aggregation SUM, and divide in result()."
)
METRIC_NOT_SUMMED = (
    "The replicas' sums are averaged: create the metric's variables with aggregation SUM."
)
METRIC_PADDING = (
    "The metric counts padding rows: pass the `weights` of update_metrics, or the mask of rows, to "
    "update_state as sample_weight."
)
METRIC = (
    "The metric depends on the split: keep sums and counts of the replica's own rows in variables with "
    "aggregation SUM, without padding rows, and divide in result()."
)
METRIC_GROWS = (
    "Every step sums the variable over the replicas again, so it grows by a factor of their number: "
    "use synchronization ON_READ. All metrics of Keras 3.7 to 3.9 have this mistake, also fit's loss."
)
NOT_REDUCED = (
    "Each replica applies its own gradient: sum the gradients over the replicas by all_reduce before "
    "the optimizer applies them, or let minimize of a ctl trainer do both."
)
SOME_REPLICAS = (
    "The variable is updated on replica {which} only, and the replicas' copies differ: assign the same "
    "value on all replicas."
)
OWN_UPDATE = "Each replica updates the variable from its own rows: reduce over the replicas first."
ADDED_BY_EACH = "Every replica adds what must be added once: use aggregation ONLY_FIRST_REPLICA."

# What ctl does around the user's code.
RECOMPUTED = (
    "The second pass of ctl.recompute differs from the first, such as by another dropout mask, or moves "
    "statistics again: draw by tf_keras layers or ctl.random, and change no state in the code."
)
