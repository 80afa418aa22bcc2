"""The table of checks, and the loop that runs them."""

from collections.abc import Callable

from ctl.errors import Failure, UsageError
from ctl.modes.check import checkpoint_check, data_checks, learning_checks, replica_check
from ctl.modes.check.outcome import FAIL, Outcome, format_row, format_summary
from ctl.modes.check.trainer_factory import TrainerFactory

CHECKS: dict[str, Callable[[TrainerFactory], Outcome]] = {
    "inputs": data_checks.check_inputs,
    "data order": data_checks.check_order,
    "evaluation counts": data_checks.check_evaluation,
    "first loss": learning_checks.check_first_loss,
    "gradients": learning_checks.check_gradients,
    "one batch overfitted": learning_checks.check_overfitting,
    "save and restore": checkpoint_check.check_round_trip,
    "replica equivalence": replica_check.check_equivalence,
}


def run_checks(factory: TrainerFactory, print_line: Callable[[str], None]) -> int:
    """Runs every check and prints its outcome as soon as it is known.

    Args:
        factory: makes trainers of the experiment.
        print_line: prints one line.

    Returns:
        The exit code: 1 if a check failed, else 0.
    """
    outcomes = []
    for name, check in CHECKS.items():
        try:
            outcome = check(factory)
        except (UsageError, Failure) as error:
            outcome = Outcome(FAIL, str(error))
        outcomes.append(outcome)
        print_line(format_row(name, outcome))
    print_line(format_summary(outcomes))
    return 1 if any(outcome.verdict == FAIL for outcome in outcomes) else 0
