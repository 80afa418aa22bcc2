"""ctl keys [WORD ...]: lists the config keys whose name or description has all words, best first.

    ctl keys                    all keys, then the sections whose keys the experiment chooses
    ctl keys learning rate      the keys about the learning rate; also ctl keys lr
    ctl keys --names            only the names, as flags, such as for the completion of a shell

The search ignores case and the endings of words, and treats spaces, dashes and underscores alike. A run
that is resumed may change the keys that are marked with `resume`.
"""

from collections.abc import Sequence
import re
import shutil
import textwrap

from ctl.commands import Parser
from ctl.configs.keys import KEYS, Key, is_harmless
from ctl.errors import UsageError, closest, print_line

_MOST_FOUND = 5  # keys that a search prints


def main(arguments: Sequence[str]) -> int:
    """Prints the keys; returns the exit code.

    Raises:
        UsageError: no key contains the text.
    """
    parser = Parser("ctl keys", "ctl keys [WORD ...]", str(__doc__).partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="what to search for")
    parser.add_argument("--names", action="store_true", help="print only the names, as flags")
    values = parser.parse_args(list(arguments))
    # The other keys of a free section are not known here, so their flags cannot be completed.
    listed = [key for key in KEYS if not key.is_section and not (values.names and key.free)]
    listed.sort(key=lambda key: key.free)
    searched = _normalize(" ".join(values.words))
    keys = sorted(listed, key=lambda key: -_score(key, searched))
    keys = [key for key in keys if _score(key, searched)] if searched else listed
    if not keys:
        names = {part: key.name for key in listed for part in (key.name.split(".")[-1], key.name)}
        similar = closest(searched.replace(" ", "_"), names)
        hint = f"did you mean {similar}?" if similar else "search for one word, or run ctl keys."
        raise UsageError(f"No config key contains {' '.join(values.words)!r}: {hint}")
    more = len(keys) - _MOST_FOUND if searched and not values.names else 0
    keys = keys[:_MOST_FOUND] if more > 0 else keys
    width = max(50, shutil.get_terminal_size().columns)
    for key in keys:
        print_line(f"--config.{key.name}=" if values.names else _format(key, width))
    if more > 0:
        print_line(f"... and {more} more: add a word.")
    return 0


def _normalize(text: str) -> str:
    return re.sub(r"[\s_-]+", " ", text.lower()).strip()


def _score(key: Key, searched: str) -> int:
    """Returns how well a key matches a search: 0 if it lacks a word."""
    others = [_normalize(each) for each in key.also]
    words = [_stem(word) for word in searched.split()]
    name = _normalize(key.name)
    text = " ".join([name, _normalize(key.text), *others])
    if not all(word in text for word in words):
        return 0
    found = sum(word in name.rpartition(".")[2] or word in " ".join(others) for word in words)
    return 1 + found + sum(word in name for word in words) + 9 * (searched in others)


def _stem(word: str) -> str:
    """Returns a word without its ending, as other forms of it contain it: "clip" of "clipping"."""
    stem = re.sub(r"(?<=\w{3})(?:ing|es|(?<!s)s)$", "", word)
    return stem if stem == word else re.sub(r"([^\Ws])\1$", r"\1", stem)


def _format(key: Key, width: int) -> str:
    indent = " " * 4
    text = textwrap.fill(key.text, width, initial_indent=indent, subsequent_indent=indent)
    if key.free:
        return f"{key.name}  (free section: its keys are the experiment's)\n{text}"
    resume = ", resume" if is_harmless(key.name) else ""
    return f"{key.name} = {key.default!r}  ({key.type}{resume})\n{text}"
