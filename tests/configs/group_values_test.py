"""The values of optimizer.groups and optimizer.weight_decay_exclude."""

import pytest

from ctl.configs import group_values, keys
from ctl.errors import UsageError


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("a/*", r"optimizer\.groups\[0\] is 'a/\*', but must be a section such as dict"),
        (dict(frozen=True), "has no variables: name them by a pattern"),
        (dict(variables=[3], frozen=True), "variables contains 3, but must contain patterns"),
        (dict(variables=3, frozen=True), "variables is 3, but must be a pattern or a list"),
        (dict(variables="a/*"), "requires either frozen=True, or learning_rate_scale, "),
        (dict(variables="a/*", frozen=True, frozen_until=5), "requires either frozen=True, or"),
        (dict(variables="a/*", frozen_until=0), "frozen_until is 0, but must be a number of steps"),
        (dict(variables="a/*", frozen_until=True), "frozen_until is True, but must be a number of"),
        (dict(variables="a/*", frozen_until=1.5), "frozen_until is 1.5, but must be a number of"),
        (dict(variables="a/*", frozen_until="2 hours"), "must not depend on the speed"),
        (dict(variables="a/*", frozen="yes"), "frozen is 'yes', but must be true or false"),
        (dict(variables="a/*", learning_rate_scale=0.0), "is 0.0, but must be a finite number"),
        (dict(variables="a/*", frozen=True, optimizer={}), "requires either frozen=True, or"),
        (dict(variables="a/*", optimizer="adam"), "optimizer is 'adam', but must be a section"),
        (dict(variables="a/*", optimizer={"nme": "adam"}), "has the key 'nme': did you mean name"),
        (dict(variables="a/*", learning_rate=0.1), "did you mean learning_rate_scale"),
    ],
)
def test_bad_groups_are_one_line(group, message):
    with pytest.raises(UsageError, match=message):
        keys.check_values({"optimizer.groups": [group]})


def test_good_groups_and_exclusions():
    groups = [dict(variables=["a/*", "b"], frozen=True), dict(variables="*", learning_rate_scale=2)]
    groups += [dict(variables="c", learning_rate_scale=0.1, frozen_until="2 epochs")]
    groups += [dict(variables="d", frozen_until=5)]
    keys.check_values({"optimizer.groups": groups, "optimizer.weight_decay_exclude": ["*/b"]})
    patterns = [group_values.patterns(group) for group in groups]
    assert patterns == [["a/*", "b"], ["*"], ["c"], ["d"]]
    with pytest.raises(UsageError, match=r"weight_decay_exclude contains 3"):
        keys.check_values({"optimizer.weight_decay_exclude": [3]})
