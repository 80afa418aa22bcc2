"""The graphs that the code of a loop's replicas is traced into."""

from collections.abc import Callable, Mapping, Sequence
import re
from typing import Any

import tensorflow as tf

from ctl.configs.error_location import user_frame
from ctl.graphs.dataflow import ancestors
from ctl.graphs.places import is_in_replica, place_of

_REPLICA = re.compile(r"(?:^|/)replica_(\d+)/")  # the name scope of all but the first replica
_DATA = ("Placeholder", "IteratorGetNext")


class Traces:
    """Watches `strategy.run` of a strategy that no other loop has.

    Attributes:
        graphs: the graphs of the calls, without those of eager ones.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self.graphs: list[tf.Graph] = []
        self._owners: dict[int, int] = {}  # id of an argument -> its replica
        run = strategy.run

        def watched(
            fn: Callable[..., Any],
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
            options: Any = None,
        ) -> Any:
            self._note(strategy, args, kwargs)
            return run(fn, args, kwargs, options)

        strategy.run = watched

    def _note(self, strategy: tf.distribute.Strategy, *arguments: Any) -> None:
        if tf.executing_eagerly():
            return
        self.graphs.append(tf.compat.v1.get_default_graph())
        for value in tf.nest.flatten(arguments):
            local = strategy.experimental_local_results(value)
            if len(local) > 1:
                self._owners.update((id(x), replica) for replica, x in enumerate(local))

    def find_shared(self) -> str:
        """Returns the user's line that reads on a replica what another one has computed, or ""."""
        for op in (op for graph in self.graphs for op in graph.get_operations()):
            own = _number(op.name)
            others = [x for x in op.inputs if self._owners.get(id(x), _number(x.op.name)) != own]
            stack = [(frame.filename, frame.lineno) for frame in op.traceback] if others else []
            # The code of a merge_call, such as a reduction, runs in no replica.
            if others and is_in_replica(op) and user_frame(stack):  # not ctl's own code
                others = [x for x in others if id(x) in self._owners or is_in_replica(x.op)]
                if any(x.op.type in _DATA for x in ancestors(*others)):
                    return place_of(op)
        return ""


def _number(name: str) -> int:
    found = _REPLICA.search(name)
    return int(found[1]) if found else 0
