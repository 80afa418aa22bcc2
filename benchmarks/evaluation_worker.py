"""A process that evaluates in the windows that `benchmarks.evaluation` requests.

python -m benchmarks.evaluation_worker PROGRAM ROWS REPLICAS
"""

import sys

import tensorflow as tf

from benchmarks import evaluation, windows
from ctl import testing


def main(name: str, rows: str, replicas: str) -> None:
    tf.get_logger().setLevel("ERROR")
    testing.split_cpu(int(replicas))
    windows.serve(lambda tick: evaluation.run(name, int(rows), int(replicas), tick))


if __name__ == "__main__":
    main(*sys.argv[1:])
