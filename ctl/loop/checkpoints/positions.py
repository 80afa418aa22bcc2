"""Detects steps that share models and were saved apart, at positions that do not belong together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
import weakref

from ctl.errors import UsageError
from ctl.keras.models import adapt
from ctl.step import Step

# The steps of this process that a Checkpointer saves -> None, or the position at which the step was last
# restored, and the positions that the steps of its other models had when it was saved, by model.
_STEPS: "weakref.WeakKeyDictionary[Step, tuple[int, dict[int, int]] | None]" = (
    weakref.WeakKeyDictionary()
)


def add(steps: Sequence[object]) -> None:
    """Adds the steps of a `Checkpointer`; trainers among them are left out."""
    _STEPS.update({step: _STEPS.get(step) for step in steps if isinstance(step, Step)})


def of_others(steps: Sequence[object]) -> dict[str, int]:
    """Returns the positions of the steps that other checkpointers save, and that train models of these.

    Args:
        steps: the steps of one `Checkpointer`.

    Returns:
        "number of the step/number of its model" -> the position of the step that trains the model.
    """
    return {
        key: _position(other)
        for key, model in _models(steps)
        for other in list(_STEPS)
        if other.model is model and other not in steps
    }


def check(steps: Sequence[object], others: Mapping[str, int], path: str) -> None:
    """Compares restored steps with those that other checkpointers have restored.

    Args:
        steps: the steps of one `Checkpointer`, which were just restored.
        others: the result of `of_others` when they were saved.
        path: the checkpoint, for messages.

    Raises:
        UsageError: a step that trains a model of these was at another position when they were saved.
    """
    seen = {id(model): others[key] for key, model in _models(steps) if key in others}
    for step in (step for step in steps if isinstance(step, Step)):
        # A step that is restored again goes back, and the other one may follow.
        is_first, here = _STEPS[step] is None, _position(step)
        _STEPS[step] = here, seen
        for other, restored in list(_STEPS.items()) if is_first else ():
            if restored is None or other in steps or restored[0] != _position(other):
                continue
            there, seen_there = restored
            pairs = [(seen.get(id(other.model)), there), (seen_there.get(id(step.model)), here)]
            # The one that was saved later knows where the other one was.
            agrees = [one == two for one, two in pairs if one is not None]
            if agrees and not any(agrees):
                raise UsageError(
                    f"{path} has a step at {here}, but a step that trains one of its models was "
                    f"restored at {there}: they were not saved together. Save both by one "
                    "ctl.Checkpointer(folder, [step, other_step]); to continue, restore older "
                    "checkpoints of both by restore(path)."
                )


def _models(steps: Sequence[object]) -> Iterator[tuple[str, Any]]:
    for i, step in enumerate(steps):
        for j, model in enumerate(step.models if isinstance(step, Step) else ()):
            yield f"{i}/{j}", adapt(model)


def _position(step: Step) -> int:
    return int(step.global_step.numpy())
