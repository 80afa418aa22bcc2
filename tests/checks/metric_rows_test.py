"""The graph shows whether a metric is a sum over rows, and whether it counts those of the loss."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.built.metric_updates import update_by_name
from ctl.built.metrics import prepare
from ctl.checks.metric_rows import check_rows
from tests.support import one_batch
from tests.users_code.examples import Case
from tests.users_code.running import Split, build

WRAPPER = tf_keras.metrics.MeanMetricWrapper


def check(metric, labels=(5, 1), outputs=(5, 1)):
    with tf.Graph().as_default():
        check_rows(metric, {"labels": tf.ones(labels), "outputs": tf.ones(outputs)}, "m")


def hits(labels, outputs):
    return tf.equal(tf.cast(labels, tf.int64), tf.argmax(outputs, -1))


@pytest.mark.parametrize(
    ("function", "labels", "outputs"),
    [
        (lambda labels, outputs: labels - outputs, (5, 1), (5, 1)),
        (lambda labels, outputs: tf.reduce_mean(outputs, [1, 2]), (5,), (5, 2, 3)),
        (lambda labels, outputs: outputs[labels[:, 0] > 0], (5, 1), (5, 3)),
        (hits, (5, 4), (5, 4, 3)),
        (tf_keras.metrics.mean_squared_error, (5,), (5,)),
    ],
)
def test_values_per_row_are_accepted(function, labels, outputs):
    check(WRAPPER(function), labels, outputs)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, y: tf.reduce_sum(y), r"returned shape \[\] for labels \[rows, 1\]"),
        (
            lambda x, y: tf.reduce_sum(y, 0),
            r"returned shape \[3\] for labels \[rows, 1\] and outputs \[rows, 3\]",
        ),
        (hits, r"compares all rows with each other \(operation Equal returns \[rows, rows\]\)"),
        (
            lambda x, y: tf.reduce_sum(x - y[:, 0]),
            r"compares all rows with each other \(operation Sub returns \[rows, rows\]\)",
        ),
    ],
)
def test_other_values_are_rejected(function, message):
    with pytest.raises(ctl.UsageError, match=message):
        check(WRAPPER(function), (5, 1), (5, 3))


class Multiplied(tf_keras.metrics.Metric):
    def update_state(self, labels, outputs, sample_weight=None):
        errors = tf.abs(labels - outputs)
        tf.reduce_sum(errors if sample_weight is None else errors * sample_weight)

    def result(self):
        return 0.0


def test_metric_is_traced_with_the_weights_that_it_gets():
    metric = Multiplied()
    check(metric)
    message = (
        r"operation Mul returns \[rows, rows\]\) for labels \[rows, 1\] and outputs \[rows, 1\] "
        r"and sample_weight \[rows\]:"
    )
    with pytest.raises(ctl.UsageError, match=message), tf.Graph().as_default():
        values = {"labels": tf.ones([5, 1]), "outputs": tf.ones([5, 1])}
        check_rows(metric, {**values, "sample_weight": tf.ones([5])}, "m")


def test_metric_of_tf_keras_is_not_traced():
    metric = tf_keras.metrics.AUC()
    metric.update_state = None
    check(metric)


def test_error_of_the_users_code_is_left_to_the_update():
    def fail(labels, outputs):
        raise ZeroDivisionError

    check(WRAPPER(fail))


ROWS, LENGTHS = 7, np.array([1, 3, 2, 3, 1, 2, 1])
RNG = np.random.default_rng(0)
TOKENS = {
    "x": RNG.normal(size=(ROWS, 3, 1)),
    "label": RNG.normal(size=(ROWS, 3, 1)),
    "weight": (np.arange(3) < LENGTHS[:, None]) * RNG.uniform(0.5, 2, (ROWS, 3)),
}
ERRORS = np.abs(TOKENS["label"] - TOKENS["x"])[..., 0]
MASKED = ERRORS[TOKENS["weight"] > 0].mean()
WEIGHTED, PLAIN = np.average(ERRORS, weights=TOKENS["weight"]), ERRORS.mean()


class Tokens(one_batch.Trainer):
    """Its outputs are the inputs, until the first update."""

    EXAMPLES = TOKENS

    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(1, "linear", False, "ones")])

    def forward(self, batch, training):
        return self.model(batch["x"])

    def per_example_loss(self, batch, outputs):
        return (batch["label"] - outputs)[..., 0] ** 2

    def build_metrics(self):
        return {"mae": tf_keras.metrics.MeanAbsoluteError()}


class Weighted(Tokens):
    weighted_metrics = ("mae",)


class Unweighted(Tokens):
    weighted_metrics = ()


class TrainingAlone(Weighted):
    def sample_weight(self, batch, training):
        return batch["weight"] if training else tf.ones_like(batch["weight"])


class Ones(Tokens):
    def sample_weight(self, batch):
        return tf.ones_like(batch["weight"])


class Ignores(Unweighted):
    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["mae"].update_state(batch["label"], outputs)


class Masks(Unweighted):
    def update_metrics(self, metrics, batch, outputs, weights):
        present = ctl.replica.present()
        values = batch["label"], outputs
        if present is not None:
            values = [tf.boolean_mask(value, present > 0) for value in values]
        metrics["mae"].update_state(*values)


class Selects(Ignores):
    """Masks the tokens by itself."""

    weighted_metrics = None

    def update_metrics(self, metrics, batch, outputs, weights):
        present = tf.ones([len(batch["x"])], tf.float64) if weights is None else weights
        chosen = tf.where((batch["weight"] > 0) & (present[:, tf.newaxis] > 0))
        values = [tf.gather_nd(value, chosen) for value in (batch["label"], outputs)]
        metrics["mae"].update_state(*values)


class Numbered(Unweighted):
    """Adds the number of the replica."""

    def update_metrics(self, metrics, batch, outputs, weights):
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        outputs += tf.cast(number, outputs.dtype)
        ctl.replica.update_metric(metrics["mae"], batch["label"], outputs, weights)


class Positioned(Unweighted):
    """Adds numbers that depend on the places of the rows in the global batch."""

    def update_metrics(self, metrics, batch, outputs, weights):
        places = tf.cast(ctl.replica.positions(batch["x"]), outputs.dtype)
        outputs += 0 * places[:, tf.newaxis, tf.newaxis] + 0 * ctl.random.uniform(
            tf.shape(outputs), dtype=outputs.dtype
        )
        ctl.replica.update_metric(metrics["mae"], batch["label"], outputs, weights)


def run(cls, replicas, *, size=4, **options):
    """The metric of one step of all rows, and that of an evaluation."""
    trainer = one_batch.make(cls, ROWS, replicas, **options)
    evaluator = ctl.StandardEvaluator(trainer, global_batch_size=size)
    evaluated = evaluator.evaluate(tf.constant(-1))
    return float(trainer.train(tf.constant(1))["mae"]), float(evaluated["mae"])


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    ("cls", "training", "evaluation", "words"),
    [
        (Tokens, PLAIN, PLAIN, "mae counts all tokens"),
        (Weighted, WEIGHTED, WEIGHTED, ""),
        (Unweighted, PLAIN, PLAIN, ""),
        (TrainingAlone, WEIGHTED, PLAIN, ""),
        (Ones, PLAIN, PLAIN, ""),
        (Masks, PLAIN, PLAIN, ""),
        (Ignores, PLAIN, None, "update_metrics updates mae without its argument weights"),
        (Selects, MASKED, MASKED, ""),
    ],
)
def test_metrics_count_the_rows_and_weights_of_the_loss_or_a_line_says_so(
    cls, training, evaluation, words, replicas, caplog
):
    found = run(cls, replicas)
    if cls is Ignores:  # the numbers that the line is about
        assert abs(found[1] - PLAIN) > 1e-3 and (abs(found[0] - PLAIN) > 1e-3) == (replicas > 1)
    else:
        assert found == pytest.approx((training, evaluation), abs=1e-12)
    lines = [r.getMessage() for r in caplog.records if "mae" in r.getMessage()]
    assert (len(lines), words) == ((1, words) if words else (0, "")), lines
    assert words in "".join(lines)


@pytest.mark.parametrize("cls", [Numbered, Positioned])
@pytest.mark.parametrize("replicas", [1, 2])
def test_number_of_the_replica_in_a_metric_is_named(cls, replicas, caplog):
    found = run(cls, replicas)
    is_wrong = cls is Numbered and replicas > 1
    assert (found != pytest.approx((PLAIN, PLAIN), abs=1e-12)) == is_wrong
    assert caplog.text.count("passes mae values that contain the number of the replica") == is_wrong


class Means(Unweighted):
    """Updates a mean with the mean of a replica."""

    def build_metrics(self):
        return {"mae": tf_keras.metrics.Mean()}

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["mae"].update_state(tf.reduce_mean(tf.abs(batch["label"] - outputs)))


class WeightedMeans(Means):
    def update_metrics(self, metrics, batch, outputs, weights):
        errors = tf.reduce_mean(tf.abs(batch["label"] - outputs), axis=[1, 2])
        present = tf.ones_like(errors) if weights is None else weights
        count = tf.reduce_sum(present)
        metrics["mae"].update_state(tf.reduce_sum(errors * present) / tf.maximum(count, 1), count)


class Sums(Means):
    def build_metrics(self):
        return {"mae": tf_keras.metrics.Sum()}

    def update_metrics(self, metrics, batch, outputs, weights):
        errors = tf.reduce_mean(tf.abs(batch["label"] - outputs), axis=[1, 2])
        metrics["mae"].update_state(tf.reduce_sum(errors if weights is None else errors * weights))


@pytest.mark.parametrize(
    ("cls", "replicas", "is_named"), [(Means, 4, True), (WeightedMeans, 4, False), (Sums, 2, False)]
)
def test_mean_of_the_means_of_replicas_is_named(cls, replicas, is_named, caplog):
    found = run(cls, replicas)
    expected = PLAIN * ROWS if cls is Sums else PLAIN
    assert (found[1] != pytest.approx(expected, abs=1e-12)) == is_named
    assert ("mae one number for all rows of a replica" in caplog.text) == is_named


def test_unpadded_batches_may_be_counted_without_weights(caplog):
    assert run(Ignores, 1, size=ROWS) == pytest.approx((PLAIN, PLAIN), abs=1e-12)
    assert "update_metrics" not in caplog.text


def test_metric_of_a_target_has_the_weights_of_the_loss_that_it_is_named_by():
    names = ("age_mae", "size_mae")
    metrics = {name: tf_keras.metrics.MeanAbsoluteError() for name in names}
    prepare(metrics, names)
    labels = {"age": tf.constant([1.0, 2.0]), "size": tf.constant([3.0, 5.0])}
    weights = {"age": tf.constant([1.0, 3.0]), "size": None}
    outputs = {name: tf.zeros([2, 1]) for name in labels}
    update_by_name(metrics, {"label": labels}, outputs, None, lambda training: weights)
    assert [float(metrics[name].result()) for name in names] == [(1 + 6) / 4, 4.0]
    with pytest.raises(ctl.UsageError, match="'age_mae' of weighted_metrics"):
        update_by_name(metrics, {"label": labels}, outputs, None, lambda training: {"b": None})


def test_step_weights_the_metrics_of_training_and_evaluation_by_name():
    strategy = one_batch.strategy(2)
    make = dict.fromkeys(("mae", "plain"), tf_keras.metrics.MeanAbsoluteError)
    with strategy.scope():
        metrics, of_evaluation = [{k: m(dtype="float64") for k, m in make.items()} for _ in "ab"]
        model = tf_keras.Sequential(
            [tf_keras.layers.Dense(1, "linear", False, "ones", dtype="float64")]
        )
    step = ctl.Step(
        model,
        tf_keras.optimizers.SGD(0.0),
        lambda batch, outputs: (batch["label"] - outputs)[..., 0] ** 2,
        global_batch_size=ROWS,
        strategy=strategy,
        precision="float64",
        metrics=metrics,
        weighted_metrics=["mae"],
    )
    source = ctl.data.arrays(TOKENS)
    step(next(iter(ctl.data.distribute(source, ROWS, strategy))))
    evaluated = ctl.evaluate(step, source, of_evaluation, weighted_metrics=["mae"])
    for results in (step.results(), evaluated):
        assert float(results["mae"]) == pytest.approx(WEIGHTED, abs=1e-12)
        assert float(results["plain"]) == pytest.approx(PLAIN, abs=1e-12)
    # The same objects with another choice, and the first choice for batches with padding.
    assert ctl.evaluate(step, source, of_evaluation)["mae"] == pytest.approx(PLAIN, abs=1e-12)
    short = ctl.data.arrays({name: values[:-1] for name, values in TOKENS.items()})
    with strategy.scope():
        new = {name: m(dtype="float64") for name, m in make.items()}
    found = [ctl.evaluate(step, short, m, weighted_metrics=["mae"]) for m in (of_evaluation, new)]
    assert found[0] == pytest.approx(found[1], abs=1e-12)
    assert found[0]["mae"] != pytest.approx(found[0]["plain"], abs=1e-3)
    with pytest.raises(ctl.UsageError, match="weighted_metrics names 'mea'"):
        ctl.evaluate(step, source, of_evaluation, weighted_metrics=["mea"])


class Maximum(tf_keras.metrics.Metric):
    def __init__(self):
        super().__init__()
        self.largest = self.add_weight("largest", initializer="zeros")

    def update_state(self, labels, outputs, sample_weight=None):
        self.assign(tf.cast(tf.reduce_max(outputs), self.dtype))

    def assign(self, value):
        self.largest.assign(tf.maximum(self.largest, value))

    def result(self):
        return self.largest


class Total(Maximum):
    def assign(self, value):
        self.largest.assign(self.largest + value)


@pytest.mark.parametrize(
    ("metric", "replicas", "is_named"), [(Maximum, 2, True), (Maximum, 1, False), (Total, 2, False)]
)
def test_metric_that_is_no_sum_is_named(metric, replicas, is_named, caplog):
    case = type("Case", (Case,), {"build_metrics": lambda self: {"own": metric()}})
    build(case, Split(replicas)).train(tf.constant(1))
    lines = [x for x in caplog.messages if x.startswith("own assigns a variable another value")]
    assert len(lines) == is_named
