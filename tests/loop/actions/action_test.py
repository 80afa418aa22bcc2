"""What a callable is as an action; the order of actions, their boundaries, stops and states."""

import json

import numpy as np
import orbit
import pytest

import ctl
from ctl.loop.actions.action import ActionList
from tests.loop.shared import OtherProcesses


class Recording(ctl.Action):
    """Appends its name to a list when it is called."""

    def __init__(self, name="", calls=None, reason=""):
        self.name, self.calls, self.reason = name, [] if calls is None else calls, reason
        self.state, self.ended = {}, 0

    def __call__(self, outputs):
        self.calls.append(self.name)
        if self.reason:
            self.request_stop(self.reason)

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = dict(state)

    def end(self):
        self.ended += 1

    def result(self):
        return {self.name: 1}


def test_actions_are_called_in_order_at_their_boundary(fake_controller):
    calls = []
    in_training = ctl.as_action(Recording("b", calls), at="train")
    evaluated = [Recording("c", calls), lambda outputs: calls.append(outputs["loss"])]
    listed = ActionList([Recording("a", calls), in_training, *evaluated], fake_controller)
    listed.run("eval", {"loss": 0.5})
    assert calls == ["a", "c", 0.5]
    listed.run("train", {"loss": 0.5})
    assert calls == ["a", "c", 0.5, "b"]
    assert listed.has("train") and listed.has("eval")
    assert not ActionList([Recording("a")], fake_controller).has("train")


def test_processes_other_than_the_chief_call_only_what_runs_everywhere(fake_controller):
    fake_controller.is_chief = False
    calls = []
    everywhere = ctl.as_action(Recording("everywhere", calls), everywhere=True)
    orbit_action = orbit.actions.ConditionalAction(lambda outputs: True, Recording("orbit", calls))
    actions = ActionList([Recording("chief", calls), everywhere, orbit_action], fake_controller)
    actions.run("eval", {})
    assert calls == ["everywhere", "orbit"]
    actions.end()
    assert everywhere.ended == 1


def test_request_of_an_action_ends_the_run_and_is_recorded(fake_controller):
    fake_controller.step = 40
    last = Recording("b", reason="b is done")
    actions = ActionList([Recording("a"), last, print], fake_controller)
    assert actions.stop_reason is None
    actions.run("eval", {})
    last.request_stop("another reason")
    actions.run("eval", {})
    assert actions.stop_reason == {"step": 40, "reason": "b is done"}
    assert last.stop_reason == "b is done" and actions.results() == {"a": 1, "b": 1}
    assert actions.get_notes() == {"stopped": actions.stop_reason}
    reporter = fake_controller.reporter
    assert reporter.events == [{"event": "stop_requested", "step": 40, "reason": "b is done"}]
    assert reporter.lines == ["Training ends at step 40: b is done."]


@pytest.mark.parametrize("other", [True, False])
def test_a_request_in_any_process_counts_for_all(fake_controller, other):
    fake_controller.processes = OtherProcesses(stops=other)
    actions = ActionList([Recording("a")], fake_controller)
    actions.run("eval", {})
    assert bool(actions.stop_reason) == other
    assert fake_controller.processes.calls == [("any_process", False)]


def test_processes_do_not_communicate_after_actions_that_never_stop(fake_controller):
    fake_controller.processes = None
    watching = Recording("a")
    watching.may_stop = False
    ActionList([watching, print], fake_controller).run("eval", {})


def test_states_are_json_and_keyed_by_class_and_number(fake_controller):
    first, second = Recording(), Recording()
    first.state, second.state = {"best": 0.1 + 0.2}, {"best": None}
    state = json.loads(json.dumps(ActionList([first, second], fake_controller).get_notes()))
    assert state["actions"] == {"Recording": {"best": 0.1 + 0.2}, "Recording:1": {"best": None}}
    third = Recording()
    ActionList([third], fake_controller).set_notes(state)
    assert third.state == {"best": 0.1 + 0.2}
    assert ActionList([Recording()], fake_controller).get_notes() == {}


def test_state_of_other_types_is_rejected(fake_controller):
    action = Recording()
    action.state = {"best": np.float32(1)}
    with pytest.raises(ctl.UsageError, match="Recording cannot be saved"):
        ActionList([action], fake_controller).get_notes()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (3, "An action is 3, but must be an instance that can be called"),
        (Recording, "An action is the class Recording, but must be an instance"),
        (ctl.as_action(print, at="evel"), r"has at='evel': did you mean eval\?"),
    ],
)
def test_what_is_not_an_action_is_rejected(fake_controller, action, message):
    with pytest.raises(ctl.UsageError, match=message):
        ActionList([action], fake_controller)


def test_orbit_action_runs_in_every_process_at_evaluations(tmp_path):
    best = orbit.actions.NewBestMetric("accuracy", filename=str(tmp_path / "best"))
    action = ctl.as_action(best)
    assert (action.at, action.everywhere, action.may_stop) == ("eval", True, False)
    assert action({"accuracy": 0.5}) and not action({"accuracy": 0.5})


def test_action_keeps_its_own_and_is_copied_if_they_are_given():
    class Own(ctl.Action):
        at = "train"

    chosen = ctl.as_action(print, at="train", everywhere=False)
    assert (chosen.at, chosen.everywhere) == ("train", False)
    own = Own()
    assert ctl.as_action(own) is own
    copied = ctl.as_action(own, everywhere=True)
    assert (copied.at, copied.everywhere) == ("train", True)
    assert (own.at, own.everywhere) == ("train", False)
