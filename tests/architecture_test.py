"""The packages of ctl import each other in one direction, also inside functions."""

import ast
import functools
import graphlib
import pathlib
import re

import pytest

import ctl
from tests import closure
from tests.support import child

ROOT = pathlib.Path(__file__).resolve().parent.parent
# From the lowest layer up: a module may import from its own layer and from those before it.
LAYERS = (
    ("errors", "lazy", "optimizers", "private", "version"),
    ("hardware",),
    ("configs",),
    ("data",),
    ("graphs",),
    ("rows",),
    ("random",),
    ("kernels",),
    ("keras",),
    ("layers",),
    ("update",),
    ("parts",),
    ("compile",),
    ("built",),
    ("checks", "replica"),
    ("step", "trainer"),
    ("evaluator",),
    ("loop",),
    ("testing",),
    ("modes", "commands", "launch"),
    ("main",),
    ("ray",),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(
    p
    for p in (ROOT / "ctl").rglob("*.py")
    if p != ROOT / "ctl/__init__.py"
    if "project_template" not in p.parts  # files of users, who import ctl
)


@functools.cache
def imports(path: pathlib.Path) -> list[list[str]]:
    """The names that a module uses of others, divided at their dots.

    These are its imports, also those in its functions, and the attributes of imported modules, such as
    `ctl.loop.timing` after `import ctl`, which import a module without a statement.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names, bound = [], {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.append(alias.name)
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                bound[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names.append(f"{node.module}.{alias.name}")
                bound[alias.asname or alias.name] = names[-1]
    for node in nodes:
        name, _, attributes = ast.unparse(node).partition(".") if is_chain(node) else ("", "", "")
        if name in bound:
            names.append(f"{bound[name]}.{attributes}")
    return [find_module(name).split(".") for name in names]


def is_chain(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
        if isinstance(node, ast.Name):
            return True
    return False


def find_module(name: str) -> str:
    """The name with its module, if it is one that `ctl` itself imports when it is first used."""
    _, _, own = name.partition("ctl.")
    first = own.partition(".")[0]
    modules = (module for module, names in ctl._MODULES.items() if first in names.split())
    module = next(modules, "")
    return f"ctl.{module}.{own}" if module and name.startswith("ctl.") else name


def entry(path: pathlib.Path) -> str:
    if path.name == "config.py":  # a part of ctl.configs in the folder of its component
        return "configs"
    return path.relative_to(ROOT / "ctl").parts[0].removesuffix(".py")


def level(name: list[str]) -> int:
    return LEVELS.get("configs" if name[2:3] == ["config"] else (*name, "")[1], len(LEVELS))


def test_every_entry_of_the_package_has_a_layer():
    names = {p.name.removesuffix(".py") for p in (ROOT / "ctl").iterdir() if p.name[0] not in "_."}
    assert names - {"py.typed"} == {*LEVELS}
    table = (ROOT / "BUILD.md").read_text().partition("## Packages")[2].partition("\n## ")[0]
    listed = re.findall(r"`(\w+)/?`", "".join(re.findall(r"^\| `[^|]* \|", table, re.MULTILINE)))
    assert {*listed} == {*LEVELS}
    levels = [LEVELS[name] for name in listed]
    assert levels == sorted(levels)


def test_imports_go_down():
    upwards = {
        f"{path.relative_to(ROOT)} imports {'.'.join(name)}"
        for path in FILES
        for name in imports(path)
        # The package itself imports all layers, so that no layer may import it.
        if name[0] == "ctl" and level(name) > LEVELS[entry(path)]
    }
    assert not upwards


def test_attributes_of_modules_are_imports(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        "import ctl\n\ndef f():\n    from ctl import loop as l\n    l.timing.f(ctl.Run)"
    )
    names = {".".join(name) for name in imports(path)}
    assert names >= {"ctl", "ctl.loop", "ctl.loop.timing.f", "ctl.modes.notebook.Run"}


def test_modules_do_not_import_each_other():
    known = {"ctl.keras.keras3.adapter", "ctl.keras.keras3.random"}
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in FILES}
    graph = {
        module: {*closure.imports(path)} & modules.keys() - known
        for module, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # an error names the modules of a cycle
    testing = {
        part_of(module): {part_of(name) for name in names} - {part_of(module)}
        for module, names in graph.items()
        if module.startswith("ctl.testing.")
    }
    graphlib.TopologicalSorter(testing).prepare()


def part_of(module: str) -> str:
    return ".".join(module.split(".")[:3])


def test_package_does_not_import_what_the_wheel_lacks():
    files = (ROOT / "ctl").rglob("*.py")
    lacking = {"tests", "benchmarks", "experiments"}
    assert [p for p in files if lacking & {name[0] for name in imports(p)}] == []


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
    start += (ROOT / "ctl").glob("*/config.py")
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


# All are run in one process, one after the other; the first also without NumPy and Keras.
WITHOUT_TENSORFLOW = (
    "import ctl, ctl.launch, ctl.testing.plugin\n"
    "from ctl import errors, main, modes\n"
    "from ctl.configs import component, keys, loading, options, overrides, validation\n"
    "from ctl.loop import progress, stop, workdir\n"
    "from ctl.hardware import devices, gpu, host, selection, strategies, tpu\n"
    "ctl.config(train=dict(steps=5)); ctl.TrainerOptions(); ctl.Clip(); dir(ctl)\n"
    "assert not {'tf_keras', 'keras', 'numpy', 'orbit'} & set(sys.modules), sys.modules.keys()",
    "from ctl.configs.modes import MODES; [MODES[name].load() for name in ('devices', 'aot_compile', "
    "'find_batch')]",
    "tpu.find_obstacle()",
    "assert main.run(['ctl', 'check', 'a.py', '--checks=nonsense']) == 2",
    "assert main.run(['ctl', 'report', 'a']) == 0",
    "assert main.run(['ctl', 'diff', 'a', 'a']) == 2  # without records",
)


def test_tensorflow_is_imported_only_where_it_is_required(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.json").write_text("{}")
    check = "assert 'tensorflow' not in sys.modules, {!r}"
    lines = [f"{line}\n{check.format(line)}" for line in WITHOUT_TENSORFLOW]
    done = child.run(["-c", "\n".join(["import sys", *lines])], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# What is opened by name from a row, and by no import: folders and files relative to ctl.
LEAVES = (
    "built/collected_rows.py", "built/flops.py", "built/loop_errors.py", "built/memory_estimate.py",
    "built/out_of_memory.py", "built/state_dicts.py", "checks", "data/cache.py", "data/files",
    "data/mixing.py", "data/packing.py", "data/ragged.py", "hardware/rendezvous.py",
    "hardware/tpu.py", "keras/attention.py", "keras/dropout.py", "keras/image_layers.py",
    "keras/keras3", "keras/layer_metrics.py", "keras/penalties.py", "kernels", "layers",
    "loop/actions/best_checkpoint.py", "loop/actions/plateau.py", "loop/bucket",
    "loop/exports.py", "loop/profiler.py", "loop/watchdog.py", "modes/sweep.py",
    "parts/compression.py", "parts/ema.py", "parts/norms.py", "parts/parameter_groups.py",
    "parts/sharded_optimizer.py", "random", "compile/compiled_loop.py", "rows/moments.py",
    "rows/views.py",
)  # fmt: skip


# The lines and the files that one reads to change a step, or the program that trains, at most.
@pytest.mark.parametrize(
    ("modules", "lines", "files"),
    [(closure.CORE, 9_310, 95), (closure.PROGRAM, 14_250, 147)],
)
def test_closure_is_small_and_names_no_leaf(modules, lines, files):
    read = closure.closure(modules)
    assert all((ROOT / "ctl" / leaf).exists() for leaf in LEAVES)
    names = {str(path.relative_to(ROOT / "ctl")) for path in read}
    assert not {name for name in names if name.startswith(LEAVES)}
    assert sum(map(closure.count_lines, read)) <= 1.02 * lines and len(read) <= 1.02 * files
