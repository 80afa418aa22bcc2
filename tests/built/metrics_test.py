"""A metric is a function of the rows: the same on any split, and as `compile` computes it."""

import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras.src.engine import compile_utils

import ctl
from ctl import testing
from ctl.rows import row_mask
from tests.support import reference_model

SLOW = pytest.mark.slow
KERAS = tf_keras.metrics
ROWS = 7


@functools.cache
def columns():
    """Labels and outputs of every kind, as name -> (labels, outputs) with distinct rows."""
    rng = np.random.default_rng(0)

    def real(*shape):
        return rng.normal(size=(ROWS, *shape)) + 3

    def probability(*shape):
        return rng.uniform(0.1, 0.9, (ROWS, *shape))

    def classes(*shape):
        scores = np.exp(rng.normal(size=(ROWS, *shape, 4)))
        return scores / scores.sum(-1, keepdims=True)

    def integers(below, *shape):
        return rng.integers(0, below, (ROWS, *shape))

    one_hot = np.eye(4)[integers(4)]
    return {
        "regression": (real(), real(1)),
        "column": (real(1), real(1)),
        "vector": (real(3), real(3)),
        "scalars": (real(), real()),
        "series": (real(5), real(5, 1)),
        "binary": (integers(2), probability(1)),
        "probabilities": (integers(2), probability()),
        "labels": (integers(2, 3), probability(3)),
        "steps": (integers(2, 5), probability(5, 1)),
        "sparse": (integers(4), classes()),
        "sparse_column": (integers(4, 1), classes()),
        "one_hot": (one_hot, classes()),
        "tokens": (integers(4, 5), classes(5)),
        "pixels": (integers(4, 2, 3), classes(2, 3)),
        "one_hot32": (one_hot.astype(np.float32), classes().astype(np.float32)),
        "sparse32": (integers(4), classes().astype(np.float32)),
        "tokens32": (integers(4, 5), classes(5).astype(np.float32)),
    }


def cases():
    """Every standard metric with every kind of labels and outputs that it accepts."""
    regression = ("regression", "column", "vector", "scalars", "series")
    binary = ("binary", "probabilities", "labels", "steps")
    sparse = ("sparse", "sparse_column", "tokens", "pixels")
    table = {
        **dict.fromkeys(
            ["MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "Hinge",
             "RootMeanSquaredError", "MeanSquaredLogarithmicError", "LogCoshError", "Poisson",
             "CosineSimilarity", "SquaredHinge"], regression),
        "R2Score": ("regression", "column", "vector", "scalars"),
        "Accuracy": ("regression", "column", "scalars"),
        **dict.fromkeys(
            ["BinaryAccuracy", "BinaryCrossentropy", "AUC", "Precision", "Recall", "TruePositives",
             "FalsePositives", "TrueNegatives", "FalseNegatives"], binary),
        **dict.fromkeys(("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"), sparse),
        **dict.fromkeys(("CategoricalAccuracy", "CategoricalCrossentropy", "KLDivergence",
                         "CategoricalHinge"), ("one_hot",)),
    }  # fmt: skip
    for name, kinds in table.items():
        for kind in kinds:
            yield name, kind, {}
    yield "SensitivityAtSpecificity", "binary", {"specificity": 0.5}
    yield "SpecificityAtSensitivity", "labels", {"sensitivity": 0.5}
    yield "PrecisionAtRecall", "binary", {"recall": 0.5}
    yield "RecallAtPrecision", "labels", {"precision": 0.5}
    yield "AUC", "labels", {"multi_label": True}
    yield "AUC", "binary", {"curve": "PR"}
    yield "MeanRelativeError", "vector", {"normalizer": [1.0, 2.0, 3.0]}
    yield "BinaryIoU", "binary", {}
    yield "MeanIoU", "sparse", {"num_classes": 4, "sparse_y_pred": False}
    yield "MeanIoU", "pixels", {"num_classes": 4, "sparse_y_pred": False}
    yield "IoU", "sparse", {"num_classes": 4, "target_class_ids": [1], "sparse_y_pred": False}
    yield "OneHotIoU", "one_hot", {"num_classes": 4, "target_class_ids": [1]}
    yield "OneHotMeanIoU", "one_hot", {"num_classes": 4}
    # tf_keras computes these in float32 only.
    yield "R2Score", "one_hot32", {"num_regressors": 2, "dtype": "float32"}
    yield "Precision", "one_hot32", {"top_k": 2, "dtype": "float32"}
    for average in ("micro", "macro", "weighted", None):
        yield "F1Score", "one_hot32", {"average": average, "dtype": "float32"}
    yield "FBetaScore", "one_hot32", {"beta": 0.5, "threshold": 0.3, "dtype": "float32"}
    yield "TopKCategoricalAccuracy", "one_hot32", {"k": 2, "dtype": "float32"}
    yield "SparseTopKCategoricalAccuracy", "sparse32", {"k": 2, "dtype": "float32"}
    yield "SparseTopKCategoricalAccuracy", "tokens32", {"k": 2, "dtype": "float32"}


CASES = {f"{name}-{kind}-{options}": (name, kind, options) for name, kind, options in cases()}
# By default: labels with and without an axis of time, several thresholds, and sums that are not a mean
# of rows.
FEW = [case for case in CASES if case.startswith("R2Score-one") or "'macro'" in case]
FEW += ["MeanSquaredError-regression-{}", "MeanSquaredError-scalars-{}"]
FEW += ["AUC-steps-{}", "SparseCategoricalAccuracy-pixels-{}"]


@functools.cache
def expected(case):
    """The metric as `compile` computes it from all rows at once, in one replica."""
    name, kind, options = CASES[case]
    floatx = tf_keras.backend.floatx()
    tf_keras.backend.set_floatx("float64")
    labels, outputs = map(tf.constant, columns()[kind])
    if outputs.shape.rank == 1:  # `compile` would average over rows before the metric does
        outputs = outputs[:, tf.newaxis]
    metric = getattr(KERAS, name)(**options)
    compile_utils.MetricsContainer([metric]).update_state(labels, outputs)
    tf_keras.backend.set_floatx(floatx)
    return metric.result().numpy()


def make(cls, replicas, batch, **options):
    """Makes a trainer in float64 whose model does not change."""
    return reference_model.make_trainer(
        testing.make_strategy(replicas), batch, cls=cls,
        optimizer=lambda: tf_keras.optimizers.SGD(0.0), **options,
    )  # fmt: skip


def check(results, cases):
    wrong = {}
    for case in cases:
        value = expected(case)
        single = CASES[case][1].endswith("32")
        tolerance = 1e-6 if single else 1e-12
        if not np.allclose(results[case], value, rtol=tolerance, atol=tolerance):
            wrong[case] = (np.asarray(results[case]), value)
    assert wrong == {}


def in_shares(case, weights=None, rows=range(ROWS)):
    """The metric of rows in shares of 4, 0 and all others, with padding as a replica has it."""
    name, kind, options = CASES[case]
    metric = getattr(KERAS, name)(**{"dtype": "float64", **options})
    for share in (rows[:4], rows[:0], rows[4:]):
        padded = [*share, 0, 0]
        given = [tf.gather(values, padded) for values in columns()[kind]]
        mask = tf.constant([1.0] * len(share) + [0.0] * 2, tf.float64)
        given.append(mask if weights is None else mask * tf.gather(weights, padded))
        with row_mask.examples(mask):
            ctl.replica.update_metric(metric, *given)
    return metric.result()


EVERY = pytest.mark.parametrize("cases", [FEW, pytest.param(list(CASES), marks=SLOW)], ids=len)


@EVERY
def test_shares_of_a_batch_have_the_metrics_of_compile(cases):
    check({case: in_shares(case) for case in cases}, cases)


@EVERY
def test_weight_of_a_row_counts_the_row_so_many_times(cases):
    weights = tf.constant([2.0, 1.0, 0.0, 3.0, 1.0, 2.0, 1.0], tf.float64)
    repeated = np.repeat(range(ROWS), weights.numpy().astype(int)).tolist()
    # tf_keras takes no [rows] weights for counts over time. Its adjusted R2 does not weight the rows.
    refused = ("steps", "IoU-pixels", "num_regressors")
    for case in (case for case in cases if not any(part in case for part in refused)):
        expected = in_shares(case, rows=repeated)
        np.testing.assert_allclose(in_shares(case, weights), expected, 1e-6, err_msg=case)


class Regression(ctl.StandardTrainer):
    """A plain regression: labels [rows] and outputs [rows, 1], with the default `update_metrics`."""

    metric_factory = staticmethod(lambda: {"mse": KERAS.MeanSquaredError()})
    count = ROWS

    def build_model(self):
        ones = {"kernel_initializer": "ones"}
        return tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(1,), **ones)])

    def build_dataset(self, split, input_context):
        x = np.arange(1.0, self.count + 1)
        return ctl.data.arrays({"x": x[:, np.newaxis], "label": 2 * x, "weight": 1 / x})

    def per_example_loss(self, batch, outputs):
        return tf.square(batch["label"] - outputs[:, 0])

    def build_metrics(self):
        return self.metric_factory()


def regression(metrics, batch=ROWS):
    return make(type("Chosen", (Regression,), {"metric_factory": staticmethod(metrics)}), 1, batch)


def evaluate(trainer, batch):
    evaluator = ctl.StandardEvaluator(trainer, global_batch_size=batch)
    return {name: float(x) for name, x in evaluator.evaluate(tf.constant(-1)).items()}


def test_micro_average_of_weighted_rows_by_hand():
    # Five rows in shares of 3 and 2, the first three right: (9 + 1 + 1) / (9 + 1 + 1 + 1 + 1).
    labels = tf.one_hot([0, 1, 2, 0, 1], 3)
    outputs = tf.one_hot([0, 1, 2, 1, 2], 3)
    weights = tf.constant([9.0, 1.0, 1.0, 1.0, 1.0])
    for given in (weights, weights[:, tf.newaxis]):
        metric = KERAS.F1Score("micro")
        for rows in (slice(3), slice(3, 5), slice(5, 5)):
            ctl.replica.update_metric(metric, labels[rows], outputs[rows], given[rows])
        assert float(metric.result()) == pytest.approx(11 / 13, rel=1e-6)


def test_weights_of_tokens_do_not_repeat_the_row():
    metric = KERAS.SparseCategoricalAccuracy()
    outputs = tf.one_hot([[0, 1, 1], [1, 0, 0]], 2)
    weights = tf.constant([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    ctl.replica.update_metric(metric, tf.zeros([2, 3], tf.int32), outputs, weights)
    assert float(metric.result()) == 1 / 4


def test_cast_of_the_mask_is_no_sample_weight():
    metric = HasNoWeights()

    @tf.function(autograph=False)
    def update(mask):
        with row_mask.examples(mask):
            rows = tf.constant([[1.0], [2.0], [9.0]])
            ctl.replica.update_metric(metric, 2 * rows, rows, tf.cast(mask, tf.float16))

    update(tf.constant([1.0, 1.0, 0.0]))
    assert float(metric.result()) == 1.5


class IgnoresWeights(KERAS.Metric):
    """Sums the errors and counts the rows, and ignores the sample weights."""

    def __init__(self):
        super().__init__("largest")
        self.total = self.add_weight("total", initializer="zeros")
        self.rows = self.add_weight("rows", initializer="zeros")

    def update_state(self, labels, outputs, sample_weight=None):
        errors = tf.abs(labels - outputs)
        # NaN for no rows, as the mean of nothing is.
        self.total.assign_add(tf.reduce_mean(errors) * tf.cast(tf.size(errors), errors.dtype))
        self.rows.assign_add(tf.cast(tf.size(errors), errors.dtype))

    def result(self):
        return self.total / self.rows


class HasNoWeights(IgnoresWeights):
    """Has no argument for sample weights."""

    def update_state(self, labels, outputs):
        super().update_state(labels, outputs)


class ByHand(Regression):
    """With y = x and labels 2 x, the error of row i is i. Trains on batches of 6 rows and of 1."""

    def build_dataset(self, split, input_context):
        source = super().build_dataset(split, input_context)
        if split == "eval":
            return source
        examples = tf.data.Dataset.from_tensor_slices(source.gather(list(range(ROWS))))
        return ctl.data.GlobalBatches(examples.batch(6))

    def build_metrics(self):
        return {
            "mse": KERAS.MeanSquaredError(),
            "weighted": KERAS.MeanSquaredError(),
            "ignores": IgnoresWeights(),
            "function": KERAS.MeanMetricWrapper(lambda x, y: tf.abs(x - y)[:, 0]),
        }

    def update_metrics(self, metrics, batch, outputs, weights):
        others = {name: metric for name, metric in metrics.items() if name != "weighted"}
        super().update_metrics(others, batch, outputs, weights)
        present = tf.ones_like(batch["weight"]) if weights is None else weights
        weights = tf.cast(present, batch["weight"].dtype) * batch["weight"]
        super().update_metrics({"weighted": metrics["weighted"]}, batch, outputs, weights)


def test_metric_of_labels_without_an_axis_by_hand():
    expected = {
        "mse": 140 / 7,  # (1 + 4 + 9 + 16 + 25 + 36 + 49) / 7
        # An override multiplies the weights: sum(i^2 / i) / sum(1 / i).
        "weighted": 28 / sum(1 / i for i in range(1, 8)),
        # Metrics of users that ignore the weights get only rows that exist: (1 + ... + 7) / 7.
        **dict.fromkeys(("ignores", "function"), 4),
    }
    trainer = make(ByHand, 2, 6)
    # Evaluates shares of 2 and 1 rows, then of 1 and 0; trains on shares of 3 and 3, then of 1 and 0.
    for results in (evaluate(trainer, 3), trainer.train(tf.constant(2))):
        shown = {name: float(results[name]) for name in expected}
        assert shown == pytest.approx(expected, rel=1e-6)


def test_metric_of_the_user_that_is_not_a_sum_over_rows_is_rejected():
    # tests/checks/metric_rows_test.py has the other forms.
    wrapper = KERAS.MeanMetricWrapper(lambda labels, outputs: tf.abs(labels - outputs[:, 0]))
    trainer = regression(lambda: {"m": wrapper}, 8)
    message = r"'m' compares all rows with each other \(operation Sub returns \[rows, rows\]\) for"
    for run in (trainer.train, ctl.StandardEvaluator(trainer).evaluate):
        with pytest.raises(ctl.UsageError, match=message):
            run(tf.constant(1))


class PythonState(KERAS.experimental.PyMetric):
    def reset_state(self):
        self.count = 0


class Matrix(KERAS.Metric):
    def __init__(self):
        super().__init__()
        self.counts = self.add_weight(name="counts", shape=(2, 2), initializer="zeros")

    def update_state(self, labels, outputs, sample_weight=None):
        self.counts.assign_add(tf.ones((2, 2)))

    def result(self):
        return tf.linalg.trace(self.counts)


class Reset(Matrix):
    def reset_state(self):
        self.counts.assign(tf.zeros_like(self.counts))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (lambda: {"m": Matrix()}, r"Metric 'm' has a variable of shape \(2, 2\).*reset_state"),
        (lambda: None, "build_metrics returned None, but must return a dict of name -> metric"),
        (lambda: [KERAS.Mean()], "build_metrics returned a list, but must return a dict"),
        (lambda: {"m": KERAS.Mean}, r"Metric 'm' is a class: call it, Mean\(\)\."),
        (lambda: {"m": "accuracy"}, "Metric 'm' is 'accuracy', but must be a metric of tf_keras"),
        (lambda: {"m": KERAS.mean_squared_error}, "Metric 'm' is a function, but must be"),
        (lambda: {"m": PythonState()}, "Metric 'm' is a PyMetric, whose state in Python is not"),
    ],
)
def test_what_is_not_a_metric_is_rejected_when_the_trainer_is_built(metrics, message):
    with pytest.raises(ctl.UsageError, match=message):
        regression(metrics)


def test_metric_with_a_matrix_that_it_resets_is_accepted():
    regression(lambda: {"m": Reset()})


class Rows(Regression):
    metric_factory = staticmethod(lambda: {"m": KERAS.MeanTensor()})

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["m"].update_state(outputs)


class Own(Regression):
    metric_factory = staticmethod(lambda: {"i_loss": KERAS.Mean()})

    def update_metrics(self, metrics, batch, outputs, weights):
        ctl.replica.update_metric(metrics["i_loss"], batch["label"], outputs, weights)


class Two(Regression):
    def forward(self, batch, training):
        outputs = self.model(batch["x"])
        return {"a": outputs, "b": 2 * outputs}

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, outputs["a"])


class Targets(ctl.StandardTrainer):
    """Two outputs, x and x, whose targets are 2 x and 3 x, in the elements of Keras."""

    names = ("twice_error", "twice", "thrice")

    def build_model(self):
        x, ones = tf_keras.Input([1]), {"kernel_initializer": "ones", "use_bias": False}
        outputs = {name: tf_keras.layers.Dense(1, **ones)(x) for name in ("twice", "thrice")}
        return tf_keras.Model({"x": x}, outputs)

    def build_dataset(self, split, input_context):
        x = np.arange(1.0, ROWS + 1)
        features = {"x": x[:, np.newaxis], "unused": x}
        return tf.data.Dataset.from_tensor_slices((features, {"twice": 2 * x, "thrice": 3 * x}))

    def per_example_loss(self, batch, outputs):
        errors = [batch["label"][name] - outputs[name][:, 0] for name in batch["label"]]
        return errors[0] ** 2 + errors[1] ** 2

    def build_metrics(self):
        return {name: KERAS.MeanAbsoluteError() for name in self.names}


@pytest.mark.slow
def test_targets_are_compared_with_the_outputs_of_their_names_by_hand():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of inputs that the model does not have
        trainer = make(Targets, 2, ROWS)
        trainer.optimizer.learning_rate.assign(0.01)
        # Shares of 2 and 1 rows, then of 1 and 0. The errors of x are x and 2 x.
        expected = {"twice_error": 4, "twice": 4, "thrice": 8, "loss": 5 * 20, "examples": 7}
        assert evaluate(trainer, 3) == pytest.approx(expected, abs=1e-12)
        del expected["examples"]
        results = trainer.train(tf.constant(1))  # shares of 4 and 3 rows
    assert {k: float(v) for k, v in results.items()} == pytest.approx(expected, abs=1e-12)
    # The derivative of (y - w x)^2 is -2 x (y - w x), and the mean of x^2 is 20.
    weights = {layer.name: layer.get_weights()[0].item() for layer in trainer.model.layers[1:]}
    assert sorted(weights.values()) == pytest.approx([1 + 0.01 * 40, 1 + 0.01 * 80], abs=1e-12)


@pytest.mark.parametrize(
    ("cls", "metric", "message"),
    [
        (
            Regression, KERAS.Mean,
            r"Metric 'm' is a Mean, .*: override update_metrics, and call "
            r"metrics\['m'\]\.update_state\(values, weights\) with what it averages",
        ),
        (
            Regression, lambda: KERAS.F1Score(dtype="float32"),
            r"Metric 'm' does not accept labels float64 \(.*, 1\) and outputs float64 \(.*, 1\) "
            r"\(.*Tensor conversion requested dtype float32 .*\): convert them in",
        ),
        (Rows, None, r"Metric 'm' takes the shape .*\(shape="),
        # By its name in build_metrics.
        (Own, None, r"call metrics\['i_loss'\]\.update_state"),
        (
            type("Wrong", (Targets,), {"names": ("mae",)}), None,
            r"Metric 'mae' is named by none .*\(twice, thrice; .*call it 'twice_mae', for example",
        ),
        (Two, KERAS.MeanSquaredError, "and the outputs a dict: override update_metrics, and"),
    ],
)  # fmt: skip
def test_metric_that_does_not_fit_the_outputs_is_rejected_by_the_first_step(cls, metric, message):
    factory = {"metric_factory": staticmethod(lambda: {"m": metric()})} if metric else {}
    with pytest.raises(ctl.UsageError, match=message):
        make(type("Chosen", (cls,), factory), 1, ROWS).train(tf.constant(1))


class Tokens(ctl.StandardTrainer):
    """Classes per time step, with a mask of the steps that are not padding (token 0)."""

    def build_model(self):
        layers = tf_keras.layers
        embedding = layers.Embedding(6, 8, mask_zero=True, input_length=5)
        return tf_keras.Sequential([embedding, layers.Dense(3)])

    def build_dataset(self, split, input_context):
        rng = np.random.default_rng(1)
        tokens = rng.integers(1, 6, (ROWS, 5)) * (np.arange(5) <= np.arange(ROWS)[:, np.newaxis])
        return ctl.data.arrays({"x": tokens, "label": rng.integers(0, 3, (ROWS, 5))})

    def per_example_loss(self, batch, outputs):
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        return tf.reduce_sum(loss(batch["label"], outputs), axis=-1)

    def build_metrics(self):
        return {"accuracy": KERAS.SparseCategoricalAccuracy()}


@pytest.mark.slow
def test_mask_over_time_is_that_of_compile():
    trainer = make(Tokens, 1, ROWS, precision="bfloat16", xla="gradients")
    examples = trainer.build_dataset("eval", None).gather(list(range(ROWS)))
    outputs = trainer.model(examples["x"])
    metric = KERAS.SparseCategoricalAccuracy()
    compile_utils.MetricsContainer([metric]).update_state(examples["label"], outputs)
    unmasked = KERAS.SparseCategoricalAccuracy()
    unmasked.update_state(examples["label"], outputs)
    assert metric.result() != unmasked.result()
    expected = pytest.approx(float(metric.result()), abs=1e-6)
    results = evaluate(trainer, 4)
    assert results["accuracy"] == expected
    # The loss of tf_keras reads the same mask, in every precision.
    losses = tf_keras.losses.sparse_categorical_crossentropy(
        examples["label"], tf.cast(outputs, tf.float64), from_logits=True
    )
    masked = tf.reduce_sum(tf.where(examples["x"] > 0, losses, 0)) / ROWS
    assert results["loss"] == pytest.approx(float(masked), rel=1e-3)
    outputs = trainer.train(tf.constant(1))
    assert float(outputs["accuracy"]) == expected
    assert float(outputs["loss"]) == pytest.approx(float(masked), rel=1e-3)


class Partly(Regression):
    """The first of its metrics is that of compile, the second is not updated."""

    count = 6
    metric_factory = staticmethod(
        lambda: {"mse": KERAS.MeanSquaredError(), "other": KERAS.Mean(), "own": KERAS.Mean()}
    )

    def update_metrics(self, metrics, batch, outputs, weights):
        super().update_metrics({"mse": metrics["mse"]}, batch, outputs, weights)
        metrics["own"].total.assign_add(3.0)  # without update_state
        metrics["own"].count.assign_add(1.0)


def test_metrics_of_micro_batches_are_accumulated_and_those_that_nothing_updates_are_not_reported():
    trainer = make(Partly, 1, 6, micro_batches=4)
    results = trainer.train(tf.constant(1))
    assert {*results} == {"loss", "mse", "own"}
    # Micro-batches of 1, 2, 1, 2 rows: the mean of their means is not the mean of the rows.
    assert float(results["mse"]) == pytest.approx(91 / 6, abs=1e-12)
    assert {*evaluate(trainer, 4)} == {"loss", "mse", "own", "examples"}


class Skipping(Regression):
    """The inputs of step 1 are not numbers."""

    metric_factory = staticmethod(lambda: {"r2": KERAS.R2Score(), "mse": KERAS.MeanSquaredError()})

    def preprocess(self, batch):
        rows = ctl.replica.current()
        step = 0 if rows is None else rows.step
        nan = tf.constant(np.nan, batch["x"].dtype)
        label = batch["label"] + tf.cast(step, batch["label"].dtype)
        return {"x": tf.where(tf.equal(step, 1), nan, batch["x"]), "label": label}


def test_metric_of_a_skipped_step_is_restored_if_it_creates_its_variables_late():
    trainer = make(Skipping, 1, ROWS, on_non_finite="skip")
    results = trainer.train(tf.constant(3))
    assert trainer.skipped_steps.numpy() == 1
    # The error of row i in step s is i + s: 140 / 7 in step 0, and 280 / 7 in step 2.
    assert float(results["mse"]) == pytest.approx(30, rel=1e-12)
    assert np.isfinite(float(results["r2"]))
    # A loop without an applied step has no loss and no metrics.
    trainer.global_step.assign(1)
    results = trainer.train(tf.constant(1))
    assert int(results.pop("skipped_steps")) == 2
    assert results.keys() == {"loss", "r2", "mse"} and all(map(np.isnan, results.values()))
    assert np.isfinite(trainer.train(tf.constant(1))["loss"])
