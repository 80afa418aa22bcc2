"""A read-only section of a config that records which keys are read."""

from collections.abc import Iterator, Mapping
from typing import Any

from ctl import errors
from ctl.errors import UsageError


class _MissingKeyError(UsageError, AttributeError):
    """A missing key; as an AttributeError it lets `getattr(section, key, default)` work."""


class Section(Mapping[str, Any]):
    """A read-only section of a config, accessed by attribute or key, that records which keys are read.

    A key that is never read has no effect; `unread` returns these keys.

    Args:
        values: keys and their values. Mappings among the values become sections, too.
        name: the name of the section in messages, such as "model".

    Raises:
        UsageError: a key has the name of a method, which the attribute would return instead.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, name: str = ""):
        for key in values or {}:
            if isinstance(key, str) and hasattr(Section, key):
                raise UsageError(
                    f"The config has the key {name}.{key}, but {key!r} is a method of a section: rename "
                    f"the key, for example to {name}.{key}_value."
                )
        self._name = name
        self._values = {
            key: Section(value, f"{name}.{key}") if isinstance(value, Mapping) else value
            for key, value in (values or {}).items()
        }
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            known = {name: f"{self._name}.{name}" for name in self._values}
            hint = errors.did_you_mean(str(key), known) or ": the section is empty."
            raise _MissingKeyError(f"The config has no key {self._name}.{key}{hint}")
        self._read.add(key)
        return self._values[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        return self[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or a default if the section does not have the key."""
        try:
            return self[key]
        except _MissingKeyError:
            return default

    def peek(self, key: str) -> Any:
        """Returns a value without recording that it was read; None without the key."""
        return self._values.get(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Section({self._values})"

    def unread(self) -> list[str]:
        """Returns the full names of the keys that were never read."""
        names = []
        for key, value in self._values.items():
            if isinstance(value, Section):
                names += value.unread()
            elif key not in self._read:
                names.append(f"{self._name}.{key}")
        return names
