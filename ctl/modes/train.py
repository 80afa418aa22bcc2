"""--mode=train and --mode=train_and_eval."""

import contextlib
import functools

from ctl.loop.checkpoints import warm_start
from ctl.loop.lock import RunLock
from ctl.loop.stop import StopOnSignal
from ctl.modes import DONE, STOPPED, Arguments, messages, results
from ctl.modes.run import DRY_STEPS, RunParts, dry_run
from ctl.modes.session import Session
from ctl.replica.step.engine import engine_of


def train(arguments: Arguments) -> int:
    """Trains to `train.steps`; returns the exit code."""
    return _start(arguments, evaluates=False)


def train_and_eval(arguments: Arguments) -> int:
    """Trains to `train.steps` and evaluates in between and at the end; returns the exit code."""
    return _start(arguments, evaluates=True)


def _start(arguments: Arguments, *, evaluates: bool) -> int:
    if arguments.dry_run:
        return dry_run(arguments, functools.partial(_train, evaluates=evaluates))
    return _train(arguments, evaluates=evaluates)


def _train(arguments: Arguments, *, evaluates: bool) -> int:
    evaluates = evaluates and bool(arguments.config.eval.splits)
    run = RunParts(arguments, evaluates=evaluates)
    config, workdir, processes, progress = run.config, run.workdir, run.processes, run.progress

    actions = run.make_actions()
    stop = StopOnSignal()

    with RunLock(workdir.path) as lock, contextlib.ExitStack() as stack:
        stack.callback(run.checkpoints.close)
        changes: list[str] = []
        if run.is_chief:
            lock.acquire()
        stack.enter_context(run.all_open_bucket(stop))
        # Mistakes are reported before anything in the folder changes.
        if arguments.fresh or not run.checkpoints.files.steps():
            moved = workdir.path if arguments.fresh else None
            warm_start.check(run.trainer, config.init, moved=moved)
        if run.is_chief:
            aside = workdir.move_aside() if arguments.fresh else None
            if aside:
                progress.print_line(f"The old run is now {aside}.")
                lock.follow(aside)
            changes = workdir.check_config(run.record, allow_change=arguments.allow_config_change)
        # No process reads the folder before the chief has moved the old run.
        if not workdir.bucket:
            lock.all_check_shared(processes)

        latest = processes.broadcast_from_chief(run.checkpoints.latest_step() or 0)
        # The chief's result and its changes of the config decide for all processes.
        if processes.any_process(
            run.is_chief
            and results.is_complete(
                workdir, latest, steps=config.train.steps, evaluates=evaluates, changes=changes
            )
        ):
            progress.print_line(messages.complete(latest, workdir.result(), config))
            return DONE

        with stop, progress:
            session = Session(
                run, stop, actions=actions, config_path=arguments.config_path, changes=changes
            )
            with session.watching():
                session.all_restore()
                progress.print_line(messages.start(run.experiment.hardware, run.trainer))
                for line in engine_of(run.trainer).step.describe().values():
                    progress.print_line(line)
                session.print_start()
                session.record_start()
                session.train(
                    config.train.steps,
                    evaluates=evaluates,
                    eval_steps=DRY_STEPS if arguments.dry_run else -1,  # -1: all
                )
                session.record_end()
            controller = session.controller
            controller.reporter.metrics.close("KILLED" if controller.stopped else "FINISHED")
        processes.barrier()  # no process exits while another one still writes

    if not arguments.dry_run:
        stopped = messages.stopped(controller.step, workdir.name)
        done = messages.done(workdir.name, config.summaries.writers)
        progress.print_line(stopped if controller.stopped else done)
    return STOPPED if controller.stopped else DONE
