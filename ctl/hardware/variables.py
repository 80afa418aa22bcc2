"""Reads numbers from environment variables."""

from collections.abc import Mapping
import re

from ctl.errors import UsageError


def read_number(
    environment: Mapping[str, str],
    name: str,
    *,
    minimum: int,
    maximum: int,
    default: int | None = None,
) -> int:
    """Reads a whole number from an environment variable.

    Args:
        environment: variables of the process.
        name: the name of the variable.
        minimum: the smallest valid number.
        maximum: the largest valid number.
        default: the number if the variable is empty or not set; None if it must be set.

    Returns:
        The number.

    Raises:
        UsageError: the value is not a whole number from `minimum` to `maximum`.
    """
    text = environment.get(name, "").strip()
    if not text and default is not None:
        return default
    # Kubernetes sets variables such as CTL_PORT=tcp://10.0.0.1 for a Service of the same name.
    if not re.fullmatch("[0-9]{1,9}", text) or not minimum <= int(text) <= maximum:
        raise UsageError(
            f"{name} is {text!r}, but must be a whole number from {minimum} to {maximum}."
        )
    return int(text)
