"""Which variants are measured, and what they are compared with."""

import pytest

from benchmarks import loops, variants


def test_fastest_hand_written_loop_is_the_reference():
    rates = {variants.LOOP: [[2.0, 3.0]], variants.LOOP_XLA: [[4.0, 5.0]], "tf_keras fit": [[9.0]]}
    assert loops.best_loop(rates) == variants.LOOP_XLA
    assert loops.best_loop({variants.LOOP: [[2.0]]}) == variants.LOOP


@pytest.mark.parametrize("name", [loops.DEFAULT, variants.LOOP])
def test_variants_without_ctl_or_without_a_reference_are_rejected(name):
    assert loops.parse(["--variants", loops.DEFAULT, variants.LOOP]).variants
    with pytest.raises(SystemExit, match="--variants must include"):
        loops.parse(["--variants", name, "tf_keras fit"])
