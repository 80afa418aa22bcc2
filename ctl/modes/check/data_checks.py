"""Looks at the data: what comes in, in which order, and whether an evaluation counts all of it."""

from typing import Any

import numpy as np
import tensorflow as tf

from ctl.data import batching
from ctl.data.source import GlobalBatches, PerReplica
from ctl.modes.check.outcome import FAIL, PASS, WARNING, Outcome
from ctl.modes.check.trainer_factory import Rows, TrainerFactory

_BATCHES = 4
_MOST_EVALUATED = 200_000  # examples; more would take longer than a look should
_FARTHEST, _WIDEST, _NARROWEST = 10.0, 10.0, 1e-3  # of a mean and a deviation: roughly normalised


def inputs(blueprint: TrainerFactory) -> Outcome:
    """Whether what the model gets is finite, and of a size that it can learn from."""
    trainer = blueprint.experiment.trainer
    seen: dict[str, list[np.ndarray]] = {}
    for batch in blueprint.batches(_BATCHES):
        prepared = trainer.preprocess({k: tf.convert_to_tensor(v) for k, v in batch.items()})
        for name, value in prepared.items():
            if tf.as_dtype(value.dtype).is_floating and name != "weight":
                seen.setdefault(name, []).append(np.asarray(value, np.float64))
    told, verdict, fix = [], PASS, ""
    for name, parts in seen.items():
        values = np.concatenate([part.reshape(-1) for part in parts])
        if not np.isfinite(values).all():
            count = int((~np.isfinite(values)).sum())
            return Outcome(
                FAIL,
                f"{name} has {count} values that are not finite in the first {_BATCHES} batches",
                "mend the data, or take these values out in preprocess",
            )
        mean, deviation = values.mean(), values.std()
        told.append(f"{name}: mean {mean:.3g}, deviation {deviation:.3g}")
        if abs(mean) > _FARTHEST or not _NARROWEST <= deviation <= _WIDEST:
            verdict, fix = WARNING, f"bring {name} to about mean 0 and deviation 1 in preprocess"
    return Outcome(verdict, "; ".join(told) or "no features of floats", fix)


def order(blueprint: TrainerFactory) -> Outcome:
    """Whether the data comes in the same order when it is read again, and from a later step on."""
    first, again = blueprint.batches(3), blueprint.batches(3)
    later = blueprint.batches(1, start=2)
    for step, (one, other) in enumerate(zip(first, again, strict=True)):
        name = _different(one, other)
        if name:
            return Outcome(
                FAIL,
                f"read twice, {name} of batch {step} differs",
                "return a ctl.data.Source, or seed the dataset's shuffles by self.options.seed with "
                "reshuffle_each_iteration=False; or no resumed run is the run that was killed",
            )
    name = _different(first[2], later[0])
    if name:
        return Outcome(
            FAIL,
            f"read from step 2 on, {name} is not that of batch 2",
            "let build_dataset return the examples in one order, from the first on",
        )
    return Outcome(PASS, "the same when read twice, and from step 2 on")


def evaluation(blueprint: TrainerFactory) -> Outcome:
    """Whether an evaluation counts every example once."""
    evaluator = blueprint.experiment.evaluator
    assert evaluator is not None
    want = _count(blueprint.feed().data("eval"))
    if want is None:
        return Outcome(
            WARNING, f"not run: there are more than {_MOST_EVALUATED:,} examples, or no end"
        )
    outputs = evaluator.evaluate(tf.constant(-1))
    found = int(outputs["examples"])
    if found != want:
        return Outcome(
            FAIL,
            f"counted {found} of {want} examples",
            "let the evaluation data end after its last example, with no batch dropped or repeated",
        )
    return Outcome(PASS, f"{found} of {want} examples, loss {float(outputs['loss']):.4g}")


def _count(data: Any) -> int | None:
    source = batching.source_of(data)
    if source is not None:
        return len(source) if len(source) <= _MOST_EVALUATED else None
    ready = isinstance(data, GlobalBatches | PerReplica)
    count = 0
    for element in data.dataset if ready else data:
        count += len(next(iter(element.values()))) if ready else 1
        if count > _MOST_EVALUATED:
            return None
    return count


def _different(one: Rows, other: Rows) -> str | None:
    if one.keys() != other.keys():
        return " and ".join(sorted(one.keys() ^ other.keys()))
    return next((name for name in one if one[name].tobytes() != other[name].tobytes()), None)
