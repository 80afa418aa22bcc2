"""The code and the numbers of lines of docs/real-projects.md are those of its test."""

import ast
import re
import textwrap

from tests.docs import pages
from tests.support import child

TEST = (child.ROOT / "tests/end_to_end/real_projects_test.py").read_text()
NAMES = {
    "PINNs-TF2.0": "Burgers", "baselines": "Ppo", "spektral": "Gin", "recommenders": "Retrieval",
    "TensorFlowASR": "SpeechCtc", "CycleGAN-Tensorflow-2": "CycleGan",
}  # fmt: skip


def body(name, method):
    """The lines of a method of a project, without its first one."""
    project = next(node for node in ast.parse(TEST).body if getattr(node, "name", "") == name)
    node = next(node for node in project.body if getattr(node, "name", "") == method)
    return "\n".join(TEST.splitlines()[node.lineno : node.end_lineno])


def test_code_and_numbers_of_lines_of_the_real_projects_are_those_of_their_test():
    before, after = pages.blocks("real-projects", "py")
    for code, method in ((before, "original"), (after, "port")):  # their lines have other lengths
        tested = ast.parse(textwrap.dedent(body("Retrieval", method)))
        assert ast.dump(ast.parse(code)) == ast.dump(tested)
    page = (child.ROOT / "docs/real-projects.md").read_text()
    rows = re.findall(r"^\| \[([\w.-]+)\].*?\|.*?\| (\d+) \| (\d+) \|", page, re.MULTILINE)
    assert [name for name, *_ in rows] == [*NAMES]
    for name, *counts in rows:
        bodies = [body(NAMES[name], method) for method in ("original", "port")]
        lines = [sum(bool(line.strip()) for line in each.splitlines()) for each in bodies]
        assert [int(count) for count in counts] == lines, name
