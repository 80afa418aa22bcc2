"""Trains the experiment of a config with Ray Train, and runs its sweep with Ray Tune.

    result = ctl.ray.trainer("experiments/mnist_multi_worker.py", num_workers=2).fit()
    results = ctl.ray.tuner("experiments/mnist.py", {"seed": [0, 1, 2]}).fit()

Each worker runs the same program as `ctl CONFIG`, in a workdir that all nodes must share. After each
evaluation it reports the metrics and the newest checkpoint to Ray; a run without evaluations reports
after each inner loop. A worker that Ray starts again resumes from the run's last checkpoint. Install the
extra `ray` for this module.
"""

from collections.abc import Callable, Mapping, Sequence
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Any

try:
    import ray.train
    import ray.train.tensorflow
    import ray.tune
except ModuleNotFoundError as error:
    raise ImportError(
        f"ctl.ray requires Ray ({error}): pip install 'ctl-tensorflow[ray]'."
    ) from None

from ctl import main
from ctl.errors import Failure
from ctl.hardware import rendezvous
from ctl.hardware.child_process import KERAS
from ctl.loop import json_files
from ctl.loop.actions.action import Action
from ctl.loop.controller import Controller
from ctl.loop.workdir import name_experiment, name_values
from ctl.modes import DONE
from ctl.modes import sweep as sweeps

_RUN = "run"  # the parameter of a trial that holds the values of one run of `get_sweep`


def trainer(
    config: str,
    *, num_workers: int = 1, use_gpu: bool = False, workdir: str = "",
    arguments: Sequence[str] = (), **options: Any,
) -> ray.train.tensorflow.TensorflowTrainer:  # fmt: skip
    """Makes a trainer of Ray Train that trains the experiment of a config.

    `fit()` returns Ray's result: `metrics` are the last reported numbers, `checkpoint` holds a folder
    `checkpoints` with the newest checkpoint, and `return_value` is the content of `result.json`. With
    `ray.train.FailureConfig(max_failures=3)` in the `run_config`, Ray starts all workers again after one
    was lost.

    Args:
        config: the experiment, as on the command line.
        num_workers: the number of worker processes.
        use_gpu: whether each worker gets a GPU.
        workdir: the folder of the run; `runs/<experiment>` in the current folder by default.
        arguments: further arguments of the command line, such as "--config.train.steps=1000".
        **options: arguments of `TensorflowTrainer`, such as `run_config`, or `scaling_config` in place
            of `num_workers` and `use_gpu`.
    """
    folder = workdir or f"runs/{name_experiment(config)}"
    scaling = ray.train.ScalingConfig(num_workers=num_workers, use_gpu=use_gpu)
    return ray.train.tensorflow.TensorflowTrainer(
        _train_worker,
        train_loop_config=_make_task(config, os.path.abspath(folder), arguments),
        **{"scaling_config": scaling, **options},
    )


def tuner(
    config: str, sweep: Mapping[str, Any] | None = None,
    *, workdir: str = "", arguments: Sequence[str] = (),
    resources: Mapping[str, float] | None = None, **options: Any,
) -> ray.tune.Tuner:  # fmt: skip
    """Makes a tuner of Ray Tune, each trial of which trains the config with other values in one process.

    A trial that is repeated with the same values resumes the same run.

    Args:
        config: the experiment, as on the command line.
        sweep: key -> a list, all of whose values are tried, or a distribution such as
            `ray.tune.loguniform(1e-4, 1e-2)`; by default the runs of `get_sweep()` in the config file.
        workdir: the folder of the runs; `runs/<experiment>.ray` in the current folder by default.
        arguments: further arguments of the command line.
        resources: what a trial requires, such as `{"cpu": 4, "gpu": 1}`.
        **options: arguments of `ray.tune.Tuner`, such as `tune_config` and `run_config`.

    Raises:
        UsageError: `get_sweep()` is missing or wrong.
    """
    space: dict[str, Any]
    if sweep is None:
        runs = sweeps.list_runs(config, [], [sweeps.FROM_FILE])
        space = {_RUN: ray.tune.grid_search([*runs.values()])}
    else:
        space = {k: ray.tune.grid_search(v) if isinstance(v, list) else v for k, v in sweep.items()}
    folder = workdir or f"runs/{name_experiment(config)}.ray"
    task = _make_task(config, os.path.abspath(folder), arguments)

    def run_trial(values: dict[str, Any]) -> None:
        _run_trial(task, values)

    trial = ray.tune.with_resources(run_trial, dict(resources)) if resources else run_trial
    return ray.tune.Tuner(trial, param_space=space, **options)


def _make_task(config: str, workdir: str, arguments: Sequence[str]) -> dict[str, Any]:
    # The folders of the driver: Ray starts the workers in another one.
    file, colon, text = config.partition(":")
    command = [f"--config={os.path.abspath(file)}{colon}{text}", *arguments]
    environment = {name: os.environ[name] for name in KERAS if name in os.environ}
    return {
        "command": command, "workdir": workdir, "cwd": os.getcwd(), "environment": environment,
    }  # fmt: skip


def _train_worker(task: dict[str, Any]) -> Any:
    """Trains in a worker of Ray Train, which has set TF_CONFIG."""
    os.environ[rendezvous.PORTS_BY_LAUNCHER] = "1"  # a port in use is no mistake of the user
    return _execute(task, task["workdir"], ray.train.report, ray.train.Checkpoint)


def _run_trial(task: dict[str, Any], values: dict[str, Any]) -> None:
    """Trains with the values of a trial of Ray Tune."""
    texts = {key: str(value) for key, value in values.get(_RUN, values).items()}
    changes = [f"--config.{key}={text}" for key, text in texts.items()]
    task = {**task, "command": [*task["command"], *changes]}
    workdir = os.path.join(task["workdir"], name_values(texts))
    _execute(task, workdir, ray.tune.report, ray.tune.Checkpoint)


def _execute(
    task: dict[str, Any], workdir: str, report: Callable[..., Any], checkpoint: Any
) -> dict[str, Any]:
    """Runs the program; returns the run's result.

    Args:
        task: the result of `_make_task`.
        workdir: the folder of the run.
        report: Ray's function that reports metrics.
        checkpoint: Ray's class of checkpoints.
    """
    os.environ.update(task["environment"])
    if os.path.isdir(task["cwd"]):  # a node may not have it; the config then names what is missing
        os.chdir(task["cwd"])
    if task["cwd"] not in sys.path:
        sys.path.insert(0, task["cwd"])
    argv = ["ctl", *task["command"], f"--workdir={workdir}"]
    code = main.execute(argv, actions=[_Report(report, checkpoint)])
    if code != DONE:
        # Ray starts a failed function again, which resumes a run that was stopped.
        raise Failure(f"The run in {workdir} ended with exit code {code}.")
    return json_files.read(pathlib.Path(workdir, "result.json"))


class _Report(Action):
    """Reports metrics and checkpoints to Ray; every worker must report as often as the others."""

    everywhere = True
    may_stop = False

    def __init__(self, report: Callable[..., Any], checkpoint: Any):
        self._report, self._checkpoint = report, checkpoint
        self._reported = 0

    def begin(self, controller: Controller) -> None:
        super().begin(controller)
        self.at = "eval" if controller.evaluator else "train"

    def end(self) -> None:
        if self.at == "train":  # the last checkpoint is saved after the last inner loop
            self(self.controller.outputs)

    def __call__(self, outputs: Mapping[str, Any]) -> None:
        controller = self.controller
        metrics = {"step": controller.step, **sweeps.flatten("train", controller.outputs)}
        if self.at == "eval":
            metrics |= sweeps.flatten("eval", outputs)
        assert controller.checkpoints  # a trial has a workdir
        controller.checkpoints.wait()
        step = controller.checkpoints.latest_step() or 0
        if step == self._reported or not controller.is_chief:
            self._report(metrics)
            return
        self._reported = step
        # The files of this checkpoint only: the run's folder has the earlier ones, too.
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(controller.checkpoints.path(step))
            target = pathlib.Path(folder, "checkpoints")
            target.mkdir()
            for file in source.parent.glob(f"{source.name}.*"):
                shutil.copy(file, target)
            self._report(metrics, checkpoint=self._checkpoint.from_directory(folder))
