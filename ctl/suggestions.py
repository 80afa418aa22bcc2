"""Words for messages: what a person may have meant, and what they gave instead."""

from collections.abc import Iterable, Mapping, Sequence
import difflib
from typing import Any

_SHOWN = 8  # names in a line, before the others are only counted


def did_you_mean(name: str, *known: Mapping[str, str] | Iterable[str]) -> str:
    """Words such as ": did you mean X?" for the closest known name, else ": there are X, Y".

    Args:
        name: what was written.
        *known: names, or name -> how to show it. The same name in any collection comes before a
            close one in the first, which comes before a close one in the second.

    Returns:
        Words to stand behind "There is no X": nothing where nothing is known.
    """
    tables = [dict(n) if isinstance(n, Mapping) else {k: k for k in n} for n in known]
    folded = [{key.lower(): shown for key, shown in table.items()} for table in tables]
    for table in folded:
        if name.lower() in table:
            return f": did you mean {table[name.lower()]}?"
    for table in folded:
        close = difflib.get_close_matches(name.lower(), table, n=1, cutoff=0.6)
        if close:
            return f": did you mean {table[close[0]]}?"
    shown = list(tables[0].values()) if tables else []
    if not shown:
        return ""
    return f": there {'is' if len(shown) == 1 else 'are'} {', '.join(shown)}."


def kind(value: Any) -> str:
    """What a value is, such as "a dict", "an int" or "None"."""
    name = type(value).__name__
    return "None" if value is None else f"a{'n' * (name[0].lower() in 'aeiou')} {name}"


def some(names: Sequence[str]) -> str:
    """Names for a line: the first, and how many more there are."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
