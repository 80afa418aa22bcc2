"""The devices, processes and machines of a run, and the strategies that use them.

The tables `strategies.STRATEGIES` and `engines.ENGINES` name the functions of their rows, which are
imported when a run uses them.
"""

from collections.abc import Callable
import importlib
from typing import Any


def load(function: str) -> Callable[..., Any]:
    """Imports a function of this package.

    Args:
        function: "module:function", such as "tpu:build".
    """
    module, name = function.split(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
