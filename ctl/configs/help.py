"""The texts of `ctl --help` and `ctl --version`; opened by name for them."""

from collections.abc import Mapping
import importlib.metadata

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


def format_help(commands: Mapping[str, str]) -> str:
    """Formats the text of `ctl --help`.

    Args:
        commands: name of each command -> what it does.
    """
    modes = {name: mode.text for name, mode in MODES.items()}
    sections = {"modes": modes, "commands": commands, "flags": describe_flags()}
    parts = [_USAGE]
    for title, rows in sections.items():
        width = max(len(name) for name in rows)
        lines = [f"  {name:{width}}  {text}" for name, text in rows.items()]
        parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(parts)


def format_version() -> str:
    """Returns the versions of ctl and of the packages that determine its results."""
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"ctl {find_version()} ({', '.join(versions)})"
