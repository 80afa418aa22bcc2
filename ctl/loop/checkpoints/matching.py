"""Which variables of a checkpoint are which of a trainer, by their places and by their names."""

from collections import Counter
from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2
import tf_keras

from ctl.errors import list_some

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # where TensorFlow keeps which object is whose child
_VALUE = "VARIABLE_VALUE"
_IN_PARTS = "ShardedVariable"  # what TensorFlow calls each variable that parameter servers cut


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable of a trainer, or one in a checkpoint.

    Attributes:
        name: as the model's summary has it, such as "dense/kernel"; "m/dense/kernel" is a slot.
        shape: its shape, all parts of it together.
        dtype: its type.
        source: the variable itself, or the key that a checkpoint has its value under.
        node: its number in a checkpoint's graph of objects.
        slot: whether an optimizer keeps it for another variable.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: tf.DType
    source: Any
    node: int = -1
    slot: bool = False

    def fits(self, other: "Variable") -> bool:
        """Whether one can have the other's value as it is."""
        return self.dtype == other.dtype and self.same_shape(other)

    def same_shape(self, other: "Variable") -> bool:
        """Whether the two are of one shape."""
        return tf.TensorShape(self.shape).is_compatible_with(other.shape)


class CheckpointContent:
    """What is in a checkpoint.

    content = Content("runs/mine/checkpoints/ckpt-500")
    content.variables[0].name                       # "dense/kernel"
    """

    def __init__(self, path: str):
        """Reads what is there; values are read when they are asked for.

        Raises:
            ValueError or tf.errors.OpError: it cannot be read.
        """
        self._view = tf.train.CheckpointView(path)
        self._reader = tf.train.load_checkpoint(path)
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        graph.ParseFromString(self._reader.get_tensor(_GRAPH))
        self._nodes = graph.nodes
        self._parents: dict[int, list[int]] = {}
        for node, content in enumerate(graph.nodes):
            for child in content.children:
                self._parents.setdefault(child.node_id, []).append(node)
        self._by_slot = {s.slot_variable_node_id for n in graph.nodes for s in n.slot_variables}
        self.variables = list(self._variables())

    def value(self, variable: Variable) -> np.ndarray:
        """The value of one of the variables."""
        value: np.ndarray = self._reader.get_tensor(variable.source)
        return value

    def under(self, child: str) -> list[Variable]:
        """The variables that one of the root's children holds, such as "model"."""
        reached, waiting = set(), [self._view.children(0).get(child)]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in reached:
                reached.add(node)
                waiting += self._view.children(node).values()
        return [variable for variable in self.variables if variable.node in reached]

    def places(self, root: tf.train.Checkpoint) -> dict[int, Any]:
        """Number of an object in the checkpoint -> the object at the same place under a root."""
        found: dict[int, Any] = self._view.match(root)
        return found

    def waits(self, variable: Variable, places: dict[int, Any]) -> bool:
        """Whether TensorFlow restores a variable later, when what holds it is built."""
        reached, waiting = set(), [variable.node]
        while waiting:
            node = waiting.pop()
            if _unbuilt(places.get(node)):
                return True
            reached.add(node)
            waiting += [p for p in self._parents.get(node, []) if p not in reached]
        return False

    def _variables(self) -> Iterator[Variable]:
        shapes = self._reader.get_variable_to_shape_map()
        dtypes = self._reader.get_variable_to_dtype_map()
        for number, node in enumerate(self._nodes):
            for attribute in node.attributes:
                key = attribute.checkpoint_key
                own = number not in self._by_slot and not key.startswith("save_counter/")
                if attribute.name == _VALUE and key in shapes and own:
                    yield Variable(
                        attribute.full_name or key,
                        tuple(shapes[key]),
                        dtypes[key],
                        key,
                        node=number,
                        slot="/_variables/" in key,
                    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A trainer's variables beside those of a checkpoint, by name.

    Attributes:
        pairs: (the trainer's, the checkpoint's), of one name, shape and type.
        others: (the trainer's, the checkpoint's), of one name, but not of one shape or type.
        missing: what the trainer has and the checkpoint has not.
        unused: what the checkpoint has and the trainer has not.
    """

    pairs: list[tuple[Variable, Variable]]
    others: list[tuple[Variable, Variable]]
    missing: list[Variable]
    unused: list[Variable]

    @property
    def complete(self) -> bool:
        """Whether each is the other's."""
        return not (self.others or self.missing or self.unused)

    def told(self) -> str:
        """What does not match, for a line; the model's own variables before their slots."""
        shapes = [f"{a.name} is {_kind(a, b)}, there {_kind(b, a)}" for a, b in _first(self.others)]
        parts = [
            ("", shapes),
            ("only the trainer has ", [v.name for v in _first(self.missing)]),
            ("only the checkpoint has ", [v.name for v in _first(self.unused)]),
        ]
        return "; ".join(start + list_some(names) for start, names in parts if names)

    def left(self) -> list[str]:
        """The names of the trainer's variables that the checkpoint has no value for."""
        return [v.name for v in _first([*(a for a, _ in self.others), *self.missing])]

    def dropped(self) -> list[str]:
        """The names of the checkpoint's variables that the trainer has no use for."""
        return [v.name for v in _first([*(b for _, b in self.others), *self.unused])]


def variables_of(root: Any) -> list[Variable]:
    """The variables that an object holds, as a checkpoint of it would."""
    found, seen, waiting = [], {id(root)}, [(root, False)]
    while waiting:
        thing, slot = waiting.pop(0)
        if callable(getattr(thing, "assign", None)) and hasattr(thing, "shape"):
            name = thing.name.removesuffix(":0")
            found.append(Variable(name, tuple(thing.shape), thing.dtype, thing, slot=slot))
            continue
        for name, child in tf.train.TrackableView.children(thing).items():
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append((child, slot or name == "_variables"))
    return found


def compare(mine: Sequence[Variable], theirs: Sequence[Variable], places: Any = ()) -> Comparison:
    """Finds what is the same variable by name; where several have it, by place.

    Args:
        mine: of a trainer.
        theirs: of a checkpoint.
        places: what `Content.places` returned.
    """
    at = {id(thing): node for node, thing in dict(places).items()}
    mine_of, theirs_of = (Counter(v.name for v in side) for side in (mine, theirs))
    pairs: list[tuple[Variable, Variable]] = []
    others: list[tuple[Variable, Variable]] = []
    missing = []
    for variable in mine:
        found = [v for v in theirs if v.name == variable.name]
        if max(mine_of[variable.name], theirs_of[variable.name]) > 1:
            # The place of a slot is a number, which moves with the number of variables.
            place = None if variable.slot else at.get(id(variable.source))
            found = [v for v in found if v.node == place]
        if not found:
            missing.append(variable)
        else:
            (pairs if variable.fits(found[0]) else others).append((variable, found[0]))
    used = {b.node for _, b in (*pairs, *others)}
    return Comparison(pairs, others, missing, [v for v in theirs if v.node not in used])


def misplaced(
    mine: Sequence[Variable], content: CheckpointContent, places: dict[int, Any]
) -> tuple[bool, list[Variable]]:
    """Whether TensorFlow can restore a trainer by the places of its variables.

    Returns:
        Whether one of the trainer's has no value of its shape, type and role at its place, and the
        checkpoint's that are at no place of the trainer.
    """
    there = {id(places[v.node]): v for v in content.variables if v.node in places}
    at_odds = any(
        id(v.source) not in there
        or not v.fits(there[id(v.source)])
        or not _same_role(v, there[id(v.source)])
        for v in mine
    )
    return at_odds, [v for v in content.variables if v.node not in places]


def _first(variables: Sequence[Any]) -> list[Any]:
    """The model's own before slots, which say little more."""
    return sorted(variables, key=lambda v: (v[0] if isinstance(v, tuple) else v).slot)


def _kind(variable: Variable, other: Variable) -> str:
    shown = str(list(variable.shape))
    return (
        shown
        if variable.same_shape(other) is variable.fits(other)
        else (f"{variable.dtype.name} {shown}")
    )


def _same_role(one: Variable, other: Variable) -> bool:
    """Whether both are "m/..." of some variable: another optimizer's slots are other numbers."""
    if not one.slot or one.name.partition("/")[0] == other.name.partition("/")[0]:
        return True
    if _IN_PARTS in (one.name, other.name):  # it has no name of its own
        return True
    # An optimizer that is built in a step puts its own name before: "SGD/m/dense/kernel".
    return one.name.endswith(f"/{other.name}") or other.name.endswith(f"/{one.name}")


def _unbuilt(thing: Any) -> bool:
    if isinstance(thing, tf_keras.optimizers.Optimizer):
        inner = getattr(thing, "inner_optimizer", thing)  # of a LossScaleOptimizer
        return not getattr(inner, "_built", False)
    return isinstance(thing, tf_keras.layers.Layer) and not thing.built
