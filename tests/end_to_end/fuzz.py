"""Makes mistakes at random, commits each, and judges what comes of it.

python -m tests.end_to_end.fuzz command_line 0 17 1   # kind, seed, first case, how many

A case is a function of the seed, the kind and its number. It has to end in one of two ways: what was
given is taken for what it says, or it is refused in one line, with nothing written.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import gzip
import io
import json
import math
import os
import pathlib
import random
import shutil
import struct
import sys
import traceback
from typing import Any
import warnings
import zlib

from ctl import main
from ctl.configs import defaults, options, overrides
from ctl.configs.flags import MODES
from ctl.errors import UsageError
from ctl.hardware import cluster
from ctl.loop.workdir import Workdir

REFUSED, TAKEN = "refused", "taken"
BASE = {"trainer": "tiny.py:Tiny", "data.global_batch_size": 4}
FILES = {
    "exp.py": """\
import ctl

def get_config():
    return ctl.config(trainer="tiny.py:Tiny", data=dict(global_batch_size=4))
""",
    "tiny.py": "import ctl\n\nclass Tiny(ctl.StandardTrainer):\n    pass\n",
}
DEFAULTS = {**overrides.flat(defaults.defaults()), "model.units": 5}
SECTIONS = sorted({k.rpartition(".")[0] for k in DEFAULTS} - {""})
DELICATE = ("trainer", "runtime.devices", "runtime.tpu.address", "runtime.tpu.name") * 3
ODD_TEXTS = (
    *("", " ", "0", "-0", "-1", "1", "5", "1e5", "1e400", "nan", "-nan", "inf", "-Infinity", "1.0"),
    *("True", "false", "yes", "None", "null", "1_000", "0x10", "1,5", "+3", " 4 ", "5L", "1/2"),
    *("٣", "²", "½", "é", "🙂", "\u2028", "\u202e", "a\nb", "a\tb", "\x1b[31m", "\udc80", "\x7f"),
    *("9" * 5000, "9" * 30, "-" + "9" * 30, str(2**31), str(2**32), str(2**63), "0." + "0" * 400),
    *(
        "()",
        "[]",
        "{}",
        "(1,)",
        "('GPU:0',)",
        "('GPU:0', 'GPU:0')",
        "['CPU:0', 'GPU:1']",
        "'GPU:0'",
    ),
    *("([],)", "({},)", "{'a': 1}", "{[]: 1}", "(", "(" * 3000, "[" * 99999, "-" * 9999 + "1"),
    *(
        "lambda: 0",
        "print()",
        "--fresh",
        "=",
        "a=b",
        "'",
        '"',
        "\\",
        "%s",
        "{0}",
        "$HOME",
        "*",
        ":",
    ),
    *(
        "auto",
        "AUTO",
        "bf16",
        "cosine",
        "loop",
        "device",
        "mirrored",
        "tpu",
        "multi_worker_mirrored",
    ),
    *("tiny.py:", "tiny.py:Tina", ":Tiny", "tiny:Tiny", "no.py:Tiny", "../x.py:A", "x" * 5000),
    *("a.b:C", "..:A", "class:A", "__main__:A", "builtins:int", "os.path:join", "é.py:É", "sys:A"),
    *("x" * 300 + ".py:A", "exp.py:Tiny", ".py:A", "json:A", "x:y:z", "grpc://a:1", "grpc://a:٣"),
)
ODD_VALUES = (
    *(
        "None",
        "True",
        "False",
        "0",
        "-1",
        "1",
        "5",
        "10**5000",
        "-10**400",
        "2**31",
        "2**63",
        "0.0",
    ),
    *("-0.0", "1.5", "1e308", "float('nan')", "float('inf')", "-float('inf')", "1j", "'5'", "''"),
    *(
        r"'\x00'",
        r"'a\nb'",
        r"'\ud800'",
        "'é🙂'",
        "'x' * 9999",
        "b'5'",
        "bytearray(3)",
        "...",
        "print",
    ),
    *("[]", "()", "{}", "set()", "[[[]]]", "[None]", "{'a': {'b': {}}}", "{'a': 1}", "{1: 2}"),
    *("{(1, 2): 3}", "{None: 0}", "{'': 1}", "{'a.b': 1}", "{'a b': 1}", "{b'a': 1}", "{'é': 1}"),
    *(
        "{1.5: 0}",
        "{True: 0}",
        "{float('nan'): 0}",
        "[{'a': [{(1,): 2}]}]",
        "[10**5000]",
        "[{1: 2}]",
    ),
    *("range(3)", "iter(())", "int", "object()", "ctl", "ctl.config()", "ctl.config().train"),
    *("numpy.int64(5)", "numpy.float32(0.5)", "numpy.float64('nan')", "numpy.array([1, 2])"),
    *("numpy.bool_(True)", "numpy.str_('adam')", "ConfigDict({'a': 1})", "ConfigDict({})"),
    *("placeholder(int)", "placeholder(str)", "required_placeholder(int)", "FieldReference(5)"),
    *(
        "FieldReference('x')",
        "FieldReference(None, field_type=int)",
        "looped()",
        "nested([], 5000)",
    ),
    *("looped_section()", "nested({}, 300)", "nested({}, 5000)", "type('I', (int,), {})(5)"),
    *("type('S', (str,), {})('adam')", "type('R', (), {'__repr__': lambda self: 'a\\nb'})()"),
    *("type('R', (), {'__repr__': lambda self: 1 / 0})()", "('GPU:0', 1)", "('GPU:0', [])"),
    *("('CPU:0',)", "'tiny.py:Tiny'", "'x\\x00.py:Tiny'", "'x' * 300 + '.py:A'", "'__main__:A'"),
)
HELPERS = """\
import ctl
import numpy
from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder, required_placeholder

def looped():
    found = []
    found.append(found)
    return found

def looped_section():
    found = {}
    found["a"] = found
    return found

def nested(value, depth):
    for _ in range(depth):
        value = [value] if isinstance(value, list) else {"a": value}
    return value

"""


class Found(AssertionError):
    """Something that must not be."""


@dataclasses.dataclass
class Run:
    """What came of a run of the program."""

    code: int
    line: str
    config: Any = None


class _LoadsTensorFlow(BaseException):
    """The program got so far that it would load TensorFlow: it has taken what was given."""


_made: list[Any] = []


def without_tensorflow() -> None:
    """Lets the program end where it would load TensorFlow; what it took must fit in a workdir."""

    def load() -> None:
        raise _LoadsTensorFlow

    def dispatch(values: Any, config: Any, *_: Any) -> int:
        copy = type(config)(config.to_dict()).lock()
        options.Section(copy.model.to_dict(), "model")
        check_ranges(overrides.flat(copy))
        made = pathlib.Path.cwd().parent / "made"
        shutil.rmtree(made, ignore_errors=True)
        Workdir(made).create(copy.to_dict())
        if changes := Workdir(made).check_config(copy.to_dict()):
            raise Found(f"what was written is not what is read: {changes}")
        _made.append(copy)
        return 0

    main._quiet_tensorflow = load
    main._dispatch = dispatch


def check_ranges(values: Mapping[str, Any]) -> None:
    """No number is one that no key of ctl can have a use for."""
    for name, value in values.items():
        if name.startswith("model.") or isinstance(value, str | list):
            continue
        least = -1 if name in ("data.prefetch", "data.tfrecord.parallel_calls") else 0
        if not least <= value < (math.inf if isinstance(value, float) else 2**32):
            raise Found(f"{name} is taken for {value!r}")


def program(arguments: list[str], **environment: str) -> Run:
    """Runs the program here; its standard error is what a terminal would get."""
    stdout, stderr = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)
        for errors in ("strict", "backslashreplace")
    )
    _made.clear()
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = main.run(["ctl", *arguments])
    except _LoadsTensorFlow:
        code = 0
    finally:
        os.environ.clear()
        os.environ.update(before)
    line = stderr.buffer.getvalue().decode()
    return Run(code, line, _made[0] if _made else None)


def judged(run: Run, *names: str) -> str:
    """Whether the program has taken or refused what it was given, and told it as it should.

    Args:
        run: what came of it.
        names: a line that refuses has one of these in it; any line will do where there are none.
    """
    if run.code == 0:
        if run.line:
            raise Found(f"exit code 0 with a line on stderr: {run.line!r}")
        return TAKEN
    if run.code != 2:
        raise Found(f"exit code {run.code}: {run.line!r}")
    check_line(run.line, "ctl: ", *names)
    if len(run.line) > 5_000:
        raise Found(f"too long to read: {run.line[:500]!r}")
    return REFUSED


def check_line(line: str, start: str, *names: str) -> None:
    """A refusal is one line that names what is wrong and says something about it."""
    if not line.endswith("\n") or len(line.splitlines()) != 1 or not line.startswith(start):
        raise Found(f"not one line: {line[:500]!r}")
    if "Traceback" in line:
        raise Found(f"not a line to read: {line[:500]!r}")
    if names and not any(name in line for name in names):
        raise Found(f"none of {names} is in {line[:500]!r}")


def refusal(function: Callable[[], Any], *names: str) -> tuple[bool, Any]:
    """Whether a function refuses, and what it returns if not."""
    try:
        return False, function()
    except UsageError as error:
        check_line(f"{' '.join(str(error).split())}\n", "", *names)
        return True, None


@contextlib.contextmanager
def untouched(folder: pathlib.Path, *but: str) -> Iterator[None]:
    """What happens inside leaves a folder as it is."""
    before = content(folder)
    yield
    after = content(folder)
    changed = [name for name in {**before, **after} if before.get(name, 0) != after.get(name, 0)]
    if changed := [name for name in changed if not name.startswith(but or ("\0",))]:
        raise Found(f"refused or only looked at, and yet changed: {sorted(changed)}")


def content(folder: pathlib.Path) -> dict[str, bytes | None]:
    """Everything in a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def write(folder: pathlib.Path, files: Mapping[str, str | bytes]) -> None:
    """Writes files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        (folder / name).write_bytes(raw)


# Mutations.


def misspelt(draw: random.Random, name: str) -> str:
    """A name with a letter dropped, doubled, swapped or strange, or a part of it gone."""
    i = draw.randrange(len(name))
    last = name.rpartition(".")[-1]
    return draw.choice(
        [
            name[:i] + name[i + 1 :],
            name[:i] + name[i] + name[i:],
            name[:i] + draw.choice("éx_.- $0") + name[i + 1 :],
            name.upper(),
            last,
            f"{draw.choice(SECTIONS)}.{last}",
            f"{name}.{last}",
            f"{name}.",
            f".{name}",
        ]
    )


def damaged(draw: random.Random, raw: bytes) -> bytes:
    """Bytes that were flipped, cut, added, doubled or replaced; seldom none are left."""
    changed = bytearray(raw)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        where, length = draw.randrange(len(changed) + 1), draw.choice([1, 1, 2, 4, 8, 50])
        kind = draw.randrange(8)
        if kind <= 2 and where < len(changed):
            changed[where] ^= 1 << draw.randrange(8)
        elif kind == 3 and where < len(changed):
            changed[where] = draw.randrange(256)
        elif kind == 4:
            del changed[where:]
        elif kind == 5:
            del changed[where : where + length]
        elif kind == 6:
            changed[where:where] = draw.randbytes(length)
        else:
            changed += changed[where : where + length]
    return bytes(changed)


def changed_json(draw: random.Random, tree: Any) -> Any:
    """A tree with one of its nodes replaced, removed, doubled or renamed."""
    if not isinstance(tree, dict | list) or not tree or draw.random() < 0.15:
        return odd_json(draw)
    if isinstance(tree, list):
        i = draw.randrange(len(tree))
        return draw.choice(
            [
                [*tree[:i], *tree[i + 1 :]],
                [*tree, tree[i]],
                tree[::-1],
                {str(n): value for n, value in enumerate(tree)},
                *[[*tree[:i], changed_json(draw, tree[i]), *tree[i + 1 :]]] * 3,
            ]
        )
    key = draw.choice(list(tree))
    rest = {name: value for name, value in tree.items() if name != key}
    odd = draw.choice(
        [key.upper(), f"{key}s", "", "é", "master", "evaluator", "ps", "chief", "x.y"]
    )
    return draw.choice(
        [
            rest,
            {**rest, odd: tree[key]},
            {**tree, odd: tree[key]},
            list(tree.values()),
            *[{**tree, key: changed_json(draw, tree[key])}] * 5,
        ]
    )


def odd_json(draw: random.Random) -> Any:
    """A value of JSON that few expect."""
    return draw.choice(
        [
            *(None, True, False, 0, -1, 1, 2, 10**30, 1.0, 0.5, 1e300, math.nan, math.inf, "", " "),
            *("0", "1", "-1", "--1", "1.0", "²", "٣", "½", "+1", "1_0", "worker", "é🙂", "\ud800"),
            *("a\0b", "a\nb", "x" * 5000, "9" * 5000, [], {}, [[]], [{}], {"0": "a:1"}, ["a:1"]),
            *(["a:0"], ["a:99999"], ["a:٣"], ["a"], [":1"], ["a:1", "a:1"], ["[::1]:1"], ["a b:1"]),
            *(["http://a:1"], [1], [None], {"a": {"b": []}}, ["a:1", "A:1", "a:01"], ["é:1"]),
        ]
    )


def odd_text_of_json(draw: random.Random, tree: Any) -> bytes:
    """A tree as text, itself changed, or its text, or another text."""
    kind = draw.randrange(10)
    if kind <= 5:
        for _ in range(draw.choice([1, 1, 2])):
            tree = changed_json(draw, tree)
        return json.dumps(tree).encode()
    if kind <= 7:
        return damaged(draw, json.dumps(tree).encode())
    if kind == 8:
        text = json.dumps(tree).encode()
        return text[: draw.randrange(len(text))]
    odd = [
        b"",
        b" ",
        b"null",
        b"[",
        b"[" * 99_999,
        b'{"a":' * 99_999,
        b"\0\0",
        b"\xff\xfe",
        b"{}{}",
    ]
    return draw.choice([*odd, b"1" * 5000, b"\xef\xbb\xbf{}", draw.randbytes(100), b'"\\ud800"'])


# The kinds that need no TensorFlow.


def command_line(draw: random.Random, folder: pathlib.Path) -> str:
    """Keys on the command line, right and misspelt, with values of all sorts."""
    write(folder, {**FILES, "exp.py": FILES["exp.py"].replace("))\n", "), model=dict(units=5))\n")})
    name = draw.choice([*DEFAULTS, *SECTIONS, *DELICATE])
    known = draw.random() < 0.7
    written = name if known else misspelt(draw, name)
    text = draw.choice(ODD_TEXTS)
    if draw.random() < 0.3:
        text = str(DEFAULTS.get(name, "")) or draw.choice(["tiny.py:Tiny", "bfloat16", "é a=b"])
    elif draw.random() < 0.3:
        text = str(
            draw.choice([draw.randint(-(10**10), 10**10), draw.randint(1, 9), draw.gauss(1, 9)])
        )
    arguments = draw.choice(
        [
            *[[f"--config.{written}={text}"]] * 6,
            [f"-config.{written}={text}"],
            [f"--config.{written}", text],
            [f"--config.{written}"],
            [f"--noconfig.{written}"],
            [f"--noconfig.{written}={text}"],
        ]
    )
    print(arguments)
    with untouched(folder):
        run = program(["--config=exp.py", *arguments])
    names = {written.split(".")[0], written.split(".")[-1], written.strip(".").split(".")[-1]}
    outcome = judged(run, *names, arguments[-1], "config")
    if outcome == TAKEN and len(arguments) == 1 and "=" in arguments[0] and known:
        check_meaning(name, text, overrides.flat(run.config)[name] if run.config else None)
    return outcome


def check_meaning(name: str, text: str, value: Any) -> None:
    """A value that was taken is what its text says."""
    default = DEFAULTS[name]
    meant = {int: int, float: float, str: str}.get(type(default))
    if type(value) is not type(default) or (meant and meant(text) != value):
        raise Found(f"{name}={text!r} is taken for {value!r}")


def config_file(draw: random.Random, folder: pathlib.Path) -> str:
    """Config files that set what they must not, as they must not, or that are damaged."""
    name = draw.choice([*DEFAULTS, *SECTIONS, *DELICATE])
    if draw.random() < 0.2:
        name = misspelt(draw, name)
    value = draw.choice(ODD_VALUES)
    section = name.rpartition(".")[0]
    item = "".join(f"[{part!r}]" for part in name.split("."))
    nested = value
    for part in reversed(name.split(".")):
        nested = f"{{{part!r}: {nested}}}"
    right = "trainer='tiny.py:Tiny', data=dict(global_batch_size=4)"
    statement = draw.choice(
        [
            *[f"config = ctl.config(**{{**{{'trainer': 'tiny.py:Tiny'}}, **{nested}}})"] * 3,
            *[f"config.{name} = {value}"] * 3,
            f"config{item} = {value}",
            f"config.update({nested})",
            f"config.unlock().{name} = {value}",
            f"with config.unlocked(): config.{section + '.' if section else ''}new = {value}",
            f"del config.unlock().{name}",
            f"with config.ignore_type(): config.{name} = {value}",
            f"config.model = {value}",
            f"config.model = {{'a': {value}, {value!r}: [{value}]}}",
            f"config = ctl.config({right}, model={value})",
            f"config = ctl.config({right}, model={{'a': [{value}, ({value},)]}})",
            f"config = {value}",
            f"raise {draw.choice(['ValueError', 'SystemExit', 'MemoryError', 'OSError'])}({value})",
        ]
    )
    body = f"config = ctl.config({right})\n    {statement}\n    return config\n"
    text = f"{HELPERS}def get_config():\n    {body}".encode()
    print(statement)
    if draw.random() < 0.15:
        text = damaged(draw, text)
        print(text[-200:])
    write(folder, {**FILES, "bad.py": text})
    with untouched(folder):
        run = program(["--config=bad.py"])
    return judged(run, "bad.py", *name.split("."), "config", "model", "trainer", "batch_size")


def flags(draw: random.Random, folder: pathlib.Path) -> str:
    """Flags in any number, order and spelling, with values of all sorts."""
    write(folder, {**FILES, "flags.txt": "--mode=explain\n", "bad.txt": b"\xff\xfe--mode=\0"})
    names = ["config", "workdir", "mode", "fresh", "allow_config_change", "help", "flagfile"]
    names += [
        "allow_partial_restore",
        "undefok",
        "helpfull",
        "helpshort",
        "nofresh",
        "nohelp",
        "noconfig",
        "no",
        "",
        "-",
        "é",
    ]
    values = [
        *MODES,
        "exp.py",
        "exp.py:",
        "exp.py:5",
        "run",
        ".",
        "..",
        "tiny.py",
        "exp.py/x",
    ]
    values += ["flags.txt", "bad.txt", "no.txt", "true", "0", "a/b/c", "x" * 300, "x" * 300 + ".py"]
    arguments = ["--config=exp.py"] if draw.random() < 0.7 else []
    for _ in range(draw.choice([1, 1, 2, 3, 4])):
        name = draw.choice(names)
        name = misspelt(draw, name) if name and draw.random() < 0.1 else name
        value = draw.choice([*values, *values, *ODD_TEXTS[:40]])
        dashes = draw.choice(["--", "--", "--", "-", "---", ""])
        arguments.append(
            draw.choice(
                [f"{dashes}{name}={value}", f"{dashes}{name}={value}", dashes + name, value]
            )
        )
    draw.shuffle(arguments)
    print(arguments)
    with untouched(folder):
        run = program(arguments)
    return judged(run)


def tf_config(draw: random.Random, folder: pathlib.Path) -> str:
    """Descriptions of clusters, by TF_CONFIG or by the variables of an indexed Job."""
    if draw.random() < 0.25:
        return indexed_job(draw)
    tasks = {"worker": [f"host-{i}:{2000 + i}" for i in range(draw.randint(1, 3))]}
    if draw.random() < 0.5:
        tasks = {"chief": ["c:1"], **tasks, "ps": ["p:1", "p:2"][: draw.randint(1, 2)]}
    role = draw.choice(list(tasks))
    task = {"type": role, "index": draw.randrange(len(tasks[role]))}
    raw = odd_text_of_json(draw, {"cluster": tasks, "task": task, "environment": "cloud"})
    text = raw.decode("utf-8", "surrogateescape")
    print(text[:2000])
    refused, place = refusal(lambda: cluster.read({"TF_CONFIG": text}), "TF_CONFIG")
    if not refused and place is not None:
        told = json.loads(text)
        check_place(place)
        if place.addresses != told["cluster"] or place.role != told["task"]["type"]:
            raise Found(f"{text} is taken for {place}")
        if place.index != int(told["task"]["index"]):
            raise Found(f"{text} is taken for {place}")
    if draw.random() < 0.3 and "\0" not in text:
        write(folder, FILES)
        with untouched(folder):
            run = program(["--config=exp.py"], TF_CONFIG=text)
        if (judged(run, "TF_CONFIG", "cluster", "runtime.strategy") == REFUSED) < refused:
            raise Found("the program takes what cluster.read refuses")
    return REFUSED if refused else TAKEN


def indexed_job(draw: random.Random) -> str:
    """Some variables of an indexed Job, one or two of them odd."""
    right = {"JOB_COMPLETION_INDEX": "1", "CTL_JOB": "job", "CTL_SERVICE": "service"}
    right |= {"CTL_WORKERS": "2", "CTL_PS": "1", "CTL_PORT": "2222"}
    for name in draw.sample(list(right), draw.choice([1, 2])):
        odd = [
            "",
            " ",
            "0",
            "-1",
            "3",
            "4",
            "99999",
            "²",
            "٣",
            "1.0",
            "x",
            " 1 ",
            "a b",
            "a:b",
            "é",
        ]
        right[name] = draw.choice([*odd, "65536", "9" * 5000, "9" * 9, "_", "a/b", "1_0"])
    print(right)
    refused, place = refusal(lambda: cluster.read(right), "CTL_", "JOB_COMPLETION_INDEX")
    if not refused and place is not None:
        check_place(place)
        workers, servers = int(right["CTL_WORKERS"]), int(right["CTL_PS"].strip() or 0)
        if place.size != workers + servers + bool(servers):
            raise Found(f"{right} is taken for {place}")
    return REFUSED if refused else TAKEN


def check_place(place: cluster.Cluster) -> None:
    """A place that was taken is one that TensorFlow can be given, and is what it writes."""
    everyone = [address for tasks in place.addresses.values() for address in tasks]
    for address in everyone:
        host, _, port = address.rpartition(":")
        ascii_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
        if not (host and ascii_port) or any(c.isspace() or c in "/\0" for c in address):
            raise Found(f"{address!r} is taken for an address")
    if len(set(everyone)) < len(everyone) or place.address not in everyone:
        raise Found(f"{place} has an address twice, or not its own")
    if place.size != len(place.others()) + 1 or cluster.parse(place.tf_config()) != place:
        raise Found(f"{place} is not what it writes")


def workdir(draw: random.Random, folder: pathlib.Path) -> str:
    """Runs' folders with a file that is damaged, emptied, of other types, or no file."""
    write(folder, {**FILES, "runs/exp/checkpoints/checkpoint": "", "runs/exp/events.jsonl": "{}\n"})
    config = overrides.config(trainer="tiny.py:Tiny", data={"global_batch_size": 4}).to_dict()
    result = {"step": 1000, "train": {"loss": 0.5}, "eval": {"loss": 1.0}, "versions": {}}
    trees = {"config.json": config, "result.json": result}
    for name, tree in trees.items():
        write(folder, {f"runs/exp/{name}": json.dumps(tree)})
    name = draw.choice(list(trees))
    path = folder / "runs" / "exp" / name
    kind = draw.randrange(20)
    path.unlink()
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path)
    elif kind > 2:
        path.write_bytes(odd_text_of_json(draw, trees[name]))
        print(name, path.read_bytes()[:3000])
    arguments = ["--config=exp.py", f"--mode={draw.choice(MODES[:4])}"]
    arguments += draw.choice([[], [], [], ["--fresh"], ["--allow_config_change"]])
    print(arguments)
    with untouched(folder):
        run = program(arguments)
    outcome = judged(run, "runs/exp", "--fresh", "--allow_config_change")
    if outcome == TAKEN and len(arguments) == 2 and path.is_file() and name == "config.json":
        old = {**DEFAULTS, **overrides.flat(json.loads(path.read_bytes()))}
        for key in ("seed", "trainer", "optimizer.name", "runtime.precision"):
            if old[key] != overrides.flat(config)[key]:
                raise Found(f"goes on with another {key}: {old[key]!r}")
    here = Workdir("runs/exp")
    with untouched(folder):
        refusal(here.config, "config.json")
        unread, found = refusal(here.result, "result.json")
        refusal(here.check_movable, "runs/exp")
        refusal(lambda: here.check_config(config), "runs/exp")
    if not unread and not isinstance(found, dict):
        raise Found(f"the result is {found!r}")
    moved, aside = refusal(here.move_aside, "runs/exp")
    if not moved and aside and (here.path.exists() or not aside.exists()):
        raise Found("moved aside, and still there or nowhere")
    return outcome


# The kinds that need TensorFlow.

_IDX_TYPES = {8: "B", 9: "b", 11: "h", 12: "i", 13: "f", 14: "d"}


def encoded(values: list[Any], shape: tuple[int, ...], kind: int = 8) -> bytes:
    """The bytes of an IDX file."""
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape)
    return header + struct.pack(f">{len(values)}{_IDX_TYPES[kind]}", *values)


def decoded(raw: bytes) -> tuple[tuple[int, ...], list[Any]] | None:
    """Shape and values of an IDX file by the letter of the format; None if it is none."""
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.GzipFile(fileobj=io.BytesIO(raw)).read()
        except (OSError, EOFError, zlib.error):
            return None
    try:
        zeros, kind, axes = struct.unpack_from(">HBB", raw)
        shape = struct.unpack_from(f">{axes}I", raw, 4)
        count = math.prod(shape)
        if zeros or not 1 <= axes <= 32 or not 0 < count <= len(raw):
            return None
        form = f">{count}{_IDX_TYPES[kind]}"
        if struct.calcsize(form) != len(raw) - 4 - 4 * axes:
            return None
        return shape, list(struct.unpack_from(form, raw, 4 + 4 * axes))
    except (struct.error, KeyError):
        return None


def idx_pair(draw: random.Random) -> dict[str, bytes]:
    """Images and labels, one of them damaged in its bytes or wrong in its header."""
    count, rows, columns = draw.randint(1, 9), draw.randint(1, 4), draw.randint(1, 4)
    kind = draw.choice(list(_IDX_TYPES))
    pixels = [draw.randrange(100) for _ in range(count * rows * columns)]
    pair = {
        "images-idx3-ubyte": encoded(pixels, (count, rows, columns), kind),
        "labels-idx1-ubyte": encoded([draw.randrange(2) for _ in range(count)], (count,)),
    }
    name = draw.choice(list(pair))
    raw = pair[name]
    how = draw.randrange(10)
    if how == 0:  # wrong dimensions
        where = 4 + 4 * draw.randrange(raw[3])
        odd = draw.choice([0, 1, 2, count + 1, count - 1, 2**31, 2**32 - 1])
        raw = raw[:where] + struct.pack(">I", odd) + raw[where + 4 :]
    elif how == 1:  # another type, or number of axes
        raw = raw[:2] + bytes([draw.choice([8, 9, 10, 13, 14, 0]), draw.randrange(256)]) + raw[4:]
    elif how == 2:
        raw = draw.choice(
            [b"", raw[:4], raw[:16], raw + b"\0", raw * 2, b"404", raw[:-1], raw[::-1]]
        )
    elif how == 3:  # no examples
        raw = encoded([], (0, rows, columns) if "images" in name else (0,))
    zipped = draw.random() < 0.5
    if how > 6:
        raw = damaged(draw, raw)
    pair[name] = raw
    if zipped:
        pair = {each: gzip.compress(content) for each, content in pair.items()}
        if 3 < how <= 6:
            pair[name] = damaged(draw, pair[name])
        elif how == 2 and draw.random() < 0.5:
            pair[name] = draw.choice([pair[name][:-4], pair[name] * 2, pair[name] + b"\0" * 5])
    elif how > 3:
        pair[name] = damaged(draw, pair[name])
    ending = draw.choice(["", ".gz"])
    return {f"{each}{ending}": content for each, content in pair.items()}


def expected_of(pair: Mapping[str, bytes]) -> tuple[Any, Any] | None:
    """Shape and values of the images, and the labels; None where the pair must be refused."""
    images, labels = (decoded(raw) for raw in pair.values())
    if not images or not labels or len(labels[0]) != 1 or images[0][0] != labels[0][0]:
        return None
    return images, labels[1]


def idx(draw: random.Random, folder: pathlib.Path) -> str:
    """IDX files: read for exactly what they hold by the letter of the format, or refused."""
    import numpy as np
    import tensorflow as tf

    from ctl.data import idx

    pair = idx_pair(draw)
    write(folder / "data", {f"train-{name}": raw for name, raw in pair.items()})
    print(pair)
    refused, source = refusal(lambda: idx("data", "train"), "data/train-")
    want = expected_of(pair)
    if (want is None) != refused:
        raise Found(f"{'refused' if refused else 'taken'}, and it holds {want}")
    if refused:
        return REFUSED
    (shape, values), labels = want
    batch = source.gather(tf.range(len(source), dtype=tf.int64))
    image = batch["image"].numpy()
    if len(source) != shape[0] or image.shape != tuple(shape):
        raise Found(f"{len(source)} examples, {image.shape}, and it holds {shape}")
    if not np.array_equal(image.ravel().astype("f8"), np.array(values, "f8"), equal_nan=True):
        raise Found("other pixels than it holds")
    if not np.array_equal(batch["label"].numpy().astype("f8"), np.array(labels, "f8"), True):
        raise Found("other labels than it holds")
    return TAKEN


def records_of(ids: list[int]) -> bytes:
    """The bytes of a TFRecord file, framed and checked by hand."""
    return b"".join(framed(example(i)) for i in ids)


def example(number: int) -> bytes:
    """A serialized example."""
    import tensorflow as tf

    features = {
        "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=[number, -number])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def framed(record: bytes) -> bytes:
    """A record as TFRecord files hold it."""
    length = struct.pack("<Q", len(record))
    return length + masked_crc(length) + record + masked_crc(record)


def masked_crc(raw: bytes) -> bytes:
    """CRC-32C, masked as TFRecord files have it."""
    crc = 0xFFFFFFFF
    for byte in raw:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def unframed(raw: bytes) -> list[bytes] | None:
    """The records of a file by the letter of the format; None if it is damaged or has none."""
    found = []
    while raw:
        length = raw[:8]
        size = int.from_bytes(length, "little")
        if len(raw) < 16 + size or masked_crc(length) != raw[8:12]:
            return None
        record, crc, raw = raw[12 : 12 + size], raw[12 + size : 16 + size], raw[16 + size :]
        if masked_crc(record) != crc:
            return None
        found.append(record)
    return found or None


def tfrecords(draw: random.Random, folder: pathlib.Path) -> str:
    """TFRecord files: every record that is there, once and unchanged, or refused."""
    import tensorflow as tf

    from ctl.data import distribution, tfrecords

    features = {
        "id": tf.io.FixedLenFeature([], tf.int64),
        "x": tf.io.FixedLenFeature([2], tf.float32),
    }
    files = {f"data/{n}.tfrecord": records_of(list(range(10 * n, 10 * n + 4))) for n in range(2)}
    name, how = draw.choice(list(files)), draw.randrange(10)
    pattern = "data/*.tfrecord"
    wrong_features = how == 0
    if how == 0:
        odd = {
            "x": tf.io.FixedLenFeature([3], tf.float32),
            "id": tf.io.FixedLenFeature([], tf.string),
        }
        odd["y"] = tf.io.FixedLenFeature([], tf.int64)
        key = draw.choice(list(odd))
        features[key] = odd[key]
    elif how == 1:
        files[name] = draw.choice(
            [b"", files[name][:16], b"text", files[name][:-1], files[name] * 2]
        )
    elif how == 2:
        pattern = draw.choice(
            ["data/no*", "no/*", "", "data", "data/", "\0", "x" * 300, "[", "é*", "data/["]
        )
    elif how == 3:  # whole records fewer
        files[name] = b"".join(map(framed, (unframed(files[name]) or [])[: draw.randrange(4)]))
    else:
        files[name] = damaged(draw, files[name])
    write(folder, files)
    print(pattern, how, files)
    split = draw.choice(["train", "eval"])
    tuning = {"interleave": draw.randint(1, 3), "cache": draw.random() < 0.3, "shuffle_buffer": 5}
    refused, dataset = refusal(
        lambda: tfrecords(str(pattern), features, split=split, tuning=tuning), "TFRecord", "data"
    )
    held = [unframed(raw) for raw in files.values()]
    want = (
        None if wrong_features or None in held else sorted(number(r) for file in held for r in file)
    )
    if refused:
        if want is not None and how != 2:
            raise Found(f"refused, and it holds {want}")
        return REFUSED
    if how == 2:
        raise Found(f"{pattern!r} is taken for files")
    try:
        elements = list(distribution.disable_autotune(dataset).as_numpy_iterator())
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
        if want is not None:
            raise Found(f"{error}, and it holds {want}") from None
        return REFUSED
    found = sorted(int(element["id"]) for element in elements)
    if found != want or any(list(e["x"]) != [e["id"], -e["id"]] for e in elements):
        raise Found(f"{found} is read, and it holds {want}")
    return TAKEN


def number(record: bytes) -> int:
    """The id of a serialized example."""
    import tensorflow as tf

    return tf.train.Example.FromString(record).features.feature["id"].int64_list.value[0]


WHOLE = {
    "exp.py": """\
import ctl

def get_config():
    return ctl.config(
        trainer="net.py:Net", data=dict(dir="data", global_batch_size=4), train=dict(steps=3))
""",
    "net.py": """\
import tensorflow as tf
import tf_keras
import ctl

class Net(ctl.StandardTrainer):
    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Flatten(), tf_keras.layers.Dense(2)])

    def build_dataset(self, split, input_context):
        return ctl.data.idx(self.options.data.dir, split)

    def preprocess(self, batch):
        return {**batch, "image": tf.cast(batch["image"], self.compute_dtype)}

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.mean_squared_error(
            tf.one_hot(tf.cast(batch["label"], tf.int32), 2), outputs)

    def build_metrics(self):
        return {"count": tf_keras.metrics.Sum()}

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["count"].update_state(tf.ones([tf.shape(outputs)[0]]), sample_weight=weights)
""",
    "records.py": """\
import tensorflow as tf
import tf_keras
import ctl
from net import Net

class Records(Net):
    def build_dataset(self, split, input_context):
        features = {"id": tf.io.FixedLenFeature([], tf.int64),
                    "x": tf.io.FixedLenFeature([2], tf.float32)}
        return ctl.data.tfrecords(
            f"{self.options.data.dir}/*", features, split=split, seed=self.options.seed,
            tuning=self.options.data.tfrecord)

    def preprocess(self, batch):
        return {"image": tf.cast(batch["x"], self.compute_dtype), "label": batch["id"] % 2}
""",
}

LIKELY = {
    "data.global_batch_size": ("1", "3", "5", "100", "0"),
    "data.per_replica_batch_size": ("2", "4"),
    "data.placement": ("device",),
    "data.prefetch": ("0", "1", "100"),
    "eval.global_batch_size": ("1", "2", "7", "100"),
    "eval.interval": ("1", "2", "100"),
    "init.checkpoint": ("nowhere", "."),
    "init.variables": ("('*',)",),
    "optimizer.clip.norm": ("0.5",),
    "optimizer.clip.global_norm": ("1e-30", "1e30"),
    "optimizer.gradient_accumulation_steps": ("2", "3", "5", "100"),
    "optimizer.learning_rate": ("1e-30", "1e30", "1e39"),
    "optimizer.momentum": ("0.9", "1e-9"),
    "optimizer.name": ("adamw", "sgd", "rmsprop", "adagrad", "lion"),
    "optimizer.schedule": ("cosine",),
    "optimizer.weight_decay": ("0.1", "1e30"),
    "runtime.all_reduce.algorithm": ("ring", "nccl", "one_device"),
    "runtime.all_reduce.dtype": ("bfloat16",),
    "runtime.devices": ("('CPU:0',)", "('CPU:7',)", "('GPU:0',)"),
    "runtime.gpu.memory_limit_mib": ("1",),
    "runtime.logical_devices": ("1", "2"),
    "runtime.logical_shards": ("1", "2", "3"),
    "runtime.loss_scale": ("2", "1e30"),
    "runtime.precision": ("float64", "bfloat16", "float16"),
    "runtime.strategy": ("default", "one_device", "mirrored", "central_storage"),
    "runtime.xla": ("off", "step", "loop", "gradients"),
    "seed": ("4294967295",),
    "train.checkpoint_interval": ("0", "1", "2"),
    "train.checkpoints_to_keep": ("1", "2147483647"),
    "train.loss_spike": ("1.0", "2.0"),
    "train.norms": ("true",),
    "train.on_non_finite": ("skip", "rollback", "ignore"),
    "train.steps": ("1", "2", "5"),
    "train.steps_per_loop": ("1", "2"),
}


def whole_run(draw: random.Random, folder: pathlib.Path) -> str:
    """Whole runs: to the last step and over every example, or refused with nothing written."""
    right = {
        f"data/{split}-{name}": raw
        for split, count in (("train", 6), ("t10k", 7))
        for name, raw in {
            "images-idx3-ubyte": encoded(list(range(4 * count)), (count, 2, 2)),
            "labels-idx1-ubyte": encoded([i % 2 for i in range(count)], (count,)),
        }.items()
    }
    what = draw.choice(["images", "records", "config", "config", "config"])
    arguments, files, held, steps = [], right, 7, 3
    if what == "images":
        split = draw.choice(["train", "t10k"])
        pair = idx_pair(draw)
        kept = {k: v for k, v in right.items() if not k.startswith(f"data/{split}-")}
        files = {**kept, **{f"data/{split}-{name}": raw for name, raw in pair.items()}}
        want = expected_of(pair)
        held = 0 if want is None else len(want[1]) if split == "t10k" else 7
    elif what == "records":
        raw = records_of(list(range(7)))
        raw = raw if draw.random() < 0.2 else damaged(draw, raw)
        files = {"data/one.tfrecord": raw}
        held = len(unframed(raw) or [])
        arguments.append("--config.trainer=records.py:Records")
    else:
        for key in draw.sample(list(LIKELY), draw.choice([1, 2, 3])):
            arguments.append(f"--config.{key}={draw.choice(LIKELY[key])}")
            if key == "train.steps":
                steps = int(arguments[-1].partition("=")[2])
    write(folder, {**WHOLE, **files})
    print(arguments, files if what != "config" else "")
    run = program(["--config=exp.py", "--workdir=run", "--mode=train_and_eval", *arguments])
    outcome = judged(run)
    result = folder / "run" / "result.json"
    if outcome == REFUSED:
        # What a record holds is known when it is read, which is after the run has begun.
        if result.exists() or ((folder / "run").exists() and what != "records"):
            raise Found(f"refused, and yet written: {run.line}")
        if held and what != "config":
            raise Found(f"refused, and it holds {held}: {run.line}")
        return REFUSED
    found = json.loads(result.read_text())
    if not held or (found["step"], found["eval"]["count"]) != (steps, held):
        raise Found(f"{steps} steps and {held} examples are wanted, and the result is {found}")
    return TAKEN


LIGHT = {each.__name__: each for each in (command_line, config_file, flags, tf_config, workdir)}
HEAVY = {each.__name__: each for each in (idx, tfrecords, whole_run)}


def attempt(kind: str, seed: str, case: int) -> tuple[str, str]:
    """One case: its outcome, and what is wrong with it or nothing."""
    folder = pathlib.Path(f"case-{case}").resolve()
    folder.mkdir()
    start = pathlib.Path.cwd()
    os.chdir(folder)
    given = io.StringIO()
    try:
        with contextlib.redirect_stdout(given):
            outcome = {**LIGHT, **HEAVY}[kind](random.Random(f"{kind} {seed} {case}"), folder)
        wrong = ""
    except Exception:  # whatever it is, it is what is looked for
        outcome = "wrong"
        wrong = f"{kind} {seed} {case}: {given.getvalue()[:3000]}\n{traceback.format_exc()[-2500:]}"
    os.chdir(start)
    shutil.rmtree(folder)
    return outcome, wrong


def attempts(kind: str, seed: str, first: int, count: int) -> None:
    """Tries cases one after the other, and prints what came of them as JSON."""
    sys.path.insert(0, "")  # the current folder, as it changes
    sys.dont_write_bytecode = True
    warnings.simplefilter("ignore")  # Python's own, about a damaged file
    if kind in LIGHT:
        without_tensorflow()
    counts = {TAKEN: 0, REFUSED: 0, "wrong": 0}
    wrongs = []
    for case in range(first, first + count):
        pathlib.Path("case").write_text(str(case))  # for who finds that this hangs
        outcome, wrong = attempt(kind, seed, case)
        counts[outcome] += 1
        wrongs += [wrong] if wrong else []
    if kind in LIGHT and "tensorflow" in sys.modules:
        wrongs.append("TensorFlow was loaded")
    print(json.dumps({"counts": counts, "wrong": wrongs}))


if __name__ == "__main__":
    attempts(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
