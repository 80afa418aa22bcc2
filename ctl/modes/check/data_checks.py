"""Checks of the data: its values, its order, and the number of examples that are evaluated."""

from typing import Any

import numpy as np
import tensorflow as tf

from ctl.built.inner_loop import step_of
from ctl.data.distribution import disable_autotune
from ctl.data.features import flatten_features
from ctl.data.kinds import Kind
from ctl.data.python_functions import python_ops
from ctl.modes.check.outcome import FAIL, PASS, WARNING, Outcome
from ctl.modes.check.trainer_factory import Examples, TrainerFactory

_BATCHES = 4
_MAX_EVALUATED = 200_000  # examples; evaluating more takes longer than a check should
# The features of a roughly normalized data set have a mean and a standard deviation within these.
_MAX_MEAN, _MAX_DEVIATION, _MIN_DEVIATION = 10.0, 10.0, 1e-3


def check_inputs(factory: TrainerFactory) -> Outcome:
    """Checks that the model's inputs are finite and roughly normalized."""
    trainer = factory.experiment.trainer
    parts: dict[str, list[np.ndarray]] = {}
    for batch in factory.read_batches(_BATCHES):
        tensors = tf.nest.map_structure(tf.convert_to_tensor, batch)
        with step_of(trainer).rows(tensors, None):  # for draws and mixtures of rows
            prepared = trainer.preprocess(tensors)
        for name, value in flatten_features(prepared).items():
            if tf.as_dtype(value.dtype).is_floating and name != "weight":
                parts.setdefault(name, []).append(np.asarray(value, np.float64))
    statistics, verdict, fix = [], PASS, ""
    for name, arrays in parts.items():
        values = np.concatenate([array.reshape(-1) for array in arrays])
        if not np.isfinite(values).all():
            count = int((~np.isfinite(values)).sum())
            return Outcome(
                FAIL,
                f"{name} has {count} values that are not finite in the first {_BATCHES} batches",
                "fix the data, or replace these values in preprocess",
            )
        mean, deviation = values.mean(), values.std()
        statistics.append(f"{name}: mean {mean:.3g}, deviation {deviation:.3g}")
        if abs(mean) > _MAX_MEAN or not _MIN_DEVIATION <= deviation <= _MAX_DEVIATION:
            verdict = WARNING
            fix = f"normalize {name} to about mean 0 and deviation 1 in preprocess"
    return Outcome(verdict, "; ".join(statistics) or "no floating-point features", fix)


def check_order(factory: TrainerFactory) -> Outcome:
    """Checks that the order of the data is the same when read twice, and from a later step on."""
    first, second = factory.read_batches(3), factory.read_batches(3)
    later = factory.read_batches(1, start=2)
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        name = _find_difference(one, other)
        if name:
            observation = f"read twice, {name} of batch {step} differs"
            return Outcome(FAIL, observation, _suggest_order(factory))
    name = _find_difference(first[2], later[0])
    if name:
        return Outcome(
            FAIL,
            f"read from step 2 on, {name} of batch 2 differs",
            "let build_dataset always return the examples in the same order, from the first on",
        )
    return Outcome(PASS, "the same when read twice, and from step 2 on")


def _suggest_order(factory: TrainerFactory) -> str:
    python = python_ops(factory.input_pipeline().data("train"))
    if python:
        return (
            f"the data calls Python functions ({python[0]}: tf.numpy_function, tf.py_function or a "
            "generator): draw their random numbers from a seed that is one of their arguments, such "
            "as the one that ctl.data.augmented passes to its function"
        )
    return (
        "return a ctl.data.Source, or seed the dataset's shuffles by self.options.seed with "
        "reshuffle_each_iteration=False; otherwise a resumed run differs from an uninterrupted one"
    )


def check_evaluation(factory: TrainerFactory) -> Outcome:
    """Checks that an evaluation counts every example exactly once."""
    evaluator = factory.experiment.evaluator
    if evaluator is None:
        return Outcome(PASS, "no evaluation data: eval.splits is empty")
    pipeline = factory.input_pipeline()
    data = {split: pipeline.evaluation_data(split) for split in evaluator.splits}
    counts = {split: _count_examples(examples) for split, examples in data.items()}
    if None in counts.values():
        return Outcome(
            WARNING,
            f"not run: the evaluation data has more than {_MAX_EVALUATED:,} examples, or no end",
        )
    results = evaluator.evaluate(tf.constant(-1))
    texts = []
    for split, expected in counts.items():
        name, outputs = "", results
        if len(counts) > 1:
            name, outputs = f"{split}: ", results[split]
        counted = int(outputs["examples"])
        if counted != expected:
            return Outcome(
                FAIL,
                f"{name}counted {counted} of {expected} examples",
                "let the evaluation data end after its last example, with no batch dropped or repeated",
            )
        # A trainer with its own step need not define a loss for evaluation.
        loss = f", loss {float(outputs['loss']):.4g}" if "loss" in outputs else ""
        texts.append(f"{name}{counted} of {expected} examples{loss}")
    return Outcome(PASS, "; ".join(texts))


def _count_examples(data: Kind) -> int | None:
    """Counts the examples; None if there are more than `_MAX_EVALUATED`."""
    if data.source is not None:
        return len(data.source) if len(data.source) <= _MAX_EVALUATED else None
    count = 0
    for element in disable_autotune(data.dataset):
        count += len(tf.nest.flatten(element)[0]) if data.in_batches else 1
        if count > _MAX_EVALUATED:
            return None
    return count


def _find_difference(one: Examples, other: Examples) -> str | None:
    """Returns the name of the first feature that differs, or None."""
    one, other = flatten_features(one), flatten_features(other)
    if one.keys() != other.keys():
        return " and ".join(sorted(one.keys() ^ other.keys()))
    return next((name for name in one if _content(one[name]) != _content(other[name])), None)


def _content(values: np.ndarray) -> Any:
    # The bytes of an array of texts are addresses in memory.
    return values.tolist() if values.dtype == object else values.tobytes()
