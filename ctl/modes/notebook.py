"""ctl.Run: a run that a notebook or a script trains in steps."""

from collections.abc import Callable, Iterator
import contextlib
import math
import os
import pathlib
import tempfile
import threading
import time
from typing import Any

from ml_collections import config_dict

from ctl import optimizers
from ctl.configs import durations, overrides, validation
from ctl.configs import flags as command_line
from ctl.configs.options import OPTION_KEYS
from ctl.errors import UsageError
from ctl.evaluator import StandardEvaluator
from ctl.hardware.selection import Hardware
from ctl.loop.actions.learning_rate import LearningRate
from ctl.loop.checkpoints import warm_start
from ctl.loop.lock import RunLock
from ctl.loop.stop import StopOnSignal
from ctl.loop.workdir import Workdir
from ctl.modes import Arguments, results
from ctl.modes.experiment import Experiment
from ctl.modes.history import History
from ctl.modes.run import Run as ProgramRun
from ctl.trainer import StandardTrainer


class Run:
    """Trains and evaluates in as many calls as you like, with the bits of the program.

        with ctl.Run("my_model.py", workdir="runs/mine") as run:
            run.train(steps=500)
            run.learning_rate = 1e-4
            run.train("2 epochs")
            run.evaluate()                              # {"loss": ..., "accuracy": ...}
            pandas.DataFrame(run.history)

    Intervals of evaluations and checkpoints, actions, the data order and the handling of steps that
    are not finite are those of the config, as with `python -m ctl.main`. With a workdir a run is saved
    at the end of each call, and a new `ctl.Run` of the same workdir, or the program, resumes it.
    An interrupt (Ctrl-C, or the stop button of a notebook) ends a call after the inner loop, saved.

    Attributes:
        trainer, evaluator, config: those of the run.
    """

    def __init__(
        self,
        experiment: str | os.PathLike[str] | config_dict.ConfigDict | StandardTrainer,
        workdir: str | os.PathLike[str] | None = None,
        *,
        print_lines: bool = True,
    ):
        """Builds the experiment; trains and writes nothing.

        Args:
            experiment: a config file, the result of `ctl.config(...)`, or a trainer.
            workdir: the folder to save and resume in; by default a temporary one.
            print_lines: print the lines that the program prints.

        Raises:
            UsageError: the config is wrong, or the workdir holds another run.
        """
        # Removed when the object is: everything in a run may then rely on its folder.
        self._temporary = (
            tempfile.TemporaryDirectory(prefix="ctl-run-") if workdir is None else None
        )
        self._workdir = Workdir(pathlib.Path(workdir or self._temporary.name))  # type: ignore[union-attr]
        built: Experiment | None = None
        config: Any = experiment
        path = ""
        if isinstance(experiment, StandardTrainer):
            built = _wrap(experiment)
            config = built.config
        elif isinstance(experiment, config_dict.ConfigDict):
            validation.check_config(experiment)
        else:
            path = str(experiment)
            config = command_line.load_config(path, [])
        self._config_path = os.path.abspath(path.partition(":")[0]) if path else ""
        self._run = ProgramRun(
            Arguments(config, path.partition(":")[0], self._workdir),
            evaluates=bool(config.eval.splits),
            built=built,
        )
        self.trainer, self.config = self._run.trainer, self._run.config
        self.evaluator = self._run.experiment.evaluator
        if self.config.train.early_stopping.restore_best:
            raise UsageError(
                "train.early_stopping.restore_best ends a run, but ctl.Run may train again after each "
                "call: set it to false."
            )
        if self._run.experiment.hardware.cluster:
            raise UsageError("ctl.Run trains in one process: unset TF_CONFIG.")
        if not print_lines:
            self._run.progress.print_line = lambda line: None  # type: ignore[method-assign]
            self._run.progress._write = lambda line: None
        self._workdir.check_config(self.config.to_dict())
        self._history = History()
        self._stop = StopOnSignal()
        actions = self._run.make_actions()
        self._rate = next(action for action in actions if isinstance(action, LearningRate))
        actions += self._history.make_actions(lambda: self._rate.value)
        self._controller = self._run.make_controller(
            stop=self._stop, rollback=self._run.broadcast_rollback_policy(), actions=actions
        )
        self._saved_step: int | None = None
        self._begin()

    @property
    def step(self) -> int:
        """The number of consumed global batches."""
        return self._controller.step

    @property
    def history(self) -> dict[str, list[float]]:
        """The numbers of this object's calls, as lists of equal length, for `pandas.DataFrame`.

        `step`, then the mean loss and metrics of each inner loop by their names, and those of
        evaluations as "eval/NAME"; NaN where a step has none.
        """
        return self._history.columns()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update; set it to change a constant one.

        The change is in `events.jsonl` and in every checkpoint from the current step on, so that a
        resumed run continues with it.
        """
        return self._rate.value

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise UsageError(f"learning_rate is {value!r}, but must be a finite number above 0.")
        old = self._rate.value
        self._rate.set(float(value))
        self._controller.reporter.record("learning_rate", self.step, old=old, new=float(value))
        checkpoints = self._controller.checkpoints
        if checkpoints and self._saved_step == self.step:
            # A kill in the next call resumes from this checkpoint, and must not undo the change.
            checkpoints.wait()
            checkpoints.files.commit(self.step, self._controller.actions.get_notes())

    def train(self, steps: int | str | None = None) -> dict[str, Any]:
        """Trains, and evaluates at multiples of `eval.interval`, and then also at the end.

        Args:
            steps: the number of steps to train now, or "2 epochs"; by default up to `train.steps`.

        Returns:
            The mean loss and metrics of the last inner loop; {} if there was no step.
        """
        end = self.config.train.steps if steps is None else self.step + self._count_steps(steps)
        interval, seconds = self.config.eval.interval, self.config.eval.seconds
        with self._call():
            if self.step >= end or self._controller.actions.stop_reason:
                return dict(self._controller.outputs)
            if self.evaluator and (interval or seconds):
                self._controller.train_and_evaluate(
                    end, eval_interval=interval, eval_seconds=seconds
                )
            else:
                self._controller.train(end)
        return dict(self._controller.outputs)

    def evaluate(self) -> dict[str, Any]:
        """Evaluates the current weights; returns the loss and the metrics."""
        with self._call():
            return dict(self._controller.evaluate() or {})

    @property
    def stop_reason(self) -> str:
        """Why training has ended before its time, such as early stopping; "" if it has not."""
        return (self._controller.actions.stop_reason or {}).get("reason", "")

    def close(self) -> None:
        """Waits for the last checkpoint, and removes the temporary workdir."""
        if self._controller.checkpoints:
            self._controller.checkpoints.wait()
        if self._is_recorded:
            self._controller.reporter.metrics.close("FINISHED")
        if self._temporary:
            self._temporary.cleanup()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Restores the newest checkpoint of the workdir, or the weights that `init` names."""
        self._restored = self._controller.restore_checkpoint()
        if self._restored:
            self._run.progress.print_line(f"Resumed from {self._restored}.")
        else:
            warm_start.check(self.trainer, self.config.init)
            warm_start.all_load(self.trainer, self.config.init, self._run.processes)
        self._saved_step = self._run.checkpoints.latest_step()
        self._is_recorded = False

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Locks the workdir, takes interrupts as a request to stop, and records the result."""
        controller, workdir = self._controller, self._workdir
        with RunLock(workdir.path) as lock, contextlib.ExitStack() as stack:
            lock.acquire()
            if self._run.checkpoints.latest_step() != self._saved_step:
                raise UsageError(
                    f"Another run has trained in {workdir.path} since: make a new ctl.Run to continue "
                    "it."
                )
            if not self._is_recorded:
                workdir.create(self.config.to_dict())
                if self._restored:
                    workdir.event("resume", self.step, path=self._restored)
                else:
                    workdir.event("start", self.step, config=self._config_path)
                controller.reporter.metrics.begin(
                    self.config.to_dict(), step=self.step, is_new=not self._restored
                )
                self._run.clock.mark_started()
                self._is_recorded = True
            self._stop.reasons, controller.stopped = {}, False
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(self._stop)
            start = time.monotonic()
            try:
                yield
            finally:
                self._run.checkpoints.wait()
                self._saved_step = self._run.checkpoints.latest_step()
            result = results.make_result(self._run.experiment, controller, time.monotonic() - start)
            workdir.write_result({**workdir.result(), **result, "step": self.step})
            seconds = controller.reporter.seconds()
            workdir.event("stop" if controller.stopped else "end", self.step, seconds=seconds)

    def _count_steps(self, steps: int | str) -> int:
        if isinstance(steps, str):
            examples = self._run.experiment.examples_per_epoch
            return durations.to_steps("steps", steps, self.trainer.global_batch_size, examples)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise UsageError(f'steps is {steps!r}, but must be a number of steps or "2 epochs".')
        return steps


def _wrap(trainer: StandardTrainer) -> Experiment:
    """An experiment of a trainer that a script has made; its config records what is known of it."""
    cls, optimizer = type(trainer), trainer.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    config = overrides.config(
        trainer=f"{cls.__module__}:{cls.__qualname__}",
        data=dict(global_batch_size=trainer.global_batch_size),
        model=_to_dict(trainer.options.model),
    )
    with config.ignore_type():
        for option, key in OPTION_KEYS.items():
            section: Any = config
            *path, name = key.split(".")
            for part in path:
                section = section[part]
            section[name] = getattr(trainer.options, option)
        config.optimizer.name = f"{type(inner).__module__}:{type(inner).__name__}"
        if not callable(inner._learning_rate):
            config.optimizer.learning_rate = float(inner.learning_rate.numpy())
    hardware = Hardware(trainer.strategy, type(trainer.strategy).__name__, "the trainer's own")
    make: Callable[[int | None], Any] = lambda examples: config  # noqa: E731 - never called
    return Experiment(
        config, hardware, trainer, StandardEvaluator(trainer), optimizers.FromConfig(make)
    )


def _to_dict(section: Any) -> dict[str, Any]:
    return {k: _to_dict(v) if hasattr(v, "items") else v for k, v in section.items()}
