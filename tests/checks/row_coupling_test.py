"""Losses of a row that depend on other rows of its replica are rejected, and no others."""

import os

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.checks import searched_trace
from ctl.errors import LateUsageError
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.controller import Controller
from tests.checks.traced_losses import (
    BATCH,
    DRAW,
    FEATURES,
    LABEL,
    ROWS,
    TIME,
    attention,
    by_row,
    shifted_by_the_maximum,
    trace,
)
from tests.users_code import running
from tests.users_code.examples import EXAMPLES, Case
from tests.users_code.running import Split

layers = tf_keras.layers


def model(feature, *network):
    """The sum of squares of a network's outputs."""
    sequence = tf_keras.Sequential(network)
    sequence(BATCH[feature])  # creates the variables
    return lambda batch: by_row(sequence(batch[feature], training=True))


def transformer():
    inputs = tf_keras.Input([TIME], dtype=BATCH["tokens"].dtype)
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2)(x, x, use_causal_mask=True))
    return model("tokens", tf_keras.Model(inputs, layers.Dense(4)(layers.Dense(8, "gelu")(x))))


def penalty(batch):
    kernel = tf.constant(DRAW.normal(size=(FEATURES, 3)).astype(np.float32))
    with tf.GradientTape() as tape:
        tape.watch(batch["x"])
        outputs = tf.reduce_sum(tf.tanh(batch["x"] @ kernel) ** 2)
    return by_row(tape.gradient(outputs, batch["x"]))


def masked_sum(batch):
    values = tf.boolean_mask(batch["series"], batch["tokens"] > 0)
    rows = tf.where(batch["tokens"] > 0)[:, 0]
    return tf.math.unsorted_segment_sum(tf.reduce_sum(values, axis=1), rows, batch["x"].shape[0])


def longest(batch):
    longest = tf.reduce_max(tf.reduce_sum(tf.cast(batch["tokens"] > 0, tf.int32), axis=1))
    mask = tf.cast(batch["tokens"][:, :longest] > 0, tf.float32)
    return tf.reduce_sum(mask * batch["series"][:, :longest, 0], axis=1)


def two_views(batch):
    both = tf.concat([batch["x"], 2 * batch["x"]], axis=0) @ tf.ones([FEATURES, 3])
    first, second = tf.split(tf.nn.relu(both), 2)
    return by_row(first - second) + by_row(both[:ROWS] - both[ROWS:])


def decoded(batch):
    """A search until every row has ended."""

    def body(i, state, ended):
        state = tf.where(ended[:, None], state, state + batch["x"])
        return i + 1, state, tf.reduce_sum(state, axis=1) > 3

    start = tf.constant(0), tf.zeros_like(batch["x"]), tf.zeros([ROWS], tf.bool)
    _, state, _ = tf.while_loop(lambda i, s, e: (i < 4) & ~tf.reduce_all(e), body, start)
    return by_row(state)


# Networks of known layers, in which nothing is suspected: no batch is computed.
SEARCHED = {
    "dense": lambda: model("x", layers.Dense(3, "relu"), layers.Dropout(0.0), layers.Dense(2)),
    "layer normalization": lambda: model("series", layers.LayerNormalization()),
    "group normalization": lambda: model("image", layers.GroupNormalization(groups=3)),
    "plain batch normalization, which the plan warns of": lambda: model(
        "image", layers.Conv2D(2, 3), layers.BatchNormalization(), layers.ReLU()
    ),
    "synchronized batch normalization": lambda: model("x", ctl.SyncBatchNormalization()),
    "convolutions": lambda: model(
        "image", layers.SeparableConv2D(3, 3), layers.Conv2DTranspose(2, 3, strides=2),
        layers.UpSampling2D(2, interpolation="bilinear"), layers.ZeroPadding2D(1),
        layers.AveragePooling2D(4), layers.GlobalMaxPooling2D(),
    ),
    "transformer": transformer,
    "positions of rows": lambda: lambda b: by_row(b["x"]) + tf.cast(
        ctl.replica.positions(b["x"]), tf.float32
    ),
    "sort of each row": lambda: lambda b: tf.sort(b["x"], axis=1)[:, 0],
    "time first": lambda: lambda b: by_row(tf.transpose(
        tf.math.cumsum(tf.transpose(b["series"], [1, 0, 2]), axis=0), [1, 0, 2]
    )),
    "gradient penalty": lambda: penalty,
    "rows of the global batch": lambda: lambda b: tf.reduce_sum(
        b["x"] @ tf.transpose(ctl.replica.all_gather(b["x"])), axis=1
    ),
    "noise of ctl": lambda: lambda b: by_row(b["x"] + ctl.random.normal([ROWS, FEATURES])),
    "partners in the global batch": lambda: lambda b: by_row(
        b["x"] + tf.gather(ctl.replica.all_gather(b["x"]), ctl.random.permutation_of_batch())
    ),
}  # fmt: skip
# Here an op combines rows, or has no rule, and the losses of a batch show that they do not depend on
# each other.
COMPUTED = {
    "boolean mask and segments": lambda: masked_sum,
    "longest row": lambda: longest,
    "map over rows": lambda: lambda b: tf.map_fn(lambda r: tf.reduce_sum(r**2), b["x"]),
    "loop until all rows end": lambda: decoded,
    "hidden number of rows": lambda: lambda b: masked_sum({**b, "series": (
        tf.raw_ops.PlaceholderWithDefault(input=b["series"], shape=[None, TIME, FEATURES])
    )}),
    "convolutions with gaps": lambda: model(
        "image", layers.SeparableConv2D(3, 3, dilation_rate=2), layers.GlobalMaxPooling2D(),
    ),
    "two views": lambda: two_views,
}  # fmt: skip


EXISTS = lambda b: tf.cast(b["tokens"] > 0, tf.float32)  # noqa: E731


def ranking(batch):
    """The pairs of a row's scores, of which the mask selects those that exist."""
    scores, exists = batch["series"][:, :, 0], batch["tokens"] > 0
    pairs = tf.nn.softplus(scores[:, :, None] - scores[:, None, :])
    both = exists[:, :, None] & exists[:, None, :]
    flat = tf.boolean_mask(pairs, both)
    rows = tf.where(both)[:, 0]
    total = tf.math.unsorted_segment_sum(flat, rows, ROWS)
    return total / tf.maximum(tf.math.unsorted_segment_sum(tf.ones_like(flat), rows, ROWS), 1.0)


def ragged(batch):
    lengths = tf.reduce_sum(tf.cast(batch["tokens"] > 0, tf.int32), axis=1)
    values = tf.RaggedTensor.from_tensor(batch["series"][:, :, 0], lengths)
    return tf.reduce_mean(tf.square(values), axis=1)


def logsumexp(batch):
    largest = tf.reduce_max(batch["x"])
    return tf.math.log(tf.reduce_sum(tf.exp(batch["x"] - largest), axis=1)) + largest


def last(batch, length):
    """The last value of each row, by its place among the values of all rows."""
    values = tf.reshape(batch["series"][:, :, 0], [-1])
    return tf.gather(values, tf.range(ROWS, dtype=tf.int64) * TIME + length - 1) ** 2


def samples(batch):
    """The mean over three samples of each row, which stand one after another."""
    x = tf.tile(batch["x"], [3, 1]) * tf.repeat(tf.constant([1.0, 2.0, 3.0]), ROWS)[:, None]
    logs = tf.reshape(-by_row(x), [3, ROWS])
    largest = tf.reduce_max(logs)
    return tf.math.log(tf.reduce_mean(tf.exp(logs - largest), axis=0)) + largest


# Code of tutorials and papers, with reductions over rows, masks and selections, that is right.
INDEPENDENT = {
    "maximum of the batch": shifted_by_the_maximum,
    "logsumexp by the maximum of the batch": logsumexp,
    "attention": attention,
    "ranking in a row": ranking,
    "ragged rows": ragged,
    "masked mean of tokens": lambda b: tf.math.divide_no_nan(
        tf.reduce_sum(b["series"][:, :, 0] * EXISTS(b), axis=1), tf.reduce_sum(EXISTS(b), axis=1)
    ),
    "padding to the longest row": longest,
    "dice of each row": lambda b: 1 - 2 * tf.reduce_sum(b["image"][..., 0] * b["image"][..., 1], [1, 2])
    / (tf.reduce_sum(b["image"][..., 0] + b["image"][..., 1], [1, 2]) + 1e-6),
    "focal loss": lambda b: -tf.gather(
        tf.nn.log_softmax(b["x"]) * (1 - tf.nn.softmax(b["x"])) ** 2, b["label"], batch_dims=1
    ),
    "normalization of each row": lambda b: by_row(
        (b["x"] - tf.reduce_mean(b["x"], 1, keepdims=True)) / (1 + tf.norm(b["x"], axis=1)[:, None])
    ),
    "positions of a batch's shape": lambda b: by_row(tf.gather_nd(b["series"], tf.stack([
        tf.range(tf.shape(b["tokens"])[0], dtype=tf.int64),
        tf.argmax(b["tokens"], axis=1),
    ], axis=1))),
    "hardest negative class": lambda b: tf.nn.relu(
        1 + tf.reduce_max(b["x"] - 1e9 * tf.one_hot(b["label"], FEATURES), axis=1)
        - tf.gather(b["x"], b["label"], batch_dims=1)
    ),
    "one weight per class": lambda b: (
        tf.gather(tf.constant([1.0, 2.0, 3.0]), b["label"]) * by_row(b["x"])
    ),
    "a branch if any row is positive": lambda b: tf.cond(
        tf.reduce_any(b["label"] > 0),
        lambda: by_row(b["x"]) * LABEL(b),
        lambda: by_row(b["x"]) * LABEL(b),
    ),
    "rows that are sorted, and put back": lambda b: tf.gather(
        tf.gather(by_row(b["x"]), tf.argsort(b["label"], stable=True)),
        tf.argsort(tf.argsort(b["label"], stable=True)),
    ),
    "last value by its length": lambda b: last(b, b["length"]),
    "last value by the tokens": lambda b: last(b, tf.reduce_sum(tf.sign(b["tokens"]), axis=1)),
    "samples of each row": samples,
    "a warm-up": lambda b: by_row(b["x"]) * tf.cast(tf.minimum(STEP, 10), tf.float32),
}  # fmt: skip
STEP = tf.Variable(0, dtype=tf.int64, trainable=False)
# They depend on other rows, but not in the first batch: no label is positive, every token exists, no
# label is 255, and the first step is no late one.
FACTOR = tf.Variable(0.0, trainable=False)
HIDDEN = {
    "a factor that grows": lambda b: by_row(b["x"]) + tf.nn.relu(FACTOR - 0.5) * tf.reduce_mean(b["x"]),
    "sum of the labels": lambda b: (
        LABEL(b) * by_row(b["x"]) / tf.maximum(tf.reduce_sum(LABEL(b)), 1.0)
    ),
    "hardest positive": lambda b: by_row(b["x"]) * LABEL(b) + LABEL(b) * tf.reduce_max(
        tf.where(b["label"] > 0, by_row(b["x"]), 0.0)
    ),
    "rows of a class": lambda b: (
        tf.math.unsorted_segment_mean(by_row(b["x"]), b["label"], 3)[1] * LABEL(b)
    ),
    "mean of the rows to use": lambda b: by_row(b["x"]) / tf.reduce_mean(
        tf.cast(b["label"] != 255, tf.float32)
    ),
    "a branch": lambda b: tf.cond(
        tf.reduce_any(b["label"] > 0),
        lambda: by_row(b["x"] - tf.reduce_mean(b["x"], axis=0)),
        lambda: by_row(b["x"]),
    ),
    "a late term": lambda b: by_row(b["x"]) + tf.where(STEP >= 2, tf.reduce_mean(b["x"]), 0.0),
    "a late branch": lambda b: tf.cond(
        STEP >= 5000, lambda: by_row(b["x"] - tf.reduce_mean(b["x"], axis=0)), lambda: by_row(b["x"])
    ),
    "a step of many": lambda b: by_row(b["x"]) + tf.where(
        STEP % 1000 == 0, tf.reduce_mean(b["x"]) * tf.cast(STEP > 0, tf.float32), 0.0
    ),
    "the shape of the positive rows": lambda b: by_row(b["x"]) / tf.maximum(
        tf.cast(tf.shape(tf.where(b["label"] > 0))[0], tf.float32), 1.0
    ),
    "ones for the positive rows": lambda b: by_row(b["x"]) * (
        1.0 + tf.reduce_sum(tf.ones_like(tf.boolean_mask(b["x"][:, 0], b["label"] > 0)))
    ),
    "the number of classes": lambda b: by_row(b["x"]) / tf.cast(
        tf.size(tf.unique(b["label"]).y), tf.float32
    ),
    "the place of a positive row": lambda b: LABEL(b) * tf.cast(tf.range(ROWS), tf.float32),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEPENDENT)
def test_rows_that_are_made_up_cause_no_false_alarm(name, caplog):
    trace(INDEPENDENT[name])
    assert not caplog.text


@pytest.mark.parametrize("name", HIDDEN)
def test_losses_are_rejected_that_depend_on_other_rows_in_other_batches_or_later_steps(
    name, monkeypatch
):
    monkeypatch.setitem(BATCH, "label", np.zeros(ROWS, np.int64))
    with pytest.raises(
        ctl.UsageError, match=r"row_coupling_test\.py:\d+.* (combines rows|the place)"
    ):
        trace(HIDDEN[name])
    assert STEP.numpy() == 0


DYNAMIC = ("transformer", "dense", "synchronized batch normalization")


@pytest.mark.parametrize(
    ("name", "static"), [*((n, True) for n in SEARCHED), *((n, False) for n in DYNAMIC)]
)
def test_losses_of_independent_rows_are_accepted_without_computing_them(name, static):
    assert trace(SEARCHED[name](), static=static) == 0


@pytest.mark.parametrize("name", COMPUTED)
def test_losses_are_computed_where_the_ops_do_not_show_that_rows_are_independent(name, caplog):
    assert trace(COMPUTED[name]())
    assert not caplog.text


def retrieval(labels):
    """The cross-entropy of the similarities of each row with the rows of the global batch."""

    def loss(batch):
        rows = ctl.replica.all_gather(batch["x"][:, 1:])
        scores = tf.matmul(batch["x"][:, :-1], rows, transpose_b=True)
        return labels(scores)

    return loss


def cross_entropy(scores):
    eye = tf.eye(tf.shape(scores)[0], tf.shape(scores)[1])
    return tf.nn.softmax_cross_entropy_with_logits(eye, scores)


def rolled(batch, noise=0.0):
    """As for a library that takes candidate i for the positive of query i."""
    first = ctl.replica.positions(batch["x"])[0]
    rows = tf.roll(ctl.replica.all_gather(batch["x"][:, 1:]), -first, axis=0)
    return cross_entropy(tf.matmul(batch["x"][:, :-1] + noise, rows, transpose_b=True))


def of_all_rows(batch, select):
    rows = ctl.replica.all_gather(batch["x"])
    scores = tf.matmul(rows, rows, transpose_b=True)
    return select(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(ROWS), scores))


PLACES = {
    "eye": retrieval(cross_entropy),
    "range": retrieval(lambda scores: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.range(tf.shape(scores)[0]), scores
    )),
    "diagonal": retrieval(lambda scores: -tf.linalg.diag_part(scores)),
    "slice": lambda b: by_row(b["x"] - ctl.replica.all_gather(b["x"])[: tf.shape(b["x"])[0]] ** 2),
    "slice of losses": lambda b: of_all_rows(b, lambda losses: losses[: tf.shape(b["x"])[0]]),
    "every second row": lambda b: (
        by_row(b["x"]) * tf.cast(tf.range(tf.shape(b["x"])[0]) % 2, tf.float32)
    ),
    "constant": lambda b: by_row(b["x"]) * np.arange(ROWS, dtype=np.float32),
    "part of a table": lambda b: by_row(b["x"]) + tf.range(64.0)[: b["x"].shape[0]],
    "numbers of a loop": lambda b: by_row(b["x"]) + tf.stack([
        tf.random.stateless_normal([], [i, 7]) for i in range(b["x"].shape[0])
    ]),
}  # fmt: skip
OWN_PLACES = {
    "positions": retrieval(lambda scores: tf.nn.sparse_softmax_cross_entropy_with_logits(
        ctl.replica.positions(scores), scores
    )),
    "rolled": rolled,
    "rolled, with keyed noise": lambda b: rolled(b, ctl.random.normal([None, FEATURES - 1])),
    "losses of all rows": lambda b: of_all_rows(
        b, lambda losses: tf.gather(losses, ctl.replica.positions(b["x"]))
    ),
    "one loss of all rows": lambda b: of_all_rows(
        b, lambda losses: by_row(b["x"]) + tf.fill(tf.shape(b["x"])[:1], tf.reduce_mean(losses))
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in PLACES), ("eye", {"rows": 1})]
    + [(name, {"static": False}) for name in ("eye", "every second row")],
)
def test_loss_by_the_place_of_a_row_in_its_replica_is_rejected(name, options):
    message = r"_test\.py:\d+.* uses the place of a row .*ctl\.replica\.positions"
    with pytest.raises(ctl.UsageError, match=message) as caught:
        trace(PLACES[name], **options)
    assert "\n" not in str(caught.value)


def test_place_of_a_row_is_warned_of_if_one_replica_has_all_rows(caplog):
    trace(PLACES["eye"], replicas=1)
    assert "uses the place of a row" in caplog.text


@pytest.mark.parametrize("name", OWN_PLACES)
def test_loss_by_the_place_of_a_row_in_the_global_batch_is_accepted(name, caplog):
    trace(OWN_PLACES[name])
    if name in ("positions", "rolled"):
        trace(OWN_PLACES[name], static=False)
    assert not caplog.text


def ghost_batch_normalization(batch):
    groups = tf.reshape(batch["x"], [2, ROWS // 2, FEATURES])
    return by_row(tf.reshape(groups - tf.reduce_mean(groups, axis=1, keepdims=True), [ROWS, -1]))


def carried(batch):
    """A mean that a loop over the rows carries from row to row."""
    return by_row(tf.scan(lambda mean, row: 0.9 * mean + 0.1 * row, batch["x"]))


def in_python(batch):
    return tf.ensure_shape(
        tf.numpy_function(lambda x: (x - x.mean(axis=0)).sum(axis=1), [batch["x"]], tf.float32),
        [ROWS],
    )


@tf.function
def centered(x):
    return x - tf.reduce_mean(x, axis=0)


def in_branch(batch):
    return by_row(tf.cond(SWITCH > 0, lambda: centered(batch["x"]), lambda: batch["x"]))


SWITCH = tf.Variable(1)
COUPLED = {
    "negatives by einsum": lambda b: tf.reduce_logsumexp(tf.einsum("if,jf->ij", b["x"], b["x"]), 1),
    "mean of the class": lambda b: by_row(
        b["x"] - tf.gather(tf.math.unsorted_segment_mean(b["x"], b["label"], 3), b["label"])
    ),
    "scan over rows": carried,
    "moments": lambda b: by_row(
        (b["x"] - tf.nn.moments(b["x"], [0])[0]) / tf.nn.moments(b["x"], [0])[1]
    ),
    "fused statistics": lambda b: by_row(
        tf.compat.v1.nn.fused_batch_norm(b["image"], [1.0] * 3, [0.0] * 3)[0]
    ),
    "groups of rows": ghost_batch_normalization,
    "losses over their quantile": lambda b: (
        tf.nn.relu(by_row(b["x"]) - tf.sort(by_row(b["x"]))[ROWS // 2])
    ),
    "convolution over rows": lambda b: by_row(
        tf.nn.conv1d(b["x"][None], tf.ones([3, FEATURES, 2]), 1, "SAME")[0]
    ),
    "neighbors by roll": lambda b: by_row(b["x"] - tf.roll(b["x"], 1, 0)),
    "first row": lambda b: by_row(b["x"] - b["x"][0]),
    "numpy": in_python,
    "in a branch and a tf.function": in_branch,
    "next token of the flattened batch": lambda b: by_row(b["series"] - tf.reshape(
        tf.roll(tf.reshape(b["series"], [-1, FEATURES]), -1, 0), [ROWS, TIME, FEATURES]
    )),
}  # fmt: skip
# Rules read the number of rows for reshapes, slices and products.
NOT_STATIC = (
    "negatives by einsum", "groups of rows", "losses over their quantile", "first row",
    "next token of the flattened batch",
)  # fmt: skip
ONE_COUPLED = ("scan over rows", "moments", "fused statistics")


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in COUPLED), *((name, {"static": False}) for name in NOT_STATIC)]
    + [(name, {"rows": 1}) for name in ONE_COUPLED],
)
def test_losses_that_depend_on_other_rows_are_rejected_with_the_line_and_what_to_write(
    name, options
):
    with pytest.raises(ctl.UsageError) as raised:
        trace(COUPLED[name], **options)
    message = str(raised.value)
    assert message.startswith("tests/checks/row_coupling_test.py:") and "\n" not in message
    assert "combines rows" in message and "runtime.allow_row_coupling" in message
    assert "use ctl.replica.all_gather" in message and "permutation_of_batch" in message
    assert "ctl.SyncBatchNormalization" in message


KERNEL = tf.Variable(tf.ones([FEATURES, 1]))
BROADCAST = {
    "labels minus outputs": (
        lambda b: tf.reduce_mean((b["x"][:, 0] - b["x"] @ KERNEL) ** 2, axis=-1),
        'batch["x"] (6,) and outputs (6, 1) broadcast to (6, 6) (Sub)', "use outputs[:, 0]",
    ),
    "outputs minus labels of rank 2": (
        lambda b: tf.reduce_mean((tf.tanh(b["x"] @ KERNEL)[:, 0] - b["x"][:, :1]) ** 2, axis=-1),
        'outputs (6,) and batch["x"] (6, 1) broadcast to (6, 6) (Sub)', 'use batch["x"][:, 0]',
    ),
    "a function of tf_keras": (
        lambda b: tf_keras.losses.mean_squared_error(b["x"][:, 0], b["x"] @ KERNEL),
        'outputs (6, 1) and batch["x"] (6,) broadcast to (6, 6)', "use outputs[:, 0]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "replicas"), [*zip(BROADCAST, (1, 2, 1), strict=True)])
def test_rows_that_broadcast_to_all_pairs_are_an_error_that_names_the_shapes(name, replicas):
    loss, shapes, fix = BROADCAST[name]
    with pytest.raises(ctl.UsageError) as raised:
        trace(loss, replicas=replicas)
    message = str(raised.value)
    assert message.startswith("tests/checks/row_coupling_test.py:")
    assert shapes in message and fix in message


def margin(batch):
    scores = (batch["x"] @ KERNEL)[:, 0]
    return tf.reduce_sum(tf.nn.relu(1 - (scores[:, None] - scores)), axis=1)


def distances(batch):
    """The distances of a kernel two-sample test, of the rows and what a model computes from them."""
    x, y = batch["x"], batch["x"] * tf.transpose(KERNEL)
    squares = tf.reduce_sum(x**2, axis=1, keepdims=True) + tf.reduce_sum(y**2, axis=1)
    return tf.reduce_sum(tf.exp(-squares + 2 * x @ tf.transpose(y)), axis=1)


@pytest.mark.parametrize("loss", [margin, distances])
def test_pairs_that_are_meant_are_no_error_on_one_replica(loss, caplog):
    trace(loss, replicas=1)
    assert "combines rows" in caplog.text and " (6, 1) and " in caplog.text


def test_line_of_a_coupling_is_that_of_the_op_that_couples():
    table = tf_keras.layers.IntegerLookup(vocabulary=np.arange(9))

    def loss(batch):
        x = tf.cast(table(batch["tokens"]), tf.float32)
        x = masked_sum({**batch, "series": x[:, :, None]})
        return tf.nn.softmax(x) * x  # an exponential over a sum

    with pytest.raises(ctl.UsageError, match=r"combines rows .* \(Softmax\)"):
        trace(loss)


def test_losses_that_depend_on_other_rows_are_accepted_by_an_option():
    assert trace(COUPLED["moments"], allow=True) == 0


def test_losses_are_computed_in_a_step_that_has_added_a_mask():
    # Once for other rows, and once for one replica.
    assert trace(COMPUTED["map over rows"](), padded=True) == 2


def test_code_that_assigns_a_variable_is_not_computed_which_is_only_warned_of(caplog):
    @tf.function
    def count(x):
        SWITCH.assign_add(1)
        return tf.map_fn(tf.reduce_sum, x)

    before = SWITCH.numpy()
    trace(lambda batch: count(batch["x"]))
    assert SWITCH.numpy() == before
    assert "may combine rows" in caplog.text and "it reads or changes a state" in caplog.text


def test_one_replica_that_computes_the_batch_at_once_is_only_warned(caplog):
    trace(COUPLED["moments"], replicas=1)
    assert "tests/checks/row_coupling_test.py:" in caplog.text
    assert "SyncBatchNormalization" in caplog.text


# The only row of a replica: the step is traced again with two rows.
ONE_ROW = {
    "map": lambda b: tf.map_fn(lambda row: tf.reduce_sum(row**2), b["x"]),
    "diagonal": lambda b: tf.linalg.diag_part(b["x"] @ tf.transpose(b["x"])),
    "a branch in Python": lambda b: by_row(b["x"]) if b["x"].shape[0] == 1 else masked_sum(b),
}


@pytest.mark.parametrize(("name", "static"), [*((name, True) for name in ONE_ROW), ("map", False)])
def test_losses_of_the_only_row_of_a_replica_are_accepted(name, static, caplog):
    trace(ONE_ROW[name], rows=1, static=static)
    assert "may combine rows" not in caplog.text


def mapped(batch, outputs):
    def loss(row):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(row[0], row[1])

    return tf.map_fn(loss, (batch["label"], outputs), fn_output_signature=outputs.dtype)


def coupled(batch, outputs):
    return mapped(batch, outputs - tf.reduce_mean(outputs, axis=0))


class MapOverRows(Case):
    per_example_loss = staticmethod(mapped)


class Coupled(Case):
    per_example_loss = staticmethod(coupled)


@pytest.mark.slow
@pytest.mark.parametrize("split", [Split(2, 2), Split(1, 3, 2)], ids=str)
def test_trainer_of_one_row_per_part_computes_the_update_of_one_replica(split):
    expected = running.train(MapOverRows, split.reference)
    assert running.difference(expected, running.train(MapOverRows, split)) <= 1e-10
    with pytest.raises(ctl.UsageError, match="combines rows"):
        running.train(Coupled, split)


def test_losses_of_the_users_own_dataset_are_computed_too():
    trainer = running.build(Coupled, Split(2, 4))
    data = tf.data.Dataset.from_tensor_slices({k: EXAMPLES[k] for k in Coupled.features})
    dataset = data.batch(4, drop_remainder=True).repeat()
    trainer.train_dataset = trainer.strategy.experimental_distribute_dataset(dataset)
    with pytest.raises(ctl.UsageError, match=r"combines rows .* \(Mean\)"):
        trainer.train(tf.constant(1))


class Coded(Case):
    """A mean over rows, of codes that are 0 at first and in rows that are made up."""

    features = ("x", "code")

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": EXAMPLES["x"], "code": np.zeros((19, 2), np.int64)})

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def per_example_loss(self, batch, outputs):
        codes = tf.cast(batch["code"], outputs.dtype)
        return tf.reduce_sum(outputs**2, axis=1) * tf.reduce_mean(codes)


def own_batches(code_of_row):
    """Batches of 4 rows; the third one has codes."""
    code = np.zeros((16, 2), np.int64)
    code[8:12] = code_of_row
    data = {"x": EXAMPLES["x"][:16], "code": code}
    return tf.data.Dataset.from_tensor_slices(data).batch(4, drop_remainder=True)


def test_later_batches_of_the_users_own_dataset_are_searched_each_read_once():
    trainer = running.build(Coded, Split(2, 4))
    dataset = own_batches([[1, 0], [2, 0], [5, 0], [3, 3]])
    trainer.train_dataset = trainer.strategy.experimental_distribute_dataset(dataset)
    trainer.train(tf.constant(1))
    with pytest.raises(LateUsageError, match=r"combines rows .* \(Mean\)"):
        trainer.train(tf.constant(1))
    assert trainer.global_step.numpy() == 2
    assert trainer._ctl_loop._own[1] == 2  # the number of the batch that the checks have read last


class Largest(Case):
    """Takes the largest output of all rows from each, which changes no loss."""

    def per_example_loss(self, batch, outputs):
        return largest(batch, outputs)


def test_batches_of_an_iterator_are_left_to_the_training(caplog):
    trainer = running.build(Largest, Split(2, 4))
    data = {k: EXAMPLES[k][:8] for k in Largest.features}
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(4, drop_remainder=True)
    trainer.train_dataset = iter(trainer.strategy.experimental_distribute_dataset(dataset))
    trainer.train(tf.constant(2))
    assert [line for line in caplog.messages if "train_dataset is an iterator" in line]


@pytest.mark.parametrize("loss", ["positives", "largest"])
def test_step_in_a_function_of_the_user_is_searched_with_rows_that_are_made_up(loss, caplog):
    """Without a batch that can be read."""
    strategy, losses = running.strategy(2), {"positives": positives, "largest": largest}
    step = ctl.Step(
        lambda: tf_keras.Sequential([layers.Dense(3)]),
        lambda: tf_keras.optimizers.SGD(0.1),
        losses[loss], global_batch_size=8, strategy=strategy,
        forward=lambda batch, training: step.model(batch["x"], training=training),
    )  # fmt: skip
    data = {"x": EXAMPLES["x"][:16].astype(np.float32), "positive": np.zeros(16, np.float32)}
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(8, drop_remainder=True)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    function = tf.function(lambda batch: step(batch).loss)
    if loss == "positives":
        with pytest.raises(ctl.UsageError, match=r"combines rows .* \(Sum\)"):
            function(next(batches))
        return
    for batch in batches:
        function(batch)
    unread = [line for line in caplog.messages if "cannot read the batches" in line]
    assert len(unread) == 1 and "rows that it made up" in unread[0]


def positives(batch, outputs):
    weights = batch["positive"]
    return weights * outputs[:, 0] ** 2 / tf.maximum(tf.reduce_sum(weights), 1.0)


def largest(batch, outputs):
    shift = tf.stop_gradient(tf.reduce_max(outputs))
    return shift + tf.reduce_logsumexp(outputs - shift, axis=1)


def divided_by_static_rows(batch, outputs):
    return by_row(outputs) / float(batch["x"].shape[0] or 1)


@pytest.mark.parametrize(
    ("loss", "batch", "message"),
    [
        (coupled, 2, "combines rows"),  # one row per replica
        (divided_by_static_rows, 6, "depend on the number of rows"),
        (divided_by_static_rows, 8, "depend on the number of rows"),  # beside a normalization
    ],
)
def test_step_is_searched_with_the_rows_of_all_replicas_and_with_other_numbers(
    loss, batch, message
):
    strategy = running.strategy(2)
    data = ctl.data.arrays({name: EXAMPLES[name] for name in ("x", "label")})
    step = ctl.Step(
        lambda: tf_keras.Sequential(
            [layers.Dense(3), *([ctl.SyncBatchNormalization()] if batch == 8 else [])]
        ),
        lambda: tf_keras.optimizers.SGD(0.1),
        loss, global_batch_size=batch, strategy=strategy, precision="float64",
    )  # fmt: skip
    with pytest.raises(ctl.UsageError, match=message):
        step(next(iter(ctl.data.distribute(data, batch, strategy))))


@pytest.mark.parametrize(
    ("loss", "options", "reason"),
    [
        (ONE_ROW["diagonal"], dict(read=1), "the batch has one row"),
        (lambda b: ONE_ROW["map"]({"x": tf.ensure_shape(b["x"], [1, FEATURES])}), {}, "ValueError"),
    ],
)
def test_losses_that_cannot_be_compared_are_accepted_with_a_warning(loss, options, reason, caplog):
    trace(loss, rows=1, **options)
    (line,) = caplog.messages
    assert line.startswith("tests/") and "may combine rows" in line
    assert "which is not known" in line and reason in line


@pytest.mark.parametrize("name", ["layer normalization", "group normalization"])
def test_layers_that_normalize_a_row_by_itself_are_accepted_if_there_is_only_one_row(name, caplog):
    trace(SEARCHED[name](), rows=1)
    assert "may combine rows" not in caplog.text


def test_graphs_of_the_search_are_not_optimized(request):
    """TensorFlow's optimizer prints errors about loops, which a user could not place."""
    optimizer, seen = tf.config.optimizer, []
    before = optimizer.get_experimental_options()
    request.addfinalizer(lambda: optimizer.set_experimental_options(before))
    optimizer.set_experimental_options({"disable_meta_optimizer": False})

    def record(values):
        seen.append(optimizer.get_experimental_options()["disable_meta_optimizer"])
        return values

    def loss(batch):
        values = batch["x"][:, 0] + 0 * tf.reduce_mean(batch["x"])
        return tf.ensure_shape(tf.py_function(record, [values], tf.float32), [ROWS])

    trace(loss)
    assert seen and all(seen)
    assert not optimizer.get_experimental_options()["disable_meta_optimizer"]


def test_errors_of_rows_that_are_made_up_are_not_printed(capfd, monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    failed = []

    def check(x):
        os.write(2, b"a line of TensorFlow\n")
        if not x.numpy().any(axis=1).all():
            failed.append(x)
            raise ValueError("a row is 0")
        return x

    def loss(batch):
        x = tf.ensure_shape(tf.py_function(check, [batch["x"]], tf.float32), [ROWS, FEATURES])
        return by_row(x)

    trace(loss)
    assert failed and capfd.readouterr().err == ""


class Gated(Case):
    """A mean over rows, whose factor is zero at first."""

    def per_example_loss(self, batch, outputs):
        factor = self.model.layers[-1].bias[0] ** 2  # whose gradient is zero at first, too
        return super().per_example_loss(batch, outputs) + factor * tf.reduce_mean(outputs**2)


class Scarce(Case):
    """The only positive example is a late one, by a feature."""

    features = ("x", "amount")

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": EXAMPLES["x"], "amount": 1.0 * (np.arange(19) == 5)})

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def per_example_loss(self, batch, outputs):
        weights = batch["amount"]
        return tf.reduce_sum(outputs**2, axis=1) * weights / tf.maximum(tf.reduce_sum(weights), 1.0)


def test_batches_of_later_steps_are_searched_and_the_run_ends_after_them():
    trainer = running.build(Gated, Split(2))
    with pytest.raises(LateUsageError, match=r"_test\.py:\d+.* combines rows"):
        trainer.train(tf.constant(1))
    assert trainer.global_step.numpy() == 1
    with pytest.raises(ctl.UsageError, match="combines rows"):
        running.build(Scarce, Split(2)).train(tf.constant(1))


def test_steps_of_a_loop_of_the_user_are_searched_again_at_powers_of_two(monkeypatch):
    strategy = running.strategy(2)
    factor = tf.Variable([0.0], trainable=False)
    step = ctl.Step(
        lambda: tf_keras.Sequential([layers.Dense(3)]),
        lambda: tf_keras.optimizers.SGD(0.1),
        lambda b, outputs: by_row(outputs) + factor[0] * tf.reduce_mean(outputs),
        global_batch_size=8, strategy=strategy,
    )  # fmt: skip
    data = ctl.data.arrays({"x": EXAMPLES["x"].astype(np.float32), "label": EXAMPLES["label"]})
    batches = iter(ctl.data.distribute(data, 8, strategy))
    for _ in range(4):  # the steps 1, 2 and 4 are searched
        step(next(batches))
    factor.assign([1.0])
    for _ in range(3):
        step(next(batches))
    with pytest.raises(LateUsageError, match="combines rows"):
        step(next(batches))


def test_run_saves_the_step_that_shows_that_a_loss_combines_rows(tmp_path):
    trainer = running.build(Gated, Split(2))
    checkpoints = Checkpointer(str(tmp_path), trainer)
    controller = Controller(trainer=trainer, steps_per_loop=3, checkpoints=checkpoints)
    with pytest.raises(LateUsageError, match="combines rows"):
        controller.train(6)
    assert [path.name for path in tmp_path.glob("*.index")] == ["ckpt-3.index"]


def by_group(batch):
    """The mean of the rows of a group, none of which has two rows in a replica."""
    groups = batch["group"]
    means = tf.math.unsorted_segment_mean(batch["x"], groups, ROWS)
    return by_row(batch["x"] - 2 * tf.gather(means, groups))


def test_groups_of_rows_that_no_batch_has_are_made_up(monkeypatch):
    monkeypatch.setitem(BATCH, "group", np.arange(ROWS))
    with pytest.raises(ctl.UsageError, match=r"combines rows .*UnsortedSegment"):
        trace(by_group)


class TwoViews(Case):
    """A Siamese network on both views at once, which the global statistics of a layer join."""

    features = ("x", "view", "label")

    def build_model(self):
        return tf_keras.Sequential([layers.Dense(4), ctl.SyncBatchNormalization(), layers.Dense(3)])

    def forward(self, batch, training):
        return self.model(tf.concat([batch["x"], batch["view"]], axis=0), training=training)

    def per_example_loss(self, batch, outputs):
        first, second = tf.split(outputs, 2)
        return by_row(first - second) + Case.per_example_loss(self, batch, first)


def test_two_views_at_once_are_right_beside_synchronized_batch_normalization(caplog):
    searched_trace._warn.cache_clear()
    expected = running.train(TwoViews, Split(1, 8))
    assert running.difference(expected, running.train(TwoViews, Split(2, 8))) <= 1e-10
    assert "rows" not in caplog.text


def test_views_that_are_compared_with_those_of_the_same_replica_are_named():
    def loss(batch):
        both = tf.concat([batch["x"], 2 * batch["x"]], axis=0)
        scores = both @ tf.transpose(both)
        first, second = tf.split(tf.reduce_logsumexp(scores, axis=1), 2)
        return first + second

    with pytest.raises(ctl.UsageError, match=r"combines rows .*MatMul.*all_gather"):
        trace(loss)


@pytest.mark.slow
def test_application_is_accepted():
    network = tf_keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), classes=2)
    assert trace(lambda batch: by_row(network(batch["image"], training=True))) == 0


# The number of rows of a replica.
