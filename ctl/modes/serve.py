"""What a worker or parameter server does in a run that a chief coordinates."""

import os

from ctl.hardware import server
from ctl.hardware.strategies import StrategyOptions
from ctl.loop import goodput
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, STOPPED, Arguments


def serve(arguments: Arguments) -> int:
    """Serves the chief until it has gone.

    Returns:
        The exit code: stopped if the run was not complete by then, so that it is started again.
    """
    options = StrategyOptions.from_config(arguments.config.runtime, os.environ)
    assert options.cluster is not None
    server.serve(options.cluster, start_timeout=options.start_timeout)
    # A dry run is not repeated, whatever its result: the chief reports it.
    return DONE if arguments.dry_run or _is_complete(arguments.workdir) else STOPPED


def _is_complete(workdir: Workdir) -> bool:
    """Whether the last process that trained in the folder has reached the end of the run.

    The end may be that of early stopping or of a time limit, so the step does not show it.
    """
    events = [line.get("event") for line in goodput.read_lines(workdir.path / "events.jsonl")]
    lives = [event for event in events if event in ("start", "resume", "end", "stop")]
    return lives[-1:] == ["end"]
