"""The table of docs/why-believe-it.md: what ctl claims, which test checks it, and its last result."""

import ast
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def render() -> str:
    """Returns the table; its numbers are those of benchmarks/results and of the tests' tables."""
    kills = _sums("chaos", "kills", 1)
    tried, survived, failed = (_sums("faults", "tries", column) for column in (1, 2, 3))
    versions = json.loads((ROOT / "benchmarks/results/versions.json").read_text())
    tests = versions["tables"]["tests"]["rows"]
    snippets = _rows("docs/with-your-libraries.md", "| library | tried |")
    mistakes = _rows("docs/testing.md", "| mistake of the trainer |")
    tutorials = _rows("docs/prove-your-loop.md", "| program | verdict |")
    return "\n".join(
        [
            "| claim | test | last result | repeat it |",
            "|---|---|---|---|",
            _row(
                "The update is the same on 1, 2 and 4 replicas, with uneven and empty shares",
                "tests/update/combinations_test.py",
                "after 50 steps in float64, 1e-10 from one replica",
                "pytest tests/update",
            ),
            _row(
                "It holds for options in any allowed combination",
                "tests/properties/step_test.py",
                "passes in CI, with each change",
                "pytest -m slow --hypothesis-profile=long tests/properties",
            ),
            _row(
                "A killed run ends with the bits of an undisturbed one",
                "tests/end_to_end/resume_test.py",
                f"{kills} random kills, all the same bits ({_when('chaos')})",
                "python -m benchmarks.chaos --kills=50",
            ),
            _row(
                "A run survives faults of disks and stores, and signals, without a loss",
                "tests/end_to_end/faults_test.py",
                f"{tried} faults, {survived} survived, {failed} failed ({_when('faults')})",
                "python -m benchmarks.faults",
            ),
            _row(
                "Code of tutorials and papers is right, or is rejected with its line",
                "tests/end_to_end/users_code_test.py",
                f"{_cases()} cases",
                "pytest -m slow tests/end_to_end/users_code_test.py",
            ),
            _row(
                "`ctl check` names a planted mistake",
                "tests/testing/equivalence_test.py",
                f"{mistakes} mistakes ([list](testing.md#which-mistakes-are-named))",
                "pytest tests/testing",
            ),
            _row(
                "Loops of public tutorials are judged rightly",
                "tests/docs/prove_your_loop_test.py",
                f"{tutorials} programs ([list](prove-your-loop.md#public-tutorials))",
                "python -m benchmarks.comparisons.tutorials",
            ),
            _row(
                "Other libraries train unchanged",
                "tests/docs/libraries_test.py",
                f"{snippets} libraries ([list](with-your-libraries.md))",
                "pytest -m long tests/docs/libraries_test.py",
            ),
            _row(
                "It works with TensorFlow 2.18 to 2.22",
                "tests/support/versions.py",
                f"{len(tests)} runs of the tests ([table](install.md#versions-of-tensorflow))",
                "python -m tests.support.versions VERSION",
            ),
            _row(
                "The speed on one GPU, divided by that of other frameworks",
                "benchmarks/gpu",
                f"{_speeds()}, on one {_gpu()} ({_when('gpu')}, [table](speed.md#on-one-gpu))",
                "python -m benchmarks.gpu --out gpu.jsonl",
            ),
            _row(
                "Programs for TPUs and for several GPUs compute the right update",
                "tests/compile/gpu_programs_test.py",
                "on virtual devices; no TPU and no several GPUs have run them",
                "ctl aot_compile experiments/mnist_tpu.py --execute",
            ),
            _row(
                "Outputs on the pages and in the notebooks were printed by runs",
                "tests/docs/outputs_test.py",
                "compared before a release; those of other machines say so in their source",
                "python -m docs.outputs",
            ),
        ]
    )


def _row(claim: str, test: str, result: str, command: str) -> str:
    assert (ROOT / test).exists(), test
    return f"| {claim} | `{test}` | {result} | `{command}` |"


def _measurement(name: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def _sums(name: str, table: str, column: int) -> int:
    return sum(row[column] or 0 for row in _measurement(name)["tables"][table]["rows"])


def _when(name: str) -> str:
    return f"{_measurement(name)['date']}, commit {_measurement(name)['commit']}"


def _speeds() -> str:
    """Returns the range of the ratios by framework."""
    ratios: dict[str, list[float]] = {}
    for _, _, other, _, ratio in _measurement("gpu")["tables"]["speed"]["rows"]:
        ratios.setdefault(other.replace(",", ""), []).append(ratio)
    each = (
        f"{name} {' to '.join(map(str, sorted({min(r), max(r)})))}" for name, r in ratios.items()
    )
    return ", ".join(each)


def _gpu() -> str:
    return str(_measurement("gpu")["host"].get("gpu", "GPU")).removeprefix("one ")


def _cases() -> int:
    """Returns the number of cases of users' code, without importing TensorFlow."""
    tree = ast.parse((ROOT / "tests/users_code/table.py").read_text())
    tables = (node for node in tree.body if isinstance(node, ast.Assign))
    return next(len(t.value.elts) for t in tables if ast.unparse(t.targets[0]) == "ROWS")


def _rows(page: str, head: str) -> int:
    """Returns the number of rows of a table of a page."""
    lines = (ROOT / page).read_text().split(head)[1].split("\n\n")[0]
    return lines.count("\n| ")
