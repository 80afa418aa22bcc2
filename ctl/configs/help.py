"""The texts of `ctl --help` and `ctl --version`; opened by name for them."""

from collections.abc import Mapping
import importlib.metadata
import re

from ctl.configs.flags import describe_flags
from ctl.configs.modes import MODES
from ctl.version import find_version

_USAGE = """\
usage: ctl [MODE] CONFIG [--config.KEY=VALUE ...] [FLAGS]
       ctl COMMAND ...

  ctl experiments/mnist.py                             train and evaluate
  ctl experiments/mnist.py --config.train.steps=1000   with another value of a config key
  ctl eval experiments/mnist.py --checkpoint=best      evaluate a checkpoint of the run
  ctl check experiments/mnist.py                       test the trainer on several replicas
  ctl keys learning_rate                               search the config keys

CONFIG is the file of an experiment, or FILE.py:TEXT for its get_config(TEXT). The flags --config and
--mode are equivalent: python -m ctl.main --config=CONFIG --mode=MODE."""
_PACKAGES = ("tensorflow-cpu", "tensorflow", "tensorflow-tpu", "tf_keras", "tf-models-official")


def format_help(commands: Mapping[str, str], mode: str = "") -> str:
    """Formats the text of `ctl --help`, or of `ctl MODE --help`.

    Args:
        commands: name of each command -> what it does.
        mode: the mode; "" for all.
    """
    if mode:
        return _format_mode(mode)
    modes = {name: mode.text for name, mode in MODES.items()}
    sections = {"modes": modes, "commands": commands, "flags": describe_flags()}
    return "\n\n".join([_USAGE, *(_format_rows(*section) for section in sections.items())])


def _format_mode(name: str) -> str:
    mode = MODES[name]
    accepted = {re.split("[-=]+", flag)[1]: flag for flag in describe_flags()}
    own = [accepted[flag] for flag in (*(flag.name for flag in mode.own), "checkpoint")]
    change = "--config.data.global_batch_size=64"
    example = next((flag for flag in own if re.split("[-=]+", flag)[1] in mode.flags), change)
    command = f"ctl {name} experiments/mnist.py" if mode.builds_trainer else f"ctl {name}"
    config = "CONFIG" if mode.builds_trainer else "[CONFIG]"
    flags = {accepted[flag]: describe_flags()[accepted[flag]] for flag in mode.flags}
    return (
        f"usage: ctl {name} {config} [--config.KEY=VALUE ...] [FLAGS]\n\n  {mode.text}\n\n"
        f"  {command}\n  {command} {example}\n\n"
        + _format_rows(
            "flags", {"--config.KEY=VALUE": "change a config key: see ctl keys", **flags}
        )
    )


def _format_rows(title: str, rows: Mapping[str, str]) -> str:
    width = max(len(name) for name in rows)
    lines = [f"  {name:{width}}  {text}" for name, text in rows.items()]
    return "\n".join([f"{title}:", *lines])


def format_version() -> str:
    """Returns the versions of ctl and of the packages that determine its results."""
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"ctl {find_version()} ({', '.join(versions)})"
