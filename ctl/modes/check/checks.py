"""All looks, one after the other, and the table that a person reads."""

from collections.abc import Callable

from ctl.errors import Failure, UsageError
from ctl.modes.check import checkpoint_check, data_checks, learning_checks, replica_check
from ctl.modes.check.outcome import FAIL, Outcome, row, summary
from ctl.modes.check.trainer_factory import TrainerFactory

LOOKS: dict[str, Callable[[TrainerFactory], Outcome]] = {
    "inputs": data_checks.inputs,
    "data order": data_checks.order,
    "evaluation counts": data_checks.evaluation,
    "first loss": learning_checks.first_loss,
    "gradients": learning_checks.gradients,
    "one batch overfitted": learning_checks.one_batch,
    "save and restore": checkpoint_check.round_trip,
    "replica equivalence": replica_check.equivalence,
}


def look(blueprint: TrainerFactory, print_line: Callable[[str], None]) -> int:
    """Takes every look, and tells of each as it is done.

    Args:
        blueprint: of the experiment.
        print_line: prints a line.

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
        print_line(row(name, outcome))
    print_line(summary(outcomes))
    return 1 if any(outcome.verdict == FAIL for outcome in outcomes) else 0
