"""Runs of the MNIST experiment of tests/support/experiments.py in one process or several."""


def flags(folder, name, *arguments):
    """The flags of a run whose workdir has the given name."""
    return [f"--config={folder / 'small.py'}", f"--workdir={folder / name}", *arguments]


def launch(folder, name, *arguments, workers=2, servers=0):
    """The command that starts several processes."""
    processes = [f"--workers={workers}", f"--ps={servers}"]
    return ["-m", "ctl.launch", *processes, "--", *flags(folder, name, *arguments)]
