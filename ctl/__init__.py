"""Custom training loops for TensorFlow whose update is a function of the global batch alone.

`import ctl` does not import TensorFlow: each name is imported when it is first used (PEP 562).
"""

import importlib
import importlib.util
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from ctl import lazy

if TYPE_CHECKING:
    from ctl import data as data
    from ctl import random as random
    from ctl import replica as replica
    from ctl import testing as testing
    from ctl.configs.options import Clip as Clip
    from ctl.configs.options import TrainerOptions as TrainerOptions
    from ctl.configs.overrides import config as config
    from ctl.errors import UsageError as UsageError
    from ctl.evaluator import StandardEvaluator as StandardEvaluator
    from ctl.evaluator import evaluate as evaluate
    from ctl.kernels.attention import dot_product_attention as dot_product_attention
    from ctl.layers.batch_norm import SyncBatchNormalization as SyncBatchNormalization
    from ctl.layers.batch_norm import convert_sync_batch_norm as convert_sync_batch_norm
    from ctl.layers.recompute import recompute as recompute
    from ctl.loop.actions.action import Action as Action
    from ctl.loop.actions.action import as_action as as_action
    from ctl.loop.actions.keras_callback import KerasCallback as KerasCallback
    from ctl.loop.bucket.store import Store as Store
    from ctl.loop.checkpoints.checkpointer import Checkpointer as Checkpointer
    from ctl.modes.export import load as load
    from ctl.modes.notebook import Run as Run
    from ctl.step import Step as Step
    from ctl.trainer import StandardTrainer as StandardTrainer
    from ctl.update.part import Part as Part

    __version__: str


def _add_copies(folder: pathlib.Path) -> None:
    """Makes the copies in the wheel importable, for what is not installed: tf_keras or Orbit."""
    lacks = (importlib.util.find_spec(name) is None for name in ("tf_keras", "orbit"))
    if folder.is_dir() and any(lacks) and str(folder) not in sys.path:
        sys.path.append(str(folder))  # at the end: an installed one is found first


_add_copies(pathlib.Path(__file__).parent / "_vendored")

_PACKAGES = ("data", "hardware", "loop", "random", "ray", "replica", "testing")
_MODULES = {
    "configs.options": "Clip TrainerOptions",
    "configs.overrides": "config",
    "errors": "UsageError",
    "evaluator": "StandardEvaluator evaluate",
    "loop.actions.action": "Action as_action",
    "loop.actions.keras_callback": "KerasCallback",
    "loop.bucket.store": "Store",
    "loop.checkpoints.checkpointer": "Checkpointer",
    "modes.export": "load",
    "modes.notebook": "Run",
    "kernels.attention": "dot_product_attention",
    "layers.batch_norm": "SyncBatchNormalization convert_sync_batch_norm",
    "layers.recompute": "recompute",
    "update.part": "Part",
    "step": "Step",
    "trainer": "StandardTrainer",
}
_find, __dir__, __all__ = lazy.attach(__name__, _MODULES)
__all__ += ["data", "random", "replica", "testing"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ctl.version import find_version

        return find_version()
    if name in _PACKAGES:
        return importlib.import_module(f"ctl.{name}")
    return _find(name)
