"""Random augmentation in the input pipeline, keyed by the run's seed, the epoch and the example."""

import re
from typing import Any

import tensorflow as tf

from ctl.data.source import Augment, Augmented, Source
from ctl.errors import UsageError

# The stateful ops behind tf.random.uniform and similar functions, and behind tf.random.Generator.
# Their state is not in the checkpoint, so a resumed run would repeat or change their numbers. The op
# RandomIndexShuffle is stateless in spite of its name.
_STATEFUL = re.compile(
    "Random(?!IndexShuffle)|Rng|Multinomial|(Parameterized)?TruncatedNormal"
    "|Stateful(Random|Standard|Truncated|Uniform)"
)


def augmented(data: Source | tf.data.Dataset, augment: Augment) -> Augmented:
    """Applies a random augmentation to training examples, reproducibly on any hardware.

        def flip(example, seed):
            image = tf.image.stateless_random_flip_left_right(example["image"], seed)
            return {**example, "image": image}

        ctl.data.augmented(ctl.data.idx("experiments/data/mnist", "train"), flip)

    The seed is a function of the run's seed, the epoch and the example. For a dataset, whose epochs
    are unknown, it is a function of the run's seed and the position in the training stream. So the
    augmentation of an example does not depend on the replica that reads it nor on how often the run
    was restarted, and it differs between epochs.

    Args:
        data: a `Source`, or a `tf.data.Dataset` of single examples.
        augment: takes an example (a dict of tensors without the batch axis) and a [2] int64 seed
            for the `tf.image.stateless_*` and `tf.random.stateless_*` functions; returns an example.
            To draw several times, split the seed with `tf.random.split(seed, n)`.

    Returns:
        A value that `build_dataset("train", ...)` may return.

    Raises:
        UsageError: `data` is of another type.
    """
    if not isinstance(data, Source | tf.data.Dataset):
        raise UsageError(
            f"ctl.data.augmented got {type(data).__name__}, but requires a ctl.data.Source or a "
            "tf.data.Dataset of single examples."
        )
    return Augmented(data, augment)


def output_spec(augment: Augment, example_spec: Any) -> Any:
    """Returns the spec of the examples that `augment` returns.

    Args:
        augment: the user's augmentation.
        example_spec: spec of the examples that it takes, without the batch axis.

    Raises:
        UsageError: the augmentation uses random numbers that do not come from its seed.
    """
    seed = tf.TensorSpec([2], tf.int64)
    traced = tf.function(augment).get_concrete_function(example_spec, seed)
    graph = traced.graph.as_graph_def()
    # Branches and loops of the augmentation are functions of their own in the graph's library.
    nested = [node for function in graph.library.function for node in function.node_def]
    for node in (*graph.node, *nested):
        if _STATEFUL.match(node.op):
            raise UsageError(
                f"The augmentation uses {node.op}, whose values change after a restart: use a "
                "stateless function (tf.image.stateless_random_crop, tf.random.stateless_uniform) "
                "with the seed."
            )
    return tf.nest.map_structure(tf.TensorSpec.from_tensor, traced.structured_outputs)
