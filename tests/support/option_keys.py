"""The keys that are options of a trainer, each with another value than its default."""

from ctl.configs import keys
from ctl.errors import UsageError

KEYS = [key for key in keys.KEYS if key.option]
_GROUP = {"variables": "*", "frozen": True}
_VALUES = (True, 2, 0.5, 3.0, "memory", ["*/bias"], [_GROUP])


def other_value(key):
    """Returns a value that is allowed, and is not the default."""
    if key.default == {}:
        return {"a": 2.0} if key.free else {"dir": "x"}
    for value in (*key.choices, *_VALUES):
        if type(value) is not type(key.default) or value == key.default:
            continue
        try:
            key.check(value)
        except UsageError:
            continue
        return value
    raise AssertionError(f"no other value of {key.name} is known")
