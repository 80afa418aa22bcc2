"""Loads weights to start from: those of another run, without its slots and counters, or of a file."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import fnmatch
import functools
import glob
import os
import pathlib
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.built.inner_loop import step_of
from ctl.configs.values import is_weight_file
from ctl.data import description
from ctl.errors import UsageError, did_you_mean, list_some
from ctl.hardware.collectives import ProcessGroup
from ctl.loop import store
from ctl.loop.checkpoints import matching
from ctl.loop.checkpoints.files import find_files
from ctl.loop.checkpoints.weight_files import WeightFile
from ctl.trainer import StandardTrainer
from ctl.update.part import AVERAGES

_Pairs = list[tuple[matching.Variable, matching.Variable]]


@dataclasses.dataclass(frozen=True)
class LoadedWeights:
    """The weights that a model got from a checkpoint.

    Attributes:
        model: the attribute of the trainer that is the model, such as "teacher"; "" for its `model`.
        path: the checkpoint.
        names: the model's variables that were loaded.
        total: how many variables the model has.
        cast: the types that values were cast from, or "".
        averages: whether they are the averages of the other run's weights.
    """

    model: str
    path: str
    names: list[str]
    total: int
    cast: str
    averages: bool

    def __str__(self) -> str:
        cast = f", cast from {self.cast}" if self.cast else ""
        model = f" of {self.model}" if self.model else ""
        kind = "Averaged weights" if self.averages else "Weights"
        total = f"{self.total} variable{'s' * (self.total != 1)}"
        return (
            f"{kind} of {len(self.names)} of {total}{model} from {self.path}{cast}: "
            f"{list_some(self.names)}."
        )


@dataclasses.dataclass(frozen=True)
class _Request:
    """A model to load, and its settings in the config.

    Attributes:
        key: the config key, for messages.
        attribute: the same as `LoadedWeights.model`.
        model: the model.
        source: the value of the key: a workdir, a folder of checkpoints, a checkpoint, or a file of
            weights.
        patterns: patterns of the variables to load, or with ! of those not to load; none for all.
        averages: whether to load the averages of the weights.
        names: pattern of the model's names -> name in the file of weights.
        layout: the layout of the kernels in the file of weights.
    """

    key: str
    attribute: str
    model: tf_keras.Model
    source: str
    patterns: Sequence[str] = ()
    averages: bool = False
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layout: str = ""

    @functools.cached_property
    def local(self) -> str:
        """The path of `source`, which is fetched if it is a URL."""
        return store.fetch(self.source)


def check(trainer: StandardTrainer, init: Any, *, moved: pathlib.Path | None = None) -> None:
    """Checks, before anything is written, that `all_load` can load the weights.

    Args:
        trainer: its models get the weights.
        init: the section `init` of the config.
        moved: the folder that `--fresh` is going to move aside.

    Raises:
        UsageError: a checkpoint does not exist, or does not have the requested weights.
    """
    # Not collective: each process checks by itself, before the first collective call of the run.
    for request in _requests(trainer, init):
        path = _path(request, _latest_step(request.local))
        # The weights would be gone from that path by the time they are loaded.
        if moved and pathlib.Path(path).resolve().is_relative_to(moved.resolve()):
            raise UsageError(
                f"{request.key} is {request.source}, which --fresh moves aside: name another --workdir."
            )
        _read(request, path, values=False)


def describe_files(init: Any) -> dict[str, str]:
    """Returns the names and sizes of the files that `init` names, by the names of the models.

    Folders are left out, since the run in one may train on, and URLs, which are not read again.
    """
    sources = {"checkpoint": init.checkpoint, **init.models}
    files = {
        k: sorted(glob.glob(f"{glob.escape(v)}.data-*")) or [v] for k, v in sources.items() if v
    }
    return {k: description.describe_files(v) for k, v in files.items() if os.path.isfile(v[0])}


def all_load(
    trainer: StandardTrainer, init: Any, processes: ProcessGroup | None = None
) -> list[LoadedWeights]:
    """Loads the weights that the config's `init` names; every process must call it.

    Args:
        trainer: its models get the weights, before the first step.
        init: the section `init` of the config.
        processes: the processes of the run; by default this one only.

    Returns:
        What was loaded, one entry per model.

    Raises:
        UsageError: a checkpoint does not exist, or does not have the requested weights.
    """
    values, loaded = [], []
    for request in _requests(trainer, init):
        # The other run may save meanwhile, so that the processes see different newest checkpoints.
        latest = _latest_step(request.local)
        path = _path(request, (processes or ProcessGroup()).broadcast_from_chief(latest))
        pairs, total, read = _read(request, path)
        values += read  # all of them before a variable changes
        cast = " and ".join(sorted({b.dtype.name for a, b in pairs if b.dtype != a.dtype}))
        names = [variable.name for variable, _ in pairs]
        loaded.append(LoadedWeights(request.attribute, path, names, total, cast, request.averages))
    # In the scope, a value is assigned to the copies on all replicas.
    with trainer.strategy.scope():
        for variable, value in values:
            variable.source.assign(tf.cast(value, variable.dtype))
    if loaded:
        step_of(trainer).restart()
    return loaded


def record(loaded: Sequence[LoadedWeights]) -> dict[str, Any]:
    """Returns the fields of the event in events.jsonl."""
    fields = {each.model: {"weights_from": each.path, "weights": each.names} for each in loaded}
    result: dict[str, Any] = fields.pop("", {})
    result |= {"averages": True} if any(each.averages for each in loaded) else {}
    return {**result, "models": fields} if fields else result


def _requests(trainer: StandardTrainer, init: Any) -> list[_Request]:
    """Returns a request for each model that the config names weights for.

    Raises:
        UsageError: `init.models` names no model, or one that is not built.
    """
    requests = []
    if init.checkpoint:
        names, source = init.variables, init.checkpoint
        requests = [
            _Request(
                "init.checkpoint", "", trainer.model, source, names, init.averages,
                dict(init.names), init.layout,
            )
        ]  # fmt: skip
    models = step_of(trainer).attributes.named_models()
    # A model that is an attribute has the name "teacher/0", and one in a list "members/1".
    models = {name.removesuffix("/0"): model for name, model in models.items() if name}
    for name, source in init.models.items():
        if name not in models:
            hint = did_you_mean(name, list(models))
            hint = hint or ": it has only `model`, which init.checkpoint loads."
            raise UsageError(f"init.models has {name!r}, which is no model of the trainer{hint}")
        if not models[name].built:
            raise UsageError(
                f"init.models has {name!r}, but self.{name} is not built: build it in the constructor, "
                "such as by its build(input_shape)."
            )
        key = f"init.models.{name}"
        requests.append(_Request(key, name, models[name], source, (), init.averages))
    return requests


def _read(
    request: _Request, path: str, *, values: bool = True
) -> tuple[_Pairs, int, list[tuple[matching.Variable, Any]]]:
    """Matches the requested variables with a checkpoint; reads their values, if that is required."""
    with _reading(request):
        content = _open(path)
        pairs, total = _match(content, request)
        return pairs, total, [(a, content.value(b)) for a, b in pairs if values]


def describe(trainer: StandardTrainer, init: Any) -> list[str]:
    """Lists the weights that each variable would get, also if they do not match; loads nothing."""
    lines = []
    for request in _requests(trainer, init):
        path = _path(request, _latest_step(request.local))
        with _reading(request):
            content = _open(path)
            comparison, variables = _compare(content, request)
        sources = {id(v.source): "missing" for v in comparison.missing}
        for a, b in (*comparison.pairs, *comparison.mismatches):
            other = f", cast from {b.dtype.name}" if a.dtype != b.dtype else ""
            other = other if a.same_shape(b) else f" {list(b.shape)}, another shape"
            sources[id(a.source)] = content.name_of(b) + other
        prefix = f"{request.attribute}/" if request.attribute else ""
        for v in variables:
            source = sources.get(id(v.source), "not loaded (init.variables)")
            lines.append(f"{prefix}{v.name} {list(v.shape)} <- {source}")
        if comparison.unused:
            lines.append(f"not used: {list_some([v.name for v in comparison.unused])}")
    return lines


@contextlib.contextmanager
def _reading(request: _Request) -> Iterator[None]:
    """Reports a file that cannot be read in one line."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, tf.errors.OpError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{request.key} is {request.source}, which cannot be read ({reason}): name another "
            "checkpoint."
        ) from None


def _open(path: str) -> matching.CheckpointContent | WeightFile:
    return WeightFile(path) if is_weight_file(path) else matching.CheckpointContent(path)


def _latest_step(name: str) -> int:
    """Returns the step of the newest complete checkpoint in a folder; 0 if there is none."""
    return max(find_files(name).steps(), default=0) if os.path.isdir(name) else 0


def _path(request: _Request, step: int) -> str:
    """Returns the path of the checkpoint that a key names; `step` selects one in a folder."""
    name = request.local
    if is_weight_file(name) and os.path.isfile(name):
        return name
    if not os.path.isdir(name):  # the prefix of a checkpoint's files
        if not os.path.isfile(f"{name}.index"):
            raise UsageError(
                f"{request.key} is {request.source}, which does not exist: name a run's workdir, its "
                "folder of checkpoints, a checkpoint in it, such as runs/mine/checkpoints/ckpt-500, or "
                "a file of weights."
            )
        return name
    if not step:
        raise UsageError(
            f"{request.key} is {request.source}, which has no complete checkpoint: name another run, or "
            "train that one first."
        )
    return find_files(name).path(step)


def _compare(
    content: matching.CheckpointContent | WeightFile, request: _Request
) -> tuple[matching.Comparison, list[matching.Variable]]:
    """Compares the requested variables with those of a checkpoint; also returns all of the model's."""
    variables = matching.list_variables(request.model)
    requested = _filter(variables, request.patterns)
    if isinstance(content, WeightFile):
        found = content.match(requested, request.model, names=request.names, layout=request.layout)
        used = {v.node for v in found}
        unused = [v for v in content.variables if v.node not in used]
        comparison = matching.compare(requested, found, {})
        return dataclasses.replace(comparison, unused=unused), variables
    places = content.places(tf.train.Checkpoint(model=request.model))
    saved = content.variables_of("model")
    if request.attribute:
        # By place: Keras continues the layer numbers of the first model in the second one.
        by_node = {id(places[v.node]): v for v in saved if v.node in places}
        saved = [
            dataclasses.replace(by_node[id(v.source)], name=v.name)
            for v in variables
            if id(v.source) in by_node
        ]
    return matching.compare(requested, saved, places), variables


def _match(
    content: matching.CheckpointContent | WeightFile, request: _Request
) -> tuple[_Pairs, int]:
    """Matches the requested variables with the `model` in a checkpoint.

    Returns:
        Pairs (the model's variable, the checkpoint's), and the number of variables of the model.
    """
    comparison, variables = _compare(content, request)
    pairs, shapes = list(comparison.pairs), []
    for a, b in comparison.mismatches:
        if a.same_shape(b):  # with another type, which is cast
            pairs.append((a, b))
        else:
            shapes.append(f"{a.name} is {list(a.shape)}, but {list(b.shape)} in the checkpoint")
    missing = [v.name for v in comparison.missing]
    reasons = [f"no {list_some(missing)}"] * bool(missing) + [list_some(shapes)] * bool(shapes)
    if reasons:
        fix = "name what to load by init.variables, or another checkpoint"
        if isinstance(content, WeightFile):
            reasons += [f"it also has {list_some([v.name for v in comparison.unused])}"]
            fix = (
                "map names by init.names, or leave variables out by init.variables (--mode=explain)"
            )
        if request.attribute:
            fix = "build the same model as that run, or name another checkpoint"
        raise UsageError(
            f"{request.key} is {request.source}, which does not match the model "
            f"({'; '.join(reasons)}): {fix}."
        )
    if request.averages:
        if isinstance(content, WeightFile):
            raise UsageError(
                f"init.averages is set, but {request.key} is {request.source}, which has no averages: "
                "set init.averages=False."
            )
        pairs = _replace_by_averages(content, pairs, request)
    return pairs, len(variables)


def _replace_by_averages(
    content: matching.CheckpointContent, pairs: _Pairs, request: _Request
) -> _Pairs:
    """Replaces the weights of a checkpoint by their averages; other variables have none."""
    averages = content.variables_of(AVERAGES)
    # The names of the other run: `pairs` may have the names of this one.
    names = {v.node: v.name for v in content.variables_of("model")}
    result = []
    for variable, saved in pairs:
        name = names[saved.node]
        matches = [v for v in averages if v.name == f"{AVERAGES}/{name}" and v.matches(saved)]
        if saved.dtype.is_floating and len(matches) != 1:
            shown = (
                f"{len(matches)} averages of {name}" if averages else "no averages of the weights"
            )
            raise UsageError(
                f"init.averages is set, but {request.key} is {request.source}, which has {shown}: "
                "set init.averages=False, or name another run."
            )
        result.append((variable, matches[0] if saved.dtype.is_floating else saved))
    return result


def _filter(variables: list[matching.Variable], patterns: Sequence[str]) -> list[matching.Variable]:
    """Returns the variables that match a pattern; all if there are no patterns."""
    # A pattern without a match is a typing error, which would leave random weights unnoticed.
    all_names = [v.name for v in variables]
    matches = {p: fnmatch.filter(all_names, p.removeprefix("!")) for p in patterns}
    for pattern, names in matches.items():
        if not names:
            raise UsageError(
                f"init.variables has {pattern!r}, which no variable of the model matches: its "
                f"variables are {list_some([variable.name for variable in variables])}."
            )
    left_out = {name for p, names in matches.items() if p.startswith("!") for name in names}
    wanted = [names for p, names in matches.items() if not p.startswith("!")]
    chosen = [v for v in variables if not wanted or any(v.name in names for names in wanted)]
    return [v for v in chosen if v.name not in left_out]
