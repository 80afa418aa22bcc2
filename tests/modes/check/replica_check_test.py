"""An update that depends on the split of the batch is detected in a process of its own."""

from ctl.modes.check import replica_check
from ctl.modes.check.outcome import FAIL

MEAN_OVER_THE_LOCAL_BATCH = """
    def per_example_loss(self, batch, outputs):
        losses = super().per_example_loss(batch, outputs)
        return tf.fill(tf.shape(losses), tf.reduce_mean(losses))
    """


def test_a_mean_over_the_local_batch_fails(make_factory, monkeypatch):
    # In this process; checks_test.py compares in another one.
    monkeypatch.setattr(
        replica_check.multiprocess, "call", lambda function, values, timeout: [function(*values)]
    )
    outcome = replica_check.start(make_factory(MEAN_OVER_THE_LOCAL_BATCH))()
    assert outcome.verdict == FAIL, outcome
    assert "ctl rejects every split: " in outcome.observation
    assert " combines rows of the same replica " in outcome.observation
