"""--mode=train and --mode=train_and_eval."""

import functools
import os
import time

from ctl.loop import goodput
from ctl.loop.checkpoints import warm_start
from ctl.loop.lock import RunLock
from ctl.loop.stop import StopOnSignal
from ctl.modes import DONE, FAILED, STOPPED, Arguments, dry_run, messages, results
from ctl.modes.run import Run


def train(arguments: Arguments) -> int:
    """Trains to `train.steps`; returns the exit code."""
    return _start(arguments, evaluates=False)


def train_and_eval(arguments: Arguments) -> int:
    """Trains to `train.steps` and evaluates in between and at the end; returns the exit code."""
    return _start(arguments, evaluates=True)


def _start(arguments: Arguments, *, evaluates: bool) -> int:
    if arguments.dry_run:
        return dry_run.run(arguments, functools.partial(_train, evaluates=evaluates))
    return _train(arguments, evaluates=evaluates)


def _train(arguments: Arguments, *, evaluates: bool) -> int:
    evaluates = evaluates and bool(arguments.config.eval.splits)
    run = Run(arguments, evaluates=evaluates)
    config, workdir, processes, progress = run.config, run.workdir, run.processes, run.progress

    # Mistakes are reported before anything in the folder changes.
    if arguments.fresh or not run.checkpoints.files.steps():
        moved = workdir.path if arguments.fresh else None
        warm_start.check(run.trainer, config.init, moved=moved)
    actions = run.make_actions()

    with RunLock(workdir.path) as lock:
        changes: list[str] = []
        if run.is_chief:
            lock.acquire()
            aside = workdir.move_aside() if arguments.fresh else None
            if aside:
                progress.print_line(f"The old run is now {aside}.")
                lock.follow(aside)
            changes = workdir.check_config(
                config.to_dict(), allow_change=arguments.allow_config_change
            )
        processes.barrier()  # no process reads the folder before the chief has moved the old run

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

        profiler = run.make_profiler()
        with (
            StopOnSignal() as stop,
            profiler.on_signal(),
            progress,
            run.watch_for_preemption(stop),
            run.make_watchdog() as watchdog,
        ):
            rollback = run.broadcast_rollback_policy()
            controller = run.make_controller(
                stop=stop,
                watchdog=watchdog,
                profiler=profiler,
                rollback=rollback,
                actions=actions,
            )
            restored = controller.restore_checkpoint()
            warm = None
            if not restored:
                warm = warm_start.all_load(run.trainer, config.init, processes)
            # Not before the checkpoint is known to match: a rejected run leaves config.json alone.
            workdir.create(config.to_dict())

            lost = goodput.find_lost(workdir.path, controller.step) if run.is_chief else {}
            progress.print_line(messages.start(run.experiment.hardware, run.trainer))
            for line in changes:
                progress.print_line(f"Changed since the run was started: {line}")
            if restored:
                progress.print_line(f"Resumed from {restored}.")
                partial = run.checkpoints.unmatched
                if partial:
                    progress.print_line(messages.restored_in_part(partial))
                left = {"left": partial.left(), "dropped": partial.dropped()} if partial else {}
                workdir.event(
                    "resume", controller.step, path=restored, changes=changes, **left, **lost
                )
            else:
                if warm:
                    progress.print_line(messages.loaded_weights(warm))
                started = {"config": os.path.abspath(arguments.config_path), **lost}
                workdir.event(
                    "start", controller.step, **started, **(warm.record() if warm else {})
                )

            controller.reporter.metrics.begin(
                config.to_dict(), step=controller.step, is_new=not restored
            )
            run.clock.mark_started()
            eval_steps = dry_run.STEPS if arguments.dry_run else -1  # -1: all
            start = time.monotonic()
            if not evaluates:
                controller.train(config.train.steps)
            elif controller.step < config.train.steps:
                if config.eval.before_training and controller.step == 0:
                    controller.evaluate(eval_steps)
                controller.train_and_evaluate(
                    config.train.steps,
                    eval_steps=eval_steps,
                    eval_interval=config.eval.interval,
                    eval_seconds=config.eval.seconds,
                )
            else:  # killed between the last checkpoint and the last evaluation
                controller.evaluate()
                controller.end_training()

            result = results.make_result(run.experiment, controller, time.monotonic() - start)
            if not controller.outputs:  # only evaluated: keep what was recorded of the training
                result |= results.read_training(workdir)
            if run.is_chief:
                result |= results.measure_run(workdir, controller)
            workdir.write_result(result)
            event = "stop" if controller.stopped else "end"
            ended_by = controller.actions.stop_reason or {}
            reasons = stop.reasons | {k: v for k, v in ended_by.items() if k == "reason"}
            seconds = controller.reporter.seconds()
            workdir.event(event, result["step"], **reasons, seconds=seconds)
            controller.reporter.metrics.close("KILLED" if controller.stopped else "FINISHED")
        processes.barrier()  # no process exits while another one still writes

    if not arguments.dry_run:
        stopped = messages.stopped(controller.step, workdir.path)
        progress.print_line(stopped if controller.stopped else messages.done(workdir.path))
    if controller.stopped:
        return STOPPED
    return DONE if result.get("overfit", {}).get("down", True) else FAILED
