"""What all processes of a run decide alike: to stop, where to go on, and when all are done."""

import tensorflow as tf

from ctl.hardware.strategies import Hardware


class ProcessGroup:
    """Decisions of several processes; of a single one they are its own, at no cost.

        agreement = Agreement(hardware)
        agreement.of_chief(latest_step)     # the chief's number, in every process
        agreement.any(stop_was_asked)       # whether any process was asked to

    Every process must call the same methods in the same order.
    """

    def __init__(self, hardware: Hardware | None = None):
        """Takes the strategy that the processes share; none where there is one process."""
        cluster = hardware.cluster if hardware else None
        # Of parameter servers the chief alone decides anything.
        self._alone = cluster is None or cluster.has_servers
        self._strategy = hardware.strategy if hardware else tf.distribute.get_strategy()
        self._total = tf.function(self._run, autograph=False)

    def any_process(self, mine: bool) -> bool:
        """Whether it is true in any process."""
        return mine if self._alone else self._sum(float(mine), first=False) > 0

    def broadcast_from_chief(self, mine: int) -> int:
        """The chief's whole number, below 2^53."""
        return mine if self._alone else round(self._sum(float(mine), first=True))

    def barrier(self) -> None:
        """Waits until every process is here."""
        self.any_process(False)

    def _sum(self, mine: float, *, first: bool) -> float:
        total = self._total(tf.constant(mine, tf.float64), tf.constant(first))
        return float(self._strategy.experimental_local_results(total)[0])

    def _run(self, mine: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        def add() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            is_first = tf.equal(context.replica_id_in_sync_group, 0)  # the chief's first replica
            counts = tf.logical_or(is_first, tf.logical_not(first))
            return context.all_reduce("SUM", tf.where(counts, mine, tf.zeros_like(mine)))

        return self._strategy.run(add)
