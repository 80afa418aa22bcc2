"""The exit code of a worker or parameter server, after its chief has gone."""

import json
import pathlib

import pytest

from ctl.hardware import server
from ctl.hardware.strategies import StrategyOptions
from ctl.modes import DONE, STOPPED, serve
from tests import experiments


@pytest.fixture
def exit_code(make_arguments, monkeypatch):
    """Makes the exit code of a server whose chief has left some events behind."""
    monkeypatch.setattr(server, "serve", lambda cluster, start_timeout: None)
    monkeypatch.setattr(
        StrategyOptions, "from_config", lambda *_: StrategyOptions(cluster=object())
    )

    def make(events, **fields):
        lines = [json.dumps({"event": event, "step": 5}) + "\n" for event in events]
        experiments.write("run", {"events.jsonl": "".join(lines)})
        return serve.serve(make_arguments(**fields))

    return make


@pytest.mark.parametrize(
    ("events", "code"),
    [
        (["start", "checkpoint", "eval", "end"], DONE),
        (["start", "stop_requested", "end", "export"], DONE),  # by early stopping or a time limit
        (["start", "stop", "resume", "end", "checkpoint_eval"], DONE),
        (["start", "checkpoint", "stop"], STOPPED),
        (["start", "checkpoint"], STOPPED),  # the chief was killed
        (["start", "stop_requested", "end", "resume"], STOPPED),  # continued, and killed
        ([], STOPPED),
    ],
)
def test_server_of_a_run_that_has_not_ended_is_started_again(exit_code, events, code):
    assert exit_code(events) == code


def test_dry_run_is_not_started_again(exit_code):
    assert exit_code([], dry_run=True) == DONE
    assert not pathlib.Path("run.dry_run").exists()
