"""ctl diff A B: lists what differs between two runs, or between two checkpoints.

    ctl diff runs/a runs/b
    ctl diff runs/a/checkpoints/ckpt-100 runs/b/checkpoints/ckpt-100

The exit code is 0 if nothing differs, 1 if something does, and 2 for a mistake of the user, such as two
runs without a common step.
"""

from collections.abc import Sequence
import os
import pathlib

from ctl.commands import run_comparison, run_files
from ctl.commands.parser import Parser
from ctl.commands.run_comparison import Section
from ctl.errors import UsageError, print_line
from ctl.loop.checkpoints.files import CheckpointFiles

_MAX_LINES = 10  # about variables
_FORM = "ctl diff A B, where each is the workdir of a run, or a checkpoint"


def main(arguments: Sequence[str]) -> int:
    """Prints what differs; returns 0 if nothing does, else 1.

    Raises:
        UsageError: an argument is wrong, a file is damaged, or the two have no result to compare.
    """
    parser = Parser("ctl diff", _FORM, str(__doc__).partition("\n")[0])
    parser.add_argument("a", metavar="A", help="the workdir of a run, or a checkpoint")
    parser.add_argument("b", metavar="B", nargs="?", help="what to compare it with")
    values = parser.parse_args(list(arguments))
    if values.b is None:
        raise UsageError("ctl diff needs two runs or checkpoints: ctl diff A B.")
    names = [values.a, values.b]
    for name in names:
        _check(name)
    sections = []
    if all((pathlib.Path(name) / "config.json").exists() for name in names):
        sections += run_comparison.compare_runs(*run_files.read_runs(names))
    sections.append(_compare_weights(*names))
    for section in sections:
        print_line(f"{section.name:<11} {section.summary}")
        for line in section.lines:
            print_line(f"  {line}")
    if not any(section.compared for section in sections):
        raise UsageError(
            f"No result of {values.a} and {values.b} was compared: they have neither records of metrics "
            "nor checkpoints of the same step. Train both up to the same step, or name two checkpoints."
        )
    return int(any(section.differs for section in sections))


def _check(name: str) -> None:
    path = pathlib.Path(name)
    index = pathlib.Path(f"{name}.index")
    if not path.exists() and not index.exists():
        raise UsageError(
            f"{name} does not exist: name a run's --workdir, or the files of a checkpoint without their "
            "ending, such as runs/mine/checkpoints/ckpt-500."
        )
    is_run = (path / "config.json").exists() or _checkpoints(name).steps()
    if not is_run and not index.exists():
        raise UsageError(
            f"{name} is neither the workdir of a run nor a checkpoint: name a run's --workdir, or the "
            "files of a checkpoint without their ending, such as runs/mine/checkpoints/ckpt-500."
        )


def _checkpoints(name: str) -> CheckpointFiles:
    """Returns the checkpoints of a workdir, or of a folder of checkpoints."""
    inner = pathlib.Path(name, "checkpoints")
    return CheckpointFiles(inner if inner.is_dir() else name)


def _compare_weights(a: str, b: str) -> Section:
    pairs = _pair_checkpoints(a, b)
    if not pairs:
        listed = [_list_steps(name) for name in (a, b)]
        steps = ", ".join(f"{name}: {text}" for name, text in zip((a, b), listed, strict=True))
        summary = f"not compared, since no step has two checkpoints ({steps})"
        return Section("weights", summary, differs=listed != ["none", "none"])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from ctl.commands import checkpoint_comparison

    same: list[str] = []
    for label, first, second in pairs:
        variables, lines = checkpoint_comparison.compare_checkpoints(first, second)
        if lines:
            before = f"the same {same[-1]}; " if same else ""
            differing = f"{len(lines)} of {variables} variables differ {label}"
            more = [f"and {len(lines) - _MAX_LINES} more"] * (len(lines) > _MAX_LINES)
            shown = (*lines[:_MAX_LINES], *more)
            return Section("weights", f"{before}{differing}", shown, differs=True, compared=True)
        same.append(label)
    return Section("weights", f"the same bits {', '.join(same)}", compared=True)


def _list_steps(name: str) -> str:
    return ", ".join(map(str, _checkpoints(name).steps())) or "none"


def _pair_checkpoints(a: str, b: str) -> list[tuple[str, str, str]]:
    """Returns a label and the paths of the checkpoints to compare, in the order of their steps."""
    folders = [os.path.isdir(name) for name in (a, b)]
    if all(folders):
        first, second = _checkpoints(a), _checkpoints(b)
        common = sorted({*first.steps()} & {*second.steps()})
        return [(f"at step {step}", first.path(step), second.path(step)) for step in common]
    paths: list[str] = []
    for name, is_folder in zip((a, b), folders, strict=True):
        steps = _checkpoints(name).steps() if is_folder else []
        if is_folder and not steps:
            return []
        paths.append(_checkpoints(name).path(steps[-1]) if is_folder else name)
    return [(f"between {paths[0]} and {paths[1]}", paths[0], paths[1])]
