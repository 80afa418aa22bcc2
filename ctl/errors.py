"""Errors that end a run with one line, and functions to compose such lines.

ctl.main prints the message of these errors without a traceback. An exception of another type is a
bug, or an error in the user's own code, and keeps its traceback.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import difflib
import functools
import inspect
import os
import re
import sys
from typing import Any

_MAX_LISTED = 8  # names in one line; the rest is only counted


class UsageError(ValueError):
    """A mistake that the user can fix; the program exits with 2.

    The message is one line: what is wrong, where, and what to do. A script that uses ctl as a library
    gets it as a `ValueError`.
    """

    # AutoGraph wraps exceptions that are raised while it traces, except those with this attribute.
    ag_pass_through = True
    # tf_keras appends the arguments of the layer to other exceptions, on several lines.
    _keras_call_info_injected = True


class LateUsageError(UsageError):
    """A mistake that a step has shown which is complete; a run saves it before it ends."""


class NegativeWeight(UsageError):
    """A weight of a row is negative, which a step that XLA has compiled shows by NaN."""


class Failure(RuntimeError):
    """A failure outside the user's control, such as a process that never starts; exit code 1.

    The message is one line.
    """

    ag_pass_through = True


class NonFiniteStep(Failure):
    """The loss or the gradients of a step were not finite, or its loss was a spike.

    Args:
        report: a `ctl.update.non_finite.NonFiniteReport`.
        examples: the indices of the examples in the batch, if the data source numbers them.
        rows: the rows of the batch whose own features or loss are not finite, if they are known.

    Attributes:
        step: the global step.
        tensor: the name of the first tensor that was not finite.
        what: one sentence that describes the step.
    """

    def __init__(self, report: Any, examples: Sequence[int] | None, rows: Sequence[int] = ()):
        self.step: int = report.step
        self.tensor: str = report.tensor
        named = [examples[row] for row in rows] if examples else rows
        shown = named or examples or ()
        listed = ", ".join(map(str, shown[:_MAX_LISTED]))
        more = ", ..." if len(shown) > _MAX_LISTED else ""
        kind = f"{'example' if examples else 'row'}{'s' * (len(shown) != 1)}"
        batch = f", on the {kind} {listed}{more}" if shown else ""
        batch += ", whose own features or loss are not finite" if rows else ""
        self.what = f"Step {report.step} {report}{batch}."
        super().__init__(
            f"{self.what} No checkpoint was saved after it: check these examples, lower the learning "
            "rate or clip the gradients, or choose train.on_non_finite=skip or rollback."
        )


class LostWorker(RuntimeError):
    """Another process of the run was lost; exit code 75: rerun the same command to resume."""

    ag_pass_through = True


# The user and the password in a URL, and the signature of a signed one.
_SECRET = re.compile(
    r"(\b[a-z][\w+.-]{0,20}:/{1,2}(?=[^\s/@?#]*:)|\bhttps?:/{1,2}(?=[^\s/@?#.]+@))[^\s/@?#]+(?=@)"
    r"|([?&](?:[\w-]{0,40}[_-])?(?:credential|(?:api|access|aws)?-?(?:access)?key(?:id)?|password|secret|"
    r"sig|signature|token)=)[^\s&#]+",
    re.IGNORECASE,
)
# Characters that a terminal obeys, or that change the order of the others; names of files have them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Returns a text without control characters, and without the credentials of URLs."""
    text = _SECRET.sub(lambda match: f"{match[1] or match[2]}***", text)
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def check_credentials(name: str, text: str) -> None:
    """Rejects a URL with a password or another secret, which files and names of folders would show.

    Args:
        name: the key or the URL, for the message.
        text: its value.

    Raises:
        UsageError: there is such a URL in the text.
    """
    if _SECRET.search(text):
        raise UsageError(
            f"{printable(name)} has credentials in a URL, which files of the run would show: set the "
            "variables of its client, such as AWS_SECRET_ACCESS_KEY or FSSPEC_SFTP_PASSWORD."
        )


_print: Callable[[str], None] = functools.partial(print, flush=True)


def print_line(line: str, write: Callable[[str], None] = _print) -> None:
    """Prints a line; if the output cannot be written, this and all later lines are dropped.

    Ctrl-C during `python -m ctl.main ... | tee log` ends `tee` first, the terminal of a run that ignores
    SIGHUP may be closed, and the disk of a log may be full. None of them must end the run, nor must a
    character that the encoding of the output does not have.

    Args:
        line: the line.
        write: writes it to sys.stdout.
    """
    write_text(printable(line), write)


def write_text(line: str, write: Callable[[str], None] = _print) -> None:
    """Prints a line as `print_line` does, with the control characters in it, such as those of colors."""
    try:
        try:
            write(line)
        except UnicodeEncodeError as error:
            write(line.encode(error.encoding, "backslashreplace").decode(error.encoding))
    except (OSError, ValueError):  # a ValueError if the stream is closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open until the process exits


def check_local(name: str, path: str | os.PathLike[str]) -> None:
    """Rejects a URL, such as gs://bucket/run, which would become a local folder named "gs:".

    Args:
        name: the flag, key or argument, for the message.
        path: its value. `pathlib` shortens :// to :/.

    Raises:
        UsageError: the path is a URL.
    """
    if is_url(path):
        raise UsageError(
            f"{name} is {path}, but ctl does not support URLs here: name a path of a file system, which "
            "may be a mounted bucket."
        )


def is_url(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL, such as gs://bucket/run."""
    return bool(re.match(r"[A-Za-z][\w+.-]*:/", str(path)))


@contextlib.contextmanager
def name_arguments() -> Iterator[None]:
    """Names the arguments of a user without a trainer in errors that name the methods of a trainer."""
    try:
        yield
    except UsageError as error:
        text = re.sub(r"build_(data|model|metrics)\w*(\(.*?\))? returned", r"\1 is", str(error))
        text = text.replace("per_example_loss", "loss_fn").replace("must return", "must be")
        text = text.replace("override forward", "pass forward")
        text = text.replace(", or remove eval from eval.splits", "")
        raise UsageError(text) from None


def closest(name: str, *known: Mapping[str, str] | Iterable[str], similarity: float = 0.6) -> str:
    """Returns the known name that is closest to an unknown one, or "" if none is similar.

    Args:
        name: the unknown name.
        *known: collections of known names; a mapping gives name -> how the message shows it. An
            equal name in any collection is preferred to a similar one, and earlier collections are
            preferred to later ones.
        similarity: of similar names, at least; 1 for equal ones.
    """
    tables = [{key.lower(): shown for key, shown in _shown(names).items()} for names in known]
    for table in tables:
        if name.lower() in table:
            return table[name.lower()]
    for table in tables:
        for key in difflib.get_close_matches(name.lower(), table, n=1, cutoff=similarity):
            return table[key]
    return ""


def did_you_mean(name: str, *known: Mapping[str, str] | Iterable[str]) -> str:
    """Returns the end of a message about an unknown name; `closest` has the arguments.

    Returns:
        ": did you mean X?", or, if no name is similar, ": expected one of X, Y." with the names of the
        first collection, or "" if it is empty.
    """
    similar = closest(name, *known)
    if similar:
        return f": did you mean {similar}?"
    # An empty name would not be seen.
    names = [shown or '""' for shown in _shown(known[0]).values()]
    if not names:
        return ""
    return f": expected {'one of ' * (len(names) > 1)}{', '.join(names)}."


def _shown(names: Mapping[str, str] | Iterable[str]) -> dict[str, str]:
    """Returns name -> how a message shows it."""
    return dict(names) if isinstance(names, Mapping) else {name: name for name in names}


def type_name(value: Any) -> str:
    """Returns the type of a value with its article, such as "a dict", a class with a fix, or "None"."""
    if isinstance(value, type):
        return f"the class {value.__name__} (call it: {value.__name__}())"
    name = type(value).__name__
    return "None" if value is None else f"a{'n' * (name[0].lower() in 'aeiou')} {name}"


def show_value(value: Any) -> str:
    """Returns the repr of a value; the name or the type of a value whose repr has an address."""
    if isinstance(getattr(value, "__name__", None), str):
        kinds = {"class": inspect.isclass(value), "module": inspect.ismodule(value)}
        kind = next((kind for kind, is_kind in kinds.items() if is_kind), "function")
        return f"the {kind} {value.__name__}"
    try:
        shown = repr(value)
    except Exception:  # an integer of thousands of digits, or a user's class with a broken __repr__
        return type_name(value)
    return type_name(value) if re.search(r" at 0x[0-9a-f]+>", shown) else shown


def align(rows: Iterable[Sequence[str]]) -> list[str]:
    """Formats the rows of a table as lines, with the cells of a column below each other."""
    columns = [
        [cell.ljust(max(map(len, cells))) for cell in cells] for cells in zip(*rows, strict=True)
    ]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def count(number: int, noun: str) -> str:
    """Returns a number with a noun, such as "2 replicas"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def list_some(names: Sequence[str]) -> str:
    """Returns the first names, separated by commas, and the number of the others."""
    more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
