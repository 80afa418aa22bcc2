"""Runs the tests with other versions of TensorFlow and Python, for docs/install.md.

    .uv/bin/uv run python -m tests.support.versions 2.21.0 2.22.0rc0 --python=3.11
    .uv/bin/uv run python -m tests.support.versions 2.21.0 --python=3.11 --tests=slow

Each version has an environment of its own in a temporary folder, with the built wheel, and tf_keras and
Orbit in the versions that the wheel contains. benchmarks/results/versions.json keeps the results, and
`python -m benchmarks.results` writes them into the page.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from benchmarks import results
from tests.support import child

RESULT = "versions"
# Each version of TensorFlow has its own bounds of these packages, directly or by protobuf.
FREE = (
    "gast", "google-api-core", "google-cloud-storage-control", "googleapis-common-protos",
    "grpc-google-iam-v1", "grpcio", "grpcio-status", "h5py", "keras", "ml-dtypes", "numpy",
    "proto-plus", "protobuf", "setuptools", "tensorboard", "tensorboard-data-server", "tensorflow",
    "tensorflow-cpu", "tensorflow-tpu", "tf-keras",
)  # fmt: skip
COLUMNS = ("TensorFlow", "Python", "tests", "Keras", "numpy", "date", "passed", "failed")
# The expression for `pytest -m`. The long tests are for releases.
MARKS = {"default": "not slow and not long", "slow": "slow and not long"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tensorflow", nargs="*", help="versions of TensorFlow")
    parser.add_argument("--python", default="3.11", help="a version, or a path")
    parser.add_argument("--tests", choices=MARKS, default="default")
    arguments = parser.parse_args()
    for version in arguments.tensorflow:
        with tempfile.TemporaryDirectory() as folder:
            row = test(version, arguments.python, arguments.tests, pathlib.Path(folder))
        kept = [each for each in rows() if each[:3] != row[:3]]
        columns = [(name, 0 if name == "passed" else None) for name in COLUMNS]
        results.save(
            results.FOLDER / f"{RESULT}.json",
            {"tests": results.Table(columns, sorted([*kept, row]))},
            samples='`default` is `pytest`, `slow` is `pytest -m "slow and not long"`',
        )


def rows() -> list[list]:
    return results.load(RESULT)["tables"]["tests"]["rows"]


def test(version: str, python: str, tests: str, folder: pathlib.Path) -> list:
    """Installs ctl and a version of TensorFlow in a folder, and runs tests with them."""
    uv = shutil.which("uv") or str(child.ROOT / ".uv/bin/uv")
    subprocess.run([uv, "venv", "--no-config", f"--python={python}", folder / "env"], check=True)
    (folder / "pins.txt").write_text("\n".join(pins()))
    # The tests of --mode=aot_compile run uv.
    path = f"{pathlib.Path(uv).parent}{os.pathsep}{os.environ['PATH']}"
    environment = child.environment(VIRTUAL_ENV=str(folder / "env"), TMPDIR=str(folder), PATH=path)
    del environment["PYTHONPATH"]
    install = [uv, "pip", "install", "--no-config", f"--constraint={folder / 'pins.txt'}"]
    install += [f"tensorflow-cpu=={version}", ".", "--group=dev", "--group=stores"]
    subprocess.run(install, cwd=child.ROOT, env=environment, check=True)
    # Of these the wheel has copies, but pytest imports ctl from the checkout. Their requirements would
    # install TensorFlow again.
    copied = [uv, "pip", "install", "--no-config", "--no-deps", "--requirement=vendored.txt"]
    subprocess.run(copied, cwd=child.ROOT, env=environment, check=True)
    listed = subprocess.run(
        [uv, "pip", "list", "--format=json"], env=environment, capture_output=True, check=True
    )
    packages = {row["name"]: row["version"] for row in json.loads(listed.stdout)}
    settings = (folder / "env/pyvenv.cfg").read_text()
    run = subprocess.run(
        [folder / "env/bin/python", "-m", "pytest", "-p", "no:cacheprovider", "--disable-warnings",
         "-m", MARKS[tests]],
        cwd=child.ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    print(run.stdout[-20_000:], run.stderr[-2_000:])
    passed = re.search(r"(\d+) passed", run.stdout)
    failed = [f"`{name}`" for name in re.findall(r"(?m)^(?:FAILED|ERROR) (\S+)", run.stdout)]
    return [
        version,
        re.search(r"version_info = (\d+\.\d+)", settings)[1],
        tests,
        # A release candidate may require a nightly version.
        packages.get("keras") or packages["keras-nightly"],
        packages["numpy"],
        datetime.date.today().isoformat(),
        int(passed[1]) if passed else 0,
        "<br>".join(failed) or "none",
    ]


def pins() -> list[str]:
    """Returns the pinned versions of the packages that do not depend on TensorFlow's version."""

    import tomllib  # not in Python 3.10, whose tests import this module

    settings = tomllib.loads((child.ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    pinned = settings["constraint-dependencies"]
    return [each for each in pinned if re.split("[=<>; ]", each)[0] not in FREE]


if __name__ == "__main__":
    main()
