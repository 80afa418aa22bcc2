"""Prints docs/matrix.md, the rules about which options may be combined."""

from collections.abc import Iterator
import itertools

from ctl.configs.compatibility import RULES, Choice
from ctl.configs.keys import PRECISIONS, XLA_MODES

AXES = {
    "replicas": (1, 2, 4),
    "precision": PRECISIONS,
    "xla": tuple(mode for mode in XLA_MODES if mode != "auto"),
    "sync_batch_norm": (False, True),
    "micro_batches": (1, 2),
    "shards": (0, 4),
    "reduce_dtype": ("", "bfloat16"),
}


def all_choices() -> Iterator[Choice]:
    """Yields every combination of the values in `AXES`."""
    for values in itertools.product(*AXES.values()):
        yield Choice(**dict(zip(AXES, values, strict=True)))  # type: ignore[arg-type]


def matrix() -> str:
    """Returns the text of docs/matrix.md."""
    choices = list(all_choices())
    rejected = [c for c in choices if any(rule.broken(c) for rule in RULES)]
    lines = [
        "# Which options may be combined",
        "",
        "A combination that breaks a rule of this table is rejected before the first step, with a line",
        "that also says what to set instead. `python -m ctl.configs.matrix` prints the page.",
        "",
        "Tests compare the update of every other combination of these options with the exact one",
        "(tests/replica/step/combinations_test.py):",
        "",
        *(f"- {name}: {', '.join(str(v) or 'none' for v in axis)}" for name, axis in AXES.items()),
        "",
        f"{len(rejected)} of {len(choices)} combinations are rejected. Rules without a number depend",
        "on other options, such as the strategy or the batch size.",
        "",
        "| rejected because | combinations |",
        "|---|---:|",
    ]
    for rule in RULES:
        count = sum(rule.broken(c) for c in choices)
        lines.append(f"| {rule.reason} | {count or ''} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(matrix(), end="")
