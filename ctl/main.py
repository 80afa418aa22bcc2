"""The program: trains and evaluates the experiment that a config describes.

python -m ctl.main --config=experiments/mnist.py --config.train.steps=1000
"""

from collections.abc import Sequence
import logging
import os
import pathlib
import signal
import sys
from typing import Any

if __package__ in (None, ""):  # run as a file: `import ctl` must find the package, not its rooms
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import flags
from ml_collections import config_dict

from ctl.configs import defaults, loading, overrides, validation
from ctl.configs import flags as command_line
from ctl.configs.flags import Changes
from ctl.errors import Failure, LostWorker, UsageError
from ctl.hardware import selection, tpu
from ctl.hardware.cluster import Cluster
from ctl.hardware.strategies import StrategyOptions
from ctl.loop.workdir import Workdir
from ctl.modes import Arguments

_LONGEST = 4_000  # characters of the line that tells what is wrong


def run(argv: Sequence[str]) -> int:
    """Runs the program.

    Args:
        argv: the command line, the program's name first.

    Returns:
        The exit code: 0 done, 1 failed, 2 a mistake told in one line, 75 stopped by a signal.
    """
    try:
        return _run(argv)
    except UsageError as error:
        _tell(error)
        return 2
    except Failure as error:
        _tell(error)
        return 1
    except LostWorker as error:
        _tell(error)
        return 75
    except KeyboardInterrupt:  # once training has begun, loop/stop.py catches the signal
        print("Stopped before training began, nothing written: run me again.", flush=True)
        return 75


def _tell(error: Exception) -> None:
    """Prints what is wrong in one line, without the middle of what nobody would read."""
    line = " ".join(str(error).split())
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    print("ctl:", line, file=sys.stderr, flush=True)


def console() -> None:
    """The console script `ctl`: as `python -m ctl.main`, with the current folder importable."""
    # Until loop/stop.py catches it, SIGTERM ends the program as Ctrl-C does: it may be run again.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    sys.exit(run(sys.argv))


def _run(argv: Sequence[str]) -> int:
    values, changes = command_line.parse(argv)
    if values.help:
        print(f"{__doc__}\n{values.get_help(include_special_flags=False)}")
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # a config file may load TensorFlow
    tpu.skip_metadata_server()
    if values.mode == "devices":
        return _devices(values.config, changes)
    config_path = values.config.partition(":")[0]
    config = _config(values.config, changes)
    loading.trainer_file(config.trainer, config_path)
    request = StrategyOptions.from_config(config.runtime, os.environ)
    if values.mode == "aot_compile":
        if request.cluster:
            raise UsageError("--mode=aot_compile runs in one process: unset TF_CONFIG.")
        _quiet_tensorflow()
        from ctl.modes import aot_compile

        return aot_compile.aot_compile(_arguments(values, config, config_path, None))
    if selection.resolve_name(config.runtime.strategy, request) == "tpu":
        tpu.check_available(config.runtime.tpu.name or config.runtime.tpu.address)
    arguments = _arguments(values, config, config_path, request.cluster)
    _check_workdir(values, config, arguments.workdir)
    if request.cluster and request.cluster.has_servers and not request.cluster.is_chief:
        return _serve(request, config, arguments.workdir)
    return _dispatch(values.mode, arguments, request.cluster)


def _arguments(
    values: flags.FlagValues,
    config: config_dict.ConfigDict,
    config_path: str,
    cluster: Cluster | None,
) -> Arguments:
    path = values.workdir or pathlib.Path("runs") / pathlib.Path(config_path).stem
    return Arguments(
        config=config,
        config_path=config_path,
        workdir=Workdir(path, writes=cluster is None or cluster.is_chief),
        fresh=values.fresh,
        allow_config_change=values.allow_config_change,
        allow_partial_restore=values.allow_partial_restore,
        topology=values.topology or "",
        find_batch=values.find_batch,
    )


def _devices(flag: str | None, changes: Changes) -> int:
    """Prints what there is to train on; of a config, only the runtime section bears on it."""
    if flag:
        config = _config(flag, changes)
    else:
        config = _known(changes)
        validation.check_runtime(overrides.flat(config))
    _quiet_tensorflow()
    from ctl.modes import devices

    print(devices.describe(config.runtime))
    return 0


def _serve(request: StrategyOptions, config: Any, workdir: Workdir) -> int:
    """Serves the chief of a run until it has gone; 75 if the run is not complete by then."""
    _quiet_tensorflow()
    from ctl.hardware import server

    assert request.cluster is not None
    server.serve(request.cluster, start_timeout=request.start_timeout)
    step = workdir.result().get("step")
    return 0 if isinstance(step, int) and step >= config.train.steps else 75


def _dispatch(mode: str, arguments: Arguments, cluster: Cluster | None) -> int:
    _quiet_tensorflow()
    from ctl.hardware import worker_failure
    from ctl.modes import check, evaluate, experiment, explain, train

    modes = {
        "train": train.train,
        "train_and_eval": train.train_and_eval,
        "eval": evaluate.evaluate,
        "continuous_eval": evaluate.continuous_eval,
        "check": check.check,
    }
    with worker_failure.report_lost_worker(cluster):
        if mode == "explain":
            print(explain.describe(experiment.build(arguments.config, arguments.config_path)))
            return 0
        return modes[mode](arguments)


def _config(flag: str, changes: Changes) -> config_dict.ConfigDict:
    """The checked config; what is wrong with the command line is told before the file is run."""
    _known([(name, text) for name, text in changes if not name.startswith("model.")])
    config = loading.load_config(flag)
    for name, text in changes:
        overrides.change(config, name, text)
    validation.check_config(config)
    return config


def _known(changes: Changes) -> config_dict.ConfigDict:
    """The defaults with the command line's changes, each checked by itself."""
    known = defaults.defaults()
    for name, text in changes:
        overrides.change(known, name, text)
    validation.check_values(overrides.flat(known))
    return known


def _check_workdir(values: flags.FlagValues, config: Any, workdir: Workdir) -> None:
    """Tells what is wrong with the folder before TensorFlow is loaded; `experiment` asks again."""
    if values.mode in ("check", "explain"):
        return
    if values.fresh:
        workdir.check_movable()
        return
    if values.mode in ("eval", "continuous_eval"):
        workdir.check_run()
    workdir.check_config(config.to_dict(), allow_change=values.allow_config_change)


def _quiet_tensorflow() -> None:
    """Keeps TensorFlow's start-up noise out of the way; the environment can ask for it."""
    flags.FLAGS.mark_as_parsed()
    import tensorflow as tf

    tf.get_logger().setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)


if __name__ == "__main__":
    console()
