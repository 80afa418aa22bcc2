"""Accumulate, clip, apply."""

import re
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.configs.options import Clip
from ctl.update import gradients
from tests.support import one_batch, reference_model


def dense(gradient):
    """A gradient as an array."""
    return tf.convert_to_tensor(gradient).numpy()


def test_accumulation_sums_dense_sparse_and_missing_gradients():
    parts = [
        [sparse([[1.0], [2.0]], [1, 1], 4), tf.constant(5.0), None, sparse([[1.0]], [3], 4)],
        [
            sparse([[4.0]], [2], 4),
            tf.constant(7.0),
            None,
            tf.constant([[1.0], [2.0], [3.0], [4.0]]),
        ],
        [sparse([[8.0]], [1], 4), None, None, None],
    ]
    sums = gradients.accumulate(parts)
    assert isinstance(sums[0], tf.IndexedSlices)
    assert dense(sums[0]).tolist() == [[0.0], [11.0], [4.0], [0.0]]
    assert dense(sums[1]) == 12.0
    assert sums[2] is None
    assert dense(sums[3]).tolist() == [[1.0], [2.0], [3.0], [5.0]]


def sparse(values, indices, size):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([size, 1]))


def test_gradients_after_all_of_them_keep_their_values():
    one, none, rows = gradients.after_all([tf.constant([3.0]), None, sparse([[5.0]], [1], 2)])
    assert (one.numpy().tolist(), none, dense(rows).tolist()) == ([3.0], None, [[0.0], [5.0]])
    assert gradients.after_all([None]) == [None]

    @tf.function
    def shape_in_a_graph(values):
        (rows,) = gradients.after_all(
            [tf.IndexedSlices(values, tf.constant([1]), tf.constant([2, 1]))]
        )
        return rows.shape.as_list()

    assert shape_in_a_graph(tf.constant([[5.0]])) == [2, 1]


def test_norm_of_several_dtypes_is_that_of_all_elements_by_hand():
    # 3^2 + 4^2 + (8 + 4)^2 = 13^2, in the widest real dtype.
    values = [
        tf.constant([3 + 0j, 4j], tf.complex128),
        tf.IndexedSlices(tf.constant([8.0, 4.0]), tf.constant([1, 1]), tf.constant([3])),
        None,
        tf.constant([0.0], tf.bfloat16),
    ]
    assert gradients.global_norm(values).dtype == tf.float64
    assert gradients.global_norm(values).numpy() == 13.0
    clipped = gradients.clip(values, ctl.TrainerOptions(clip_global_norm=6.5))
    np.testing.assert_allclose(clipped[0], [1.5 + 0j, 2j])
    np.testing.assert_allclose(clipped[1].values, [6.0])
    assert clipped[2] is None
    (same,) = gradients.clip([tf.constant([3.0, 4.0])], ctl.TrainerOptions(clip_global_norm=5.5))
    assert same.numpy().tolist() == [3.0, 4.0]
    assert [v.dtype for v in (clipped[0], clipped[1], clipped[3])] == [
        tf.complex128, tf.float32, tf.bfloat16,
    ]  # fmt: skip
    np.testing.assert_allclose(
        gradients.clip(values[:1], ctl.TrainerOptions(clip_norm=2.5))[0], [1.5 + 0j, 2j]
    )
    np.testing.assert_allclose(
        gradients.clip(values[:1], ctl.TrainerOptions(clip_value=2.0))[0], [2 + 0j, 2j]
    )


class SeveralDtypes(tf_keras.layers.Layer):
    """|x z|^2 + x w with a complex weight z, and a weight w in float32 beside float64."""

    def build(self, shape):
        start = tf_keras.initializers.Constant(0.5)
        self.z = self.add_weight("z", shape[-1:], dtype="complex128", initializer=start)
        self.w = self.add_weight("w", shape[-1:], dtype="float32", initializer=start)

    def call(self, x):
        return tf.abs(tf.complex(x, x**2) * self.z) ** 2 + x * tf.cast(self.w, x.dtype)


class WithSeveralDtypes(one_batch.Trainer):
    EXAMPLES: ClassVar = {"x": np.random.default_rng(3).normal(size=(8, 2))}

    def build_model(self):
        return tf_keras.Sequential([SeveralDtypes()])

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum(outputs**2, axis=1)


def test_update_of_several_dtypes_does_not_depend_on_the_split():
    def train(replicas):
        options = {"clip": Clip(global_norm=0.1), "norms": "global", "ema_decay": 0.5}
        trainer = one_batch.make(WithSeveralDtypes, 5, replicas, **options)
        results = trainer.train(tf.constant(3))
        with trainer.averaged_weights():
            averages = trainer.model.get_weights()
        return [results["gradient_norm"], *trainer.model.get_weights(), *averages]

    for one, two in zip(train(1), train(2), strict=True):
        tolerance = 1e-12 if one.dtype == np.complex128 else 1e-6
        np.testing.assert_allclose(one, two, atol=tolerance)
        assert np.abs(one).max() > 0.1


def test_clip_by_norm_bounds_each_gradient_separately():
    values = [tf.constant([3.0, 4.0]), tf.constant([0.6]), sparse([[6.0], [4.0]], [0, 0], 2)]
    one, two, rows = gradients.clip(values, ctl.TrainerOptions(clip_norm=2.5))
    assert one.numpy().tolist() == [1.5, 2.0]
    assert two.numpy() == pytest.approx([0.6])
    assert dense(rows).tolist() == [[2.5], [0.0]]


def test_clip_by_value_sums_rows_first():
    values = [tf.constant([-3.0, 0.5]), sparse([[0.8], [0.8]], [1, 1], 2)]
    one, rows = gradients.clip(values, ctl.TrainerOptions(clip_value=1.0))
    assert one.numpy().tolist() == [-1.0, 0.5]
    assert dense(rows).tolist() == [[0.0], [1.0]]


def clip_by_hand(gradients, rule, limit):
    """What the rule does to the gradient of the global batch."""
    if rule.endswith("value"):
        return [np.clip(g, -limit, limit) for g in gradients]
    norms = [np.linalg.norm(g) for g in gradients]
    if rule.startswith("global"):
        norms = [np.linalg.norm(norms)] * len(gradients)
    return [g * min(1, limit / norm) for g, norm in zip(gradients, norms, strict=True)]


@pytest.mark.parametrize(
    ("rule", "limit", "options"),
    [
        ("global_norm", 0.5, {"micro_batches": 2}),
        pytest.param("clipvalue", 0.02, {"micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param("clipnorm", 0.1, {"logical_shards": 4}, marks=pytest.mark.slow),
    ],
)
def test_bounds_apply_to_the_gradient_of_the_global_batch(rule, limit, options):
    """Bounds of the options and of the optimizer; the rows of sparse gradients are summed first."""
    of_optimizer = {rule: limit} if "clip" in rule else {}
    clip = ctl.Clip(**({} if of_optimizer else {rule: limit}))
    trainer = reference_model.make_trainer(
        testing.make_strategy(2), 8, cls=AllTokens, clip=clip,
        optimizer=lambda: tf_keras.optimizers.SGD(1.0, **of_optimizer), **options,
    )  # fmt: skip
    before = trainer.model.get_weights()
    _, exact, _ = reference_model.loss_and_gradients(before, AllTokens.rows)
    trainer.train(tf.constant(1))
    clipped = clip_by_hand(exact, rule, limit)
    assert any((one != other).any() for one, other in zip(clipped, exact, strict=True))
    for variable, old, gradient in zip(
        trainer.model.trainable_variables, before, clipped, strict=True
    ):
        assert np.abs(gradient).max() > 0
        for copy in testing.copies(trainer.strategy, variable):
            np.testing.assert_allclose(old - copy, gradient, rtol=0, atol=1e-14)


class AllTokens(reference_model.ReferenceTrainer):
    """A dataset of one batch, in which tokens occur several times."""

    rows = reference_model.examples(8)
    data_factory = staticmethod(lambda split: ctl.data.arrays(AllTokens.rows))


@pytest.mark.parametrize(
    "sizes", [None, {}, {"_SMALL": 0, "_PARTS": 2}, {"_SMALL": 0, "_ROWS": 2, "_PARTS": 1}]
)
def test_an_infinite_element_or_nan_makes_a_gradient_not_finite(sizes, monkeypatch):
    for name, size in (sizes or {}).items():  # None: without XLA
        monkeypatch.setattr(gradients, name, size)
    infinite, nan = float("inf"), float("nan")
    slices = tf.IndexedSlices(tf.constant([[1.0], [nan]]), indices=[0, 0], dense_shape=[3, 1])
    cases = [
        (None, True),
        (tf.constant([infinite, -infinite]), False),
        (tf.constant([1e30, 1e38], tf.float32), True),
        (tf.fill([100], tf.constant(60_000, tf.float16)), True),  # their float16 sum is infinite
        (tf.constant([1.0, infinite], tf.float16), False),
        (tf.constant([[1e200], [1]], tf.float64), True),
        (tf.constant([[[1.0, 2], [3, 4]], [[5, nan], [7, 8]]]), False),
        (tf.zeros([0, 3]), True),
        (tf.constant([1 + 0j, complex(1, infinite)], tf.complex64), False),
        (slices, False),
    ]

    @tf.function(jit_compile=sizes is not None)
    def check():
        some = [v for v, is_finite in cases if is_finite]
        return (
            [gradients.find_non_finite([v, slices], tf.constant(1.0)) for v, _ in cases],
            gradients.find_non_finite(some, tf.constant(1.0)),
            gradients.find_non_finite([slices], tf.constant(nan)),
        )

    assert check() == ([2 if is_finite else 1 for _, is_finite in cases], 6, 0)


@pytest.mark.slow
def test_compiled_sums_of_rows_have_no_loop():
    ids = tf.constant([7, 3, 7, 0, 3, 7] * 50)
    values = tf.random.stateless_normal([300, 2], [1, 2], dtype=tf.float64)

    def total(values, ids):
        rows = gradients.sum_rows(tf.IndexedSlices(values, ids, tf.constant([9, 2])))
        [rows] = gradients.clip([rows], ctl.TrainerOptions(clip_global_norm=1e3))  # changes nothing
        rows = gradients.sum_rows(rows)  # as an optimizer does
        return tf.scatter_nd(rows.indices[:, None], rows.values, [9, 2]), tf.size(rows.indices)

    compiled = tf.function(total, jit_compile=True)
    sums, count = compiled(values, ids)
    np.testing.assert_allclose(sums, tf.math.unsorted_segment_sum(values, ids, 9), atol=1e-12)
    assert count == 3 and total(values, ids)[1] == 3
    # A number of indices that is known only when the step runs.
    some = tf.function(lambda v, i: total(v[i < 7], i[i < 7]), jit_compile=True)
    np.testing.assert_allclose(some(values, ids)[0][:7], sums[:7], atol=1e-12)
    program = compiled.experimental_get_compiler_ir(values, ids)(stage="optimized_hlo")
    assert " while(" not in program


def test_small_gradients_are_checked_together_by_xla():
    @tf.function(jit_compile=True)
    def check(rows):
        return gradients.find_non_finite([tf.reduce_sum(rows, 0)] * 100, tf.constant(0.0))

    program = check.experimental_get_compiler_ir(tf.ones([64, 32]))(stage="optimized_hlo")
    # The rows, two parts, their minimum, and the position in the list; a GPU starts a kernel for each.
    assert len(re.findall(r"= \S+ reduce\(", program)) <= 5
