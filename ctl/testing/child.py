"""The other side of `isolation`: python -m ctl.testing.child FOLDER, which holds the task."""

import pathlib
import pickle
import sys
import traceback


def main(folder: pathlib.Path) -> None:
    """Runs the task in a folder and leaves its result there: a `Report`, or a `UsageError`."""
    with (folder / "task").open("rb") as file:
        # The caller's modules must be importable before what names them can be read.
        sys.path[:] = pickle.load(file)
        task = file.read()
    import tensorflow as tf

    from ctl.errors import UsageError
    from ctl.testing import equivalence

    plan, chosen = pickle.loads(task)
    most = max(split.replicas for split in chosen)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * most,
    )
    try:
        result: object = equivalence.run(plan, chosen)
    except UsageError as error:
        result = UsageError(str(error))
    (folder / "result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    try:
        main(pathlib.Path(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
