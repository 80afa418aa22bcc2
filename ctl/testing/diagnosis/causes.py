"""The text of each known cause: what is wrong and how to fix it."""

UNKNOWN = (
    "The cause is none of the known mistakes: look for a computation that depends on the rows of "
    "one replica, on the number of replicas, or on num_replicas_in_sync. A loop must also have its "
    "optimizers in `variables`: an update by Adam does not show how the gradient is wrong."
)
OPTIMIZER = (
    "There was no difference under plain SGD, so the optimizer, or what it receives in addition to "
    "the gradients, depends on the replicas."
)

# The loss and its gradient.
REDUCED_TWICE = (
    "The gradients are summed over the replicas twice: apply_gradients sums them again unless it "
    "is called with experimental_aggregate_gradients=False. The same factor results if a mean over "
    "the replica's own rows is summed over the replicas."
)
AVERAGED = (
    "Each replica's share of the global loss is averaged over the replicas, or divided by their "
    "number. The shares are divided by the size of the global batch already: sum them."
)
OWN_ROWS = (
    "Each replica divides its loss by the number of its own rows, and the replicas' means are "
    "{how}: divide by the number of rows of the global batch, and sum over the replicas."
)
PADDING = (
    "Padding rows count in the loss: padding repeats the last row, which counts {times} times as "
    "much as the others. Multiply the losses by the mask of rows, which is ctl.replica.present() "
    "in a ctl trainer."
)
PADDING_MEAN = (
    f"{PADDING} Each replica divides by the number of its own rows, too: divide by the number of rows "
    "of the global batch."
)
MICRO_BATCH = (
    "The loss of each micro-batch is divided by the rows of that micro-batch: divide by the number "
    "of rows of the global batch, and sum over the micro-batches."
)
MICRO_BATCH_TWICE = (
    "The sum of the gradients is divided by the number of micro-batches, but their loss is divided "
    "by the size of the global batch already: only sum them."
)
DENOMINATOR = (
    "The rows count {times} times as much as on one replica, so the denominator of the loss "
    "depends on the split: divide by the number of rows of the global batch."
)
CLIPPED = (
    "Gradients are clipped before they are summed over the replicas: every update has the norm "
    "{norm:.4g} on one replica, but {times} times this norm here. Clip the summed gradients."
)
PENALTY = (
    "The regularization losses count {times} times, since each replica adds them: divide them by "
    "the number of replicas times the number of micro-batches."
)
DECAY = (
    "The weight decay counts {times} times, since each replica adds it before the gradients are "
    "summed: add it to the summed gradients."
)
PART_SUMMED = (
    "One term of the loss counts once per replica, such as a penalty, or a mean over the replica's "
    "own rows: divide penalties by num_replicas_in_sync (tf.nn.scale_regularization_loss), and "
    "sums over rows by the number of rows of the global batch."
)
LOCAL_VALUE = (
    "The rows of a replica count {times} times as much as on one replica, the same for all rows of "
    "a replica: their losses or weights are divided by a value of the replica's own rows, such as "
    "their maximum or the sum of their weights: reduce this value over the replicas first."
)
WEIGHTS = (
    "The rows count as they should, but a multiple of the weights is added more than once, such as "
    "weight decay or an L2 penalty that each replica adds before the gradients are summed: add it "
    "to the summed gradients, or divide it by num_replicas_in_sync."
)
PART_AVERAGED = (
    "One term of the loss is divided by the number of replicas, although its denominator is that "
    "of the global batch already: remove this division."
)
PER_EXAMPLE = (
    "{hook} returns values that depend on the other rows of the replica: it must return one value "
    "per row, computed from that row alone, so do not reduce over the rows in it. A loss over "
    "pairs of the global batch compares each row with ctl.replica.all_gather(values)."
)
FORWARD = (
    "The model's outputs for a row depend on the other rows of the replica: do not reduce over the "
    "rows in forward or preprocess."
)
ALL_UPDATES = (
    "Every update of {variables} has this factor, so its gradients are {how}: sum the replicas' "
    "gradients once, of a loss that is divided by the number of rows of the global batch. In a ctl "
    "trainer minimize does both for each model and optimizer."
)
OWN_SHARE = (
    "The updates are right, but the step returns one replica's share of the loss, or their mean: "
    "the shares are divided by the rows of the global batch already, so sum them, in replica_step "
    "by all_reduce."
)
LOSS_ONLY = (
    "The updates are right, but the loss that the step returns is not that of the global batch: "
    "return the sum of the replicas' losses, each divided by the rows of the global batch."
)
LOSS_SCALE = (
    "The update depends on the loss scale: divide the summed gradients by the scale before they "
    "are applied (get_unscaled_gradients in tf_keras), or call minimize of ctl, which does it."
)

# Normalization and random layers.
OWN_STATISTICS = (
    "Each replica normalizes by the statistics of its own rows: use ctl.SyncBatchNormalization, in "
    "a ctl trainer by options.model={'sync_batch_norm': True}. "
    "BatchNormalization(synchronized=True) of tf_keras is right if all replicas always have the "
    "same number of rows."
)
MICRO_BATCH_STATISTICS = (
    "Each micro-batch normalizes by the statistics of its own rows: normalization over the global "
    "batch requires micro_batches=1."
)
UNEVEN_STATISTICS = (
    "The statistics are right only if all replicas have the same number of rows: exclude padding "
    "rows, sum the sums and the counts over the replicas, and divide after that, as "
    "ctl.SyncBatchNormalization does."
)
SQUARES = (
    "The variance is computed as E[x^2] - E[x]^2, which in float32 loses all digits for values "
    "near 3000 with a standard deviation of 0.3: use the mean of (x - mean)^2, as "
    "ctl.SyncBatchNormalization does."
)
SAME_NUMBERS = (
    "All replicas draw the same random numbers, so that rows of different replicas get the same "
    "dropout mask: draw them with ctl.random, which keys them by the row of the global batch, or "
    "use another seed on each replica."
)
OTHER_NUMBERS = (
    "The random numbers of a row depend on the replica that holds it: draw them with ctl.random, "
    "which keys them by the row of the global batch."
)
EVALUATION_NOISE = (
    "An evaluation, or a step that changes no weight, depends on random numbers, or on the replica "
    "or place of a row: call the model with training=False, and draw no random numbers, or draw "
    "them by ctl.random, which keys them by the row of the global batch."
)

# Metrics and other variables.
METRIC_AVERAGED = (
    "Each replica computes the metric of its own rows, and these values are averaged: keep sums "
    "and counts in variables with aggregation SUM, and divide in result()."
)
METRIC_NOT_SUMMED = (
    "The replicas' sums are averaged over the replicas: create the metric's variables with "
    "aggregation SUM."
)
METRIC_SUMMED = (
    "A value that is the same on all replicas is summed over them: update the metric with the "
    "replica's own rows only, or create its variables with aggregation ONLY_FIRST_REPLICA."
)
METRIC_PADDING = (
    "The metric counts padding rows: pass the `weights` of update_metrics, or the mask of rows, to "
    "update_state as sample_weight."
)
METRIC = (
    "The metric depends on the split: keep sums and counts in variables with aggregation SUM, "
    "without padding rows (pass their weights to update_state as sample_weight), and divide in "
    "result()."
)
METRIC_GROWS = (
    "Every step sums the variable over the replicas again, so it grows by a factor of their number "
    "and becomes inf, and the metric NaN: assign to it with synchronization ON_READ, or use "
    "assign_add of the replica's own part. Keras 3.7 to 3.9 have this mistake in all metrics, the "
    "loss of fit included."
)
NOT_REDUCED = (
    "Each replica applies its own gradient: sum the gradients over the replicas by all_reduce "
    "before the optimizer applies them, or let minimize of a ctl trainer do both, or "
    "apply_gradients without experimental_aggregate_gradients=False."
)
SOME_REPLICAS = (
    "The variable is updated on replica {which} only, and the replicas' copies differ: assign the "
    "same value on all replicas."
)
OWN_UPDATE = (
    "Each replica updates the variable with a value from its own rows: reduce the value over the "
    "replicas first."
)
ADDED_BY_EACH = (
    "Every replica adds to the variable what must be added once: create it with aggregation "
    "ONLY_FIRST_REPLICA."
)

# Recomputation.
MOVED_TWICE = (
    "The recomputation of ctl.recompute moves the moving statistics a second time: update them in "
    "self.add_update(lambda: ...), which the second pass skips."
)
OTHER_PASS = (
    "The recomputation of ctl.recompute is another function than the first pass, such as with a "
    "second dropout mask: draw by tf_keras layers or ctl.random, and change no Python state in the "
    "code."
)

# Slot variables that are split over the replicas.
STALE_GATHER = (
    "The slices that optimizer.shard_state gathers from the replicas are not those of this update: "
    "gather the new values, once every replica has updated its slice."
)
OTHER_SLOTS = (
    "With optimizer.shard_state a slice is updated by the slots of another slice: cut gradients, "
    "weights and slots by the same replica number."
)
