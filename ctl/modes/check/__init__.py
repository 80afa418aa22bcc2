"""--mode=check: checks an experiment before a long run, and writes nothing."""

import dataclasses

from ctl.configs import group_values
from ctl.errors import UsageError, print_line
from ctl.modes import Arguments, experiment


def check(arguments: Arguments) -> int:
    """Runs the checks of the command line on an experiment.

    Returns:
        The exit code: 1 if a check failed.
    """
    # Imported here since the checks import ctl.testing, and they need this package.
    from ctl.modes.check import checks, trainer_factory

    names = checks.choose_checks(arguments.checks, quick=arguments.quick)
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
            config.optimizer.groups = group_values.unfreeze(groups)
        built = dataclasses.replace(built, config=config)
    factory = trainer_factory.TrainerFactory(built, arguments.config_path)
    print_line(f"Checking {built.config.trainer}.")
    return checks.run_checks(factory, names, quick=arguments.quick)
