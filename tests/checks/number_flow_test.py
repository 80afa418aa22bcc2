"""The text shows where code keeps what it computes from the number of replicas."""

import textwrap

import pytest

from ctl.checks.number_flow import find_uses


def uses(text):
    """Returns the names and lines; N stands for the number."""
    text = textwrap.dedent(text).replace("N", "strategy.num_replicas_in_sync")
    return [(use.name, use.line) for use in find_uses(text)]


@pytest.mark.parametrize(
    "text",
    [
        "size = 64 * N",
        "print(N)",
        "print(f'{N} devices')",
        "logging.info('%d devices', N)",
        "if N > 1: train()",
        "assert N == 2",
        "dataset = dataset.batch(size // N)",
        "n = N\nsize = 64 * n\nprint(n)",
        "def loss(x): return x / N",
        "def loss(x):\n    n = tf.cast(N, tf.float32)\n    return x / n",
        "def build_optimizer(self): return SGD(0.1)\nsize = 64 * N",
        "N",
        "not python at all",
    ],
)
def test_global_batch_sizes_messages_tests_and_losses_keep_nothing(text):
    assert not uses(text)


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        ("self.n = N", "n", 1),
        ("n = N\nself.share = 1 / n", "share", 2),
        ("self.shares = [1 / N]", "shares", 1),
        ("self.a, self.b = 1, N", "a", 1),
        ("values['n'] = 1 / N", "", 1),
        ("self.scale: float = tf.constant(0.5 / N)", "scale", 1),
        ("n = N\nscale = n**0.5\ndef loss(x): return x / scale", "scale", 3),
        ("def make(strategy):\n    n = N\n    return lambda x: x / n", "n", 3),
        ("n = N\ndef loss(x, n=1 / n): return x * n", "", 2),
        ("loss = MyLoss(1 / N)", "", 1),
        ("loss = functools.partial(scaled, scale=1 / N)", "", 1),
        ("penalty = L2(factor / N) if factor else None", "", 1),
        ("optimizer = SGD(0.1 * N)", "", 1),
        ("def build_optimizer(self): return SGD(self.rate * N)", "", 1),
    ],
)
def test_what_a_step_may_read_is_found_with_its_name_and_line(text, name, line):
    assert (name, line) in uses(text)
