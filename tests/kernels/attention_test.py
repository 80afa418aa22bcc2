"""Attention: the formula, and the program that a GPU would run, which is read on a CPU."""

import json
import logging
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built import flops
from ctl.built.inner_loop import loop_of
from ctl.built.memory_estimate import estimate
from ctl.keras import attention as keras_attention
from ctl.kernels import attention

LENGTH, WIDTH = 512, 16
CONFIG = "cudnn_fmha_backend_config"
SHAPES = {"query": [3, 5, 4, 2], "key": [3, 6, 2, 2], "value": [3, 6, 2, 3]}


def draw(seed, shape):
    return np.random.default_rng(seed).normal(size=shape)


def reference(query, key, value, bias=0.0, mask=True, scale=None):
    """The formula, row by row and head by head."""
    outputs = np.zeros([*query.shape[:3], value.shape[3]])
    groups = query.shape[2] // key.shape[2]
    shape = [len(query), query.shape[2], query.shape[1], key.shape[1]]
    bias, mask = np.broadcast_to(bias, shape), np.broadcast_to(mask, shape)
    for row, head in np.ndindex(*shape[:2]):
        q, k = query[row, :, head], key[row, :, head // groups]
        logits = q @ k.T * (q.shape[1] ** -0.5 if scale is None else scale) + bias[row, head]
        weights = np.exp(logits - logits.max()) * mask[row, head]
        outputs[row, :, head] = (
            weights / weights.sum(1, keepdims=True) @ value[row, :, head // groups]
        )
    return outputs


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"is_causal": True}, {"mask": np.tri(5, 6, dtype=bool)}),
        ({"bias": draw(4, [1, 4, 5, 6])}, {"bias": draw(4, [1, 4, 5, 6])}),
        (
            {"mask": draw(5, [3, 1, 5, 6]) < 1, "is_causal": True},
            {"mask": (draw(5, [3, 1, 5, 6]) < 1) & np.tri(5, 6, dtype=bool)},
        ),
        (
            {"key_value_seq_lengths": [6, 2, 0]},
            {"mask": np.arange(6) < np.array([6, 2, 1])[:, None, None, None]},
        ),
    ],
)
def test_the_formula_has_grouped_heads_and_all_masks(arguments, expected):
    tensors = [draw(i, shape) for i, shape in enumerate(SHAPES.values())]
    if "mask" in expected:  # a row without any key has no result
        expected["mask"] = np.broadcast_to(expected["mask"], [3, 4, 5, 6])
        assert expected["mask"].any(-1).all()
    outputs = ctl.dot_product_attention(*tensors, **arguments).numpy()
    np.testing.assert_allclose(outputs, reference(*tensors, **expected), atol=1e-12)


def test_queries_that_do_not_exist_have_zero_outputs():
    tensors = [draw(i, shape) for i, shape in enumerate(SHAPES.values())]
    outputs = ctl.dot_product_attention(*tensors, query_seq_lengths=[5, 2, 0]).numpy()
    expected = reference(*tensors) * (np.arange(5) < np.array([5, 2, 0])[:, None])[..., None, None]
    np.testing.assert_allclose(outputs, expected, atol=1e-12)


def test_wrong_shapes_are_one_line():
    with pytest.raises(ctl.UsageError, match=r"got query \(1, 2, 3, 4\), key \(1, 2, 2, 4\)"):
        ctl.dot_product_attention(*(np.ones([1, 2, n, 4]) for n in (3, 2, 2)))


class Model(tf_keras.Model):
    """Layers of attention, made by a subclass of the test."""

    def __init__(self, make, count=2):
        super().__init__()
        self.embed = tf_keras.layers.Dense(WIDTH)
        self.parts = [make() for _ in range(count)]

    def call(self, x, training=None):
        x = self.embed(x)
        for part in self.parts:
            x += part(x, training)
        return x


class Part(tf_keras.layers.Layer):
    def __init__(self, call, attention=None, **options):
        super().__init__()
        self.attention = attention or tf_keras.layers.MultiHeadAttention(2, 8, **options)
        self.own_call = call

    def call(self, x, training):
        return self.own_call(self.attention, x, training)


class Keras3Part(keras.layers.Layer):
    def __init__(self, make):
        super().__init__()
        self.attention = make()

    def call(self, x):
        return self.attention(x, x, use_causal_mask=True)


class Trainer(ctl.StandardTrainer):
    make, length, rows = None, LENGTH, 4

    def build_model(self):
        return self.make()

    def build_dataset(self, split, input_context):
        x = draw(0, [self.rows, self.length, 3]).astype(np.float32)
        return ctl.data.arrays({"x": x, "label": x[..., 0]})

    def per_example_loss(self, batch, outputs):
        return tf.reduce_mean(tf.square(batch["label"] - outputs[..., 0]), axis=1)


def causal(layer, x, training):
    return layer(x, x, use_causal_mask=True, training=training)


def padded(layer, x, training):
    return layer(x, x, attention_mask=x[:, None, :, 0] < 3, training=training)


def with_scores(layer, x, training):
    return layer(x, x, return_attention_scores=True)[0]


class Own(tf_keras.layers.Layer):
    def __init__(self, **arguments):
        super().__init__()
        self.projections = [tf_keras.layers.Dense(n * 8) for n in (4, 2, 2)]
        self.arguments, self.out = arguments, tf_keras.layers.Dense(WIDTH)

    def call(self, x, training):
        q, k, v = (
            tf.reshape(dense(x), [-1, x.shape[1], n, 8])
            for dense, n in zip(self.projections, (4, 2, 2), strict=True)
        )
        y = ctl.dot_product_attention(q, k, v, **self.arguments)
        return self.out(tf.reshape(y, [-1, x.shape[1], 32]))


def one_head():
    attention = tf_keras.layers.Attention(use_scale=True)
    return Part(lambda layer, x, training: layer([x, x], use_causal_mask=True), attention)


def from_keras3(*makers):
    def build():
        inputs = keras.Input([LENGTH, 3])
        x = keras.layers.Dense(WIDTH)(inputs)
        for make in makers:
            x = x + Keras3Part(make)(x)
        return keras.Model(inputs, x)

    return build


def from_parts(make, count=2):
    return lambda: Model(make, count)


@pytest.fixture
def h100(monkeypatch):
    """Pretends that XLA compiles for an H100, which this machine does not have."""
    monkeypatch.setattr(attention, "capability", lambda: (9, 0))


@pytest.fixture
def gpu(h100, monkeypatch):
    """Pretends that the kernel runs on it, too."""
    monkeypatch.setattr(attention, "_try", lambda *form: "")


def make_trainer(make, *, length=LENGTH, **options):
    cls = type("T", (Trainer,), {"make": staticmethod(make), "length": length})
    return cls(
        strategy=testing.make_strategy(1),
        global_batch_size=4,
        optimizer=lambda: tf_keras.optimizers.SGD(0.1),
        options=ctl.TrainerOptions(**{"precision": "bfloat16", "xla": "loop", **options}),
    )


def program(make, **options):
    """Returns the program of XLA that the loop of a trainer would run on a GPU."""
    trainer = make_trainer(make, **options)
    inner_loop = loop_of(trainer)
    inner_loop.prepare(2)
    with inner_loop.step.trace_scope():
        trainer.train_loop_begin()
        arguments = next(iter(trainer.train_dataset)), tf.constant(0)
        loop = inner_loop.compiled_loop.usual_program()
        return loop.experimental_get_compiler_ir(*arguments)(stage="hlo")


def count(text):
    """Returns the forward and backward calls of the kernel, and the matrices of length x length."""
    calls = re.findall(r'custom_call_target="__cudnn\$fmha\w*"', text)
    backward = sum("Backward" in call for call in calls)
    matrices = re.findall(rf"\b(?:bf16|f16|f32)\[[\d,]*\b{LENGTH},{LENGTH}\]", text)
    return len(calls) - backward, backward, len(matrices)


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        pytest.param(from_parts(lambda: Part(causal)), 2, marks=pytest.mark.slow),
        pytest.param(
            from_parts(lambda: Own(is_causal=True, key_value_seq_lengths=[9, 9, 9, 9]), 1),
            1,
            marks=pytest.mark.slow,
        ),
        (
            from_keras3(
                lambda: keras.layers.MultiHeadAttention(2, 8),
                lambda: keras.layers.GroupQueryAttention(8, 4, 2),
            ),
            2,
        ),
    ],
)
def test_a_compiled_step_has_one_forward_and_one_backward_kernel_per_layer(
    gpu, caplog, make, layers
):
    assert count(program(make)) == (layers, layers, 0)
    assert "combines rows" not in caplog.text  # the check of row coupling knows the operation


@pytest.mark.slow
def test_one_head_and_micro_batches_in_float16_use_the_kernel_and_a_mask_is_a_bias(gpu):
    # The scores of one head are computed before, and XLA removes them because nobody reads them.
    assert count(program(from_parts(one_head)))[:2] == (2, 2)
    text = program(from_parts(lambda: Part(padded)), precision="float16", micro_batches=2)
    assert count(text)[:2] == (4, 4) and "fmhaScaleBiasSoftmax" in text


@pytest.mark.parametrize(
    ("dtype", "length", "width", "mask", "obstacle"),
    [
        (tf.bfloat16, LENGTH, 8, None, ""),
        (tf.float16, LENGTH, 256, tf.ones([1, 1, 1, LENGTH], tf.bool), ""),
        (tf.float32, LENGTH, 8, None, "float32: the kernel computes in bfloat16 and float16"),
        (tf.bfloat16, LENGTH, 12, None, "12 numbers per head"),
        (tf.bfloat16, LENGTH, 264, None, "264 numbers per head"),
        (tf.bfloat16, LENGTH // 2, 8, None, "short sequences (256 x 256)"),
        (tf.bfloat16, 513, 8, tf.ones([1, 1, 1, 513], tf.bool), "a mask or bias for an odd length"),
    ],
)
def test_kernel_computes_only_what_it_supports(gpu, dtype, length, width, mask, obstacle):
    tensor = tf.zeros([1, length, 1, width], dtype)
    each = attention.Attention(tensor, tensor, tensor, None, mask, 1.0, False)
    result = attention._find_static_obstacle(each)
    assert result.startswith(obstacle) and bool(result) == bool(obstacle)


@pytest.mark.slow
def test_dropout_and_returned_scores_are_the_formula(gpu):
    makers = iter([lambda: Part(causal, dropout=0.1), lambda: Part(with_scores)])
    assert count(program(from_parts(lambda: next(makers)())))[:2] == (0, 0)


@pytest.mark.slow
def test_the_estimate_of_memory_counts_matrices_only_where_the_kernel_is_not_used(gpu):
    make = from_parts(lambda: Own(is_causal=True))
    kernel, formula = (
        estimate(make_trainer(make, kernels=each)).activations for each in ("auto", "off")
    )
    logits = 4 * 4 * LENGTH * LENGTH  # numbers: 4 rows, 4 heads
    # The backward pass of each of the two layers reads the softmax in float32, and cast to bfloat16.
    assert formula >= 2 * logits * (4 + 2)
    tokens = 4 * LENGTH
    # Of each layer: its input, queries, keys, values and outputs in bfloat16, and a sum for each query
    # and head in float32.
    kept = tokens * (2 * (WIDTH + 32 + 16 + 16 + 32) + 4 * 4)
    assert 2 * kept <= kernel <= 4 * kept < logits


@pytest.mark.slow
def test_a_kernel_that_is_missing_is_the_formula_and_one_line(h100, caplog):
    attention._try.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert count(program(from_parts(lambda: Part(causal))))[:2] == (0, 0)
    attention._try.cache_clear()
    assert caplog.text.count("The fused attention of cuDNN is not used: ") == 1


def test_the_trial_accepts_right_results_and_rejects_wrong_ones(monkeypatch):
    shapes, formula = [], attention._formula
    for factor, form in (
        (1, (2**20 + 1, 300, 1, 1, 8, False, False, False, False)),  # shortened
        (1, (64, 64, 4, 2, 64, True, True, True, True)),
        (1.1, (64, 64, 4, 2, 64, True, True, True, True)),
    ):

        def kernel(each, factor=factor):
            shapes.append(each.query.shape[1:2] + each.key.shape[1:2])
            return factor * formula(each)

        monkeypatch.setattr(attention, "kernel", kernel)
        problem = attention._try.__wrapped__(tf.bfloat16, *form)
        assert problem.startswith("its results are off by 0.1") if factor > 1 else problem == ""
    assert shapes == [[1025, 300], [64, 64], [64, 64]]


def test_the_kernel_counts_as_many_flops_as_the_formula(gpu):
    counts = []
    for compute in (attention.kernel, attention._formula):

        @tf.function(jit_compile=True)
        def run(query, key, compute=compute):
            with tf.GradientTape() as tape:
                tape.watch([query, key])
                outputs = compute(attention.Attention(query, key, key, None, None, 1.0, True))
            return outputs, tape.gradient(outputs, [query, key])

        spec = [tf.TensorSpec([2, n, 3, 8], tf.bfloat16) for n in (256, 512)]
        counts.append(flops._count_graph(run.get_concrete_function(*spec).graph, loops=0))
    # Products of 2 x 3 x 256 x 512 sums of 8 numbers: two forward, four backward.
    assert counts == [6 * 2 * 2 * 3 * 256 * 512 * 8] * 2


def test_the_causal_mask_is_recognized_in_a_product():
    @tf.function
    def split(padding, own):
        i, j = tf.range(4)[:, None], tf.range(4)
        causal = tf.broadcast_to((i >= j)[None], [2, 4, 4])
        keras_hub = tf.minimum(tf.cast(padding[:, None], tf.int32), tf.cast(causal, tf.int32))
        masks = (causal, padding[:, None] & causal, tf.cast(keras_hub, tf.bool), own & causal, own)
        for mask in masks:
            splits.append(keras_attention._split_mask(tf.expand_dims(mask, 1), 4, 4))
        unknown = tf.cast(
            tf.minimum(tf.cast(own, tf.int32) - 1, tf.cast(causal, tf.int32)), tf.bool
        )
        splits.append(keras_attention._split_mask(unknown[:, None], 4, 4))

    splits = []
    split(tf.ones([2, 4], tf.bool), tf.ones([2, 4, 4], tf.bool))
    assert [is_causal for is_causal, _ in splits] == [True, True, True, True, False, False]
    assert [rest is None for _, rest in splits] == [True, False, False, False, False, False]


def test_the_fields_of_the_call_are_those_of_the_installed_tensorflow():
    folder = pathlib.Path(tf.sysconfig.get_include())
    header = (folder / "xla/service/gpu/backend_configs.pb.h").read_text()
    known = set(re.findall(r"k(\w+)FieldNumber", header))
    query = tf.zeros([1, 4, 2, 8], tf.bfloat16)
    used = set()
    for backward in (False, True):
        each = attention.Attention(query, query, query, None, None, 1.0, True)
        used |= {*json.loads(attention._backend_config(each, backward=backward))[CONFIG]}
    missing = {name for name in used if name.title().replace("_", "") not in known}
    assert len(used) == 15
    # A version that lacks a field does not parse the call, so that the trial chooses the formula.
    assert missing == ({"max_seg_per_batch"} if tf.__version__.startswith("2.18") else set())
