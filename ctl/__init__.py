"""Custom training loops for TensorFlow whose update is a function of the global batch alone.

`import ctl` does not import TensorFlow: each name is imported when it is first used (PEP 562).
"""

import importlib
import importlib.util
import pathlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl import data, random, replica, testing
    from ctl.configs.options import Clip, TrainerOptions
    from ctl.configs.overrides import config
    from ctl.errors import UsageError
    from ctl.evaluator import StandardEvaluator, evaluate
    from ctl.loop.actions.action import Action, as_action
    from ctl.loop.actions.keras_callback import KerasCallback
    from ctl.loop.checkpoints.checkpointer import Checkpointer
    from ctl.modes.export import load
    from ctl.modes.notebook import Run
    from ctl.replica.layers.attention import dot_product_attention
    from ctl.replica.layers.batch_norm import SyncBatchNormalization, convert_sync_batch_norm
    from ctl.replica.layers.recompute import recompute
    from ctl.step import Step
    from ctl.trainer import StandardTrainer

    __version__: str


def _add_copies(folder: pathlib.Path) -> None:
    """Makes the copies in the wheel importable, for what is not installed: tf_keras or Orbit."""
    lacks = (importlib.util.find_spec(name) is None for name in ("tf_keras", "orbit"))
    if folder.is_dir() and any(lacks) and str(folder) not in sys.path:
        sys.path.append(str(folder))  # at the end: an installed one is found first


_add_copies(pathlib.Path(__file__).parent / "_vendored")

_MODULES = {
    "Action": "ctl.loop.actions.action",
    "SyncBatchNormalization": "ctl.replica.layers.batch_norm",
    "convert_sync_batch_norm": "ctl.replica.layers.batch_norm",
    "Checkpointer": "ctl.loop.checkpoints.checkpointer",
    "Clip": "ctl.configs.options",
    "KerasCallback": "ctl.loop.actions.keras_callback",
    "Run": "ctl.modes.notebook",
    "StandardEvaluator": "ctl.evaluator",
    "StandardTrainer": "ctl.trainer",
    "Step": "ctl.step",
    "TrainerOptions": "ctl.configs.options",
    "UsageError": "ctl.errors",
    "as_action": "ctl.loop.actions.action",
    "evaluate": "ctl.evaluator",
    "config": "ctl.configs.overrides",
    "dot_product_attention": "ctl.replica.layers.attention",
    "load": "ctl.modes.export",
    "recompute": "ctl.replica.layers.recompute",
}
_PACKAGES = ("data", "hardware", "loop", "random", "ray", "replica", "testing")
__all__ = [
    "Action",
    "Checkpointer",
    "Clip",
    "KerasCallback",
    "Run",
    "StandardEvaluator",
    "StandardTrainer",
    "Step",
    "SyncBatchNormalization",
    "TrainerOptions",
    "UsageError",
    "as_action",
    "config",
    "convert_sync_batch_norm",
    "data",
    "dot_product_attention",
    "evaluate",
    "load",
    "random",
    "recompute",
    "replica",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ctl.version import find_version

        return find_version()
    if name in _PACKAGES:
        return importlib.import_module(f"ctl.{name}")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'ctl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *_PACKAGES])
