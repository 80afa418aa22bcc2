"""What a worker or parameter server does in a run that a chief coordinates."""

import os

from ctl.hardware import server
from ctl.hardware.strategies import StrategyOptions
from ctl.modes import DONE, STOPPED, Arguments


def serve(arguments: Arguments) -> int:
    """Serves the chief until it has gone.

    Returns:
        The exit code: stopped if the run was not complete by then, so that it is started again.
    """
    options = StrategyOptions.from_config(arguments.config.runtime, os.environ)
    assert options.cluster is not None
    server.serve(options.cluster, start_timeout=options.start_timeout)
    workdir = arguments.workdir
    step = workdir.result().get("step")
    # The chief's config.json, in which a length in epochs is a number of steps.
    is_complete = isinstance(step, int) and step >= workdir.config()["train.steps"]
    return DONE if is_complete else STOPPED
