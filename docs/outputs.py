"""Runs the commands and programs of the pages, and writes or compares the outputs shown below them.

    python -m docs.outputs                      # compares all pages, the learning path first
    python -m docs.outputs --write docs/start.md  # writes the outputs of one page
    python -m docs.outputs --list               # lists all blocks, and where each output is from

The pages of the learning path run in one folder, as a reader has it: without this clone, and with the
`ctl` of `--bin`, such as that of a fresh environment with the wheel. Each other page runs in a folder of
its own, which has the files that the path saves. A comment in the source of a page, before a block, says
what is special about it:

- `<!-- file: NAME -->` saves the Python block under this name, which later blocks use.
- `<!-- run: COMMANDS -->` before a `text` block gives the commands that print it. Otherwise it is the
  output of the last `sh` or `python` block of its section.
- `<!-- setup: COMMANDS -->` runs commands before a block, whose output is not shown.
- `<!-- not run: REASON -->` before a block says why it does not run here.
- `<!-- tested: TEST -->` before a `text` block names the test that compares it.

`...` in an output stands for any text or, as a line, for any lines. Speeds, times and names of machines
are not compared, and decimal numbers within 2 %, because they differ between CPUs. Python blocks without
an output are run by tests/docs/.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap

from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATH = tuple(
    f"docs/{name}"
    for name in re.findall(
        r"^      - (.*\.md)$",
        (ROOT / "mkdocs.yml").read_text().partition("- Learn:")[2].partition("\n  - ")[0],
        re.MULTILINE,
    )
)
_FENCE = re.compile(r"^( *)```(sh|python|text)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- (file|run|setup|not run|tested): (.*?) -->", re.DOTALL)
_NOT_HERE = {"not run", "tested"}
# What differs from run to run -> what is compared in its place.
_MASKS = (
    (r"[\d,]+ examples/s( \([\d,]+ in the last loop\))?", "N examples/s"),
    (r" \| waited \d+% for input", ""),
    (r" \| \d+ (s|min) left", ""),
    (r" in [\d.]+s( \([\d:]+\))?$", " in T"),
    (r"\b\d+(\.\d+)? ?(s|ms|min|seconds)\b", "T"),
    (r"\d{4}-\d\d-\d\d[ _T]\d\d[:-]\d\d[:-]\d\d(\.\d+)?(\+00:00)?", "DATE"),
    (r"pid[ =]\d+( on \S+)?", "PID"),
    (r"\d+ logical cores?, .*", "N logical cores"),
    (r"^TensorFlow  [\d.]+", "TensorFlow N"),
    (r"[\d.]+ GiB, [\d.]+ GiB available", "MEMORY"),
    (r"(\bdone\b.*) [\d.]+$", r"\1 T"),  # of a sweep
    (r"(Stopped at step |ckpt-)\d+", r"\1N"),
)
# Those of TensorFlow 2.21 (docs/install.md).
_IMPORT_LINES = re.compile(
    r"^(\[worker \d+\] )?(WARNING: All log messages before absl|I0000 .* oneDNN custom).*\n", re.M
)
_SEPARATOR = "\x1e"  # between the outputs of the Python blocks of a page

_WRITE = flags.DEFINE_bool("write", False, "Write the outputs into the pages.")
_LIST = flags.DEFINE_bool("list", False, "List the blocks of all pages; run nothing.")
_FOLDER = flags.DEFINE_string("folder", None, "The folder to run in, which is kept.")
_BIN = flags.DEFINE_string("bin", None, "The folder of another environment's `ctl` and `python`.")


@dataclasses.dataclass
class Block:
    """A code block of a page, with the comments before it."""

    page: str
    line: int
    language: str
    code: str
    span: tuple[int, int]  # of the code, in the text of the page
    indent: str
    section: str
    comments: dict[str, str]


def read_blocks(page: str) -> list[Block]:
    """Returns the blocks of a page, in their order."""
    text = (ROOT / page).read_text()
    blocks, end = [], 0
    for match in _FENCE.finditer(text):
        before = re.search(
            r"(?:<!-- (?:(?!-->).)* -->\s*)*\Z", text[end : match.start()], re.DOTALL
        )
        headings = re.findall(r"^#+ .*$|^=== .*$", text[: match.start()], re.MULTILINE)
        blocks.append(
            Block(
                page, text.count("\n", 0, match.start()) + 1, match[2], textwrap.dedent(match[3]),
                match.span(3), match[1], headings[-1] if headings else "",
                dict(_COMMENT.findall(before[0] if before else "")),
            )
        )  # fmt: skip
        end = match.end()
    return blocks


def pair(blocks: Sequence[Block]) -> Iterator[tuple[Block, Block | None]]:
    """Yields each block that runs, or an output with `run`, and the block with its output."""
    for i, block in enumerate(blocks):
        if block.language == "text":
            if block.comments.keys() & {"run", *_NOT_HERE}:
                yield block, block
            continue
        later = blocks[i + 1] if i + 1 < len(blocks) else None
        shown = later and later.language == "text" and later.section == block.section
        shown = shown and not later.comments.keys() & {"run", *_NOT_HERE}
        yield block, later if shown else None


def describe(block: Block, output: Block | None) -> str:
    """Returns how the output of a block was obtained."""
    if "not run" in block.comments:
        return f"not run: {' '.join(block.comments['not run'].split())}"
    if "tested" in block.comments:
        return f"compared by {block.comments['tested']}"
    if "file" in block.comments:
        return f"saved as {block.comments['file']}"
    if block.language == "python" and output is None:
        return "run by tests/docs"
    return "run" + ("" if output is None else ", output compared")


class Folder:
    """The folder of a reader, in which the blocks run."""

    def __init__(self, path: pathlib.Path, environment: str | None):
        """Makes the folder, and what stands for a download of MNIST."""
        self.path = path
        modules = path / ".modules"
        modules.mkdir(parents=True, exist_ok=True)
        (modules / "sitecustomize.py").write_text(_STANDS_FOR_A_DOWNLOAD)
        checkout = [] if environment else [str(ROOT)]
        programs = environment or str(pathlib.Path(sys.executable).parent)
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([programs, os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(modules), *checkout]),
            "CTL_MNIST": str(ROOT / "experiments/data/mnist"),
            "COLUMNS": "100",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }

    def save(self, block: Block) -> None:
        """Saves a block if a comment names its file."""
        if "file" not in block.comments:
            return
        target = self.path / block.comments["file"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(block.code)

    def run(self, command: Sequence[str]) -> tuple[str, int]:
        """Returns what a command prints, and its exit code."""
        done = subprocess.run(
            command, cwd=self.path, env=self.environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1800,
        )  # fmt: skip
        printed = _IMPORT_LINES.sub("", done.stdout)
        return printed.replace(str(self.path), "/home/you"), done.returncode

    def outputs(self, block: Block, earlier: Sequence[Block]) -> tuple[str, int]:
        """Runs a block, after the Python blocks of its page before it."""
        if "setup" in block.comments and block.language != "python":
            printed, code = self.run(["bash", "-ec", block.comments["setup"]])
            if code:
                return printed, code
        if block.language == "text":
            return self.run(["bash", "-c", block.comments["run"]])
        if block.language == "sh":
            return self.run(["bash", "-c", block.code])
        parts = [f"{b.comments.get('setup', '')}\n{b.code}" for b in [*earlier, block]]
        program = f"\nprint({_SEPARATOR!r}, flush=True)\n".join(parts)
        printed, code = self.run(["python", "-c", program])
        return printed.rpartition(f"{_SEPARATOR}\n")[2], code


# Keras downloads MNIST once per user. Where nothing can be downloaded, it comes from experiments/data.
_STANDS_FOR_A_DOWNLOAD = """
import gzip, importlib.abc, importlib.util, os, sys

def load_data():
    import numpy as np
    def read(name, offset, *shape):
        data = gzip.open(os.path.join(os.environ["CTL_MNIST"], name)).read()
        return np.frombuffer(data, np.uint8, offset=offset).reshape(-1, *shape)
    return tuple(
        (read(f"{n}-images-idx3-ubyte.gz", 16, 28, 28), read(f"{n}-labels-idx1-ubyte.gz", 8))
        for n in ("train", "t10k")
    )

class Loader(importlib.abc.Loader):
    def exec_module(self, module):
        module.load_data = load_data

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("keras.src.datasets.mnist", "tf_keras.src.datasets.mnist"):
            return importlib.util.spec_from_loader(name, Loader())

sys.meta_path.insert(0, Finder())
"""


def mask(line: str) -> str:
    """Returns a line without what differs from run to run."""
    for pattern, text in _MASKS:
        line = re.sub(pattern, text, line)
    return " ".join(line.split())


def is_same(shown: str, printed: str) -> bool:
    """Whether two lines are equal, apart from what is masked and the last digits of decimal numbers."""
    number = r"(?<![\w.-])\d+\.\d+(?:e-?\d+)?(?![\w.])"
    texts = [mask(shown), mask(printed)]
    without = [re.sub(number, "#", text) for text in texts]
    if "..." in shown:
        return bool(re.fullmatch(".*".join(map(re.escape, without[0].split("..."))), without[1]))
    if without[0] != without[1]:
        return False
    numbers = zip(*(map(float, re.findall(number, text)) for text in texts), strict=True)
    return all(math.isclose(a, b, rel_tol=0.02, abs_tol=0.002) for a, b in numbers)


def matches(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether a shown output is the printed one, where a line `...` stands for any lines."""
    if not shown:
        return not printed
    if shown[0].strip() == "...":
        return any(matches(shown[1:], printed[i:]) for i in range(len(printed) + 1))
    return bool(printed) and is_same(shown[0], printed[0]) and matches(shown[1:], printed[1:])


def shorten(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """Returns the printed lines, with as many of its first and last ones as are shown around `...`.

    An output with several `...`, or with one at an end, stays for the author to correct.
    """
    dots = [i for i, line in enumerate(shown) if line.strip() == "..."]
    if not dots:
        return list(printed)
    first, last = dots[0], len(shown) - dots[-1] - 1
    if len(dots) > 1 or not first or not last:
        return list(shown)
    return [*printed[:first], "...", *printed[len(printed) - last :]]


def check_page(page: str, folder: Folder, write: bool) -> list[str]:
    """Runs the blocks of a page; returns the outputs that differ, or writes them."""
    problems, changes, programs = [], [], []
    for block, output in pair(read_blocks(page)):
        place = f"{page}:{block.line}"
        if block.comments.keys() & {"file", *_NOT_HERE}:
            continue
        if block.language == "python" and output is None:
            programs.append(block)
            continue
        printed, code = folder.outputs(block, programs)
        programs += [block] if block.language == "python" else []
        if output is None:
            if code:
                problems.append(f"{place} ends with exit code {code}:\n{printed[-2000:]}")
            continue
        lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
        shown = output.code.splitlines()
        # A long line is wrapped on the page.
        if not matches(shown, lines) and not is_same(" ".join(shown), " ".join(lines)):
            problems.append(f"{place} prints (exit code {code}):\n" + "\n".join(lines))
            changes.append((output, shorten(shown, lines)))
    if write and changes:
        text = (ROOT / page).read_text()
        for output, lines in reversed(changes):
            new = textwrap.indent("".join(f"{line}\n" for line in lines), output.indent)
            text = text[: output.span[0]] + new + text[output.span[1] :]
        (ROOT / page).write_text(text)
    return problems


def all_pages() -> list[str]:
    """Returns the learning path in its order, and the other pages that no program writes."""
    others = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
    return [*PATH, *(p for p in others if p not in PATH and not p.startswith("docs/reference/"))]


def main(arguments: Sequence[str]) -> int:
    """Runs the pages that are named, or all of them."""
    pages = arguments[1:]
    if _LIST.value:
        for page in pages or all_pages():
            for block, output in pair(read_blocks(page)):
                print(f"{page}:{block.line}  {block.language}  {describe(block, output)}")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        parent, count = pathlib.Path(_FOLDER.value or temporary).resolve(), 0
        for page in pages or all_pages():
            name = "path" if page in PATH else page.replace("/", "-")
            folder = Folder(parent / name, _BIN.value)
            for block in (b for each in (*PATH, page) for b in read_blocks(each)):
                folder.save(block)
            problems = check_page(page, folder, _WRITE.value)
            print(f"{page}: {len(problems)} outputs differ", flush=True)
            for problem in problems:
                print(f"- {problem}", flush=True)
            count += len(problems)
    return 1 if count else 0


if __name__ == "__main__":
    app.run(main)
