"""The keys of a config that are options of a trainer, and the rules about them.

The core knows these alone, since a trainer need not have a config. `keys.py` has all keys.
"""

from typing import Any

from ctl.configs import component, experiment
from ctl.configs.component import Key, Values
from ctl.parts import config as parts
from ctl.update import config as update

COMPONENTS = (experiment, update, parts)
RULES = tuple(rule for each in COMPONENTS for rule in each.RULES)
_KEYS: list[Key] = [key for each in COMPONENTS for key in each.KEYS if key.option]
_BY_NAME = {key.name: key for key in _KEYS}
# Option of a trainer -> its config key; without the options that are sections.
OPTION_KEYS = {key.option: key.name for key in _KEYS if key.default != {}}
# Option -> the part of the update that it adds if it is set, in the order in which parts are called.
PARTS = {key.option: key.part for key in _KEYS if key.part}


def check_values(values: Values) -> None:
    """Checks the value of each option by itself; `values` has the names of their keys."""
    component.check_values(_BY_NAME, values)


def check_rules(values: Values, **facts: Any) -> None:
    """Checks the rules about options, as `component.check_rules` does.

    A rule of another component reads a key that is no option, and so would not be checked.
    """
    component.check_rules(RULES, values, **facts)
