"""Matches the variables of a checkpoint with those of a trainer, by place and by name.

TensorFlow restores by place: the path of attributes from the root to the variable. ctl checks the
result, and matches by name if the places have moved.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2
import tf_keras

from ctl.errors import list_some

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # TensorFlow's key of the object graph
_VALUE = "VARIABLE_VALUE"
_STATE = "py_state"  # of a `state_dicts.StateDict`
_SHARDED = "ShardedVariable"  # TensorFlow's name of every variable that parameter servers shard


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable of a trainer or of a checkpoint.

    Attributes:
        name: its name in the model, such as "dense/kernel"; "m/dense/kernel" is a slot variable.
        shape: its shape, with all its shards.
        dtype: its type.
        source: the variable itself, or the key of its value in the checkpoint.
        node: its number in the checkpoint's object graph; -1 for a variable of a trainer.
        slot: whether it is a slot variable of an optimizer.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: tf.DType
    source: Any
    node: int = -1
    slot: bool = False

    def matches(self, other: "Variable") -> bool:
        """Returns whether both have the same type and shape."""
        return self.dtype == other.dtype and self.same_shape(other)

    def same_shape(self, other: "Variable") -> bool:
        """Returns whether both have the same shape."""
        return tf.TensorShape(self.shape).is_compatible_with(other.shape)


class CheckpointContent:
    """The variables in a checkpoint.

        content = CheckpointContent("runs/mine/checkpoints/ckpt-500")
        content.variables[0].name                       # "dense/kernel"

    Attributes:
        variables: all variables, without their values.

    Raises:
        ValueError or tf.errors.OpError: the checkpoint cannot be read.
    """

    def __init__(self, path: str):
        # The view matches objects by place; the reader has shapes, types and values.
        self._view = tf.train.CheckpointView(path)
        self._reader = tf.train.load_checkpoint(path)
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        graph.ParseFromString(self._reader.get_tensor(_GRAPH))
        self._nodes = graph.nodes
        self._parents: dict[int, list[int]] = {}
        # The graph lists children only, but a deferred variable is looked up by its parents.
        for node, content in enumerate(graph.nodes):
            for child in content.children:
                self._parents.setdefault(child.node_id, []).append(node)
        self._by_slot = {s.slot_variable_node_id for n in graph.nodes for s in n.slot_variables}
        self.variables = list(self._variables())

    def value(self, variable: Variable) -> np.ndarray:
        """Returns the value of one of the variables."""
        return self._reader.get_tensor(variable.source)

    def name_of(self, variable: Variable) -> str:
        """Returns the name of one of the variables in the checkpoint."""
        return next(v.name for v in self.variables if v.node == variable.node)

    def variables_of(self, child: str) -> list[Variable]:
        """Returns the variables of one of the root's children, such as "model"."""
        starts = [node for name, node in self._view.children(0).items() if name == child]
        reached = _reach(starts, lambda node: self._view.children(node).values())
        return [variable for variable in self.variables if variable.node in reached]

    def places(self, root: tf.train.Checkpoint) -> dict[int, Any]:
        """Matches the checkpoint's objects by place.

        Args:
            root: the objects to match with.

        Returns:
            Number of an object in the checkpoint -> the object at the same place of `root`.
        """
        return self._view.match(root)

    def is_deferred(self, variable: Variable, places: dict[int, Any]) -> bool:
        """Returns whether TensorFlow will restore a variable when its layer or optimizer is built."""
        ancestors = _reach([variable.node], lambda node: self._parents.get(node, []))
        return any(_is_unbuilt(places.get(node)) for node in ancestors)

    def _variables(self) -> Iterator[Variable]:
        shapes = self._reader.get_variable_to_shape_map()
        dtypes = self._reader.get_variable_to_dtype_map()
        for number, node in enumerate(self._nodes):
            for attribute in node.attributes:
                key = attribute.checkpoint_key
                # Slot variables are nodes of their own, too; TensorFlow counts its saves itself.
                duplicate = number in self._by_slot or key.startswith("save_counter/")
                if attribute.name in (_VALUE, _STATE) and key in shapes and not duplicate:
                    name, is_slot = attribute.full_name or key, "/_variables/" in key
                    if attribute.name == _STATE:
                        name = key.partition("/.")[0].rpartition("/")[-1]
                    yield Variable(name, tuple(shapes[key]), dtypes[key], key, number, is_slot)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison of the variables of a trainer and of a checkpoint, by name.

    Attributes:
        pairs: variables (of the trainer, of the checkpoint) with the same name, shape and type.
        mismatches: variables with the same name, but another shape or type.
        missing: variables of the trainer that the checkpoint does not have.
        unused: variables of the checkpoint that the trainer does not have.
    """

    pairs: list[tuple[Variable, Variable]]
    mismatches: list[tuple[Variable, Variable]]
    missing: list[Variable]
    unused: list[Variable]

    @property
    def complete(self) -> bool:
        """Whether every variable of either side has a match."""
        return not (self.mismatches or self.missing or self.unused)

    def describe(self) -> str:
        """Describes what does not match, for a message; slot variables come last."""
        shapes = [
            f"{a.name} is {_describe(a, b)}, but {_describe(b, a)} in the checkpoint"
            for a, b in _sort(self.mismatches)
        ]
        parts = [
            ("", shapes),
            ("only the trainer has ", [v.name for v in _sort(self.missing)]),
            ("only the checkpoint has ", [v.name for v in _sort(self.unused)]),
        ]
        return "; ".join(start + list_some(names) for start, names in parts if names)

    def left(self) -> list[str]:
        """Returns the names of the trainer's variables that keep their initial values."""
        return [v.name for v in _sort([*(a for a, _ in self.mismatches), *self.missing])]

    def dropped(self) -> list[str]:
        """Returns the names of the checkpoint's variables that are not used."""
        return [v.name for v in _sort([*(b for _, b in self.mismatches), *self.unused])]


def list_variables(root: Any) -> list[Variable]:
    """Lists the variables that a checkpoint of an object would have."""
    # Breadth first, so that the model's variables come in the order of its layers.
    variables, seen, queue = [], {id(root)}, [(root, False)]
    while queue:
        thing, slot = queue.pop(0)
        # Not isinstance: distributed and sharded variables have no common class.
        if callable(getattr(thing, "assign", None)) and hasattr(thing, "shape"):
            name = thing.name.removesuffix(":0")
            variables.append(Variable(name, tuple(thing.shape), thing.dtype, thing, slot=slot))
            continue
        for name, child in tf.train.TrackableView.children(thing).items():
            if id(child) not in seen:
                seen.add(id(child))
                queue.append((child, slot or name == "_variables"))
    return variables


def compare(
    variables: Sequence[Variable], saved: Sequence[Variable], places: dict[int, Any]
) -> Comparison:
    """Matches variables by name; by place if several have the same name.

    Args:
        variables: the variables of the trainer.
        saved: the variables of the checkpoint.
        places: the result of `CheckpointContent.places`.
    """
    node_of = {id(thing): node for node, thing in places.items()}
    counts, saved_counts = (Counter(v.name for v in side) for side in (variables, saved))
    pairs: list[tuple[Variable, Variable]] = []
    mismatches: list[tuple[Variable, Variable]] = []
    missing = []
    for variable in variables:
        candidates = [v for v in saved if v.name == variable.name]
        if max(counts[variable.name], saved_counts[variable.name]) > 1:
            # The place of a slot is a number, which changes with the number of variables.
            node = None if variable.slot else node_of.get(id(variable.source))
            candidates = [v for v in candidates if v.node == node]
        if not candidates:
            missing.append(variable)
        else:
            matches = variable.matches(candidates[0])
            (pairs if matches else mismatches).append((variable, candidates[0]))
    # Nodes are compared, since names need not be unique.
    used = {b.node for _, b in (*pairs, *mismatches)}
    return Comparison(pairs, mismatches, missing, [v for v in saved if v.node not in used])


def find_misplaced(
    variables: Sequence[Variable], content: CheckpointContent, places: dict[int, Any]
) -> tuple[bool, list[Variable]]:
    """Checks whether TensorFlow can restore a trainer by the places of its variables.

    Returns:
        Whether a variable of the trainer has no value of its shape, type and role at its place; and
        the checkpoint's variables that are at no place of the trainer.
    """
    # TensorFlow itself checks shapes only: it restores m of SGD into v of RMSprop, and m of one layer
    # into m of another, without an error.
    saved = {id(places[v.node]): v for v in content.variables if v.node in places}
    # Keyed by the name in the trainer: Keras may have numbered the layers of this process differently.
    saved_names: dict[str, set[str]] = {}
    for v in variables:
        if not v.slot and id(v.source) in saved:
            saved_names.setdefault(v.name, set()).add(saved[id(v.source)].name)
    mismatch = any(
        (match := saved.get(id(v.source))) is None
        or not (v.matches(match) and _same_role(v, match) and _same_owner(v, match, saved_names))
        for v in variables
    )
    return mismatch, [v for v in content.variables if v.node not in places]


def _reach(starts: Iterable[int], neighbors: Callable[[int], Iterable[int]]) -> set[int]:
    """Returns all nodes that can be reached, with the first ones."""
    reached: set[int] = set()
    queue = list(starts)
    while queue:
        node = queue.pop()
        if node not in reached:
            reached.add(node)
            queue += neighbors(node)
    return reached


def _sort(variables: Sequence[tf.Variable]) -> list[Any]:
    """Sorts slot variables last, since they add little information."""
    return sorted(variables, key=lambda v: (v[0] if isinstance(v, tuple) else v).slot)


def _describe(variable: Variable, other: Variable) -> str:
    """Returns the shape of a variable, with its type if only that differs from the other's."""
    shape = str(list(variable.shape))
    same_type = variable.same_shape(other) is variable.matches(other)
    return shape if same_type else f"{variable.dtype.name} {shape}"


def _same_role(one: Variable, other: Variable) -> bool:
    """Returns whether both are one kind of slot, such as "m/...": optimizers must not mix."""
    return (
        not one.slot
        or one.name.partition("/")[0] == other.name.partition("/")[0]
        or _SHARDED in (one.name, other.name)  # the name shows nothing
        # An optimizer that is built in a step prefixes its own name: "SGD/m/dense/kernel".
        or one.name.endswith(f"/{other.name}")
        or other.name.endswith(f"/{one.name}")
    )


def _same_owner(one: Variable, other: Variable, saved_names: dict[str, set[str]]) -> bool:
    """Returns whether both are slots of the same variable: places of slots are only numbers.

    Args:
        one: a slot variable of the trainer, or any other variable.
        other: the checkpoint's variable at the same place.
        saved_names: the names in the checkpoint of the variables that are not slots, by their names
            in the trainer.
    """
    if not one.slot or _SHARDED in (one.name, other.name):
        return True
    parts = one.name.split("/")
    suffixes = ("/".join(parts[i:]) for i in range(1, len(parts)))
    owners = next((saved_names[s] for s in suffixes if s in saved_names), None)
    return owners is None or any(other.name.endswith(f"/{owner}") for owner in owners)


def _is_unbuilt(thing: Any) -> bool:
    if isinstance(thing, tf_keras.optimizers.Optimizer):
        inner = getattr(thing, "inner_optimizer", thing)  # of a LossScaleOptimizer
        return not getattr(inner, "_built", False)
    return isinstance(thing, tf_keras.layers.Layer) and not thing.built
