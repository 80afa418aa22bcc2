"""Measures the share of a run's wall time that was training."""

from collections.abc import Iterable, Mapping
import pathlib
from typing import Any

from ctl.loop.actions.action import LoopAction
from ctl.loop.json_files import read_lines

_BEGINNINGS = ("start", "resume")
_ENDINGS = ("end", "stop")
# The activities of a process; the rest of its time is "other".
_ACTIVITIES = ("steps", "evaluation", "saving", "starting", "compiling")

_NUMBER = int | float
_TYPES = dict(event=str, time=_NUMBER, step=int)

Event = Mapping[str, Any]


class Goodput(LoopAction):
    """Records what a killed process lost, and how the run used the time of all its processes."""

    def start(self) -> dict[str, Any]:
        """Returns what the last process lost, if it was killed."""
        controller, workdir = self.controller, self.controller.workdir
        return find_lost(workdir, controller.step) if workdir and controller.is_chief else {}

    def result(self) -> dict[str, Any]:
        """Returns the shares of the activities."""
        controller, workdir = self.controller, self.controller.workdir
        if not workdir or not controller.is_chief:
            return {}
        events = read_lines(workdir / "events.jsonl", **_TYPES)
        return {"goodput": measure_goodput(events, controller.reporter.seconds())}


def find_lost(workdir: pathlib.Path, step: int) -> dict[str, float]:
    """Returns what a killed run lost after the checkpoint from which it is resumed.

    Args:
        workdir: the folder of the run, as the killed process left it.
        step: the step of the checkpoint; 0 if the run starts again.

    Returns:
        `lost_steps`, which are computed again, and `lost_seconds`, the time since the checkpoint; or {}
        if the run was not killed.
    """
    events = read_lines(workdir / "events.jsonl", **_TYPES)
    first = max((i for i, e in enumerate(events) if e["event"] in _BEGINNINGS), default=None)
    if first is None or any(event["event"] in _ENDINGS for event in events[first:]):
        return {}
    process = events[first:]
    records = read_lines(workdir / "metrics.jsonl", time=_NUMBER, step=int)
    saved = [e for e in process if e["event"] == "checkpoint" and e["step"] <= step]
    last_time, last_step = (
        max(line[name] for line in [*process, *records]) for name in ("time", "step")
    )
    lost = max(0.0, last_time - (saved or process)[-1 if saved else 0]["time"])
    return {"lost_steps": max(0, last_step - step), "lost_seconds": lost}


def measure_goodput(
    events: Iterable[Event], current: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Returns how the wall time of a run was used.

    The time between two processes, in which the run did not exist, is not counted.

    Args:
        events: the events of the run, in order.
        current: the seconds of the process that is running, by activity; its own events are ignored.

    Returns:
        The shares of the activities, of "lost" (steps that were computed again after a restart) and of
        "other"; and "seconds", the total.
    """
    processes: list[Mapping[str, float]] = []
    lost = 0.0
    for event in events:
        if event["event"] in _BEGINNINGS:
            processes.append({})
            lost += event.get("lost_seconds", 0.0)
        if isinstance(event.get("seconds"), Mapping) and processes:
            processes[-1] = event["seconds"]  # cumulative
    if current is not None:
        processes[-1:] = [current]
    total = lost + sum(seconds.get("total", 0.0) for seconds in processes)
    if not total:
        return {}
    shares = {
        name: sum(seconds.get(name, 0.0) for seconds in processes) / total for name in _ACTIVITIES
    }
    shares["lost"] = lost / total
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values())), "seconds": total}
