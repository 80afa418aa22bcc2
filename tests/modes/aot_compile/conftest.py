"""A program in place of the compiler, which the tests of this folder run without its packages."""

import sys

import pytest

from ctl.modes.aot_compile import compiler_process

UV = """#!/bin/sh
for last; do :; done
[ -z "$last" ] || exec {python} {program} "$last"
"""


@pytest.fixture
def replace_compiler(tmp_path_factory, monkeypatch):
    """Replaces uv by a script that gives each request to a program: replace_compiler(text)."""
    folder = tmp_path_factory.mktemp("uv")
    program, uv = folder / "compiler.py", folder / "uv"
    uv.write_text(UV.format(python=sys.executable, program=program))
    uv.chmod(0o755)
    monkeypatch.setenv("UV", str(uv))
    compiler_process.find_python.cache_clear()
    yield program.write_text
    compiler_process.find_python.cache_clear()
