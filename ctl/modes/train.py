"""--mode=train and --mode=train_and_eval."""

import contextlib
import functools

from ctl.built.inner_loop import step_of
from ctl.configs import loading
from ctl.loop.lock import RunLock
from ctl.modes import DONE, STOPPED, Arguments, messages
from ctl.modes.run import ExperimentRun
from ctl.modes.user_errors import TRACEBACK

_DRY_RUN = "ctl.modes.dry_run:dry_run"


def train(arguments: Arguments) -> int:
    """Trains to `train.steps`; returns the exit code."""
    return _start(arguments, evaluates=False)


def train_and_eval(arguments: Arguments) -> int:
    """Trains to `train.steps` and evaluates in between and at the end; returns the exit code."""
    return _start(arguments, evaluates=True)


def _start(arguments: Arguments, *, evaluates: bool) -> int:
    if arguments.dry_run:
        train = functools.partial(_train, evaluates=evaluates)
        return loading.load(_DRY_RUN)(arguments, train)
    return _train(arguments, evaluates=evaluates)


def _train(arguments: Arguments, *, evaluates: bool) -> int:
    evaluates = evaluates and bool(arguments.config.eval.splits)
    run = ExperimentRun(arguments, evaluates=evaluates)
    config, workdir, processes, progress = run.config, run.workdir, run.processes, run.progress
    actions = run.make_actions()

    with RunLock(workdir.path) as lock, contextlib.ExitStack() as stack:
        stack.callback(run.checkpoints.close)
        changes: list[str] = []
        if run.is_chief:
            lock.acquire()
        stack.enter_context(run.all_open_store())
        # Mistakes are reported before anything in the folder changes.
        run.check_weights(fresh=arguments.fresh)
        if run.is_chief:
            aside = workdir.move_aside() if arguments.fresh else None
            if aside:
                progress.print_line(f"The old run is now {aside}.")
                lock.follow(aside)
            changes = workdir.check_config(run.record, allow_change=arguments.allow_config_change)
        # No process reads the folder before the chief has moved the old run.
        if not workdir.store:
            lock.all_check_shared(processes)

        latest = processes.broadcast_from_chief(run.checkpoints.latest_step() or 0)
        # The chief's result and its changes of the config decide for all processes.
        if processes.any_process(
            run.is_chief and run.is_complete(latest, changes, evaluates=evaluates)
        ):
            progress.print_line(messages.complete(latest, workdir.result(), config, changes))
            return DONE

        with run.stop, progress:
            run.all_begin(actions, changes)
            with run.watching():
                progress.print_line(messages.start(run.experiment.hardware, run.trainer))
                described = step_of(run.trainer).describe().values()
                for line in (*messages.images(run.trainer), *described):
                    progress.print_line(line)
                run.print_start()
                run.record_start()
                run.train(
                    config.train.steps,
                    evaluates=evaluates,
                    # A dry run evaluates as many batches as it trains.
                    eval_steps=config.train.steps if arguments.dry_run else -1,
                )
                run.record_end()
            run.controller.reporter.metrics.close(
                "KILLED" if run.controller.stopped else "FINISHED"
            )
        processes.barrier()  # no process exits while another one still writes

    if not arguments.dry_run:
        if run.is_chief and not run.controller.stopped:
            with contextlib.suppress(OSError):  # there is none
                (workdir.path / TRACEBACK).unlink()  # of an earlier failure
        stopped = messages.stopped(run.controller.step, workdir.name)
        done = messages.done(workdir.name, config.summaries.writers)
        progress.print_line(stopped if run.controller.stopped else done)
    return STOPPED if run.controller.stopped else DONE
