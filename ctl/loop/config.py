"""The config of a run: its start, length, checkpoints, summaries, actions and evaluations."""

from collections.abc import Callable, Mapping
import re
from typing import Any

from ctl import errors
from ctl.configs import durations
from ctl.configs.component import Key, Rule, Values, check_strings
from ctl.configs.values import WRITERS, is_weight_file
from ctl.errors import UsageError, check_local

_STEPS = re.compile(r"(\d{1,9}):(\d{1,9})")


def _check_variables(key: str, patterns: Any) -> None:
    check_strings(key, patterns, 'patterns such as "conv*/*"')


def _check_max_duration(key: str, text: str) -> None:
    if text:
        durations.seconds(text)


def _check_metric(key: str, metric: str) -> None:
    if metric and not re.fullmatch("eval/.+", metric):
        raise UsageError(
            f"{key} is {metric!r}, but must be the name of a metric of the evaluation, eval/NAME, such "
            "as eval/loss."
        )


def _check_actions(key: str, actions: Any) -> None:
    for index, action in enumerate(actions):
        name = action.get("name") if isinstance(action, Mapping) else action
        if not isinstance(name, str) or not name:
            raise UsageError(
                f"{key}[{index}] is {errors.show_value(action)}, but must be a name, or a dict with a "
                "name and arguments."
            )
        if ":" not in name:
            raise UsageError(
                f"{key}[{index}] is {name!r}, but must be path/to/file.py:Class or package.module:Class."
            )


def _check_profile(key: str, steps: str) -> None:
    match = _STEPS.fullmatch(steps)
    if steps and not (match and int(match[1]) < int(match[2])):
        raise UsageError(
            f"{key} is {steps!r}, but must be FIRST:END with END greater than FIRST, such as "
            "200:210."
        )


def _check_writers(key: str, writers: Any) -> None:
    check_strings(key, writers, 'names such as "jsonl"')
    for index, name in enumerate(writers):
        if name in writers[:index]:
            raise UsageError(f"{key} contains {name!r} twice: remove one of them.")
        if ":" not in name and name not in WRITERS:
            raise UsageError(f"{key} contains {name!r}{errors.did_you_mean(name, list(WRITERS))}")


def _check_splits(key: str, splits: Any) -> None:
    check_strings(key, splits, 'names such as "test"')
    for index, split in enumerate(splits):
        # The name is also used for a folder of summaries, and in the names of metrics.
        if not re.fullmatch(r"\w[\w.-]*", split):
            raise UsageError(
                f"{key} contains {split!r}, but a name must consist of letters, digits, _, - and dots."
            )
        if split in splits[:index]:
            raise UsageError(f"{key} contains {split!r} twice: remove one of them.")


# fmt: off
KEYS = (
    Key("init", {}),
    Key("init.checkpoint", "",
        text="Start from the weights of another run, named by its workdir, its folder of "
             "checkpoints (the newest is used) or one checkpoint, such as "
             "runs/a/checkpoints/ckpt-500, or from a file of weights of another library: "
             '.safetensors, .h5, .keras or .npz. Each may be a URL. With "", the initial weights '
             "are random."),
    Key("init.variables", [], validate=_check_variables,
        text="Names the variables to restore from init.checkpoint, as patterns of names such as "
             '["conv*/*", "dense/kernel"]. If empty, all are restored. A pattern such as "!head/*" '
             "leaves variables out."),
    Key("init.names", {}, free=True,
        text="For a file of weights, holds the names in it, by patterns of the model's names, such "
             'as {"*/kernel": "*.weight"}. Each * of a name stands for the text that it matches in '
             "the pattern. By default the names are those of the model. The command ctl explain lists "
             "them."),
    Key("init.layout", "", choices=("", "torch"),
        text="For a file of weights, set torch if its kernels are [outputs, inputs, ...]."),
    Key("init.averages", False,
        text="Load the averages of the weights (optimizer.ema_decay) from the runs that init names, "
             "instead of the weights."),
    Key("init.models", {}, free=True,
        text="Start further models of the trainer from the weights of other runs, by attribute: "
             'init=dict(models=dict(teacher="runs/a")) starts self.teacher from the weights of that '
             "run's model."),
    Key("train", {}, harmless=True),
    Key("train.steps", 1000, also=("epochs", "max_steps", "max_epochs", "num_epochs"),
        least=1, duration=True,
        text='Sets the total number of steps (global batches), or a length such as "90 epochs" or '
             '"5000000 examples". All keys of the type duration accept such texts.'),
    Key("train.max_duration", "", validate=_check_max_duration,
        text='End training earlier, after a time such as "8 hours". With "", there is no limit.'),
    Key("train.steps_per_loop", 100, least=1, duration=True,
        text="Sets the number of steps of an inner loop, after which the host logs and may save."),
    Key("train.best", {},
        text="Keep the checkpoints of the best evaluations in best/, apart from the others."),
    Key("train.best.metric", "", validate=_check_metric,
        text="Keep the checkpoints with the best values of this metric in best/, such as "
             'eval/accuracy. With "", this is off.'),
    Key("train.best.mode", "", choices=("", "max", "min"),
        text="Set max if higher values of train.best.metric are better, and min if lower ones are."),
    Key("train.best.keep", 1, least=1, text="Sets the number of best checkpoints that are kept."),
    Key("train.best.patience", 0, also=("early stopping",), least=0,
        text="End training after this many evaluations in a row that were not better than the best "
             "one. With 0, it does not end early."),
    Key("train.best.target", 0.0, also=("target_metric",),
        text="End training after an evaluation with a value as good as this one. With 0, this is off."),
    Key("train.best.restore", False,
        text="Restore the best checkpoint at the end, so that it is the run's result instead of the "
             "last step."),
    Key("train.export", "", choices=("", "best", "last"),
        text='Export the "best" or the "last" checkpoint to export/ at the end, with the averaged '
             'weights if optimizer.ema_decay is set. With "", nothing is exported.'),
    Key("train.profile", "", validate=_check_profile,
        text='Profile these steps, written as FIRST:END without END, such as "200:210". With "", no '
             "step is profiled. The signal SIGUSR1 profiles the next inner loop."),
    Key("train.summary_interval", 0, least=0, duration=True, time=True,
        text="Sets the steps between two writes of the trainer's own tf.summary calls in a step, or "
             'a time such as "30 minutes". With 0, they are written at multiples of '
             "train.steps_per_loop."),
    Key("train.checkpoint_interval", 1000, least=0, duration=True, time=True,
        text='Sets the steps between two checkpoints, or a time such as "30 minutes". With 0, the '
             "run saves only at the end."),
    Key("train.checkpoints_to_keep", 3, least=1,
        text="Sets how many of the newest checkpoints are kept."),
    Key("train.checkpoint_keep_every", 0, least=0, duration=True,
        text="Also keep the checkpoints at multiples of this many steps. With 0, only the newest "
             "ones are kept."),
    Key("train.checkpoint_writing", "auto", choices=("auto", "background", "blocking"),
        text="With background, copy the values and continue while a thread writes them (one process "
             "only). With blocking, wait until they are written. With auto, write in the background "
             "if possible."),
    Key("train.local_dir", "", validate=check_local,
        text="With a --workdir such as gs://bucket/run, names the local folder that the run works "
             "in. With \"\", it is a folder in the user's cache."),
    Key("train.upload_grace", 600.0, least=0,
        text="With a --workdir such as gs://bucket/run, sets how many seconds a run waits at its end, "
             "or after SIGTERM, until everything is in the bucket."),
    Key("summaries", {}, harmless=True,
        text="These keys choose where the values of a run are logged, and how often."),
    Key("summaries.writers", ["tensorboard", "jsonl"], validate=_check_writers,
        text="Names where the logged values go: tensorboard, jsonl (metrics.jsonl), mlflow, wandb, "
             "or a class of yours as path/to/file.py:Class or package.module:Class."),
    Key("actions", [], also=("callbacks", "hooks"), validate=_check_actions, harmless=True,
        text="Names the actions (callbacks) that are called at the end of inner loops and "
             "evaluations, each by a name or a dict(name=..., **arguments). A name is "
             "path/to/file.py:Class or package.module:Class."),
    Key("eval", {}, harmless=True),
    Key("eval.interval", 0, least=0, duration=True, time=True,
        text='Sets the steps between evaluations, or a time such as "30 minutes". With 0, the run '
             "evaluates only at the end."),
    Key("eval.global_batch_size", 0, least=0,
        text="Sets the number of examples per batch of an evaluation. With 0, it is the global "
             "batch size of training."),
    Key("eval.splits", ["eval"], validate=_check_splits, evaluated=True,
        text="Names the splits that build_dataset is asked for. With [], the experiment has no "
             "evaluation data. The metrics of several splits have names such as eval/test/accuracy. "
             'The source ctl.data.idx has only the splits "train" and "eval".'),
    Key("eval.before_training", False, text="Also evaluate at step 0."),
)
# fmt: on


def _check_models(v: Values) -> None:
    for name, source in v.items():
        if name.startswith("init.models.") and not (isinstance(source, str) and source):
            raise UsageError(
                f"{name} is {errors.show_value(source)}, but must be a run's workdir, its folder of "
                "checkpoints, or a checkpoint."
            )


def _has(v: Values, section: str) -> bool:
    """Returns whether a free section of a complete config has keys."""
    return any(name.startswith(f"{section}.") for name in v)


_DEFAULTS = {key.name: key.default for key in KEYS}
_BEST = [name for name in _DEFAULTS if name.startswith("train.best.")]


def _check_best(v: Values) -> None:
    changed = [name for name in _BEST if v[name] != _DEFAULTS[name]]
    if changed and not v["train.best.metric"]:
        raise UsageError(
            f"{changed[0]} has no effect without train.best.metric: set it, such as "
            f"train.best.metric=eval/loss, or remove {changed[0]}."
        )


# What counts evaluations, as a key or KEY=VALUE, and what only reads their metrics.
_COUNTING, _READING = ("train.best.patience", "optimizer.schedule=plateau"), "train.best.target"


def _is_set(name: str, v: Values) -> bool:
    key, _, value = name.partition("=")
    return v[key] == value if value else bool(v[key])


def _counted(name: str) -> Rule:
    return Rule(
        lambda v: _is_set(name, v) and durations.is_time(v["eval.interval"]),
        f"{name} counts evaluations, whose number must not depend on the speed of the machine",
        "set eval.interval in steps, epochs or examples",
    )


def _evaluated(name: str) -> Rule:
    return Rule(
        lambda v: _is_set(name, v) and not v["eval.interval"],
        f"{name} has no effect with eval.interval=0, which evaluates only at the end",
        "set eval.interval",
    )


def _without(name: str, condition: str, is_met: Callable[[Values], bool]) -> Rule:
    """Returns the rule about a key that has no effect, because another one turns off what it sets."""
    return Rule(
        lambda v: v[name] and not is_met(v),
        f"{name} has no effect without {condition}",
        f"set it, or remove {name}",
    )


def _has_tensorboard(v: Values) -> bool:
    return "tensorboard" in v["summaries.writers"]


def _profiles_too_late(v: Values) -> bool:
    steps, profile = v["train.steps"], v["train.profile"]
    return bool(profile) and isinstance(steps, int) and int(profile.partition(":")[2]) > steps


# fmt: off
RULES = (
    Rule(lambda v: v["init.variables"] and not v["init.checkpoint"],
         "init.variables has no effect without init.checkpoint",
         "set init.checkpoint to the run that the variables are from, or remove init.variables"),
    Rule(lambda v: not is_weight_file(v["init.checkpoint"])
                   and (v["init.layout"] or _has(v, "init.names")),
         "init.names and init.layout have no effect without a file of weights",
         "set init.checkpoint to one, or remove them"),
    Rule(lambda v: v["init.averages"] and not (v["init.checkpoint"] or _has(v, "init.models")),
         "init.averages has no effect without init.checkpoint or init.models",
         "set one of them to the run that the averages are from, or set init.averages=False"),
    _check_models,
    _check_best,
    Rule(lambda v: v["train.best.metric"] and not v["train.best.mode"],
         "train.best.mode is not set",
         "choose max if higher values of {train.best.metric} are better, or min if lower ones are"),
    Rule(lambda v: v["train.export"] == "best" and not v["train.best.metric"],
         "train.export=best requires train.best.metric",
         "set it, such as train.best.metric=eval/loss, or choose train.export=last"),
    Rule(lambda v: v["train.best.metric"] and not v["eval.splits"],
         "{train.best.metric} requires evaluations, but eval.splits is empty",
         "add a split, or remove the metric"),
    *map(_counted, _COUNTING),
    *map(_evaluated, (*_COUNTING, _READING)),
    _without("summaries.histogram_interval", "tensorboard in summaries.writers", _has_tensorboard),
    _without("train.summary_interval", "tensorboard in summaries.writers", _has_tensorboard),
    _without("train.checkpoint_keep_every",
             "train.checkpoint_interval",
             lambda v: v["train.checkpoint_interval"] != 0),
    Rule(_profiles_too_late,
         "train.profile is {train.profile!r}, but must end at train.steps, which is {train.steps}, or "
         "before"),
)
# fmt: on
