"""Every file, module, test, flag and config key that the documentation names exists."""

import ast
import re

import pytest

import ctl
from ctl.configs import flags, keys, overrides
from ctl.configs.modes import MODES
from tests.support import child

DOCS = sorted(str(path.relative_to(child.ROOT)) for path in child.ROOT.glob("docs/**/*.md"))
OTHERS = ["README.md", "BUILD.md", "deploy/kubernetes/README.md", "experiments/README.md"]
PAGES = [*OTHERS, *DOCS]
TEXTS = {page: (child.ROOT / page).read_text() for page in PAGES}
FOLDERS = "ctl|tests|benchmarks|experiments|deploy|docs|\\.ci"
SOURCES = [path.read_text() for path in child.ROOT.glob("tests/**/*.py")]
TESTS = set(re.findall(r"^\s*def (test_\w+)", "\n".join(SOURCES), re.MULTILINE))
SECTIONS = "init|loss_weights|runtime|data|model|optimizer|train|summaries|eval"
ATTRIBUTES = {"optimizer.iterations", "optimizer.loss_scale"}  # of the optimizers of tf_keras


def exists(path):
    return (child.ROOT / path).exists()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", TEXTS[page])
    folder = (child.ROOT / page).parent
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (folder / target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_paths_of_the_repository_exist(page):
    # A path ends in a file extension or a slash; experiments/mine.py is a file of the reader.
    paths = re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]*(?:\.\w+|/))(?![\w*])", TEXTS[page])
    assert [path for path in paths if not exists(path) and "/mine.py" not in path] == []


@pytest.mark.parametrize("page", PAGES)
def test_names_of_tests_exist_in_the_files_that_are_named_with_them(page):
    # The examples define tests of their own, and names such as test_images.
    text = re.sub(r"^```python\n.*?^```", "", TEXTS[page], flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"(?<!def )\b(test_\w+)(?!\w*\.py)", text))
    defined = set(re.findall(r"def (test_\w+)", TEXTS[page]))
    assert named - defined - TESTS == set()
    for path, name in re.findall(r"(tests/[\w/]+_test\.py)::(test_\w+)", TEXTS[page]):
        assert re.search(rf"def {name}\b", (child.ROOT / path).read_text()), (path, name)


@pytest.mark.parametrize("page", PAGES)
def test_modules_that_commands_run_exist(page):
    modules = set(re.findall(r"python3? -m ((?:ctl|benchmarks|tests)[\w.]*)", TEXTS[page]))
    paths = [module.replace(".", "/") for module in modules]
    assert [p for p in paths if not exists(f"{p}.py") and not exists(f"{p}/__main__.py")] == []


@pytest.mark.parametrize("page", PAGES)
def test_flags_and_modes_exist(page):
    commands = "\n".join(re.findall(r"(?:python3? -m ctl\.main|\bctl) --[^`\n]*", TEXTS[page]))
    valued = "config workdir mode checkpoint topology sweep sweep_parallel"
    known = {*valued.split(), *flags.SWITCHES}
    assert set(re.findall(r"--(\w+)(?![\w.])", commands)) <= known
    assert set(re.findall(r"--mode=(\w+)", TEXTS[page])) <= {*MODES, "MODE"}


# The sections in which a key may have any name.
FREE = ("model.", "init.models.", "loss_weights.", "optimizer.schedule_arguments.")


@pytest.mark.parametrize("page", PAGES)
def test_config_keys_exist(page):
    known = {*overrides.flatten(keys.defaults()), *ATTRIBUTES, *keys.FREE_SECTIONS}
    named = re.findall(rf"(?:`|--config\.)((?:{SECTIONS})(?:\.[a-z_]+)+)\b(?!\()", TEXTS[page])
    unknown = {key for key in named if not key.startswith(FREE) and key not in known}
    # A section is named by itself, too, such as `runtime.gpu`.
    assert {key for key in unknown if not any(k.startswith(f"{key}.") for k in known)} == set()


@pytest.mark.parametrize("page", PAGES)
def test_names_of_ctl_are_public(page):
    named = re.findall(r"(?:from |import |(?<!-m )`)(ctl\.[\w.]+)", TEXTS[page])
    api = "".join(text for page, text in TEXTS.items() if page.startswith("docs/reference/api/"))
    assert [name for name in named if not is_public(name) and f"`{name}`" not in api] == []


def is_public(name):
    """Whether a name such as ctl.data.arrays, or one of its attributes, is in the API."""
    _, first, *others = name.rstrip(".").split(".")
    if first == "ray":  # importing it requires Ray
        return others in ([], ["trainer"], ["tuner"])
    if first not in ctl.__all__ or not others:
        return first in {*ctl.__all__, "launch", "main"}  # these two are programs
    parent = getattr(ctl, first)
    return others[0] in getattr(parent, "__all__", dir(parent))


def test_messages_name_no_page_that_an_installed_package_lacks():
    named = set()
    for path in child.ROOT.glob("ctl/**/*.py"):
        tree = ast.parse(path.read_text())
        scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = {id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, scopes) and is_doc(n)}
        # `ctl launch --help` and the help of the commands print the docstrings of their modules.
        if path.name == "launch.py" or path.parent.name == "commands":
            docs.discard(id(tree.body[0].value))
        texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs]
        texts = [str(text.value) for text in texts]
        named |= {text for text in texts if re.search(r"docs/[\w-]+\.md|BUILD\.md", text)}
    assert named == set()


def is_doc(scope):
    """Whether a module, class or function begins with a docstring."""
    return ast.get_docstring(scope, clean=False) is not None


def test_texts_of_keys_are_sentences_that_stand_alone():
    for key in keys.KEYS:
        if key.text:
            assert re.match(r"[A-Z]", key.text) and key.text.endswith("."), key.name
            # A value with a colon, such as "0: off", is no sentence.
            assert not re.search(r'(^|[.;] )("[^"]*"|[\w-]+): ', key.text), key.name
            odd = ("The ", "Such ", "Seconds ", "Steps ", "Updates ", "Of ", "See ")
            assert not key.text.startswith(odd), key.name
