"""The attention layers of tf_keras and Keras 3, by the fused kernel where it can be used in a step."""

from collections.abc import Sequence
import contextvars
import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.graphs import dataflow, ops
from ctl.kernels import attention
from ctl.kernels.attention import Attention
from ctl.rows import row_mask

_LAYERS = (tf_keras.layers.MultiHeadAttention, tf_keras.layers.Attention)
_RETURNS_SCORES = contextvars.ContextVar("returns_scores", default=True)
# Ops whose value is known only when the step runs, or is another one each time.
_SOURCES = {"Placeholder", *ops.RANDOM, *ops.PYTHON}


def note_scores(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Notes whether a layer may return its scores, which the kernel does not store."""
    own_call = not any(type(layer).call is base.call for base in _LAYERS)
    asked = len(args) > 4 or bool(kwargs.get("return_attention_scores"))
    token = _RETURNS_SCORES.set(own_call or asked)
    try:
        return original(layer, *args, **kwargs)
    finally:
        _RETURNS_SCORES.reset(token)


def multi_head(
    original: Any, layer: Any, query: Any, key: Any, value: Any, attention_mask: Any = None,
    training: Any = None,
) -> Any:  # fmt: skip
    """Computes the attention of a `tf_keras.layers.MultiHeadAttention`."""
    outputs, fits = None, row_mask.current() is not None and query.shape.rank == 4
    if fits and _may_compute(query, layer.get_config()["dropout"], training):
        scale = layer.get_config()["key_dim"] ** -0.5
        outputs = _compute((query, key, value), attention_mask, scale=scale)
    if outputs is not None:
        return outputs, None
    return original(layer, query, key, value, attention_mask, training)


def apply_scores(
    original: Any, layer: Any, scores: Any, value: Any, scores_mask: Any = None, training: Any = None
) -> Any:  # fmt: skip
    """Computes the attention of a `tf_keras.layers.Attention`."""
    outputs, factor = None, None
    product: Any = None if row_mask.current() is None else getattr(scores, "op", None)
    if product is not None and product.type == "Mul":  # by the variable of `use_scale`
        factor, product = product.inputs[1], product.inputs[0].op
    is_product = product is not None and product.type.startswith("BatchMatMul")
    is_scaled = factor is not None and factor.shape.rank
    fits = is_product and product.get_attr("adj_y") and not is_scaled
    if fits and value.shape.rank == 3 and _may_compute(value, layer.dropout, training):
        query, key = product.inputs
        query = query if factor is None else query * factor
        one_head = [tf.expand_dims(x, 2) for x in (query, key, value)]
        outputs = _compute(one_head, scores_mask, scale=1.0)
    if outputs is not None:
        return outputs[:, :, 0], None
    return original(layer, scores, value, scores_mask, training)


def keras3(
    original: Any, query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None,
    scale: Any = None, is_causal: bool = False, flash_attention: Any = None, **others: Any,
) -> Any:  # fmt: skip
    """Computes the attention of the layers of Keras 3."""
    outputs, tensors = None, (query, key, value)
    fits = row_mask.current() is not None and not any(others.values())
    fits = fits and all(tf.is_tensor(x) and x.shape.rank == 4 for x in tensors)
    if fits and isinstance(scale, float | int | None) and _may_compute(query, 0.0, False, False):
        factor = query.shape[3] ** -0.5 if scale is None else scale
        outputs = _compute(tensors, mask, bias=bias, scale=factor, is_causal=is_causal)
    if outputs is not None:
        return outputs
    return original(*tensors, bias, mask, scale, is_causal, flash_attention, **others)


def _may_compute(
    query: tf.Tensor, dropout: float, training: Any, returns_scores: bool | None = None
) -> bool:
    """Returns whether to look at an attention. Otherwise nothing is added to its graph."""
    if attention.find_context_obstacle(query) and attention.OBSERVED.get() is None:
        return False
    if dropout and training is not False:
        return not attention.note("attention dropout, whose masks the kernel cannot key by row")
    returns_scores = _RETURNS_SCORES.get() if returns_scores is None else returns_scores
    return not (returns_scores and attention.note("its scores are returned"))


def _compute(
    tensors: Sequence[tf.Tensor], mask: Any,
    *, bias: Any = None, scale: float, is_causal: bool = False,
) -> tf.Tensor | None:  # fmt: skip
    """Returns the outputs of the kernel; None if it cannot compute them."""
    query, key, value = tensors
    if mask is not None:
        mask = tf.cast(mask if mask.shape.rank == 4 else tf.expand_dims(mask, 1), tf.bool)
        masks_later, mask = _split_mask(mask, query.shape[1], key.shape[1])
        is_causal |= masks_later
    arguments = Attention(query, key, value, bias, mask, scale, is_causal)
    return None if attention.find_obstacle(arguments) else attention.kernel(arguments)


# The causal mask, which the kernel has, in a mask that Keras or KerasHub multiplied with others.


def _split_mask(mask: tf.Tensor, length: Any, key_length: Any) -> tuple[bool, tf.Tensor | None]:
    """Returns whether a mask is causal, and what else it excludes; None for nothing."""
    is_causal, others = False, []
    for factor in _factors(mask):
        value = _constant_value(factor) if length and key_length else None
        if value is None or not value.ndim:
            others.append(factor)
            continue
        value = np.broadcast_to(value, [*value.shape[:-2], length, key_length])
        if (value == np.tri(length, key_length, dtype=bool)).all():
            is_causal = True
        elif not value.all():
            others.append(factor)
    return is_causal, functools.reduce(tf.logical_and, others) if others else None


def _factors(mask: tf.Tensor) -> list[tf.Tensor]:
    """Returns the bool masks of which a mask is the logical and, where its operations show them."""
    op: Any = getattr(mask, "op", None)
    kind = "" if op is None else op.type
    factors = [mask]
    if kind == "Cast":  # of bool to numbers and back
        factors = _factors(op.inputs[0])
    elif kind == "ExpandDims":
        factors = [tf.expand_dims(factor, op.inputs[1]) for factor in _factors(op.inputs[0])]
    elif kind in ("LogicalAnd", "Minimum") and len({x.shape.rank for x in op.inputs}) == 1:
        factors = [factor for x in op.inputs for factor in _factors(x)]
    # The smaller of two numbers is not their logical and if one of them may be negative.
    return factors if all(factor.dtype == tf.bool for factor in factors) else [mask]


def _constant_value(tensor: tf.Tensor) -> Any:
    """Computes a tensor that depends on constants only; returns None for another one."""
    if not hasattr(tensor, "op"):
        return tensor.numpy()
    if tensor.op.type == "BroadcastTo":
        return _constant_value(tensor.op.inputs[0])
    used = {x.op.name: x.op for x in dataflow.ancestors(tensor)}
    if any(op.type in _SOURCES or op.op_def.is_stateful for op in used.values()):
        return None
    definition = tf.compat.v1.GraphDef(node=[op.node_def for op in used.values()])
    for node in definition.node:
        node.device = ""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
    options = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    with tf.compat.v1.Session(graph=graph, config=options) as session:
        return session.run(tensor.name)
