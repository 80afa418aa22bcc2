"""Trainers that tests use one after the other, so that each is traced once; reports and summaries."""

import collections
from collections.abc import Callable
import functools
import types

import numpy as np
import tensorflow as tf

from ctl import testing
from ctl.built.inner_loop import loop_of
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.controller import Controller
from ctl.loop.progress import Progress
from ctl.loop.reporter import Reporter
from tests.support import reference_model


def make_reference(replicas=1, batch=8, **options):
    """Makes a trainer of the reference model."""
    return reference_model.make_trainer(testing.make_strategy(replicas), batch, **options)


def share(build: Callable) -> Callable:
    """Caches the trainers that `build` makes; a call gives all variables their first values again."""

    @functools.cache
    def build_once(*arguments, **options):
        trainer = build(*arguments, **options)
        results = loop_of(trainer).step.results
        results.measure_waiting()
        results.measure_waiting = lambda: None  # each Controller would drop the trace
        root = tf.train.Checkpoint(**trainer.checkpoint_items())
        variables = [v for v in tf.train.TrackableView(root).descendants() if hasattr(v, "assign")]
        return trainer, [(variable, variable.numpy()) for variable in variables]

    @functools.wraps(build)
    def make(*arguments, **options):
        trainer, values = build_once(*arguments, **options)
        for variable, value in values:
            variable.assign(value)
        return trainer

    make.cache_clear = build_once.cache_clear  # for tests/support/process.py, at the end of a file
    return make


class Recording(Reporter):
    """Keeps the events as (name, step, fields), and the lines."""

    def __init__(self, trainer, *, total=10**9, **options):
        self.events, self.lines = [], []
        super().__init__(
            trainer,
            progress=Progress(total=total, write=self.lines.append),
            on_event=lambda name, step, **fields: self.events.append((name, step, fields)),
            **options,
        )

    def steps(self, *names):
        """The events of some names, or all, as (name, step)."""
        return [(name, step) for name, step, _ in self.events if not names or name in names]


def control(trainer, folder=None, *, background=False, reporter=(), **options):
    """Makes a controller whose reporter records, with checkpoints in a folder if it is given."""
    checkpoints = folder and Checkpointer(folder, trainer, background=background)
    recording = Recording(trainer, **dict(reporter))
    return Controller(trainer=trainer, checkpoints=checkpoints, reporter=recording, **options)


def init(checkpoint, *variables, models=(), averages=False, names=(), layout=""):
    """The section `init` of a config."""
    return types.SimpleNamespace(
        checkpoint=str(checkpoint), variables=variables, models=dict(models), averages=averages,
        names=dict(names), layout=layout,
    )  # fmt: skip


class OtherProcesses(ProcessGroup):
    """A run of several processes, of which the others give fixed answers; keeps the calls.

    Args:
        of_chief: what the chief broadcasts.
        stops: whether the answer of another process is yes.
    """

    def __init__(self, *, of_chief=None, stops=False):
        super().__init__()
        self.of_chief, self.stops, self.calls = of_chief, stops, []

    def broadcast_from_chief(self, value):
        self.calls.append(("broadcast_from_chief", value))
        return self.of_chief

    def any_process(self, value):
        self.calls.append(("any_process", value))
        return value or self.stops

    def gather(self, values):
        self.calls.append(("gather", values))
        return [values]


def arrays(variables):
    """The values of variables."""
    return [variable.numpy() for variable in variables]


def same(one, other):
    """Whether two lists of arrays are equal."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def same_copies(variable, value, replicas):
    """Whether every replica's copy of a variable has a value."""
    copies = testing.copies(testing.make_strategy(replicas), variable)
    return all(np.array_equal(copy, value) for copy in copies)


def read_summaries(folder, part=lambda value: value.tensor):
    """Tag -> {step: tensor, or another part} of the summaries in a folder; "graph" if it has one."""
    values = collections.defaultdict(dict)
    for path in folder.glob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            if event.HasField("graph_def"):
                values["graph"][event.step] = None
            for value in event.summary.value:
                values[value.tag][event.step] = part(value)
    return values


def count_operations(trainer):
    """The number of operations of each type in the graph of a trainer's loop, which it has traced."""
    (graph,) = {f.graph for f in trainer._train_loop_fn._list_all_concrete_functions()}
    definition = graph.as_graph_def()
    bodies = [node for function in definition.library.function for node in function.node_def]
    return collections.Counter(node.op for node in (*definition.node, *bodies))
