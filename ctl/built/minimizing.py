"""Updates of one forward pass: `minimize` and `minimize_each`, and several optimizers of `ctl.Step`."""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import tensorflow as tf

from ctl.built.attributes import Attributes
from ctl.built.build import check_optimizer
from ctl.built.built_step import BuiltStep
from ctl.configs.error_location import name_function
from ctl.data.autograph import convert
from ctl.data.source import Batch
from ctl.errors import UsageError
from ctl.graphs.places import place_of
from ctl.keras.models import adapt, is_layer, raw
from ctl.keras.precision import Optimizer
from ctl.keras.variables import check_known, penalties
from ctl.rows import row_mask
from ctl.update.loss import Denominator
from ctl.update.microbatches import Target, row_count
from ctl.update.update import UpdateResult


def minimize(
    step: BuiltStep,
    batch: Batch,
    loss_fn: Callable[..., Any],
    updates: Mapping[str, tuple[Any, Optimizer | None]],
    denominator: Denominator | None,
    when: Mapping[str, tf.Tensor | None],
    regularization: Callable[[], Sequence[tf.Tensor]] | None = None,
    forward: Callable[[Batch], Any] | None = None,
) -> UpdateResult:
    """Computes and applies updates of one forward pass; see `StandardTrainer.minimize_each`.

    Args:
        step: the step of the trainer or the `ctl.Step`.
        batch: this replica's rows, preprocessed.
        loss_fn: micro-batch -> losses, not reduced; a dict of them if they have names. With `forward`
            it also gets the outputs.
        updates: name of a loss -> its variables or models and its optimizer, which may be None; "" for
            a single loss.
        denominator: as for `StandardTrainer.minimize`.
        when: name of a loss -> the condition of its update.
        regularization: as for `StandardTrainer.minimize`.
        forward: micro-batch -> outputs; None if `loss_fn` calls the models itself.

    Returns:
        The result, with the losses in the order of `updates`.
    """
    attributes, hooks = step.attributes, step.hooks
    if not updates or ("" in updates and len(updates) > 1) or not when.keys() <= updates.keys():
        raise UsageError(
            f"There are updates for {', '.join(updates) or 'no loss'} and conditions for "
            f"{', '.join(when) or 'none'}: name each update by its loss, and conditions by updates."
        )
    _check_rows(batch)
    chosen = any(variables is not None for variables, _ in updates.values())
    targets = []
    for name, (variables, optimizer) in updates.items():
        optimizer = check_optimizer(adapt(optimizer or attributes.optimizer))
        trained = attributes.trained_variables() if variables is None else variables_in(variables)
        penalty: Any = regularization or hooks.regularization_losses
        # An override counts for all updates.
        if chosen and not regularization and penalty.__module__ in ("ctl.trainer", "ctl.step"):
            penalty = functools.partial(_penalties, attributes, trained)
        check_known(optimizer, trained, attributes.owner.strategy)
        # This also covers an optimizer that the trainer does not hold as an attribute.
        step.configure(optimizer)
        targets.append(Target(trained, optimizer, penalty, when.get(name), name))

    def losses(rows: Batch, outputs: Any) -> Any:
        found = convert(loss_fn)(*([rows, outputs] if forward else [rows]))
        names = {*found} if isinstance(found, Mapping) else {""}
        if "" not in updates and names != updates.keys():
            listed = ", ".join(sorted(filter(None, names))) or "one loss"
            raise UsageError(
                f"{name_function(loss_fn)} returned {listed}, but there are updates for "
                f"{', '.join(updates)}: return a dict of these losses."
            )
        return found

    weights = step.sample_weight(batch, None if chosen else targets[0].variables)
    return step.update(
        batch,
        losses,
        forward=forward,
        sample_weight=weights,
        targets=targets,
        denominator=convert(hooks.denominator)(batch) if denominator is None else denominator,
        chosen=chosen,
    )


def members(trained: Any) -> list[Any]:
    """Returns the models and variables of any package in a structure, as those of tf_keras."""
    found: list[Any] = []
    for each in tf.nest.flatten(trained):
        found += [adapt(each)] if is_layer(each) else raw([each])
    return found


def variables_in(trained: Any) -> list[tf.Variable]:
    """Returns the variables of a structure, and those of its models that are trained."""
    every = [v.trainable_variables if is_layer(v) else [v] for v in members(trained)]
    return [variable for each in every for variable in each]


def _penalties(attributes: Attributes, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return penalties(attributes.layers(), variables)


def _check_rows(batch: Batch) -> None:
    """Raises a UsageError if a batch has another number of rows than the step, if that is static."""
    rows = row_mask.current()
    before, after = rows.count if rows else None, row_count(batch)
    if isinstance(before, int) and (not isinstance(after, int) or after != before):
        number = after if isinstance(after, int) else "an unknown number of"
        raise UsageError(
            f"{place_of(tf.no_op())} passes minimize {number} rows, but the batch has {before}: pass "
            "all of them, and leave rows out by weight 0 in sample_weight, since draws and the mask of "
            "padded rows belong to the rows of the batch."
        )
