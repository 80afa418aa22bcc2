"""--mode=check: checks an experiment before a long run, and writes nothing."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
import contextlib
import dataclasses
import functools
from typing import Any

from ctl.configs import group_values
from ctl.configs.error_location import error_location
from ctl.errors import Failure, UsageError, print_line
from ctl.modes import Arguments, experiment, messages
from ctl.modes.check import checkpoint_check, data_checks, learning_checks, replica_check
from ctl.modes.check.outcome import FAIL, Outcome, format_row, format_summary
from ctl.modes.check.trainer_factory import TrainerFactory


def check(arguments: Arguments) -> int:
    """Runs the checks of the command line on an experiment.

    Returns:
        The exit code: 1 if a check failed.
    """
    quick = arguments.flags["quick"]
    names = choose_checks(arguments.flags["checks"] or "", quick=quick)
    started = replica_check.start_processes() if REPLICAS in names else contextlib.nullcontext()
    # They end here: at the exit of Python, its thread of a pool may have closed what wakes it.
    with started as processes:
        return _check(arguments, names, processes, quick=quick)


def _check(arguments: Arguments, names: Sequence[str], processes: Any, *, quick: bool) -> int:
    built = experiment.build(arguments.config, arguments.config_path)
    if built.hardware.cluster:
        raise UsageError("--mode=check runs in one process: unset TF_CONFIG.")
    groups = built.config.optimizer.groups
    steps = [group["frozen_until"] for group in groups if group.get("frozen_until")]
    if steps:
        print_line(
            f"optimizer.groups unfreezes layers up to step {max(steps)}: checks the steps from then on, "
            "which train all of these layers."
        )
        config = type(built.config)(built.config.to_dict())
        with config.ignore_type():
            config.optimizer.groups = group_values.without(groups, "frozen_until")
        built = dataclasses.replace(built, config=config)
    factory = TrainerFactory(built, arguments.config_path)
    print_line(f"Checking {built.config.trainer} ({messages.entries(built.trainer)}).")
    for line in messages.images(built.trainer):
        print_line(line)
    return run_checks(factory, names, processes, quick=quick)


CHECKS: dict[str, Callable[[TrainerFactory], Outcome]] = {
    "inputs": data_checks.check_inputs,
    "data order": data_checks.check_order,
    "evaluation counts": data_checks.check_evaluation,
    "first loss": learning_checks.check_first_loss,
    "gradients": learning_checks.check_gradients,
    "one batch overfitted": learning_checks.check_overfitting,
    "save and restore": checkpoint_check.check_round_trip,
}
_ALIASES = {"overfit": "one batch overfitted"}
_LONGEST = ("one batch overfitted", "save and restore")  # the ones that --quick leaves out
# This check computes in a process of its own, which starts before the others and runs at the same time.
REPLICAS = "replica equivalence"


def choose_checks(text: str, *, quick: bool) -> list[str]:
    """Returns the names of the checks to run, in their order.

    Args:
        text: names separated by commas, with spaces or underscores; "" for all checks.
        quick: leave out the checks that take the longest, unless they are named.
    """
    known = [*CHECKS, REPLICAS]
    if not text:
        return [name for name in known if not (quick and name in _LONGEST)]
    chosen = [name.strip().replace("_", " ") for name in text.split(",")]
    chosen = [_ALIASES.get(name, name) for name in chosen]
    return [name for name in known if name in chosen]


def run_checks(
    factory: TrainerFactory, names: Sequence[str], processes: Executor | None, *, quick: bool = False
) -> int:  # fmt: skip
    """Runs checks of an experiment, and prints each outcome as soon as it is known.

    Args:
        factory: makes the trainers.
        names: the checks.
        processes: the result of `replica_check.start_processes`; None without this check.
        quick: compare one and two replicas only.

    Returns:
        The exit code: 1 if a check failed, else 0.
    """
    wait: Any = None
    if REPLICAS in names:
        wait = _attempt(functools.partial(replica_check.start, quick=quick), factory, processes)
    outcomes: dict[str, Outcome] = {}
    for name in names:
        outcome = _attempt(CHECKS[name], factory) if name in CHECKS else wait
        outcome = outcome if isinstance(outcome, Outcome) else _attempt(outcome)
        print_line(format_row(name, _without_repetition(outcome, outcomes)))
        outcomes[name] = outcome
    print_line(format_summary(list(outcomes.values())))
    return 1 if any(outcome.verdict == FAIL for outcome in outcomes.values()) else 0


def _without_repetition(outcome: Outcome, earlier: Mapping[str, Outcome]) -> Outcome:
    """Refers to the first check that failed for the same cause, such as an exception."""
    for name, other in earlier.items():
        if outcome.verdict == other.verdict == FAIL and outcome.observation.endswith(
            other.observation
        ):
            return Outcome(FAIL, f"for the same cause as {name}")
    return outcome


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function; an exception, such as of the user's code, becomes the outcome of a check."""
    try:
        return function(*arguments)
    except Exception as error:
        is_one_line = isinstance(error, UsageError | Failure)
        return Outcome(FAIL, str(error) if is_one_line else error_location(error))
