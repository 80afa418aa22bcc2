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
        text="Start from the weights of another run: its workdir, its folder of checkpoints (the "
             "newest is used), or one checkpoint, such as runs/a/checkpoints/ckpt-500; or a file of "
             "weights of another library: .safetensors, .h5, .keras or .npz. Each may be a URL. "
             '"": random initial weights.'),
    Key("init.variables", [], validate=_check_variables,
        text='The variables to restore, as patterns of names such as ["conv*/*", "dense/kernel"]; '
             'empty: all. A pattern such as "!head/*" leaves variables out.'),
    Key("init.names", {}, free=True,
        text="With a file of weights: the names in it, by patterns of the model's names, such as "
             '{"*/kernel": "*.weight"}; the texts that each * stands for are inserted. By default the '
             "names are those of the model. --mode=explain lists them."),
    Key("init.layout", "", choices=("", "torch"),
        text="With a file of weights: torch if its kernels are [outputs, inputs, ...]."),
    Key("init.averages", False,
        text="Load the averages of the weights of these runs (optimizer.ema_decay) instead of the "
             "weights."),
    Key("init.models", {}, free=True,
        text="The same for further models of the trainer, by attribute: "
             'init=dict(models=dict(teacher="runs/a")) starts self.teacher from the weights of that '
             "run's model."),
    Key("train", {}, harmless=True),
    Key("train.steps", 1000, also=("epochs", "max_steps", "max_epochs", "num_epochs"),
        least=1, duration=True,
        text='The total number of steps (global batches), or a duration: "90 epochs", "5000000 '
             'examples". The other keys that accept a duration are listed in docs/running.md; '
             'checkpoint_interval, summary_interval and eval.interval also accept a time, such as "30 '
             'minutes".'),
    Key("train.max_duration", "", validate=_check_max_duration,
        text='End training earlier, after a time such as "8 hours"; "": no limit.'),
    Key("train.steps_per_loop", 100, least=1, duration=True,
        text="Steps of an inner loop, after which the host logs and may save."),
    Key("train.best", {},
        text="Keep the checkpoints of the best evaluations in best/, apart from the others."),
    Key("train.best.metric", "", validate=_check_metric, text='Such as eval/accuracy; "": off.'),
    Key("train.best.mode", "", choices=("", "max", "min"),
        text="max if higher values of the metric are better, min if lower ones are."),
    Key("train.best.keep", 1, least=1, text="The number of checkpoints."),
    Key("train.best.patience", 0, least=0,
        text="End training after this many evaluations in a row that were not better than the best "
             "one; 0: do not end it early."),
    Key("train.best.restore", False, text="The run's result is the best checkpoint, not the last step."),
    Key("train.export", "", choices=("", "best", "last"),
        text='Export the "best" or the "last" checkpoint to export/ at the end, with the averaged '
             'weights if optimizer.ema_decay is set; "": do not.'),
    Key("train.profile", "", validate=_check_profile,
        text='The steps to profile, as FIRST:END without END, such as "200:210"; "": none. A SIGUSR1 '
             "profiles the next inner loop."),
    Key("train.summary_interval", 0, least=0, duration=True, time=True,
        text="Steps between two writes of the trainer's own tf.summary calls in a step; 0: "
             "steps_per_loop."),
    Key("train.checkpoint_interval", 1000, least=0, duration=True, time=True,
        text="Steps between two checkpoints; 0: save only at the end."),
    Key("train.checkpoints_to_keep", 3, least=1, text="The newest ones."),
    Key("train.checkpoint_keep_every", 0, least=0, duration=True,
        text="Also keep those of its multiples; 0: none."),
    Key("train.checkpoint_writing", "auto", choices=("auto", "background", "blocking"),
        text="background: copy the values and continue while a thread writes them (one process only); "
             "blocking: wait until they are written; auto: background if possible."),
    Key("train.local_dir", "", validate=check_local,
        text="With a --workdir such as gs://bucket/run: the local folder that the run works in; \"\": a "
             "folder in the user's cache. See docs/storage.md."),
    Key("train.upload_grace", 600.0, least=0,
        text="With such a --workdir: seconds that the end of a run, also after SIGTERM, waits until "
             "everything is in the bucket."),
    Key("summaries", {}, harmless=True, text="See docs/observing.md."),
    Key("summaries.writers", ["tensorboard", "jsonl"], validate=_check_writers,
        text="Where the logged values go: tensorboard, jsonl (metrics.jsonl), mlflow, wandb, or "
             "path/to/file.py:Class or package.module:Class."),
    Key("summaries.histogram_interval", 0, least=0, option="histogram_interval",
        text="Steps between two histograms of the weights and of the gradients in TensorBoard; 0: "
             "none."),
    Key("actions", [], also=("callbacks", "hooks"), validate=_check_actions, harmless=True,
        text="Actions at the end of inner loops and evaluations, each a name or a dict(name=..., "
             "**arguments): path/to/file.py:Class or package.module:Class; see docs/actions.md."),
    Key("eval", {}, harmless=True),
    Key("eval.interval", 0, least=0, duration=True, time=True,
        text="Steps between evaluations; 0: evaluate only at the end."),
    Key("eval.global_batch_size", 0, least=0,
        text="Examples per batch; 0: the global batch size of training."),
    Key("eval.splits", ["eval"], validate=_check_splits, evaluated=True,
        text="The splits that build_dataset is asked for; [] for an experiment without evaluation "
             "data. The metrics of several splits have names such as eval/test/accuracy. ctl.data.idx "
             'has only the splits "train" and "eval".'),
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


def _without(name: str, condition: str, is_met: Callable[[Values], bool]) -> Rule:
    """Returns the rule about a key that has no effect, because another one turns off what it sets."""
    return Rule(
        lambda v: v[name] != _DEFAULTS[name] and not is_met(v),
        f"{name} has no effect without {condition}",
        f"set it, or remove {name}",
    )


def _has_tensorboard(v: Values) -> bool:
    return "tensorboard" in v["summaries.writers"]


def _profiles_too_late(v: Values) -> bool:
    steps, profile = v["train.steps"], v["train.profile"]
    return bool(profile) and isinstance(steps, int) and int(profile.partition(":")[2]) > steps


RULES = (
    Rule(
        lambda v: v["init.variables"] and not v["init.checkpoint"],
        "init.variables has no effect without init.checkpoint",
        "set init.checkpoint to the run that the variables are from, or remove init.variables",
    ),
    Rule(
        lambda v: (
            not is_weight_file(v["init.checkpoint"]) and (v["init.layout"] or _has(v, "init.names"))
        ),
        "init.names and init.layout have no effect without a file of weights",
        "set init.checkpoint to one, or remove them",
    ),
    Rule(
        lambda v: v["init.averages"] and not (v["init.checkpoint"] or _has(v, "init.models")),
        "init.averages has no effect without init.checkpoint or init.models",
        "set one of them to the run that the averages are from, or set init.averages=False",
    ),
    _check_models,
    _check_best,
    Rule(
        lambda v: v["train.best.metric"] and not v["train.best.mode"],
        "train.best.mode is not set",
        "choose max if higher values of {train.best.metric} are better, or min if lower ones are",
    ),
    Rule(
        lambda v: v["train.export"] == "best" and not v["train.best.metric"],
        "train.export=best requires train.best.metric",
        "set it, such as train.best.metric=eval/loss, or choose train.export=last",
    ),
    Rule(
        lambda v: v["train.best.metric"] and not v["eval.splits"],
        "{train.best.metric} requires evaluations, but eval.splits is empty",
        "add a split, or remove the metric",
    ),
    Rule(
        lambda v: v["train.best.patience"] and durations.is_time(v["eval.interval"]),
        "train.best.patience counts evaluations, whose number must not depend on the speed of the "
        "machine",
        "set eval.interval in steps, epochs or examples",
    ),
    Rule(
        lambda v: v["train.best.patience"] and not v["eval.interval"],
        "train.best.patience has no effect with eval.interval=0, which evaluates only at the end",
        "set eval.interval",
    ),
    _without("summaries.histogram_interval", "tensorboard in summaries.writers", _has_tensorboard),
    _without("train.summary_interval", "tensorboard in summaries.writers", _has_tensorboard),
    _without(
        "train.checkpoint_keep_every",
        "train.checkpoint_interval",
        lambda v: v["train.checkpoint_interval"] != 0,
    ),
    Rule(
        _profiles_too_late,
        "train.profile is {train.profile!r}, but must end at train.steps, which is {train.steps}, or "
        "before",
    ),
)
