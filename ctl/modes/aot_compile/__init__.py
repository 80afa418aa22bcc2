"""--mode=aot_compile: compiles the step for TPU slices that this machine need not have."""

import os

from ctl.errors import UsageError, print_line
from ctl.hardware.strategies import StrategyOptions
from ctl.modes import DONE, FAILED, Arguments
from ctl.modes.aot_compile import slices


def aot_compile(arguments: Arguments) -> int:
    """Compiles the step for each slice of `--topology`, and writes a report into the workdir.

    Returns:
        The exit code: 1 if the step would not run on one of the slices, or computes something else.
    """
    if StrategyOptions.from_config(arguments.config.runtime, os.environ).cluster:
        raise UsageError("--mode=aot_compile runs in one process: unset TF_CONFIG.")
    requested = slices.parse_topology(arguments.flags["topology"] or slices.DEFAULT)
    # Imported after the checks: they import private parts of TensorFlow.
    from ctl.modes.aot_compile import survey

    results = survey.compile_for_slices(arguments.config, arguments.config_path, requested)
    print_line(survey.format_table(results))
    path = survey.write_json(results, arguments.workdir.path)
    print_line(f"{survey.DISCLAIMER} All figures: {path}")
    right = all(result.compiled for result in results)
    if right and arguments.flags["execute"]:
        from ctl.modes.aot_compile import execution

        for cores in sorted({result.slice.cores for result in results}):
            comparison = execution.compare(arguments.config, arguments.config_path, cores)
            print_line(str(comparison))
            right = right and comparison.is_right
    return DONE if right else FAILED
