"""ctl keys [WORD ...]: lists the config keys whose name or description contains all words.

    ctl keys                    all keys, then the sections whose keys the experiment chooses
    ctl keys learning rate      the keys about the learning rate; also ctl keys lr
    ctl keys --names            only the names, as flags, such as for the completion of a shell

The search ignores case, and treats spaces, dashes and underscores alike. A run that is resumed may
change the keys that are marked with `resume`.
"""

from collections.abc import Sequence
import re
import shutil
import textwrap

from ctl.commands import Parser
from ctl.configs.keys import KEYS, Key, is_harmless
from ctl.errors import UsageError, did_you_mean, print_line


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
    keys = [key for key in listed if _normalize(searched) in map(_normalize, key.also)]
    keys += [key for key in listed if key not in keys and _contains(key, searched.split())]
    if not keys:
        names = {part: key.name for key in listed for part in (key.name.split(".")[-1], key.name)}
        hint = did_you_mean(searched.replace(" ", "_"), names)
        raise UsageError(f"No config key contains {' '.join(values.words)!r}{hint}")
    width = max(50, shutil.get_terminal_size().columns)
    for key in keys:
        print_line(f"--config.{key.name}=" if values.names else _format(key, width))
    return 0


def _normalize(text: str) -> str:
    return re.sub(r"[\s_-]+", " ", text.lower()).strip()


def _contains(key: Key, words: Sequence[str]) -> bool:
    text = _normalize(f"{key.name} {key.text} {' '.join(key.also)}")
    return all(word in text for word in words)


def _format(key: Key, width: int) -> str:
    indent = " " * 4
    text = textwrap.fill(key.text, width, initial_indent=indent, subsequent_indent=indent)
    if key.free:
        return f"{key.name}  (free section: its keys are the experiment's)\n{text}"
    resume = ", resume" if is_harmless(key.name) else ""
    return f"{key.name} = {key.default!r}  ({key.type}{resume})\n{text}"
