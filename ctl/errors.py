"""The one exception for a person's mistake."""


class UsageError(ValueError):
    """A mistake that the person who runs or configures ctl can mend.

    Its message is one line that says what is wrong, where, and what to do. The program prints that
    line and exits with 2; in a plain script it is a `ValueError` like any other.
    """

    # AutoGraph wraps what is raised while it traces into errors of its own, unless they say so.
    ag_pass_through = True


class Failure(RuntimeError):
    """Something outside of the run went wrong, such as a process that never came.

    Its message is one line as a `UsageError`'s; the program prints it and exits with 1.
    """

    ag_pass_through = True


class LostWorker(RuntimeError):
    """Another process of the run has gone; the program exits with 75: run me again."""

    ag_pass_through = True
