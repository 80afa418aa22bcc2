"""All looks, one after the other, and the table that a person reads."""

from collections.abc import Callable

from ctl.errors import Failure, UsageError
from ctl.preflight import data_looks, learning_looks, replica_look, state_look
from ctl.preflight.blueprint import Blueprint
from ctl.preflight.outcome import FAIL, Outcome, row, summary

LOOKS: dict[str, Callable[[Blueprint], Outcome]] = {
    "inputs": data_looks.inputs,
    "data order": data_looks.order,
    "evaluation counts": data_looks.evaluation,
    "first loss": learning_looks.first_loss,
    "gradients": learning_looks.gradients,
    "one batch overfitted": learning_looks.one_batch,
    "save and restore": state_look.round_trip,
    "replica equivalence": replica_look.equivalence,
}


def look(blueprint: Blueprint, say: Callable[[str], None]) -> int:
    """Takes every look, and tells of each as it is done.

    Args:
        blueprint: of the experiment.
        say: prints a line.

    Returns:
        The exit code: 1 where one failed.
    """
    outcomes = []
    for name, taken in LOOKS.items():
        try:
            outcome = taken(blueprint)
        except (UsageError, Failure) as error:
            outcome = Outcome(FAIL, str(error))
        outcomes.append(outcome)
        say(row(name, outcome))
    say(summary(outcomes))
    return 1 if any(outcome.verdict == FAIL for outcome in outcomes) else 0
