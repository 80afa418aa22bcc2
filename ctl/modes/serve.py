"""Runs a worker or parameter server of a run that a chief coordinates."""

import os

from ctl.hardware import server
from ctl.hardware.strategies import StrategyOptions
from ctl.modes import DONE, STOPPED, Arguments, results


def serve(arguments: Arguments) -> int:
    """Serves the chief until the chief has ended.

    Returns:
        The exit code: stopped if the run was not complete by then, so that it is started again.
    """
    options = StrategyOptions.from_config(arguments.config.runtime, os.environ)
    assert options.cluster is not None
    server.serve(options.cluster, start_timeout=options.start_timeout)
    # A dry run is not repeated, whatever its result: the chief reports it.
    return DONE if arguments.dry_run or results.has_ended(arguments.workdir) else STOPPED
