"""Mixes several sources in fixed proportions.

A table with a period of M rows names the source of each row of the training stream. Source s occurs in
it exactly m_s times, so that every M consecutive rows have the exact proportions. In the table, the
j-th of the m_s rows of a source is at a random place of the j-th of m_s equal parts (stratified
sampling), so every shorter part of the stream is close to the proportions, too. The rows of a source
are its own endless stream: one permutation of all its examples per epoch.
"""

from collections.abc import Callable, Mapping
import copy
import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf

from ctl import errors
from ctl.data import sampler
from ctl.data.autograph import convert, traced
from ctl.data.elements import name_features, source_spec
from ctl.data.features import flatten_features
from ctl.data.source import Batch, RowSource, Source
from ctl.errors import UsageError

_MAX_EXACT_PERIOD = 10_000
_PERIOD = 2**16  # for proportions without a common denominator up to _MAX_EXACT_PERIOD
_MIN_PERIOD = 2**12  # shorter exact periods are multiplied, so that the order repeats less often


def mixture(sources: Mapping[str, tuple[Source, float]]) -> "Mixture":
    """Mixes the examples of several sources in fixed proportions.

        ctl.data.mixture({"books": (books, 0.7), "web": (web, 0.3)})

    The source of a row of a step, and the example that it gives, are functions of the run's seed and
    the step. A source is read without replacement in each of its own epochs; a small source has
    more epochs than a large one. The weights are divided by their sum. If they are multiples of
    1 / M for some M up to 10,000, the proportions are exact; otherwise they are rounded to
    multiples of 1 / 65,536.

    A mixture, and so its epoch, is as long as all its sources together. An evaluation reads every
    example of every source once, without weights.

    Args:
        sources: name -> (source, weight). All sources have the same features.

    Raises:
        UsageError: a weight is not positive, or a source has other features or no examples.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise UsageError(
            "ctl.data.mixture requires a dict of at least one source, {name: (source, weight)}."
        )
    for name, value in sources.items():
        _check_entry(name, value)
    specs = {name: source_spec(source) for name, (source, _) in sources.items()}
    first = next(iter(specs))
    for name, spec in specs.items():
        if spec != specs[first]:
            raise UsageError(
                f"The sources of ctl.data.mixture must have the same features, but {name!r} has "
                f"{_describe(spec)}, and {first!r} has {_describe(specs[first])}."
            )
    counts = _rows_per_period({name: float(weight) for name, (_, weight) in sources.items()})
    examples = {name: source for name, (source, _) in sources.items()}
    read_specs = [_read_spec(source) for source in examples.values()]
    same_rows = read_specs[0] is not None and all(spec == read_specs[0] for spec in read_specs)
    return (RowMixture if same_rows else Mixture)(examples, counts)


class Mixture(Source):
    """Several sources, whose examples are numbered one source after the other.

    Args:
        sources: name -> source.
        rows: how many rows of a period each source gives.
    """

    def __init__(self, sources: dict[str, Source], rows: list[int]):
        self._sources, self.inner_sources = sources, tuple(sources.values())
        self._rows = rows
        sizes = [len(source) for source in sources.values()]
        self._firsts = np.cumsum([0, *sizes]).tolist()
        self._tables = functools.cache(self._make_tables)
        row_bytes = [source.row_bytes for source in sources.values()]
        known = [size for size in row_bytes if size is not None]
        self.row_bytes = max(known) if len(known) == len(row_bytes) else None

    def __len__(self) -> int:
        """The number of examples of all sources."""
        return int(self._firsts[-1])

    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads examples, the rows of each source in one call."""
        return self._collect(indexes, lambda source: source.gather)

    def training_order(
        self, positions: tf.Tensor, *, batch_size: int, seed: int, span: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the examples at positions of the training stream; see the module."""
        table, before = self._tables(seed)
        period, place = positions // len(table), positions % len(table)
        chosen = tf.gather(tf.constant(table), place)
        earlier = tf.gather(tf.constant(before), place)  # [rows, sources], in the period
        indexes, seeds = tf.zeros_like(positions), tf.zeros([tf.size(positions), 2], tf.int64)
        for number, (name, source) in enumerate(self._sources.items()):
            # The position in the stream of the source: how many rows it has given before.
            own = period * self._rows[number] + earlier[:, number]
            order = {"seed": sampler.derive_seed(seed, f"source {name}"), "span": span}
            index = source.order(own, **order) + self._firsts[number]
            is_chosen = chosen == number
            indexes = tf.where(is_chosen, index, indexes)
            own_seeds = sampler.augmentation_seeds(own, index, count=len(source), **order)
            seeds = tf.where(is_chosen[:, tf.newaxis], own_seeds, seeds)
        return indexes, seeds

    def count_examples(self, positions: int, *, seed: int) -> dict[str, dict[str, float]]:
        """Counts the examples that each source gives to the first rows of the training stream."""
        table, before = self._tables(seed)
        period, place = divmod(positions, len(table))
        examples = period * np.array(self._rows) + before[place]
        return {
            name: {"examples": int(count), "epochs": int(count) / len(source)}
            for (name, source), count in zip(self._sources.items(), examples, strict=True)
        }

    def without_python(self) -> Source:
        """Returns the same mixture, read by TensorFlow ops alone."""
        mixture = copy.copy(self)
        mixture._sources = {name: s.without_python() for name, s in self._sources.items()}
        return mixture

    def _collect(
        self, indexes: tf.Tensor, reader: Callable[[Any], Callable[[tf.Tensor], Any]]
    ) -> Any:
        """Calls a function of each source for its rows, and puts these into the order of `indexes`."""
        places, parts = [], []
        for number, source in enumerate(self._sources.values()):
            first, end = self._firsts[number], self._firsts[number + 1]
            where = tf.where((indexes >= first) & (indexes < end))[:, 0]
            rows = tf.size(where)
            # A source may not be able to read no row, so it then reads its first one.
            read = tf.cond(
                rows > 0,
                lambda where=where, first=first: tf.gather(indexes, where) - first,
                lambda: tf.zeros([1], tf.int64),
            )
            batch = reader(source)(read)
            parts.append(tf.nest.map_structure(lambda value, rows=rows: value[:rows], batch))
            places.append(tf.cast(where, tf.int32))
        return tf.nest.map_structure(lambda *values: tf.dynamic_stitch(places, values), *parts)

    def _make_tables(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each row of a period, and the earlier rows of each source in it."""
        generator = np.random.Philox(key=sampler.derive_seed(seed, "mixture"))
        places = []
        for rows in self._rows:
            jitter = (generator.random_raw(rows) >> np.uint64(11)) * 2.0**-53  # in [0, 1)
            places.append((np.arange(rows) + jitter) / rows)
        numbers = np.repeat(np.arange(len(places)), self._rows)
        table = numbers[np.argsort(np.concatenate(places), kind="stable")]
        is_source = table[:, np.newaxis] == np.arange(len(places))
        before = np.cumsum(is_source, axis=0) - is_source
        return table.astype(np.int64), before.astype(np.int64)


class RowMixture(Mixture, RowSource):
    """Several `RowSource`s with rows of the same spec, which are parsed one by one, in parallel."""

    def read(self, indexes: tf.Tensor) -> Any:
        """Reads the number of the source of each row, and the row that its `parse` takes."""
        number = tf.searchsorted(
            tf.constant(self._firsts[1:], tf.int64), indexes, side="right", out_type=tf.int32
        )
        return number, self._collect(indexes, lambda source: source.read)

    def parse(self, row: Any) -> Batch:
        """Parses a row by the function of its source."""
        number, value = row
        sources: Any = self._sources.values()

        def parse_by(source: RowSource) -> Batch:
            return name_features(convert(source.parse)(value))

        return tf.switch_case(number, [functools.partial(parse_by, source) for source in sources])


def _read_spec(source: Source) -> Any:
    """Returns the spec of the rows that a `RowSource` reads; None for another source."""
    if not isinstance(source, RowSource):
        return None
    read = traced(source.read)
    outputs = read.get_concrete_function(tf.TensorSpec([None], tf.int64)).structured_outputs
    return tf.nest.map_structure(tf.type_spec_from_value, outputs)


def _rows_per_period(weights: dict[str, float]) -> list[int]:
    """Returns how many rows of a period each source gives."""
    shares = np.array(list(weights.values())) / math.fsum(weights.values())
    periods = np.arange(1, _MAX_EXACT_PERIOD + 1)[:, np.newaxis]
    rows = np.rint(periods * shares)
    is_exact = ((np.abs(rows - periods * shares) < 1e-12 * periods) & (rows > 0)).all(axis=1)
    if is_exact.any():
        exact = rows[np.argmax(is_exact)].astype(int)
        return (exact * math.ceil(_MIN_PERIOD / exact.sum())).tolist()
    rounded = np.floor(_PERIOD * shares).astype(int)
    # The largest remainders are rounded up.
    missing = _PERIOD - int(rounded.sum())
    rounded[np.argsort(rounded - _PERIOD * shares, kind="stable")[:missing]] += 1
    for name, count in zip(weights, rounded, strict=True):
        if count == 0:
            raise UsageError(
                f"ctl.data.mixture got weight {weights[name]} for {name!r}, but the share of a source "
                f"must be at least 1 / {_PERIOD:,}."
            )
    return rounded.tolist()


def _check_entry(name: Any, value: Any) -> None:
    """Raises UsageError if an entry of the dict is not (source, positive weight)."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], Source):
        raise UsageError(
            f"ctl.data.mixture got {errors.type_name(value)} for {name!r}, but requires (source, "
            "weight), where the source is a ctl.data.Source."
        )
    source, weight = value
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight <= 0:
        raise UsageError(
            f"ctl.data.mixture got weight {weight!r} for {name!r}, but requires a positive number."
        )
    if source.has_own_order:
        raise UsageError(
            f"ctl.data.mixture got a mixture or ctl.data.bucketed for {name!r}, which choose their own "
            "examples: pass all sources to one mixture, or use ctl.data.packed."
        )
    if not len(source):
        raise UsageError(
            f"The source {name!r} of ctl.data.mixture has no examples, but must have at least one."
        )


def _describe(spec: dict[str, tf.TensorSpec]) -> str:
    return ", ".join(
        f"{name} {s.dtype.name} {s.shape[1:]}" for name, s in sorted(flatten_features(spec).items())
    )
