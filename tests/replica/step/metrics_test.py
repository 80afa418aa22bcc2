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
from ctl.replica.arithmetic import row_mask

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
             "CosineSimilarity", "SquaredHinge"],
            regression,
        ),
        "R2Score": ("regression", "column", "vector", "scalars"),
        "Accuracy": ("regression", "column", "scalars"),
        **dict.fromkeys(
            ["BinaryAccuracy", "BinaryCrossentropy", "AUC", "Precision", "Recall", "TruePositives",
             "FalsePositives", "TrueNegatives", "FalseNegatives"],
            binary,
        ),
        **dict.fromkeys(("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"), sparse),
        **dict.fromkeys(
            ("CategoricalAccuracy", "CategoricalCrossentropy", "KLDivergence", "CategoricalHinge"),
            ("one_hot",),
        ),
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
# Tracing all of them takes a minute, so most tests compute these: labels with and without an axis of
# time, several thresholds, and sums that are not a mean of rows.
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


class Given(ctl.StandardTrainer):
    """Compares given outputs with given labels, by every metric of the table."""

    as_global_batches = 0
    cases = FEW

    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(1,))])

    def build_dataset(self, split, input_context):
        data = {"x": np.ones((ROWS, 1))}
        for kind, (labels, outputs) in columns().items():
            data |= {f"{kind}/labels": labels, f"{kind}/outputs": outputs}
        if self.as_global_batches:
            batches = tf.data.Dataset.from_tensor_slices(data).batch(self.as_global_batches)
            return ctl.data.GlobalBatches(batches)
        return ctl.data.arrays(data)

    def forward(self, batch, training):
        return self.model(batch["x"])

    def per_example_loss(self, batch, outputs):
        return outputs[:, 0]

    def build_metrics(self):
        chosen = [(case, *CASES[case]) for case in self.cases]
        return {case: getattr(KERAS, name)(**options) for case, name, _, options in chosen}

    def update_metrics(self, metrics, batch, outputs, weights):
        for case in self.cases:
            kind = CASES[case][1]
            labels = {"label": batch[f"{kind}/labels"]}
            values = batch[f"{kind}/outputs"]
            super().update_metrics({case: metrics[case]}, labels, values, weights)


def make(cls, replicas, batch, **options):
    """Makes a trainer in float64 whose model does not change."""
    options.setdefault("precision", "float64")
    return cls(
        strategy=testing.make_strategy(replicas),
        global_batch_size=batch,
        optimizer=lambda: tf_keras.optimizers.SGD(0.0),
        options=ctl.TrainerOptions(**options),
    )


def check(results, cases):
    wrong = {}
    for case in cases:
        value = expected(case)
        single = CASES[case][1].endswith("32")
        tolerance = 1e-6 if single else 1e-12
        if not np.allclose(results[case], value, rtol=tolerance, atol=tolerance):
            wrong[case] = (np.asarray(results[case]), value)
    assert wrong == {}


# Shares of 2 and 1 rows; in the last batch of 1 and 0.
@pytest.mark.slow
def test_evaluation_is_that_of_compile_on_any_split():
    trainer = make(type("All", (Given,), {"cases": list(CASES)}), 2, 4)
    evaluator = ctl.StandardEvaluator(trainer, global_batch_size=3)
    check(evaluator.evaluate(tf.constant(-1)), CASES)


@pytest.mark.slow
def test_metrics_of_a_compiled_step_are_those_of_compile():
    trainer = make(Given, 2, ROWS, micro_batches=2, xla="gradients")
    check(trainer.train(tf.constant(1)), FEW)


def test_metrics_of_global_batches_with_empty_shares_are_those_of_compile():
    cls = type("Batches", (Given,), {"as_global_batches": 6})  # 6 rows, then 1
    check(make(cls, 2, 6).train(tf.constant(2)), FEW)


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


def regression(metrics, replicas=1, batch=ROWS, **options):
    body = {"metric_factory": staticmethod(metrics)}
    return make(type("Chosen", (Regression,), body), replicas, batch, **options)


def evaluate(trainer, batch):
    evaluator = ctl.StandardEvaluator(trainer, global_batch_size=batch)
    return {name: float(x) for name, x in evaluator.evaluate(tf.constant(-1)).items()}


def test_accumulation_over_six_rows_by_hand():
    # Micro-batches of 1, 2, 1, 2 rows: the mean of their means is not the mean of the rows.
    body = {"count": 6, "metric_factory": staticmethod(Regression.metric_factory)}
    trainer = make(type("Six", (Regression,), body), 1, 6, micro_batches=4)
    assert float(trainer.train(tf.constant(1))["mse"]) == pytest.approx(91 / 6, abs=1e-12)


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


@pytest.mark.parametrize("cases", [FEW, pytest.param(list(CASES), marks=SLOW)], ids=len)
def test_weight_of_a_row_counts_the_row_so_many_times(cases):
    weights = tf.constant([2.0, 1.0, 0.0, 3.0, 1.0, 2.0, 1.0], tf.float64)
    # tf_keras takes no [rows] weights for counts over time. Its adjusted R2 does not weight the rows.
    refused = ("steps", "IoU-pixels", "num_regressors")
    for case in (case for case in cases if not any(part in case for part in refused)):
        name, kind, options = CASES[case]
        labels, outputs = map(tf.constant, columns()[kind])
        one, other = (getattr(KERAS, name)(**{"dtype": "float64", **options}) for _ in range(2))
        ctl.replica.update_metric(one, labels, outputs, weights)
        repeated = tf.repeat(tf.range(ROWS), tf.cast(weights, tf.int32))
        ctl.replica.update_metric(other, tf.gather(labels, repeated), tf.gather(outputs, repeated))
        np.testing.assert_allclose(one.result(), other.result(), 1e-6, err_msg=case)


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
    """With y = x and labels 2 x, the error of row i is i."""

    def build_metrics(self):
        return {
            "mse": KERAS.MeanSquaredError(),
            "weighted": KERAS.MeanSquaredError(),
            "ignores": IgnoresWeights(),
            "has none": HasNoWeights(),
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
        **dict.fromkeys(("ignores", "has none", "function"), 4),
    }
    trainer = make(ByHand, 2, ROWS)
    for results in (evaluate(trainer, 3), trainer.train(tf.constant(1))):
        shown = {name: float(results[name]) for name in expected}
        assert shown == pytest.approx(expected, rel=1e-6)


def test_metric_of_the_user_is_not_updated_by_an_empty_share():
    class Batches(Regression):
        metric_factory = staticmethod(lambda: {"mine": IgnoresWeights()})

        def build_dataset(self, split, input_context):
            examples = super().build_dataset(split, input_context).gather(list(range(ROWS)))
            return ctl.data.GlobalBatches(tf.data.Dataset.from_tensor_slices(examples).batch(6))

    trainer = make(Batches, 2, 6)
    assert float(trainer.train(tf.constant(2))["mine"]) == pytest.approx(4, abs=1e-12)


def test_metric_of_the_user_that_is_not_a_sum_over_rows_is_rejected():
    # tests/replica/checks/metric_rows_test.py has the other forms.
    wrapper = KERAS.MeanMetricWrapper(lambda labels, outputs: tf.abs(labels - outputs[:, 0]))
    trainer = regression(lambda: {"m": wrapper}, 1, 8)
    message = (
        r"Metric 'm' compares all rows with each other \(operation Sub returns \[rows, rows\]\) for"
    )
    for run in (trainer.train, ctl.StandardEvaluator(trainer).evaluate):
        with pytest.raises(ctl.UsageError, match=message):
            run(tf.constant(1))


class PythonState(KERAS.experimental.PyMetric):
    def update_state(self, labels, outputs, sample_weight=None):
        self.count += 1

    def reset_state(self):
        self.count = 0

    def result(self):
        return self.count


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


def test_metric_that_takes_its_shape_from_an_unknown_number_of_rows_is_rejected():
    class Rows(Regression):
        metric_factory = staticmethod(lambda: {"m": KERAS.MeanTensor()})

        def update_metrics(self, metrics, batch, outputs, weights):
            metrics["m"].update_state(outputs)

    with pytest.raises(ctl.UsageError, match=r"Metric 'm' takes the shape .*\(shape="):
        make(Rows, 1, ROWS)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            lambda: {"m": KERAS.Mean()},
            r"Metric 'm' is a Mean, .*: override update_metrics, and call "
            r"metrics\['m'\]\.update_state\(values, weights\) with what it averages",
        ),
        (
            lambda: {"m": KERAS.F1Score(dtype="float32")},
            r"Metric 'm' does not accept labels float64 \(.*, 1\) and outputs float64 \(.*, 1\) "
            r"\(.*Tensor conversion requested dtype float32 .*\): convert them in",
        ),
    ],
)
def test_metric_that_does_not_fit_the_outputs_is_rejected_by_the_first_step(metrics, message):
    with pytest.raises(ctl.UsageError, match=message):
        regression(metrics).train(tf.constant(1))


def test_mean_that_an_override_gives_labels_is_called_by_its_name_in_build_metrics():
    class Own(Regression):
        metric_factory = staticmethod(lambda: {"i_loss": KERAS.Mean()})

        def update_metrics(self, metrics, batch, outputs, weights):
            ctl.replica.update_metric(metrics["i_loss"], batch["label"], outputs, weights)

    with pytest.raises(ctl.UsageError, match=r"call metrics\['i_loss'\]\.update_state"):
        make(Own, 1, ROWS).train(tf.constant(1))


def test_several_outputs_require_an_override():
    class Two(Regression):
        def forward(self, batch, training):
            outputs = self.model(batch["x"])
            return {"a": outputs, "b": 2 * outputs}

        def per_example_loss(self, batch, outputs):
            return super().per_example_loss(batch, outputs["a"])

    with pytest.raises(
        ctl.UsageError, match="and the outputs a dict: override update_metrics, and"
    ):
        make(Two, 1, ROWS).train(tf.constant(1))

    class Chosen(Two):
        def update_metrics(self, metrics, batch, outputs, weights):
            ctl.replica.update_metric(metrics["mse"], batch["label"], outputs["b"], weights)

    assert evaluate(make(Chosen, 1, 5), 5)["mse"] == 0


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


def test_metric_without_a_target_is_named():
    trainer = make(type("Wrong", (Targets,), {"names": ("mae",)}), 1, ROWS)
    message = r"Metric 'mae' is named by none .*\(twice, thrice; .*call it 'twice_mae', for example"
    with pytest.raises(ctl.UsageError, match=message):
        trainer.train(tf.constant(1))


class Tokens(ctl.StandardTrainer):
    """Classes per time step, with a mask of the steps that are not padding (token 0)."""

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [layers.Embedding(6, 8, mask_zero=True, input_length=5), layers.Dense(3)]
        )

    def build_dataset(self, split, input_context):
        rng = np.random.default_rng(1)
        tokens = rng.integers(1, 6, (ROWS, 5)) * (np.arange(5) <= np.arange(ROWS)[:, np.newaxis])
        return ctl.data.arrays({"x": tokens, "label": rng.integers(0, 3, (ROWS, 5))})

    def per_example_loss(self, batch, outputs):
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        return tf.reduce_sum(loss(batch["label"], outputs), axis=-1)

    def build_metrics(self):
        return {"accuracy": KERAS.SparseCategoricalAccuracy()}


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


def test_metric_that_nothing_updates_is_not_reported():
    class Partly(Regression):
        metric_factory = staticmethod(
            lambda: {"mse": KERAS.MeanSquaredError(), "other": KERAS.Mean(), "own": KERAS.Mean()}
        )

        def update_metrics(self, metrics, batch, outputs, weights):
            super().update_metrics({"mse": metrics["mse"]}, batch, outputs, weights)
            metrics["own"].total.assign_add(3.0)  # without update_state
            metrics["own"].count.assign_add(1.0)

    trainer = make(Partly, 1, 8)
    assert {*trainer.train(tf.constant(1))} == {"loss", "mse", "own"}
    assert {*evaluate(trainer, 4)} == {"loss", "mse", "own", "examples"}


def test_metric_of_a_skipped_step_is_restored_if_it_creates_its_variables_late():
    class Skipping(Regression):
        metric_factory = staticmethod(
            lambda: {"r2": KERAS.R2Score(), "mse": KERAS.MeanSquaredError()}
        )

        def preprocess(self, batch):
            rows = ctl.replica.current()
            step = 0 if rows is None else rows.step
            nan = tf.constant(np.nan, batch["x"].dtype)
            label = batch["label"] + tf.cast(step, batch["label"].dtype)
            return {"x": tf.where(tf.equal(step, 1), nan, batch["x"]), "label": label}

    trainer = make(Skipping, 1, ROWS, on_non_finite="skip")
    results = trainer.train(tf.constant(3))
    assert trainer.skipped_steps.numpy() == 1
    # The error of row i in step s is i + s: 140 / 7 in step 0, and 280 / 7 in step 2.
    assert float(results["mse"]) == pytest.approx(30, rel=1e-12)
    assert np.isfinite(float(results["r2"]))
