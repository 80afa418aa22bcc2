"""Generated command lines, config files, clusters and workdirs are used as they are, or rejected."""

import json
import math
import pathlib
import tempfile

from hypothesis import strategies as st
import pytest

from ctl.configs import keys, options, overrides
from ctl.configs.modes import MODES
from ctl.hardware import engines
from ctl.hardware.engines import tf_config
from ctl.loop.workdir import Workdir
from tests.support import generated
from tests.support.generated import FILES, explore, folder, is_accepted, rejects, unchanged

DEFAULTS = {**overrides.flatten(keys.defaults()), "model.units": 5}
SECTIONS = sorted({key.rpartition(".")[0] for key in DEFAULTS} - {""})
RUNTIME_NAMES = ["trainer", "runtime.devices", "runtime.tpu"]
ODD_WORDS = r"""
0 -0 -1 1 5 1e5 1e400 nan -nan inf -Infinity 1.0 True false yes None null 1_000 0x10 1,5 +3 5L 1/2
٣ ² ½ é 🙂 () [] {} (1,) ('GPU:0',) 'GPU:0' ([],) ({},) {[]:1} ( = a=b print() --fresh ' " \ %s {0}
$HOME * : auto AUTO bf16 bfloat16 cosine loop device mirrored tpu multi_worker_mirrored tiny.py:
tiny.py:Tiny tiny.py:Tina :Tiny tiny:Tiny no.py:Tiny ../x.py:A a.b:C ..:A class:A __main__:A
builtins:int os.path:join é.py:É sys:A exp.py:Tiny .py:A json:A x:y:z grpc://a:1 grpc://a:٣
"""
ODD_TEXTS = [
    *ODD_WORDS.split(),
    *("", " ", " 4 ", "\u2028", "\u202e", "a\nb", "a\tb", "\x1b[31m", "\udc80", "\x7f", "é a=b"),
    *("('GPU:0', 'GPU:0')", "['CPU:0', 'GPU:1']", "{'a': 1}", "lambda: 0", "x" * 300 + ".py:A"),
    *("9" * 5000, "9" * 30, "-" + "9" * 30, str(2**31), str(2**32), str(2**63), "0." + "0" * 400),
    *("(" * 3000, "[" * 99999, "-" * 9999 + "1", "x" * 5000),
]
ODD_EXPRESSIONS = r"""
None True False 0 -1 1 5 10**5000 -10**400 2**31 2**63 0.0 -0.0 1.5 1e308 1j '5' '' float('nan')
float('inf') -float('inf') '\x00' 'a\nb' '\ud800' 'é🙂' 'x'*9999 b'5' bytearray(3) ... print [] ()
{} set() [[[]]] [None] {'a':{'b':{}}} {'a':1} {1:2} {(1,2):3} {None:0} {'':1} {'a.b':1} {b'a':1}
{'é':1} {1.5:0} {True:0} {float('nan'):0} [{'a':[{(1,):2}]}] [10**5000] [{1:2}] range(3) iter(())
int ctl object() ctl.config() ctl.config().train numpy.int64(5) numpy.float32(0.5)
numpy.float64('nan') numpy.array([1,2]) numpy.bool_(True) numpy.str_('adam') ConfigDict({'a':1})
ConfigDict({}) placeholder(int) placeholder(str) required_placeholder(int) FieldReference(5)
FieldReference('x') FieldReference(None,field_type=int) cyclic([]) cyclic({}) nested([],5000)
nested({},300) nested({},5000) ('GPU:0',1) ('GPU:0',[]) ('CPU:0',) 'tiny.py:Tiny' '__main__:A'
'x\x00.py:Tiny' 'x'*300+'.py:A' type('I',(int,),{})(5) type('S',(str,),{})('adam')
"""
ODD_VALUES = [
    *ODD_EXPRESSIONS.split(), "{'a b': 1}", r"type('R', (), {'__repr__': lambda self: 'a\nb'})()",
    "type('R', (), {'__repr__': lambda self: 1 / 0})()",
]  # fmt: skip
HELPERS = """\
import ctl
import numpy
from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder, required_placeholder

def cyclic(value):
    value.append(value) if isinstance(value, list) else value.update(a=value)
    return value

def nested(value, depth):
    for _ in range(depth):
        value = [value] if isinstance(value, list) else {"a": value}
    return value

"""
RIGHT = "trainer='tiny.py:Tiny', data=dict(global_batch_size=4)"
keys = st.sampled_from([*DEFAULTS, *SECTIONS, *RUNTIME_NAMES * 3])
texts = st.one_of(
    st.sampled_from(ODD_TEXTS), st.integers().map(str), st.integers(1, 9).map(str),
    st.floats().map(str), st.text(max_size=9),
)  # fmt: skip


@st.composite
def misspelled(draw, name):
    i = draw(st.integers(0, len(name) - 1)) if name else 0
    last, section = name.rpartition(".")[-1], draw(st.sampled_from(SECTIONS))
    letter = name[:i] + draw(st.sampled_from(["", *"éx_.- $0"])) + name[i + 1 :]
    double = name[: i + 1] + name[i:]
    names = [letter, double, name.upper(), last, f"{section}.{last}", f"{name}.{last}", f".{name}"]
    return draw(st.sampled_from([*names, f"{name}."]))


@st.composite
def command_lines(draw):
    """(key or None if it is misspelled, its text or None, the arguments)"""
    key = draw(keys)
    text = draw(st.one_of(texts, texts, st.just(str(DEFAULTS.get(key, "")))))
    if draw(st.integers(0, 9)) < 3:
        name = draw(misspelled(key))
        return None, text, [f"--config.{name}={text}"]
    if draw(st.integers(0, 9)) < 6:
        return key, text, [f"--config.{key}={text}"]
    spellings = ([f"-config.{key}={text}"], [f"--config.{key}", text], [f"--config.{key}"])
    negated = ([f"--noconfig.{key}"], [f"--noconfig.{key}={text}"])
    return key, None, draw(st.sampled_from([*spellings, *negated]))


def check_accepted(config):
    """A config that was accepted has usable numbers, and can be written and read again."""
    options.Section(config["model"], "model")
    for name, value in overrides.flatten(config).items():
        if isinstance(value, str | list | tuple) or name.startswith("model."):
            continue
        least = -1 if name == "data.prefetch" else 0
        assert least <= value < (math.inf if isinstance(value, float) else 2**32), name
    with tempfile.TemporaryDirectory() as path:
        workdir = Workdir(pathlib.Path(path, "run"))
        workdir.create(config)
        assert not workdir.check_config(config)


def accepts_command_line(case):
    key, text, arguments = case
    config_file = FILES["exp.py"].replace("))\n", "), model=dict(units=5))\n")
    with folder({**FILES, "exp.py": config_file}), unchanged():
        outcome = generated.run_without_tensorflow(["--config=exp.py", *arguments])
    name = arguments[0].lstrip("-").partition(".")[2].partition("=")[0]
    parts = name.strip(".").split(".")
    if not is_accepted(outcome, parts[0], parts[-1], arguments[-1], "config"):
        return False
    if outcome.config:
        check_accepted(outcome.config)
    if key and text is not None and outcome.config:
        value, default = overrides.flatten(outcome.config)[key], DEFAULTS[key]
        assert type(value) is type(default)
        if isinstance(default, str) or type(default) in (int, float):
            assert value == type(default)(text)
    return True


@st.composite
def config_files(draw):
    """(the key that is set, the source of the config file)"""
    key, value = draw(keys), draw(st.sampled_from(ODD_VALUES))
    if draw(st.integers(0, 4)) == 1:
        key = draw(misspelled(key))
    tree = value
    for part in reversed(key.split(".")):
        tree = f"{{{part!r}: {tree}}}"
    item = "".join(f"[{part!r}]" for part in key.split("."))
    section = key.rpartition(".")[0]
    error = draw(st.sampled_from(["ValueError", "SystemExit", "MemoryError", "OSError"]))
    statements = [
        *[f"config = ctl.config(**{{'trainer': 'tiny.py:Tiny', **{tree}}})"] * 3,
        *[f"config.{key} = {value}"] * 3,
        f"config{item} = {value}",
        f"config.update({tree})",
        f"config.unlock().{key} = {value}",
        f"with config.unlocked(): config.{section + '.' if section else ''}new = {value}",
        f"del config.unlock().{key}",
        f"with config.ignore_type(): config.{key} = {value}",
        f"config.model = {{'a': {value}, {value!r}: [{value}]}}",
        f"config = ctl.config({RIGHT}, model={{'a': [{value}, ({value},)]}})",
        f"config = {value}",
        f"raise {error}({value})",
    ]
    statement = draw(st.sampled_from(statements))
    source = f"{HELPERS}def get_config():\n    config = ctl.config({RIGHT})\n"
    source = f"{source}    {statement}\n    return config\n".encode()
    if draw(st.integers(0, 6)) == 1:
        source = draw(generated.damaged(source))
    return key, source


def accepts_config_file(case):
    key, source = case
    with folder({**FILES, "bad.py": source}), unchanged():
        outcome = generated.run_without_tensorflow(["--config=bad.py"])
    if outcome.config:
        check_accepted(outcome.config)
    names = ("bad.py", *key.split("."), "config", "model", "trainer", "batch_size")
    return is_accepted(outcome, *names)


FLAGS = (
    "config workdir mode fresh allow_config_change help flagfile allow_partial_restore undefok "
    "helpfull helpshort nofresh nohelp noconfig no topology - é"
)
RIGHT_FLAGS = ["workdir=run", "fresh", "allow_config_change", "help", "flagfile=flags.txt"]
FLAG_VALUES = (
    "exp.py exp.py: exp.py:5 run . .. tiny.py exp.py/x flags.txt bad.txt no.txt true 0 a/b"
)


@st.composite
def flags(draw):
    values = st.sampled_from([*FLAG_VALUES.split(), *MODES, "x" * 300, "x" * 300 + ".py"])
    arguments = ["--config=exp.py"] * draw(st.sampled_from([0, 1, 1, 1]))
    arguments += draw(st.lists(st.sampled_from([f"--{name}" for name in RIGHT_FLAGS]), max_size=2))
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        name = draw(st.sampled_from([*FLAGS.split(), ""]))
        if draw(st.integers(0, 9)) == 1:
            name = draw(misspelled(name))
        value = draw(st.one_of(values, values, texts))
        flag = draw(st.sampled_from(["--", "--", "--", "-", "---", ""])) + name
        arguments.append(draw(st.sampled_from([f"{flag}={value}", f"{flag}={value}", flag, value])))
    return draw(st.permutations(arguments))


def accepts_flags(arguments):
    files = {"flags.txt": "--mode=explain\n", "bad.txt": b"\xff\xfe--mode=\0"}
    with folder({**FILES, **files}), unchanged():
        return is_accepted(generated.run_without_tensorflow(arguments))


@st.composite
def tf_configs(draw):
    tasks = {"worker": [f"host-{i}:{2000 + i}" for i in range(draw(st.integers(1, 3)))]}
    if draw(st.booleans()):
        tasks |= {"chief": ["c:1"], "ps": ["p:1", "p:2"][: draw(st.integers(1, 2))]}
    role = draw(st.sampled_from(list(tasks)))
    task = {"type": role, "index": draw(st.integers(0, len(tasks[role]) - 1))}
    raw = draw(generated.json_texts({"cluster": tasks, "task": task, "environment": "cloud"}))
    return {"TF_CONFIG": raw.decode("utf-8", "surrogateescape")}


@st.composite
def indexed_jobs(draw):
    """The variables of a Kubernetes Indexed Job, one or two of them odd."""
    variables = {"JOB_COMPLETION_INDEX": "1", "CTL_JOB": "job", "CTL_SERVICE": "service"}
    variables |= {"CTL_WORKERS": "2", "CTL_PS": "1", "CTL_PORT": "2222"}
    words = "0 -1 3 4 99999 ² ٣ 1.0 x a:b é 65536 _ a/b 1_0"
    odd = [*words.split(), "", " ", " 1 ", "9" * 5000]
    names = st.sampled_from(list(variables))
    return {
        **variables,
        **draw(st.dictionaries(names, st.sampled_from(odd), min_size=1, max_size=2)),
    }


def accepts_cluster(variables):
    names = ("TF_CONFIG", "CTL_", "JOB_COMPLETION_INDEX")
    rejected, place = rejects(lambda: engines.from_environment(variables), *names)
    text = variables.get("TF_CONFIG")
    if not rejected and place is not None:
        check_place(place)
        if text is None:
            servers = int(variables["CTL_PS"].strip() or 0)
            assert place.size == int(variables["CTL_WORKERS"]) + servers + bool(servers)
        else:
            tree = json.loads(text)
            task = tree["task"]["type"], int(tree["task"]["index"])
            assert (place.addresses, (place.role, place.index)) == (tree["cluster"], task)
    if text is not None and "\0" not in text and len(text) % 3 == 0:  # a third, as each takes time
        with folder(FILES), unchanged():
            outcome = generated.run_without_tensorflow(["--config=exp.py"], TF_CONFIG=text)
        accepted = is_accepted(outcome, "TF_CONFIG", "cluster", "runtime.strategy")
        assert not (accepted and rejected), "the program accepts what from_environment rejects"
    return not rejected


def check_place(place):
    """A place that was accepted has addresses that TensorFlow can use, and is what it writes."""
    addresses = [address for tasks in place.addresses.values() for address in tasks]
    for address in addresses:
        host, _, port = address.rpartition(":")
        assert host and not any(c.isspace() or c in "/\0" for c in address)
        assert port.isascii() and port.isdigit() and 0 < int(port) < 2**16
    assert len(set(addresses)) == len(addresses) and place.address in addresses
    assert place.size == len(place.others()) + 1
    assert tf_config.read({"TF_CONFIG": place.tf_config()}) == place


CONFIG = overrides.config(trainer="tiny.py:Tiny", data={"global_batch_size": 4}).to_dict()
RESULT = {"step": 1000, "train": {"loss": 0.5}, "eval": {"loss": 1.0}, "versions": {}}
WORKDIR = {"config.json": CONFIG, "result.json": RESULT}


@st.composite
def workdirs(draw):
    """(name of the odd file, its content or "folder" or "link" or "missing", the arguments)"""
    name = draw(st.sampled_from(list(WORKDIR)))
    content = generated.json_texts(WORKDIR[name])
    content = draw(st.one_of(*[content] * 7, st.sampled_from(["folder", "link", "missing"])))
    options = st.sampled_from([[], [], [], ["--fresh"], ["--allow_config_change"]])
    return name, content, [f"--mode={draw(st.sampled_from(list(MODES)[:4]))}", *draw(options)]


def accepts_workdir(case):
    name, content, arguments = case
    files = {f"runs/exp/{file}": json.dumps(tree) for file, tree in WORKDIR.items()}
    files |= {"runs/exp/checkpoints/checkpoint": "", "runs/exp/events.jsonl": "{}\n"}
    path = pathlib.Path("runs/exp", name)
    with folder({**FILES, **files}):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.unlink()
            make = {"folder": path.mkdir, "link": lambda: path.symlink_to(path.name)}
            make.get(content, lambda: None)()
        workdir = Workdir("runs/exp")
        with unchanged():
            outcome = generated.run_without_tensorflow(["--config=exp.py", *arguments])
            rejects(workdir.config, "config.json")
            unreadable, result = rejects(workdir.result, "result.json")
            rejects(workdir.check_movable, "runs/exp")
            rejects(lambda: workdir.check_config(CONFIG), "runs/exp")
        assert unreadable or isinstance(result, dict)
        accepted = is_accepted(outcome, "runs/exp", "--fresh", "--allow_config_change")
        if accepted and len(arguments) == 1 and name == "config.json" and path.is_file():
            saved = {**DEFAULTS, **overrides.flatten(json.loads(path.read_bytes()))}
            used = ["seed", "trainer", "runtime.precision"]
            if "train" in arguments[0]:  # an evaluation uses no optimizer
                used.append("optimizer.name")
            for key in used:
                assert saved[key] == overrides.flatten(CONFIG)[key], "resumes with another config"
        unmovable, aside = rejects(workdir.move_aside, "runs/exp")
        assert unmovable or not aside or (aside.exists() and not workdir.path.exists())
    return accepted


KINDS = {
    "command line": (command_lines(), accepts_command_line),
    "config file": (config_files(), accepts_config_file),
    "flags": (flags(), accepts_flags),
    "cluster": (st.one_of(tf_configs(), tf_configs(), indexed_jobs()), accepts_cluster),
    "workdir": (workdirs(), accepts_workdir),
}
FEW = [(kind, 0.3 if kind == "workdir" else 0.1) for kind in KINDS]
MANY = [pytest.param(kind, 1.0, marks=pytest.mark.long) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), FEW + MANY)
def test_input_is_used_as_it_is_or_rejected_in_one_line(kind, count):
    explore(*KINDS[kind], count=count)
