"""Reports errors of a running input pipeline in one line."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import re
from typing import Any

import tensorflow as tf

from ctl.configs.error_location import describe
from ctl.data.features import flat_names, flatten_features
from ctl.data.source import Source
from ctl.errors import Failure, UsageError

CHANGED_LENGTHS = "some sequences have other lengths than when they were grouped"
# TensorFlow's messages; if another version changes them, its own error is reported.
_SHAPES = re.compile(
    r"Cannot batch tensors with different shapes in component (?P<component>\d+)\. First element had "
    r"shape (?P<one>\[[\d,]*\]) and element \d+ had shape (?P<other>\[[\d,]*\])"
    r"|Cannot add tensor to the batch: .* Shapes are: \[tensor\]: (?P<added>\[[\d,]*\]), "
    r"\[batch\]: (?P<batch>\[[\d,]*\])"
)


class DamagedRecord(Exception):
    """A record whose checksum is wrong. TensorFlow passes on only the message."""


# A Python exception in an input pipeline arrives as an error that quotes it.
_DAMAGED_RECORD = re.compile(rf"{DamagedRecord.__name__}: (?P<problem>.*)\.")
_OWN_ERROR = re.compile(rf"\b(?:{UsageError.__name__}|{Failure.__name__}): (?P<line>.*)")


# Of tf.io.parse_example and tf.io.parse_single_example.
_SCHEMA = (
    r"Key: (?P<name>[^,\n]+?)[.,].* Data types don't match\. Data type: (?P<found>\w+) but expected "
    r"type: (?P<wanted>\w+)",
    r"Key: (?P<name>[^,\n]+?)[.,].* (?:Number of \w+ values != expected|Can't parse serialized "
    r"Example)",
    r"Feature: (?P<name>[^(\n]+?) \(data type: \w+\) is required but could not be (?P<missing>found)",
)


@contextlib.contextmanager
def report_data_errors(
    kind: str,
    read_spec: Callable[[], Mapping[str, Any]],
    find_unreadable: Callable[[], str] = lambda: "",
) -> Iterator[None]:
    """Turns TensorFlow's errors about corrupt or ragged data into a UsageError, as `explain` does."""
    try:
        yield
    except tf.errors.OpError as error:
        explain(error, kind, read_spec, find_unreadable)
        raise


def explain(
    error: tf.errors.OpError,
    kind: str,
    read_spec: Callable[[], Mapping[str, Any]],
    find_unreadable: Callable[[], str],
    find_files: Callable[[], str] = lambda: "",
) -> None:
    """Raises a UsageError of one line for TensorFlow's error about corrupt or ragged data.

    Args:
        error: TensorFlow's error; of one that is not about the data, nothing is raised.
        kind: "training" or "evaluation", for the message.
        read_spec: returns the spec of a batch, whose keys name the features.
        find_unreadable: returns the name of the example that cannot be decoded, if there is one.
        find_files: returns the names of the files that are read, if they are known.

    Raises:
        UsageError: an example or a file is corrupt, or examples of different shapes cannot be batched.
        Failure: a file cannot be read.
    """
    if isinstance(error, tf.errors.DataLossError):
        raise UsageError(
            f"The {kind} data is corrupt ({describe_corruption(error)}): write the file again."
        ) from None
    own = _OWN_ERROR.search(error.message)
    if isinstance(error, tf.errors.UnknownError):
        damaged = _DAMAGED_RECORD.search(error.message)
        if own:
            raise Failure(own["line"]) from None
        if damaged:
            raise UsageError(
                f"The {kind} data is corrupt: {damaged['problem']}: write the file again, or set "
                "skip_damaged=True."
            ) from None
    if not isinstance(error, tf.errors.InvalidArgumentError):
        return
    if own:
        raise UsageError(own["line"]) from None
    if CHANGED_LENGTHS in error.message:
        raise UsageError(
            f"The {kind} data has changed: {CHANGED_LENGTHS}. Remove the file of lengths, and "
            "make sure that reading an example is deterministic."
        ) from None
    shapes = _SHAPES.search(error.message)
    if shapes:
        one, other = shapes["one"] or shapes["batch"], shapes["other"] or shapes["added"]
        raise UsageError(
            f"{_find_feature(read_spec(), shapes['component'])} has shape {one} in one {kind} example "
            f"and {other} in another: pad or "
            "crop the examples to one shape in the dataset (tf.pad, tf.image.resize), or return "
            "ctl.data.GlobalBatches(dataset.padded_batch(...))."
        ) from None
    example = find_unreadable()
    schema = next(filter(None, (re.search(each, error.message) for each in _SCHEMA)), None)
    if schema:
        problem = _describe_schema(schema.groupdict(), example or "an example")
        place = find_files() or f"The {kind} data"
        raise UsageError(f"{place}: the feature {problem}: correct the schema.") from error
    if example:
        line = f"{example} cannot be read ({describe(error)}): replace it."
        raise UsageError(line) from error


def _describe_schema(parts: Mapping[str, str], example: str) -> str:
    """Describes a feature that is not as in the schema, from the parts of TensorFlow's message."""
    name, types = parts["name"], {"float": "float32"}
    if "found" in parts:
        found, wanted = (types.get(parts[key], parts[key]) for key in ("found", "wanted"))
        return f"{name} is {found} in the records and {wanted} in the schema"
    if "missing" in parts:
        return f"{name} is in the schema and not in {example}"
    return f"{name} has another length in {example} than in the schema"


def find_unreadable(source: Source, indexes: Iterable[int]) -> str:
    """Returns the first of these examples of a source that cannot be read; "" if all can be."""
    for index in indexes:
        if index >= len(source):
            break
        try:
            source.gather(tf.constant([index], tf.int64))
        except tf.errors.InvalidArgumentError:
            has_files = len(source.files) == len(source)
            return source.files[index] if has_files else f"example {index}"
    return ""


def _find_feature(spec: Mapping[str, Any], component: str | None) -> str:
    """Returns the name of the feature whose shapes differ, or the names that it may be."""
    if component is not None:
        return flat_names(spec)[int(component)]  # tf.data orders the features by their names
    variable = [name for name, s in flatten_features(spec).items() if None in s.shape[1:].as_list()]
    return " or ".join(variable)


def describe_corruption(error: tf.errors.DataLossError) -> str:
    """Extracts what is corrupt from TensorFlow's message, which is mostly a stack trace."""
    match = re.search(r"(corrupted|truncated) record at \d+", error.message)
    return match[0] if match else error.message.strip().splitlines()[-1]
