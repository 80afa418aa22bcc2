"""Another run's weights for the beginning of this one: no slots, no counters."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import fnmatch
import os
import pathlib
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError, list_some
from ctl.loop.checkpoints import matching
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.trainer import StandardTrainer

_Pairs = list[tuple[matching.Variable, matching.Variable]]


@dataclasses.dataclass(frozen=True)
class Taken:
    """What was taken.

    Attributes:
        path: the checkpoint.
        names: the model's variables that have its values now.
        of: how many variables the model has.
        cast: the type that values were cast from, or nothing.
    """

    path: str
    names: list[str]
    of: int
    cast: str

    def record(self) -> dict[str, Any]:
        """What `events.jsonl` keeps of it."""
        return {"weights_from": self.path, "weights": self.names}


def check(trainer: StandardTrainer, init: Any, *, moved: pathlib.Path | None = None) -> None:
    """Refuses what `begin` could not take, before anything is written.

    Args:
        trainer: whose model it is.
        init: the config's section.
        moved: the folder that `--fresh` is to move aside.

    Raises:
        UsageError: there is no such checkpoint, or it has not what is asked for.
    """
    if not init.checkpoint:
        return
    path = _found(init.checkpoint, int)
    if moved and pathlib.Path(path).resolve().is_relative_to(moved.resolve()):
        raise UsageError(
            f"init.checkpoint is {init.checkpoint}, which --fresh moves aside: name another --workdir."
        )
    with _reading(init.checkpoint):
        _pairs(trainer, matching.CheckpointContent(path), init)


def begin(
    trainer: StandardTrainer, init: Any, *, agree: Callable[[int], int] = int
) -> Taken | None:
    """Gives a model the weights that the config's `init` names.

    Args:
        trainer: whose model it is, before the first step.
        init: the config's section.
        agree: makes a step that of the chief, so that all processes take one checkpoint, though the
            other run may save meanwhile.

    Returns:
        What was taken, or None where `init` names nothing.

    Raises:
        UsageError: there is no such checkpoint, or it has not what is asked for.
    """
    if not init.checkpoint:
        return None
    path = _found(init.checkpoint, agree)
    with _reading(init.checkpoint):
        content = matching.CheckpointContent(path)
        pairs, of = _pairs(trainer, content, init)
        # All are read before one is changed.
        values = [(mine, content.value(other)) for mine, other in pairs]
    with trainer.strategy.scope():
        for mine, value in values:
            mine.source.assign(tf.cast(value, mine.dtype))
    cast = sorted({other.dtype.name for mine, other in pairs if other.dtype != mine.dtype})
    return Taken(path, [mine.name for mine, _ in pairs], of, " and ".join(cast))


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except (ValueError, tf.errors.OpError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"init.checkpoint is {name}, which cannot be read ({reason}): name another checkpoint."
        ) from None


def _found(name: str, agree: Callable[[int], int]) -> str:
    """The prefix of the files that a run's folder, a folder of checkpoints or a prefix means."""
    if not os.path.isdir(name):
        if not os.path.isfile(f"{name}.index"):
            raise UsageError(
                f"init.checkpoint is {name}, and there is none: name a run's workdir, its folder of "
                "checkpoints, or a checkpoint in it, such as runs/mine/checkpoints/ckpt-500."
            )
        return name
    inner = os.path.join(name, "checkpoints")
    files = CheckpointFiles(inner if os.path.isdir(inner) else name)
    step = agree(max(files.steps(), default=0))
    if not step:
        raise UsageError(
            f"init.checkpoint is {name}, which has no whole checkpoint: name another run, or train "
            "that one first."
        )
    return files.path(step)


def _pairs(
    trainer: StandardTrainer, content: matching.CheckpointContent, init: Any
) -> tuple[_Pairs, int]:
    """(the model's variable, the checkpoint's) of those asked for, and how many the model has."""
    mine = matching.variables_of(trainer.model)
    chosen = _chosen(mine, init.variables)
    places = content.places(tf.train.Checkpoint(model=trainer.model))
    found = matching.compare(chosen, content.under("model"), places)
    pairs = found.pairs + [pair for pair in found.others if pair[0].same_shape(pair[1])]
    shapes = [
        f"{a.name} is {list(a.shape)}, there {list(b.shape)}"
        for a, b in found.others
        if not a.same_shape(b)
    ]
    missing = [v.name for v in found.missing]
    told = [f"no {list_some(missing)}"] * bool(missing) + [list_some(shapes)] * bool(shapes)
    if told:
        raise UsageError(
            f"init.checkpoint is {init.checkpoint}, which does not fit the model "
            f"({'; '.join(told)}): name what to take by init.variables, or another checkpoint."
        )
    return pairs, len(mine)


def _chosen(mine: list[matching.Variable], patterns: Sequence[str]) -> list[matching.Variable]:
    """The variables that patterns name; all where there are none."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(variable.name, pattern) for variable in mine):
            raise UsageError(
                f"init.variables has {pattern!r}, which no variable of the model matches: there are "
                f"{list_some([variable.name for variable in mine])}."
            )
    return [
        v for v in mine if not patterns or any(fnmatch.fnmatchcase(v.name, p) for p in patterns)
    ]
