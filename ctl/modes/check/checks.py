"""Lists the checks, and runs them."""

from collections.abc import Callable
from typing import Any

from ctl.configs.error_location import error_location
from ctl.errors import Failure, UsageError, print_line
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
}
# These compute in a process of their own, which starts before the other checks and runs at the same
# time: each function starts one check, and returns the function that waits for its outcome.
BACKGROUND: dict[str, Callable[[TrainerFactory], Callable[[], Outcome]]] = {
    "replica equivalence": replica_check.start,
}


def run_checks(factory: TrainerFactory) -> int:
    """Runs every check of an experiment, and prints its outcome as soon as it is known.

    Returns:
        The exit code: 1 if a check failed, else 0.
    """
    waits = {name: _attempt(start, factory) for name, start in BACKGROUND.items()}
    outcomes = []
    for name in (*CHECKS, *BACKGROUND):
        outcome = _attempt(CHECKS[name], factory) if name in CHECKS else waits[name]
        outcome = outcome if isinstance(outcome, Outcome) else _attempt(outcome)
        outcomes.append(outcome)
        print_line(format_row(name, outcome))
    print_line(format_summary(outcomes))
    return 1 if any(outcome.verdict == FAIL for outcome in outcomes) else 0


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function; an exception, such as of the user's code, becomes the outcome of a check."""
    try:
        return function(*arguments)
    except Exception as error:
        is_one_line = isinstance(error, UsageError | Failure)
        return Outcome(FAIL, str(error) if is_one_line else error_location(error))
