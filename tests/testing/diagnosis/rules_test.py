"""Each planted mistake is found, and its cause is reported."""

import re

import pytest

from ctl.configs.options import TrainerOptions
from ctl.testing import assert_replica_equivalent, check_replica_equivalence
from ctl.testing.diagnosis import causes
from tests.testing import gallery, mistakes


def check(mistake, **arguments):
    with pytest.raises(AssertionError) as error:
        # A step rejects some mistakes before their numbers can be compared.
        options = TrainerOptions(allow_unkeyed_random=mistake.unkeyed, allow_row_coupling=True)
        assert_replica_equivalent(
            mistake.trainer, gallery.examples(), in_process=True, options=options, **arguments
        )
    # Without the numbers that Keras appends to the names of layers.
    line = re.sub(r"(dense|batch_norm\w*?)_\d+\b", r"\1", str(error.value).splitlines()[0])
    assert line.startswith(mistake.trainer.__name__)
    assert mistake.where in line
    assert mistake.cause in line


def each_mistake():
    """All mistakes; a few of them in the default tests, most others in the slow tests.

    Those in the long tests only are found there by the default comparison, too.
    """
    marks = [[], [pytest.mark.slow, pytest.mark.long], [pytest.mark.slow], [pytest.mark.slow]]
    slow = {
        "ReducedTwice",
        "MetricAveraged",
        "PenaltyOncePerReplica",
    }  # other files have similar ones
    return [
        pytest.param(
            mistake,
            marks=marks[2 if mistake.trainer.__name__ in slow else i % 4],
            id=mistake.trainer.__name__,
        )
        for i, mistake in enumerate(mistakes.MISTAKES)
    ]


@pytest.mark.parametrize("mistake", each_mistake())
def test_planted_mistake_is_named(mistake):
    check(
        mistake,
        replicas=mistake.replicas,
        accumulation=mistake.accumulation,
        batch_sizes=mistake.batch_sizes,
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mistake", mistakes.MISTAKES, ids=lambda m: m.trainer.__name__)
def test_planted_mistake_is_named_by_the_default_comparison(mistake):
    check(mistake)


class DependsOnReplicas(gallery.Clipped):
    """Adds a constant that depends on the number of replicas, which no rule recognizes."""

    def transform(self, gradients, variables):
        return [g + 0.01 * self.strategy.num_replicas_in_sync**3 for g in gradients]


def test_unknown_mistake_is_reported_without_a_cause():
    report = check_replica_equivalence(
        DependsOnReplicas,
        gallery.examples(),
        replicas=(2,),
        accumulation=(1,),
        batch_sizes=(8,),
        steps=1,
        in_process=True,
    )
    assert report.cause == causes.UNKNOWN
    assert report.differences[0].kind == "update"
