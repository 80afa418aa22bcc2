"""The page about engines names all of them; tests/end_to_end/ray_test.py runs its Python block."""

import ast
import re
import shlex

import pytest

from ctl.configs import flags
from ctl.hardware import engines
from tests.docs.pages import blocks
from tests.support import child

TEXT = (child.ROOT / "docs/clusters.md").read_text()
SHELL = "".join(blocks("clusters", "sh")).splitlines()


def test_variables_are_named_in_the_order_in_which_they_decide():
    section = TEXT.split("## Which engine is recognized")[1]
    places = [section.index(f"`{engine.variable}`") for engine in engines.ENGINES]
    assert places == sorted(places)


@pytest.mark.parametrize("line", SHELL)
def test_shell_commands_run_the_program_with_valid_configs(line, tmp_path):
    (tmp_path / "digits.py").write_text(blocks("start")[0])  # the program of the first run
    words = shlex.split(line)
    if words[0] == "sbatch" and "--wrap" not in line:
        assert (child.ROOT / words[-1]).exists()
        return
    (command,) = re.findall(r"\bctl (?:launch .* -- )?((?:experiments/|digits.py|--)[^']*)", line)
    command = command.replace("digits.py ", f"{tmp_path / 'digits.py'} ")
    values, changes = flags.parse(
        ["ctl", *shlex.split(command.replace("$SLURM_ARRAY_TASK_ID", "1"))]
    )
    assert flags.load_config(values.config, changes).train.steps


def test_python_block_uses_experiments_that_exist():
    (code,) = blocks("clusters")
    strings = [n.value for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Constant)]
    paths = [text for text in strings if str(text).endswith(".py")]
    assert len(paths) == 2 and all((child.ROOT / path).exists() for path in paths)
