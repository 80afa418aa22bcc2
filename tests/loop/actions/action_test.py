"""What a callable is as an action."""

import orbit
import pytest

import ctl


def test_orbit_action_runs_in_every_process_at_evaluations(tmp_path):
    best = orbit.actions.NewBestMetric("accuracy", filename=str(tmp_path / "best"))
    action = ctl.as_action(best)
    assert (action.at, action.everywhere, action.may_stop) == ("eval", True, False)
    assert action({"accuracy": 0.5}) and not action({"accuracy": 0.5})


def test_boundary_and_processes_can_be_chosen():
    action = ctl.as_action(print, at="train", everywhere=False)
    assert (action.at, action.everywhere) == ("train", False)


def test_action_keeps_its_own_unless_they_are_given():
    class Own(ctl.Action):
        at = "train"

    own = Own()
    assert ctl.as_action(own) is own and (own.at, own.everywhere) == ("train", False)
    assert ctl.as_action(own, everywhere=True).everywhere and not Own.everywhere


def test_first_reason_of_a_stop_counts():
    action = ctl.Action()
    action.request_stop("first")
    action.request_stop("second")
    assert action.stop_reason == "first"
    with pytest.raises(NotImplementedError):
        action({})
