"""ctl.Run: a run that a notebook or a script trains in steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import importlib.util
import json
import math
import numbers
import operator
import os
import pathlib
import sys
import tempfile
from typing import Any, TypeVar

from ml_collections import config_dict

from ctl import optimizers
from ctl.commands import report, run_files
from ctl.configs import durations, overrides, validation
from ctl.configs import flags as command_line
from ctl.errors import Failure, UsageError, print_line
from ctl.evaluator import StandardEvaluator
from ctl.hardware import engines, selection, strategies
from ctl.loop.actions.action import as_action
from ctl.loop.actions.learning_rate import LearningRate
from ctl.loop.lock import RunLock
from ctl.loop.workdir import Workdir
from ctl.loop.writers.writer import Record
from ctl.modes import Arguments, run, user_errors
from ctl.modes.experiment import Experiment
from ctl.modes.live import LiveView
from ctl.trainer import StandardTrainer

T = TypeVar("T")


def _in_one_line(method: Callable[..., T]) -> Callable[..., T]:
    """Lets IPython show the errors of a method in one line, as the program does."""

    @functools.wraps(method)
    def call(run: "Run", *args: Any, **arguments: Any) -> T:
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is None:
            return method(run, *args, **arguments)
        show: Any = lambda shell, kind, error, *_, **__: print_line(f"ctl: {error}")  # noqa: E731
        shell.set_custom_exc((UsageError, Failure), show)
        with user_errors.report_user_errors(getattr(run, "_workdir", None)):
            return method(run, *args, **arguments)

    return call


class Run:
    """Trains and evaluates in any number of calls, with results bitwise equal to the program's.

        with ctl.Run("my_model.py", workdir="runs/mine") as run:
            run.train(steps=500)
            run.learning_rate = 1e-4
            run.train("2 epochs")
            run.evaluate()                              # {"loss": ..., "accuracy": ...}
            run.to_pandas()                             # a row per inner loop and evaluation
            run.plot()                                  # the curves of the loss and the metrics

    The constructor neither trains nor writes. As with `python -m ctl.main`, the config sets the
    intervals of evaluations and checkpoints, the actions, the data order and the handling of steps that
    are not finite. With a workdir a run is saved at the end of each call, and a new `ctl.Run` of the
    same workdir, or the program, resumes it. An interrupt (Ctrl-C, or the stop button of a notebook)
    ends a call after the current inner loop, and the run is saved. Training ends at `train.steps`, or
    when an action such as early stopping ends it. Then the best checkpoint is restored if
    `train.best.restore` is set, and the model is exported if `train.export` is set.

    Args:
        experiment: a config file, the result of `ctl.config(...)`, or a trainer.
        workdir: the folder to save and resume in; by default a temporary one.
        actions: `ctl.Action`s, or callables of the outputs, besides those of the config and the trainer.
        print_lines: whether to print the lines that the program prints.
        live: whether to show the curves and the last numbers in the cell of a notebook while it trains.

    Attributes:
        trainer: the `StandardTrainer` of the run.
        evaluator: its `StandardEvaluator`.
        config: the config of the run.

    Raises:
        UsageError: the config is wrong, or the workdir holds another run.
    """

    @_in_one_line
    def __init__(
        self,
        experiment: str | os.PathLike[str] | config_dict.ConfigDict | StandardTrainer,
        workdir: str | os.PathLike[str] | None = None,
        *,
        actions: Sequence[Callable[[Any], Any]] = (),
        print_lines: bool = True,
        live: bool = False,
    ):
        # Checked before a strategy is built, which would wait for the other processes.
        processes = engines.from_environment(os.environ)
        if processes and processes.size > 1:
            raise UsageError(
                f"ctl.Run trains in one process, but this is one of {processes.size} (`ctl devices` "
                "says why): train with python -m ctl.main."
            )
        # Removed with this object, so that everything in a run can rely on a folder.
        self._temporary = None if workdir else tempfile.TemporaryDirectory(prefix="ctl-run-")
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
        self._run = run.ExperimentRun(
            Arguments(config, path.partition(":")[0], self._workdir, actions=actions),
            evaluates=bool(config.eval.splits),
            built=built,
            prints=print_lines,
        )
        self.trainer, self.config = self._run.trainer, self._run.config
        self.evaluator = self._run.experiment.evaluator
        changes = self._workdir.check_config(self._run.record)
        self._rows: dict[int, dict[str, float]] = {}  # of the history, by step
        self._view = LiveView(lambda: self.history) if live else None
        self._is_recorded = False
        self._begin(changes)
        self._controller = self._run.controller
        rate = self._controller.actions["LearningRate"]
        assert isinstance(rate, LearningRate)
        self._rate = rate

    def __repr__(self) -> str:
        loss = self._controller.outputs.get("loss")
        shown = f", loss {loss:.4g}" if isinstance(loss, float) else ""
        shown = f"step {self.step} of {self.config.train.steps}{shown}"
        return f"<ctl.Run: {shown}, in {self._workdir.path}>"

    @property
    def step(self) -> int:
        """The number of consumed global batches; at the best checkpoint, if it is restored."""
        return self._controller.step

    @property
    def history(self) -> dict[str, list[float]]:
        """The numbers of this object's calls, as lists of equal length.

        The columns are `step`, the mean loss and metrics of inner loops by name, and the results of
        evaluations as "eval/NAME"; NaN where a step has no value.
        """
        rows = [{"step": step, **self._rows[step]} for step in sorted(self._rows)]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name, math.nan) for row in rows] for name in names}

    @_in_one_line
    def to_pandas(self) -> Any:
        """Returns `history` as a `pandas.DataFrame` whose index is the step."""
        if importlib.util.find_spec("pandas") is None:
            raise UsageError(
                "A data frame requires the package pandas: run pip install pandas, or use run.history."
            )
        import pandas

        return pandas.DataFrame(self.history).set_index("step")

    @_in_one_line
    def plot(self) -> Any:
        """Returns a figure of plotly with the loss and the metrics, from the first step of the run.

        It is drawn from metrics.jsonl, and so contains what other processes have trained in the workdir.
        It requires `pip install 'ctl-tensorflow[report]'`.
        """
        if not (self._workdir.path / "config.json").exists():
            raise UsageError(
                "There is nothing to plot: train first; without a workdir, plot before it is closed."
            )
        return report.plot(*run_files.read_runs([str(self._workdir.path)]))

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update; set it to change a constant one.

        The change is in `events.jsonl` and in every checkpoint from the current step on, so that a
        resumed run continues with it.
        """
        return self._rate.value

    @learning_rate.setter
    @_in_one_line
    def learning_rate(self, value: float) -> None:
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)  # also of numpy
        if not number or not 0 < value < math.inf:
            raise UsageError(f"learning_rate is {value!r}, but must be a finite number above 0.")
        with self._lock():
            self._leave_best()
            old = self._rate.value
            self._rate.set(float(value))
            self._controller.reporter.record("learning_rate", self.step, old=old, new=float(value))
            if self._saved_step == self.step:
                # A kill in the next call resumes from this checkpoint, and must not undo the change.
                notes = self._controller.get_notes()
                self._run.checkpoints.files.commit(self.step, notes)

    @_in_one_line
    def train(self, steps: int | str | None = None) -> dict[str, Any]:
        """Trains; with an evaluation interval, also evaluates at its multiples and at the end.

        Args:
            steps: the number of steps to train now, or "2 epochs"; by default up to `train.steps`.

        Returns:
            The mean loss and metrics of the last inner loop; {} if there was no step.
        """
        # Training continues from the last step, not from a best checkpoint that is restored.
        has_best = self._controller.has_other_weights
        first = int(self._controller.trained_step or 0) if has_best else self.step
        end = self.config.train.steps if steps is None else first + self._count_steps(steps)
        with self._call():
            # A process that was killed or interrupted at the last step has left the end to this call.
            is_unended = self._run.must_end(first) and not self._run.has_ended
            if is_unended or (first < end and not self._controller.actions.stop_reason):
                self._leave_best()
                if end > (last := self.config.train.steps):
                    self._run.progress.print_line(
                        f"Trains to step {end}, beyond train.steps={last}."
                    )
                self._controller.begin_training()
                evaluates = bool(self.evaluator and self.config.eval.interval)
                self._run.train(end, evaluates=evaluates)
        return dict(self._controller.outputs)

    @_in_one_line
    def evaluate(self) -> dict[str, Any]:
        """Evaluates the current weights; returns the loss and the metrics."""
        if self.evaluator is None:
            raise UsageError("The run has no evaluation data: name its splits in eval.splits.")
        with self._call():
            return dict(self._controller.evaluate() or {})

    @property
    def stop_reason(self) -> str:
        """The reason why an action ended training, such as early stopping; "" if none did."""
        return (self._controller.actions.stop_reason or {}).get("reason", "")

    def close(self) -> None:
        """Waits for the last checkpoint, and removes the temporary workdir."""
        self._run.checkpoints.wait()
        self._run.checkpoints.close()
        if self._is_recorded:
            self._controller.reporter.metrics.close("FINISHED")
        if self._temporary:
            self._temporary.cleanup()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, changes: Sequence[str]) -> None:
        """Restores the newest checkpoint of the workdir, or the weights that `init` names."""
        run, actions = self._run, self._run.make_actions()
        actions += [
            as_action(lambda o: self._record({**o, "learning_rate": self._rate.value}), at="train"),
            as_action(lambda outputs: self._record({"eval": outputs}), at="eval"),
        ]
        run.check_weights()
        run.all_begin(actions, changes)
        run.print_start()
        self._saved_step = run.checkpoints.latest_step()
        # A run that has ended is as its last process left it.
        if run.is_complete(run.controller.step, changes, evaluates=False):
            run.resume_end()

    def _leave_best(self) -> None:
        """Continues from the last step, if training had ended and restored the best checkpoint."""
        if self._controller.has_other_weights:
            self._controller.restore_checkpoint()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Locks the workdir; raises UsageError if another run uses it, or has trained in it."""
        if self._temporary and not self._workdir.path.exists():
            raise UsageError(
                "The run was closed, which has removed its temporary folder: make a new ctl.Run, with a "
                "workdir to continue in."
            )
        with RunLock(self._workdir.path) as lock:
            lock.acquire()
            if self._run.checkpoints.latest_step() != self._saved_step:
                raise UsageError(
                    f"Another run has trained in {self._workdir.path} since: make a new ctl.Run to "
                    "continue it."
                )
            yield

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Locks the workdir, takes interrupts as a request to stop, and records the result."""
        with self._lock():
            if not self._is_recorded:
                self._run.record_start()
                self._is_recorded = True
            self._controller.withdraw_stop()
            if self._view:
                self._view.begin()
            with self._run.stop, self._run.watching():
                try:
                    yield
                finally:
                    if self._view:
                        self._view.end()
                    self._run.checkpoints.wait()
                    self._saved_step = self._run.checkpoints.latest_step()
                self._run.record_end()

    def _record(self, outputs: Mapping[str, Any]) -> None:
        """Adds numbers to the row of the current step; a repeated step replaces them."""
        self._rows.setdefault(self.step, {}).update(Record("", self.step, outputs).numbers())
        if self._view:
            self._view.update()

    def _count_steps(self, steps: int | str) -> int:
        if isinstance(steps, str):
            examples = self._run.experiment.examples_per_epoch
            return durations.to_steps("steps", steps, self.trainer.global_batch_size, examples)
        if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < 0:
            raise UsageError(f'steps is {steps!r}, but must be a number of steps or "2 epochs".')
        return int(steps)


def _read_arguments(optimizer: Any) -> dict[str, Any]:
    """Returns the arguments of an optimizer in JSON types; {} if its schedule has no get_config."""

    def describe(value: Any) -> Any:
        return value.item() if hasattr(value, "item") else type(value).__name__

    try:
        return json.loads(json.dumps(optimizer.get_config(), default=describe))
    except NotImplementedError:
        return {}


def _wrap(trainer: StandardTrainer) -> Experiment:
    """Makes the experiment of a trainer that a script has made; its config records what is known.

    Raises:
        UsageError: the trainer runs in several processes.
    """
    cls, optimizer = type(trainer), trainer.optimizer
    if strategies.spec_of(trainer.strategy).multi_process:
        raise UsageError(
            f"ctl.Run trains in one process, but the trainer has a {type(trainer.strategy).__name__}: "
            "train with ctl launch."
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    config = overrides.config(
        trainer=f"{cls.__module__}:{cls.__qualname__}",
        data=dict(global_batch_size=trainer.global_batch_size),
        model=_to_dict(trainer.options.model),
        loss_weights=dict(trainer.options.loss_weights),
    )
    with config.unlocked(), config.ignore_type():
        config.data.update(_to_dict(trainer.options.data))
        for key, value in trainer.options.by_key().items():
            path, _, name = key.rpartition(".")
            section = operator.attrgetter(path)(config) if path else config
            section[name] = value
        config.optimizer.name = f"{type(inner).__module__}:{type(inner).__name__}"
        if not callable(inner._learning_rate):
            config.optimizer.learning_rate = float(inner.learning_rate.numpy())
        # All that its constructor got, such as a schedule or a momentum.
        config.optimizer.arguments = _read_arguments(inner)
    name = strategies.strategy_name(trainer.strategy)
    hardware = selection.Hardware(trainer.strategy, name, "the trainer's own")
    make: Callable[[int | None], Any] = lambda examples: config  # noqa: E731 - never called
    return Experiment(
        config, hardware, trainer, StandardEvaluator(trainer), optimizers.FromConfig(make)
    )


def _to_dict(section: Any) -> dict[str, Any]:
    return {k: _to_dict(v) if hasattr(v, "items") else v for k, v in section.items()}
