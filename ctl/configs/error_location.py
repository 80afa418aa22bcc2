"""Describes an error in a user's code by one line with the user's own file and line."""

from collections.abc import Callable, Iterator
import inspect
import os
import pathlib
import re
import sysconfig
import traceback
from typing import Any

from ctl import errors
from ctl.errors import UsageError

_CTL = str(pathlib.Path(__file__).resolve().parent.parent) + os.sep
_REPLACED = os.path.join(_CTL, "private", "replaced.py")
_STANDARD_LIBRARY = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_GENERATED = "__autograph_generated_file"  # AutoGraph runs a translation of the user's function
_MAX_MESSAGE = 400  # characters; tf.debugging.assert_* prints tensors

# Parts of TensorFlow's and tf_keras' messages. If another version changes them, the line that is
# printed is less helpful, but still one line.
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
_HEADER = re.compile(
    r"Graph execution error:|Detected at node|<stack traces unavailable>|in user code:"
    r"|Exception encountered when calling|Traceback \(most recent|\[\[|\d+ root error|\(\d+\) "
)
_LAYER = re.compile(r"Exception encountered when calling (?:layer )?[\"']([^\"']+)[\"']")
_NOISE = re.compile(
    r"\{\{function_node \S+\}\} "
    r"|Error in user-defined function passed to \S+ transformation with iterator: \S+: "
    r"| ?\[Op:\w+\]( name: \S*)?"
)
_STYLES = re.compile(r"\x1b\[[\d;]*m")  # Keras 3 prints bold text


def error_location(error: BaseException, file: pathlib.Path | None = None) -> str:
    """Describes an error in a user's file by one line: "file:line: Type: message".

    The line is the innermost one outside of ctl, Python's library and the installed packages.

    Args:
        error: the exception. TensorFlow may have raised it while it traced or ran the user's code.
        file: the file that was being read, which is named if the line is not known.
    """
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{_relative(error.filename)}:{error.lineno}"
        return f"{place}: {type(error).__name__}: {error.msg}"
    place = user_line(error) or (_relative(str(file)) if file else "")
    return f"{place}: {describe(error)}" if place else describe(error)


def user_line(error: BaseException) -> str | None:
    """Returns "file:line" of the innermost line of the user's code that an error passed through.

    Returns:
        None if the error passed through no code of the user, other than what called ctl.
    """
    lines = map(user_frame, _stacks(error))
    return next((line for line in lines if line is not None), None)


def user_frame(frames: list[tuple[str, int]]) -> str | None:
    """Returns "file:line" of the innermost frame in the user's code that ctl called; None without one.

    Args:
        frames: (file, line) of a stack, outermost first.
    """
    # What ctl replaces in TensorFlow passes calls of the user's code on.
    ctl = [i for i, (name, _) in enumerate(frames) if name.startswith(_CTL) and name != _REPLACED]
    called_by_ctl = frames[ctl[0] + 1 :] if ctl else frames
    lines = [(name, line) for name, line in called_by_ctl if not _is_library(name)]
    return f"{_relative(lines[-1][0])}:{lines[-1][1]}" if lines else None


def name_function(function: Callable[..., Any]) -> str:
    """Returns the name of a user's function, with its file and line if it is written in Python."""
    function = inspect.unwrap(getattr(function, "python_function", function))
    code = getattr(function, "__code__", None)
    if code is None:  # an object that can be called, such as a loss of Keras
        return type(function).__name__
    return f"{function.__name__} ({_relative(code.co_filename)}:{code.co_firstlineno})"


def raised_by_library(error: BaseException) -> bool:
    """Returns whether an installed package raised an error, and not ctl or Python's library."""
    # TensorFlow removes its own frames from a traceback, but not from the stack of AutoGraph.
    frames = next(_stacks(error), [])
    return bool(frames) and any(part in frames[-1][0] for part in _INSTALLED)


def describe(error: BaseException) -> str:
    """Describes an error by one line, "Type: message", without the stacks in TensorFlow's messages."""
    if isinstance(error, UsageError):
        return str(error)
    feature_error = _describe_missing_feature(error)
    if feature_error:
        return feature_error
    metadata = getattr(error, "ag_error_metadata", None)
    if metadata:  # AutoGraph replaces the exception; this is the message of the original one
        name, _, text = metadata.cause_message.partition(": ")
    else:
        name = type(error).__name__
        try:
            text = str(error)
        except Exception:  # the user's own exception class may have a broken __str__
            text = ""
    # TensorFlow lists the labels of the complete batch.
    message = _LABELS.sub(lambda m: f"{m[1]} and {len(m[2].split())} more", _main_line(text))
    if re.match(r"\w+(Error|Exception): ", message):  # tf_keras repeats the type in its message
        return message + _hint(message)
    return f"{name}: {message}{_hint(message)}" if message else name


_LABELS = re.compile(r"(Label values:(?: -?\d+){8})((?: -?\d+)+)")
# How TensorFlow names both precisions.
_PRECISIONS = (("float32", "float64"), ("float tensor", "double tensor"))


def _hint(message: str) -> str:
    """Returns what to do if an op got numbers of two precisions; "" for another message."""
    if not any(one in message and two in message for one, two in _PRECISIONS):
        return ""
    return (
        " (if a feature is float64, as numbers of numpy are, store it as float32, or cast it with "
        "tf.cast(x, outputs.dtype))"
    )


def _describe_missing_feature(error: BaseException) -> str | None:
    """Describes a KeyError of a batch, which names a feature that the batch does not have."""
    # AutoGraph replaces the exception once per enclosing tf.function, and keeps the original message.
    metadata = getattr(error, "ag_error_metadata", None)
    name, _, key = metadata.cause_message.partition(": ") if metadata else ("", "", "")
    while getattr(error.__context__, "ag_error_metadata", None):
        error = error.__context__  # type: ignore[assignment]
    if isinstance(error, KeyError) and error.args and not metadata:
        name, key = "KeyError", repr(error.args[0])
    trace = error.__traceback__
    if name != "KeyError" or trace is None:
        return None
    while trace.tb_next:
        trace = trace.tb_next
    source = traceback.extract_tb(trace)[-1].line or ""
    for variable, value in trace.tb_frame.f_locals.items():
        is_batch = isinstance(value, dict) and all(hasattr(v, "shape") for v in value.values())
        # batch["key"], which AutoGraph translates to ag__.ld(batch)['key']
        read = rf"\b{variable}\)?\[[\"']{re.escape(key[1:-1])}[\"']\]"
        if is_batch and value and re.search(read, source):
            return f"The batch has no {key}{errors.did_you_mean(key[1:-1], list(value))}"
    return None


def _stacks(error: BaseException) -> Iterator[list[tuple[str, int]]]:
    """Yields stacks as (file, line), outermost first; the most informative stack first."""
    metadata = getattr(error, "ag_error_metadata", None)
    if metadata:  # in the user's own file, not in its translation
        stack = reversed(metadata.translated_stack)
        yield [(frame.filename, frame.lineno) for frame in stack]
    # An error of a running graph lists where the user's code created the op.
    if hasattr(error, "node_def"):
        yield [(name, int(line)) for name, line in _FRAME.findall(str(error))]
    frames = traceback.extract_tb(error.__traceback__)
    yield [(frame.filename, frame.lineno or 0) for frame in frames]


def _main_line(text: str) -> str:
    """Returns the first line of a message that is neither a header nor a part of a stack."""
    text = _STYLES.sub("", text)
    layer = _LAYER.findall(text)
    frame_indent: int | None = None
    for line in text.splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        # A source line follows the line of its frame and is indented further.
        is_source = frame_indent is not None and indent > frame_indent
        if not stripped or is_source or _HEADER.match(stripped):
            continue
        if _FRAME.match(line):
            frame_indent = indent
            continue
        message = _NOISE.sub("", stripped)
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]} ..."
        return f'{message} (in layer "{layer[-1]}")' if layer else message
    return ""


def _is_library(filename: str) -> bool:
    if _GENERATED in filename or filename.startswith(("<", _CTL, *_STANDARD_LIBRARY)):
        return True
    return any(part in filename for part in _INSTALLED)


def _relative(filename: str) -> str:
    return filename.removeprefix(os.getcwd() + os.sep)
