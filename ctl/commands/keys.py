"""ctl keys [TEXT]: lists the config keys whose name or description contains a text.

    ctl keys                    all keys, then the sections whose keys the experiment chooses
    ctl keys learning_rate      the keys about the learning rate
    ctl keys --names            only the names, as flags, such as for the completion of a shell

The search ignores case. A run that is resumed may change the keys that are marked with `resume`.
"""

from collections.abc import Sequence
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
    parser = Parser("ctl keys", "ctl keys [TEXT]", str(__doc__).partition("\n")[0])
    parser.add_argument("text", nargs="?", default="", metavar="TEXT", help="what to search for")
    parser.add_argument("--names", action="store_true", help="print only the names, as flags")
    values = parser.parse_args(list(arguments))
    text = values.text.lower()
    # The keys of a free section are not known here, so their flags cannot be completed.
    listed = [key for key in KEYS if key.default != {}]
    listed += [] if values.names else [key for key in KEYS if key.free]
    keys = [key for key in listed if text in key.name or text in key.text.lower()]
    if not keys:
        names = {part: key.name for key in listed for part in (key.name.split(".")[-1], key.name)}
        raise UsageError(f"No config key contains {values.text!r}{did_you_mean(text, names)}")
    width = max(50, shutil.get_terminal_size().columns)
    for key in keys:
        print_line(f"--config.{key.name}=" if values.names else _format(key, width))
    return 0


def _format(key: Key, width: int) -> str:
    indent = " " * 4
    text = textwrap.fill(key.text, width, initial_indent=indent, subsequent_indent=indent)
    if key.free:
        return f"{key.name}  (free section: its keys are the experiment's)\n{text}"
    resume = ", resume" if is_harmless(key.name) else ""
    return f"{key.name} = {key.default!r}  ({key.type}{resume})\n{text}"
