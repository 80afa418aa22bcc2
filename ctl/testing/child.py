"""The other side of `processes`: python -m ctl.testing.child FOLDER, which holds the task."""

import pathlib
import pickle
import sys


def main(folder: pathlib.Path) -> None:
    """Runs the task in a folder and leaves its result there, or the `UsageError` that it raised."""
    from ctl.errors import UsageError

    with (folder / "task").open("rb") as file:
        # The caller's modules must be importable before what names them can be read.
        sys.path[:] = pickle.load(file)
        function, arguments = pickle.load(file)
    try:
        result = function(*arguments)
    except UsageError as error:
        result = error
    # Whole or not there: the caller looks for it while this process may still be writing.
    (folder / "part").write_bytes(pickle.dumps(result))
    (folder / "part").rename(folder / "result")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
