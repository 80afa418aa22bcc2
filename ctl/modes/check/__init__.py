"""--mode=check: checks an experiment before a long run, and writes nothing."""

import time

from ctl.errors import UsageError, print_line
from ctl.modes import Arguments, experiment


def check(arguments: Arguments) -> int:
    """Runs all checks on an experiment.

    Returns:
        The exit code: 1 if a check failed.
    """
    # Imported here since the checks import ctl.testing, and they need this package.
    from ctl.modes.check import checks, estimate, trainer_factory

    startup = time.process_time()
    built = experiment.build(arguments.config, arguments.config_path)
    if built.hardware.cluster:
        raise UsageError("--mode=check runs in one process: unset TF_CONFIG.")
    factory = trainer_factory.TrainerFactory(built, arguments.config_path)
    print_line(estimate.announce(factory, startup=startup))
    return checks.run_checks(factory, print_line)
