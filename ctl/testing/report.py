"""What a comparison of splits came to. Loads no TensorFlow, so that it travels between processes."""

import dataclasses

import numpy as np

from ctl.testing.splits import Split


@dataclasses.dataclass(frozen=True)
class Difference:
    """One quantity that depends on how the batch was split.

    Attributes:
        kind: "loss", "update", "statistic", "state", "metric", "evaluation", "copy" or "probe".
        name: the quantity's own name, such as "dense/kernel:0".
        split: where it differs from one replica.
        step: the step, from 0.
        factor: how many times as large it is, where it is that in every element; else None.
        distance: the largest difference of an element.
    """

    kind: str
    name: str
    split: Split
    step: int
    factor: float | None
    distance: float

    def is_times(self, factor: float) -> bool:
        """Whether it is so many times the value of one replica, and not that value itself."""
        found = self.factor
        return found is not None and factor != 1 and abs(found / factor - 1) < 1e-5

    def __str__(self) -> str:
        """Such as `update of dense/kernel:0 on 2 replicas (...): 2 times that of one replica`."""
        what = {"update": "update of ", "copy": "copies of ", "state": "variable "}
        label = f"{what.get(self.kind, self.kind + ' ')}{self.name}"
        if self.kind == "loss":
            label = "loss"
        how = f"off by up to {self.distance:.3g}"
        if self.kind == "copy":
            how = f"the replicas' copies differ by up to {self.distance:.3g}"
        elif self.factor is not None:
            how = f"{as_fraction(self.factor)} times that of one replica"
        return f"{label} on {self.split}, step {self.step}: {how}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What was compared, what differs, and why.

    Attributes:
        trainer: its name.
        precision: what it was computed in.
        compared: the splits that were.
        refused: the splits that ctl refused to build, with its reason.
        notes: what else was not looked at, and why.
        differences: none if the trainer is right.
        cause: the likely one of the first difference; "" if there is none.
        seconds: how long it took.
    """

    trainer: str
    precision: str
    compared: tuple[Split, ...]
    refused: dict[Split, str]
    notes: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    cause: str = ""
    seconds: float = 0.0

    @property
    def equivalent(self) -> bool:
        """Whether every quantity is that of one replica, on every split."""
        return not self.differences

    def failure(self, limit: int = 12) -> str:
        """The message of a failure: the first line says all, the others what else differs.

        Args:
            limit: differences to list.
        """
        first, others = self.differences[0], self.differences[1:limit]
        lines = [f"{self.trainer}: {first}: {self.cause}"]
        lines += [f"  also {difference}" for difference in others]
        if len(self.differences) > limit:
            lines.append(f"  and {len(self.differences) - limit} more")
        lines += [f"  not compared: {split}: {why}" for split, why in self.refused.items()]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def as_fraction(factor: float) -> str:
    """A factor as a person reads it: 2, 1/4, 0.8333."""
    for denominator in range(1, 13):
        numerator = factor * denominator
        if abs(numerator - round(numerator)) < 1e-6 * denominator and round(numerator):
            whole = round(numerator)
            return str(whole) if denominator == 1 else f"{whole}/{denominator}"
    return f"{factor:.4g}"


def factor_of(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> float | None:
    """By what one array is a multiple of the other, or None where it is no multiple.

    Args:
        found: any shape.
        wanted: the same shape.
        tolerance: of each element, relative to the largest.
    """
    found, wanted = found.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    square = wanted @ wanted
    if not square or not np.isfinite(found).all():
        return None
    factor = float(found @ wanted / square)
    rest = np.abs(found - factor * wanted).max(initial=0.0)
    largest = max(np.abs(found).max(initial=0.0), np.abs(wanted).max(initial=0.0))
    return factor if rest <= 10 * tolerance * largest else None
