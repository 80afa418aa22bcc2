"""The packages of ctl import each other in one direction, also inside functions."""

import ast
import pathlib

from tests import child, closure

ROOT = pathlib.Path(__file__).resolve().parent.parent
# From the lowest layer up: a module may import from its own layer and from those before it.
LAYERS = (
    ("errors", "optimizers", "private"),
    ("hardware",),
    ("configs", "launch"),
    ("data",),
    ("replica",),
    ("random",),
    ("step", "trainer"),
    ("evaluator",),
    ("loop",),
    ("testing",),
    ("modes", "commands"),
    ("main",),
    ("ray",),
)
REPLICA_LAYERS = (
    ("graphs",),
    ("arithmetic",),
    ("random",),
    ("keras3",),
    ("layers", "checks", "updates", "measure"),
    ("step",),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(
    p for p in (ROOT / "ctl").rglob("*.py") if p.parent != ROOT / "ctl" or p.stem in LEVELS
)


def imports(path: pathlib.Path) -> list[list[str]]:
    """The names that a module imports, also in its functions, divided at their dots."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name.split(".") for name in names]


def entry(path: pathlib.Path) -> str:
    return path.relative_to(ROOT / "ctl").parts[0].removesuffix(".py")


def test_every_entry_of_the_package_has_a_layer():
    names = {p.name.removesuffix(".py") for p in (ROOT / "ctl").iterdir() if p.name[0] not in "_."}
    assert names - {"py.typed"} == {*LEVELS}


def test_imports_go_down():
    upwards = {
        f"{path.relative_to(ROOT)} imports ctl.{name}"
        for path in FILES
        for package, name, *_ in filter(lambda parts: len(parts) > 1, imports(path))
        if package == "ctl" and LEVELS.get(name, 0) > LEVELS[entry(path)]
    }
    assert not upwards


def test_package_does_not_import_what_the_wheel_lacks():
    files = (ROOT / "ctl").rglob("*.py")
    lacking = {"tests", "benchmarks", "experiments"}
    assert [p for p in files if lacking & {name[0] for name in imports(p)}] == []


def test_imports_inside_of_replica_go_down():
    level = {name: level for level, names in enumerate(REPLICA_LAYERS) for name in names}
    assert {p.parent.name for p in (ROOT / "ctl" / "replica").glob("*/*.py")} == {*level}
    upwards = {
        f"{path.relative_to(ROOT)} imports ctl.replica.{name}"
        for path in (ROOT / "ctl" / "replica").glob("*/*.py")
        for top, package, name, *_ in filter(lambda parts: len(parts) > 2, imports(path))
        if (top, package) == ("ctl", "replica") and name != path.parent.name
        if level.get(name, 0) >= level[path.parent.name]
    }
    assert not upwards


def imports_at_start(path: pathlib.Path) -> set[str]:
    """The modules that a module imports when it is imported itself, not in its functions."""
    names: set[str] = set()
    statements: list[ast.AST] = [ast.parse(path.read_text())]
    while statements:
        node = statements.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif not isinstance(node, ast.FunctionDef | ast.Lambda | ast.If):  # TYPE_CHECKING
            statements += ast.iter_child_nodes(node)
    return names


def test_config_errors_are_reported_before_tensorflow_is_imported():
    start = [ROOT / "ctl" / f"{name}.py" for name in ("main", "launch", "errors")]
    start += (ROOT / "ctl" / "configs").glob("*.py")
    start += [
        p for p in (ROOT / "ctl" / "commands").glob("*.py") if p.stem != "checkpoint_comparison"
    ]
    seen: set[pathlib.Path] = set()
    while start:
        path = start.pop()
        seen.add(path)
        for name in imports_at_start(path):
            package = name.partition(".")[0]
            assert package not in ("tensorflow", "tf_keras", "keras", "orbit"), path
            for module in (name, name.rpartition(".")[0]):
                file = ROOT / f"{module.replace('.', '/')}.py"
                start += [file] if file.exists() and file not in seen else []
    assert len(seen) > 40


# Each is run in one process, one after the other.
WITHOUT_TENSORFLOW = (
    "import ctl, ctl.launch, ctl.testing.plugin",
    "from ctl.configs.modes import MODES; [MODES[name].load() for name in ('devices', 'aot_compile', "
    "'find_batch')]",
    "from ctl.hardware import tpu; tpu.find_obstacle()",
    "from ctl import main; assert main.run(['ctl', 'report', 'a']) == 0",
    "from ctl import main; assert main.run(['ctl', 'diff', 'a', 'a']) == 2  # without records",
)


def test_tensorflow_is_imported_only_where_it_is_required(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.json").write_text("{}")
    check = "assert 'tensorflow' not in sys.modules, {!r}"
    lines = [f"{line}\n{check.format(line)}" for line in WITHOUT_TENSORFLOW]
    done = child.run(["-c", "\n".join(["import sys", *lines])], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# What a trainer, an evaluator or a step opens by name, relative to ctl.
LEAVES = (
    "replica/keras3", "replica/step/flops.py", "replica/step/loop_errors.py",
    "replica/step/memory_estimate.py", "replica/step/out_of_memory.py",
)  # fmt: skip


def test_the_core_does_not_import_leaves():
    core = {str(path.relative_to(ROOT / "ctl")) for path in closure.closure(closure.CORE)}
    assert all((ROOT / "ctl" / leaf).exists() for leaf in LEAVES)
    assert not {path for path in core if path.startswith(LEAVES)}
