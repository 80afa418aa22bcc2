"""Lists the checks, and runs them."""

from collections.abc import Callable

from ctl.configs.error_location import error_location
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
}
# These compute in a process of their own, which starts before the other checks and runs at the same
# time: each function starts one check, and returns the function that waits for its outcome.
BACKGROUND: dict[str, Callable[[TrainerFactory], Callable[[], Outcome]]] = {
    "replica equivalence": replica_check.start,
}


def run_checks(factory: TrainerFactory, print_line: Callable[[str], None]) -> int:
    """Runs every check and prints its outcome as soon as it is known.

    Args:
        factory: makes trainers of the experiment.
        print_line: prints one line.

    Returns:
        The exit code: 1 if a check failed, else 0.
    """
    waits = {name: _start(start, factory) for name, start in BACKGROUND.items()}
    outcomes = []
    runs = {name: lambda check=check: check(factory) for name, check in CHECKS.items()}
    for name, run in {**runs, **waits}.items():
        outcome = _run(run)
        outcomes.append(outcome)
        print_line(format_row(name, outcome))
    print_line(format_summary(outcomes))
    return 1 if any(outcome.verdict == FAIL for outcome in outcomes) else 0


def _start(
    start: Callable[[TrainerFactory], Callable[[], Outcome]], factory: TrainerFactory
) -> Callable[[], Outcome]:
    """Starts a check; an exception becomes its outcome."""
    try:
        return start(factory)
    except Exception as error:
        outcome = _describe(error)
        return lambda: outcome


def _run(check: Callable[[], Outcome]) -> Outcome:
    """Returns the outcome of a check, which fails if the user's code raises an exception."""
    try:
        return check()
    except Exception as error:
        return _describe(error)


def _describe(error: Exception) -> Outcome:
    is_one_line = isinstance(error, UsageError | Failure)
    return Outcome(FAIL, str(error) if is_one_line else error_location(error))
