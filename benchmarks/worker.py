"""A process that trains one variant in the windows that `benchmarks.loops` requests.

    python -m benchmarks.worker VARIANT MODEL

It reads the seconds of each window as a line from stdin, trains at least that long, and answers with
a line of JSON: steps, seconds, and the peak memory of the process. It ends at the end of stdin.
"""

import sys

import tensorflow as tf

from benchmarks import models, variants, windows


def main(name: str, model: str) -> None:
    tf.get_logger().setLevel("ERROR")
    windows.serve(lambda tick: variants.run(name, models.MODELS[model], tick))


if __name__ == "__main__":
    main(*sys.argv[1:])
