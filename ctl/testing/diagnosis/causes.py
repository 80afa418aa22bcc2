"""What the kit says of each mistake that it knows: what is wrong, and what to do instead."""

UNKNOWN = (
    "no known mistake looks like this: look for what depends on the rows that a replica holds, on "
    "how many replicas there are, or on num_replicas_in_sync"
)
OPTIMIZER = (
    "under plain SGD there was no difference: the optimizer, or what it is given beside the "
    "gradients, depends on the replicas"
)

# The loss and its gradient.
REDUCED_TWICE = (
    "a share of the global sum is reduced twice, or a mean stands where a share belongs: "
    "apply_gradients sums once more unless experimental_aggregate_gradients=False"
)
AVERAGED = (
    "shares of the global loss are averaged over the replicas, or divided by their number: they "
    "have the global denominator already, so sum them"
)
OWN_ROWS = (
    "each replica divides by its own number of rows and not by that of the global batch, so the "
    "replicas' means are {how}"
)
PADDING = (
    "padding rows count in the loss: the last row, which padding repeats, counts {times} times as "
    "often as the others; multiply by ctl.replica.present()"
)
PADDING_MEAN = f"{PADDING}; and each replica divides by its own number of rows"
MICRO_BATCH = (
    "each micro-batch divides by its own rows: divide by the rows of the global batch, and sum"
)
MICRO_BATCH_TWICE = (
    "gradients with the global denominator are divided by the number of micro-batches once more: "
    "sum them"
)
DENOMINATOR = (
    "the rows count {times} times as often as on one replica: the denominator depends on the split"
)
CLIPPED = (
    "gradients are clipped before the reduction: on one replica every update has the norm "
    "{norm:.4g}, and here {times} times that; clip what is reduced"
)
PENALTY = (
    "the regularization losses count {times} times, and every row as it should: each replica adds "
    "them, so divide them by replicas x micro-batches"
)
DECAY = (
    "the weight decay counts {times} times, and every row as it should: each replica adds it before "
    "the reduction; add it to the reduced gradient"
)
PART_SUMMED = (
    "a part of the loss counts once a replica, such as an auxiliary loss that is a local mean: "
    "divide its sum by the rows of the global batch"
)
PART_AVERAGED = "a part of the loss is divided by the number of replicas once too often"
PER_EXAMPLE = (
    "{hook} gives a row another value by the other rows of its replica: it reduces over the local "
    "batch, and ctl wants one value a row that depends on that row alone"
)
FORWARD = (
    "the outputs of a row depend on the other rows of its replica: forward, or preprocess, reduces "
    "over the local batch"
)
OWN_SHARE = (
    "the updates are right, and replica_step returns its own share of the loss: return the "
    "all-reduced SUM of the shares"
)
LOSS_ONLY = "the updates are right, and the loss that replica_step returns is reduced wrongly"
LOSS_SCALE = (
    "the update follows the loss scale, which is not undone: divide the reduced gradients by "
    "optimizer.loss_scale, or let ctl's minimize do it"
)

# What a model keeps and draws.
OWN_STATISTICS = (
    "each replica normalizes by the statistics of its own rows: use ctl.SyncBatchNormalization, or "
    "options.model={'sync_batch_norm': True}"
)
MICRO_BATCH_STATISTICS = (
    "each micro-batch normalizes by the statistics of its own rows: a normalization over the global "
    "batch and accumulation exclude each other"
)
PADDED_STATISTICS = (
    "the statistics are right on even shares alone, so padding rows count in them: use "
    "ctl.SyncBatchNormalization, which leaves them out"
)
SQUARES = (
    "in float32, of values near 3000 with a deviation of 0.3, the variance is lost: it is computed as "
    "E[x^2] - E[x]^2; use ctl.SyncBatchNormalization"
)
_KEY = (
    "key them by the row of the global batch, as ctl does for tf_keras' random layers "
    "(ctl.replica.row_mask.current().first_row)"
)
SAME_NUMBERS = f"all replicas draw the same random numbers: {_KEY}"
OTHER_NUMBERS = f"the random numbers of a row depend on which replica holds it: {_KEY}"

# Metrics and other variables.
METRIC_AVERAGED = (
    "each replica computes its own value, and these are averaged over the replicas: keep sums and "
    "counts with aggregation SUM, and divide in result()"
)
METRIC_NOT_SUMMED = (
    "the replicas' sums are averaged over the replicas: give the metric's variables aggregation SUM"
)
METRIC_SUMMED = "each replica counts what is the same on all of them: it is summed once too often"
METRIC_PADDING = (
    "it counts padding rows: hand `weights` of update_metrics to update_state, as sample_weight"
)
METRIC = (
    "update_metrics, or the metric, depends on the split: hand `weights` to update_state as "
    "sample_weight, and let the metric's variables be summed (aggregation SUM)"
)
NOT_REDUCED = (
    "each replica applied a gradient of its own, which was never reduced: all_reduce it by SUM "
    "before the optimizer gets it, or let ctl's minimize do both"
)
SOME_REPLICAS = (
    "it is updated on replica {which} only: update it on all alike, from what is reduced"
)
OWN_UPDATE = "each replica updates it by its own rows: reduce the value first"
ADDED_BY_EACH = (
    "every replica adds to it what is to be added once: give it aggregation ONLY_FIRST_REPLICA"
)
