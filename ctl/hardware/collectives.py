"""Lets all processes of a run make the same decisions, such as to stop or to save."""

from collections.abc import Sequence
import json
import re
from typing import Any

import tensorflow as tf

from ctl.hardware.strategies import Hardware


class ProcessGroup:
    """Collective calls between the processes of a run; in a run of one process they cost nothing.

        processes = ProcessGroup(hardware)
        step = processes.broadcast_from_chief(latest_step)
        if processes.any_process(signal_received):
            ...

    Every method is a collective call: every process of the run must call the same methods in the same
    order, or the processes wait for each other until runtime.all_reduce.timeout, if it is set. A call
    must therefore not depend on a condition that may differ between processes, such as a clock, a
    signal, a file, or `is_chief`: pass the condition to `any_process` instead.

    Each call is an all-reduce of a few float64s with the strategy of the training steps.

    Args:
        hardware: the strategy that the processes share; None for a group of this process alone.

    Attributes:
        is_chief: whether this process is the one that prints and writes.
        is_single: whether this process decides alone.
    """

    def __init__(self, hardware: Hardware | None = None):
        self._cluster = cluster = hardware.cluster if hardware else None
        self.is_chief = hardware is None or hardware.is_chief
        # With parameter servers the chief makes every decision, and the others only serve it.
        self.is_single = cluster is None or cluster.has_servers
        self._strategy = hardware.strategy if hardware else tf.distribute.get_strategy()
        self._gather = tf.function(self._gather_from_replicas, autograph=False)

    @property
    def members(self) -> list[tuple[str, str]]:
        """The name and the host of each process, in the order of its replicas."""
        if self._cluster is None:
            return [("worker 0", "localhost")]
        return self._cluster.members()

    def any_process(self, value: bool) -> bool:
        """Collective: returns, in every process, whether `value` is true in any of them."""
        return value if self.is_single else self.maximum(float(value)) > 0

    def broadcast_from_chief(self, value: int) -> int:
        """Collective: returns, in every process, the chief's `value`, whose magnitude is < 2^53."""
        return value if self.is_single else round(self.gather([float(value)])[0][0])

    def broadcast_json_from_chief(self, value: Any) -> Any:
        """Collective: returns, in every process, the chief's `value`, which has JSON types."""
        if self.is_single:
            return value
        return json.loads(self.gather_text(json.dumps(value) if self.is_chief else "")[0])

    def maximum(self, value: float) -> float:
        """Collective: returns, in every process, the largest `value` of all of them."""
        return max(value for (value,) in self.gather([value]))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Collective: returns, in every process, the values that each process passed.

        Args:
            values: finite numbers; every process must pass the same number of them.

        Returns:
            A list for each process, in the order of `members`.
        """
        if self.is_single:
            return [list(values)]
        table = self._gather(tf.constant(values, tf.float64))  # [replicas, values]
        local = self._strategy.experimental_local_results(table)
        # All replicas of a process pass the same values.
        return [[float(value) for value in row] for row in local[0].numpy()[:: len(local)]]

    def gather_text(self, text: str) -> list[str]:
        """Collective: returns, in every process, the text of each process, as `gather`."""
        encoded = text.encode()
        size = -(-int(self.maximum(len(encoded))) // 6) * 6
        # Six bytes are an integer below 2^53.
        padded = encoded.ljust(size)
        parts = [int.from_bytes(padded[i : i + 6], "big") for i in range(0, size, 6)]
        rows = self.gather(parts)
        return [b"".join(round(v).to_bytes(6, "big") for v in row).decode() for row in rows]

    def read_on_servers(self, path: str) -> dict[str, bytes]:
        """Returns the content of a file on each parameter server, by its name and host.

        It is b"" where there is no such file. Not collective: there are no servers, or one caller.
        """
        pattern = re.sub(r"([*?\[\\])", r"\\\1", path)
        contents = {}
        for i, address in enumerate(self._cluster.addresses.get("ps", ()) if self._cluster else ()):
            with tf.device(f"/job:ps/task:{i}/device:CPU:0"):
                # An attempt to read a missing file would also print TensorFlow's warnings.
                exists = tf.io.matching_files(pattern).numpy().size
                content = tf.io.read_file(path).numpy() if exists else b""
            contents[f"ps {i} on {address.rpartition(':')[0]}"] = content
        return contents

    def barrier(self) -> None:
        """Collective: returns when every process has called it."""
        self.any_process(False)

    def _gather_from_replicas(self, values: tf.Tensor) -> tf.Tensor:
        def all_reduce() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            index, count = context.replica_id_in_sync_group, context.num_replicas_in_sync
            own_row = tf.one_hot(index, count, dtype=tf.float64)[:, tf.newaxis]
            return context.all_reduce("SUM", own_row * values)

        return self._strategy.run(all_reduce)
