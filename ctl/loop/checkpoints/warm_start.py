"""Weights of another run to start from, without its slots and counters."""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import fnmatch
import os
import pathlib
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError, list_some
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.checkpoints import matching
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.replica.engine import engine_of
from ctl.trainer import StandardTrainer

_Pairs = list[tuple[matching.Variable, matching.Variable]]


@dataclasses.dataclass(frozen=True)
class LoadedWeights:
    """Which weights a model got.

    Attributes:
        path: the checkpoint.
        names: the model's variables that were loaded.
        total: how many variables the model has.
        cast: the types that values were cast from, or "".
    """

    path: str
    names: list[str]
    total: int
    cast: str

    def record(self) -> dict[str, Any]:
        """The fields of the event in events.jsonl."""
        return {"weights_from": self.path, "weights": self.names}


def check(trainer: StandardTrainer, init: Any, *, moved: pathlib.Path | None = None) -> None:
    """Checks, before anything is written, that `all_load` can load the weights.

    Args:
        trainer: its model gets the weights.
        init: the section `init` of the config.
        moved: the folder that `--fresh` is going to move aside.

    Raises:
        UsageError: the checkpoint does not exist, or does not have the requested weights.
    """
    if not init.checkpoint:
        return
    # Not collective: each process checks by itself, before the first collective call of the run.
    path = _path(init.checkpoint, _latest_step(init.checkpoint))
    # The weights would be gone from that path by the time they are loaded.
    if moved and pathlib.Path(path).resolve().is_relative_to(moved.resolve()):
        raise UsageError(
            f"init.checkpoint is {init.checkpoint}, which --fresh moves aside: name another --workdir."
        )
    with _report_read_errors(init.checkpoint):
        _match(trainer, matching.CheckpointContent(path), init)


def all_load(
    trainer: StandardTrainer, init: Any, processes: ProcessGroup | None = None
) -> LoadedWeights | None:
    """Loads the weights that the config's `init` names; every process must call it.

    Args:
        trainer: its model gets the weights, before the first step.
        init: the section `init` of the config.
        processes: the processes of the run; by default this one only.

    Returns:
        What was loaded, or None if `init` names no checkpoint.

    Raises:
        UsageError: the checkpoint does not exist, or does not have the requested weights.
    """
    if not init.checkpoint:
        return None
    # The other run may save meanwhile, so that the processes see different newest checkpoints.
    step = (processes or ProcessGroup()).broadcast_from_chief(_latest_step(init.checkpoint))
    path = _path(init.checkpoint, step)
    with _report_read_errors(init.checkpoint):
        content = matching.CheckpointContent(path)
        pairs, total = _match(trainer, content, init)
        # All values are read before a variable changes.
        values = [(variable, content.value(saved)) for variable, saved in pairs]
    # In the scope, a value is assigned to the copies on all replicas.
    with trainer.strategy.scope():
        for variable, value in values:
            variable.source.assign(tf.cast(value, variable.dtype))
    average = engine_of(trainer).ema
    if average:
        average.reset()
    cast = sorted({b.dtype.name for a, b in pairs if b.dtype != a.dtype})
    return LoadedWeights(path, [a.name for a, _ in pairs], total, " and ".join(cast))


@contextlib.contextmanager
def _report_read_errors(name: str) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except (ValueError, tf.errors.OpError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"init.checkpoint is {name}, which cannot be read ({reason}): name another checkpoint."
        ) from None


def _files(name: str) -> CheckpointFiles:
    """The checkpoints of a run's workdir, or of a folder of checkpoints."""
    inner = os.path.join(name, "checkpoints")
    return CheckpointFiles(inner if os.path.isdir(inner) else name)


def _latest_step(name: str) -> int:
    """The step of the newest complete checkpoint in a folder; 0 if there is none."""
    return max(_files(name).steps(), default=0) if os.path.isdir(name) else 0


def _path(name: str, step: int) -> str:
    """The path of the checkpoint that `init.checkpoint` names: of a step, if it names a folder."""
    if not os.path.isdir(name):  # the prefix of a checkpoint's files
        if not os.path.isfile(f"{name}.index"):
            raise UsageError(
                f"init.checkpoint is {name}, which does not exist: name a run's workdir, its folder of "
                "checkpoints, or a checkpoint in it, such as runs/mine/checkpoints/ckpt-500."
            )
        return name
    if not step:
        raise UsageError(
            f"init.checkpoint is {name}, which has no complete checkpoint: name another run, or train "
            "that one first."
        )
    return _files(name).path(step)


def _match(
    trainer: StandardTrainer, content: matching.CheckpointContent, init: Any
) -> tuple[_Pairs, int]:
    """Matches the requested variables.

    Returns:
        (the model's variable, the checkpoint's) of each, and how many variables the model has.
    """
    variables = matching.list_variables(trainer.model)
    requested = _filter(variables, init.variables)
    places = content.places(tf.train.Checkpoint(model=trainer.model))
    comparison = matching.compare(requested, content.variables_of("model"), places)
    pairs, shapes = list(comparison.pairs), []
    for a, b in comparison.mismatches:
        if a.same_shape(b):  # of another type, which is cast
            pairs.append((a, b))
        else:
            shapes.append(f"{a.name} is {list(a.shape)}, but {list(b.shape)} in the checkpoint")
    missing = [v.name for v in comparison.missing]
    reasons = [f"no {list_some(missing)}"] * bool(missing) + [list_some(shapes)] * bool(shapes)
    if reasons:
        raise UsageError(
            f"init.checkpoint is {init.checkpoint}, which does not match the model "
            f"({'; '.join(reasons)}): name what to load by init.variables, or another checkpoint."
        )
    return pairs, len(variables)


def _filter(variables: list[matching.Variable], patterns: Sequence[str]) -> list[matching.Variable]:
    """The variables that match a pattern; all if there are no patterns."""
    # A pattern without a match is a typing error, which would leave random weights unnoticed.
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(variable.name, pattern) for variable in variables):
            raise UsageError(
                f"init.variables has {pattern!r}, which no variable of the model matches: its "
                f"variables are {list_some([variable.name for variable in variables])}."
            )
    return [
        v
        for v in variables
        if not patterns or any(fnmatch.fnmatchcase(v.name, p) for p in patterns)
    ]
