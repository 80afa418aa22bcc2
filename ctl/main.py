"""The program: trains and evaluates the experiment that a config describes.

python -m ctl.main --config=experiments/mnist.py --config.train.steps=1000
python -m ctl.main report runs/mnist
"""

import atexit
from collections.abc import Sequence
import logging
import os
import pathlib
import signal
import sys
import threading
from typing import Any

if __package__ in (None, ""):  # run as a file: sys.path must hold the folder of the package ctl
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import flags
import absl.logging

from ctl import commands
from ctl.configs import flags as command_line
from ctl.configs import loading
from ctl.configs.modes import MODES, SERVE, SWEEP, Mode
from ctl.errors import Failure, LostWorker, UsageError, is_url, print_line, printable
from ctl.hardware import engines, installation, selection
from ctl.hardware.child_process import stop_with_parent
from ctl.hardware.cluster import Cluster
from ctl.hardware.strategies import StrategyOptions
from ctl.loop import store as stores
from ctl.loop.actions.action import Action
from ctl.loop.disk import find_reason, read_failure
from ctl.loop.workdir import Workdir, name_folder
from ctl.modes import Arguments, cluster_tasks, user_errors
from ctl.modes.user_errors import report_user_errors

_MAX_LINE = 4_000  # characters of an error message
_EXIT_SECONDS = 5.0  # for the exit handlers of a process that has lost another one


def run(argv: Sequence[str]) -> int:
    """Runs the program.

    Args:
        argv: the program's name and its arguments.

    Returns:
        The exit code: 0 done, 1 failed, 2 a mistake of the user, reported in one line, 75 stopped.
    """
    try:
        return _run_until_loss(argv)
    except LostWorker as error:
        return _print_error(error, code=75)


def console() -> None:
    """Runs the console script `ctl`: `python -m ctl.main` with the current folder importable."""
    # Until loop/stop.py handles them, they stop the program as Ctrl-C does, with exit code 75.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    stop_with_parent()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        code = _run_until_loss(sys.argv)
    except LostWorker as error:
        # Python's own exit would wait for half of runtime.cluster.heartbeat_timeout, while
        # TensorFlow tries to disconnect from processes that cannot be reached.
        code = _print_error(error, code=75)
        sys.stdout.flush()
        # The exit handlers delete temporary files, such as AutoGraph's.
        handlers = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
        handlers.start()
        handlers.join(_EXIT_SECONDS)
        os._exit(code)
    sys.exit(code)


def _run_until_loss(argv: Sequence[str]) -> int:
    try:
        return execute(argv)
    except UsageError as error:
        return _print_error(error, code=2)
    except Failure as error:
        return _print_error(error, code=1)
    except KeyboardInterrupt:  # during training, loop/stop.py handles the signal
        print_line("Interrupted: rerun the same command.")
        return 75
    except OSError as error:
        # A file of the run that cannot be read at present, or a limit of the system.
        reason = find_reason(error)
        if reason is None:
            raise
        return _print_error(read_failure(error.filename or "A file of the run", reason), code=1)


def execute(argv: Sequence[str], *, actions: Sequence[Action] = ()) -> int:
    """Runs the program, and raises its errors.

    Args:
        argv: the program's name and its arguments.
        actions: actions in addition to those of the config.

    Returns:
        The exit code: 0 done, 1 failed, 75 stopped.

    Raises:
        UsageError: a mistake of the user.
        Failure: the run failed.
        LostWorker: another process of the run was lost.
    """
    if len(argv) > 1 and argv[1] in commands.COMMANDS:
        return commands.run(argv[1:])
    values, changes = command_line.parse(argv, commands.COMMANDS)
    if values.help or values.version:
        name = "format_help" if values.help else "format_version"
        format_text = loading.load(f"ctl.configs.help:{name}")
        named = values.mode in MODES and {values.mode, f"--mode={values.mode}"} & {*argv}
        arguments_of_help = (commands.COMMANDS, values.mode if named else "")
        print_line(format_text(*(arguments_of_help if values.help else ())))
        return 0
    installation.check()
    installation.prepare_import()  # a config file may import TensorFlow
    if values.sweep is not None:
        return SWEEP.load()(values, changes)
    config = command_line.load_config(values.config, changes)
    mode = cluster_tasks.choose_mode(values.mode, config, os.environ, fresh=values.fresh)
    config_path = (values.config or "").partition(":")[0]
    # Mistakes are reported before TensorFlow is imported, which takes seconds.
    if mode.builds_trainer:
        loading.find_trainer_file(config.trainer, config_path)
        loading.find_action_files(config.actions, config_path)
        loading.find_writers(config.summaries.writers, config_path)
    cluster = _join_cluster(config.runtime) if mode.builds_strategy else None
    arguments = Arguments(
        config=config,
        config_path=config_path,
        workdir=_open_workdir(values, changes, config, mode, cluster),
        fresh=values.fresh,
        allow_config_change=values.allow_config_change,
        allow_partial_restore=values.allow_partial_restore,
        checkpoint=stores.fetch(values.checkpoint or ""),
        flags={flag.name: values[flag.name].value for flag in mode.own},
        actions=actions,
        dry_run=values.dry_run,
    )
    if mode is not MODES[values.mode]:
        cluster_tasks.wait_for_run(arguments.workdir, timeout=config.runtime.cluster.start_timeout)
    _check_workdir(mode.workdir, arguments)
    return _run_mode(mode, arguments, cluster)


def _join_cluster(runtime: Any) -> Cluster | None:
    """Returns the processes of the run; checks that this machine has what the strategy requires."""
    engines.exchange_addresses(os.environ, timeout=runtime.cluster.start_timeout)
    options = StrategyOptions.from_config(runtime, os.environ)
    selection.resolve_name(runtime.strategy, options)
    return options.cluster


def _open_workdir(
    values: flags.FlagValues,
    changes: command_line.Changes,
    config: Any,
    mode: Mode,
    cluster: Cluster | None,
) -> Workdir:
    writes = cluster is None or cluster.is_chief
    if is_url(values.workdir or ""):
        store = stores.open_store(
            values.workdir,
            config.train,
            reads=mode.workdir == "read",
            checkpoint=values.checkpoint or "",
            task="" if cluster is None or writes else cluster.name.replace(" ", "-"),
        )
        return Workdir(store.folder, writes=writes, store=store)
    # Whoever allows a change continues the run of the experiment.
    named = [] if values.allow_config_change else changes
    folder = name_folder(values.config or "", config, named)
    if mode.workdir and not values.workdir and folder != name_folder(values.config, config, []):
        print_line(f"The folder of the run with these changes is {folder}.")
    return Workdir(values.workdir or folder, writes=writes, may_read=mode.workdir == "read")


def _check_workdir(use: str, arguments: Arguments) -> None:
    workdir = arguments.workdir
    if use == "resumed" and workdir.store:  # the folder is up to date once the run owns the store
        return
    if use == "resumed" and arguments.fresh:
        workdir.check_movable()
        return
    if use == "read":
        workdir.check_run()
    if use:
        workdir.check_config(
            arguments.config.to_dict(),
            allow_change=arguments.allow_config_change,
            only_evaluates=use == "read",
        )


def _run_mode(mode: Mode, arguments: Arguments, cluster: Cluster | None) -> int:
    workdir = arguments.workdir
    if cluster and cluster.has_servers and not cluster.is_chief:
        mode = SERVE
    _silence_tensorflow()
    with (
        report_user_errors(workdir if mode.workdir else None),
        user_errors.report_lost_worker(cluster),
    ):
        code = mode.load()(arguments)
        if workdir.store and workdir.writes:
            workdir.store.close()
        return code


def _silence_tensorflow() -> None:
    """Suppresses the messages of TensorFlow and absl below errors, before they are imported."""
    flags.FLAGS.mark_as_parsed()  # without it, absl's logging prints to stderr
    absl.logging.set_verbosity(absl.logging.ERROR)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


def _print_error(error: Exception, *, code: int) -> int:
    """Prints an error in one line, without the middle of a very long one; returns the code."""
    line = printable(" ".join(str(error).split()))
    if len(line) > _MAX_LINE:
        line = f"{line[: _MAX_LINE // 2]} ... {line[-_MAX_LINE // 2 :]}"
    print_line(f"ctl: {line}", lambda text: print(text, file=sys.stderr, flush=True))
    return code


if __name__ == "__main__":
    console()
