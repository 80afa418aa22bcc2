"""Random augmentation in the input pipeline, keyed by the run's seed, the epoch and the example."""

from collections.abc import Callable
import dataclasses
import re
from typing import Any, TypeAlias

import tensorflow as tf

from ctl.data.source import Source
from ctl.errors import UsageError

# The ops behind tf.random.uniform and its like, and behind tf.random.Generator.
_STATEFUL = re.compile(
    "Random(?!IndexShuffle)|Rng|Multinomial|(Parameterized)?TruncatedNormal"
    "|Stateful(Random|Standard|Truncated|Uniform)"
)
Augment: TypeAlias = Callable[[dict[str, tf.Tensor], tf.Tensor], dict[str, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Augmented:
    """Training examples, each changed at random as it is read.

    Attributes:
        data: a `Source`, or a dataset of single examples.
        augment: (example, [2] int64 seed) -> example.
    """

    data: Source | tf.data.Dataset
    augment: Augment


def augmented(data: Source | tf.data.Dataset, augment: Augment) -> Augmented:
    """Training examples, each changed at random as it is read, the same way on any hardware.

        def flip(example, seed):
            image = tf.image.stateless_random_flip_left_right(example["image"], seed)
            return {**example, "image": image}

        ctl.data.augmented(ctl.data.idx("experiments/data/mnist", "train"), flip)

    The seed is a function of the run's seed, the epoch and the example (of a dataset, whose epochs
    ctl cannot see: of the run's seed and the position in its stream). So an example looks the same
    whichever replica gets it and however often the run was restarted, and another way in each epoch.

    Args:
        data: a `Source`, or a `tf.data.Dataset` of single examples.
        augment: takes an example (a dict of tensors without the axis of rows) and a [2] int64 seed
            for the `tf.image.stateless_*` and `tf.random.stateless_*` functions; returns an example.
            For several draws, `tf.random.split(seed, n)`.

    Returns:
        What `build_dataset("train", ...)` may return.
    """
    if not isinstance(data, Source | tf.data.Dataset):
        raise UsageError(
            f"ctl.data.augmented got {type(data).__name__}: want a ctl.data.Source or a "
            "tf.data.Dataset of single examples."
        )
    return Augmented(data, augment)


def output_spec(augment: Augment, example_spec: Any) -> Any:
    """The spec of what `augment` returns.

    Args:
        augment: the person's function.
        example_spec: of what it takes, without the axis of rows.

    Raises:
        UsageError: it draws random numbers by other means than its seed.
    """
    seed = tf.TensorSpec([2], tf.int64)
    traced = tf.function(augment).get_concrete_function(example_spec, seed)
    graph = traced.graph.as_graph_def()
    inner = [node for function in graph.library.function for node in function.node_def]
    for node in (*graph.node, *inner):
        if _STATEFUL.match(node.op):
            raise UsageError(
                f"The augmentation draws by {node.op}, anew after each restart: use a stateless "
                "function (tf.image.stateless_random_crop, tf.random.stateless_uniform) and the seed."
            )
    return tf.nest.map_structure(tf.TensorSpec.from_tensor, traced.structured_outputs)
