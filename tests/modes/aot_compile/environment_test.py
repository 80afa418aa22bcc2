"""The compiler's environment is made once, by one process, from the pins."""

import pathlib
import threading

import pytest

import ctl
from ctl.errors import Failure
from ctl.modes.aot_compile import environment

FAKE_UV = """#!/bin/sh
echo "$@" >> {log}
if [ "$1" = venv ]; then
  for last; do :; done
  mkdir -p "$last/bin" "$last/lib/python3.11/site-packages" && touch "$last/bin/python"
  sleep 0.3
fi
if [ "$1" = pip ]; then
  [ -n "{fails}" ] && {{ echo "{fails}" >&2; exit 2; }}
  for last; do :; done
  site=$(dirname "$(dirname "$last")")/lib/python3.11/site-packages
  grep '==' {pins} | while IFS= read -r line; do
    name=$(echo "${{line%%==*}}" | tr - _)
    mkdir "$site/$name-${{line##*==}}.dist-info"
    printf 'Metadata-Version: 2.1\\nName: %s\\nVersion: %s\\n' "${{line%%==*}}" "${{line##*==}}" \\
      > "$site/$name-${{line##*==}}.dist-info/METADATA"
  done
fi
"""


@pytest.fixture
def uv(tmp_path, monkeypatch):
    """Replaces uv by a script that makes folders and logs its arguments: uv(fails=message)."""
    log = tmp_path / "log"

    def put(fails=""):
        path = tmp_path / "uv"
        path.write_text(FAKE_UV.format(log=log, pins=environment.PINS, fails=fails))
        path.chmod(0o755)
        monkeypatch.setenv("UV", str(path))
        return log

    return put


def test_every_pin_is_one_exact_version():
    pins = environment.read_pins()
    assert {"jax", "jaxlib", "libtpu"} <= set(pins)
    assert pins["jax"] == pins["jaxlib"]
    assert all(version[0].isdigit() for version in pins.values())


def test_the_environment_is_made_once(uv, tmp_path):
    log = uv()
    python = environment.ensure_python(tmp_path / "cache")
    assert python == environment.ensure_python(tmp_path / "cache")
    assert python.exists()
    assert len(log.read_text().splitlines()) == 2  # uv venv, then uv pip install


def test_concurrent_calls_make_one_environment(uv, tmp_path):
    log = uv()
    pythons = []
    threads = [
        threading.Thread(
            target=lambda: pythons.append(environment.ensure_python(tmp_path / "cache"))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(pythons)) == 1 and len(pythons) == 4
    assert len(log.read_text().splitlines()) == 2


def test_a_partly_made_environment_is_removed(uv, tmp_path):
    uv(fails="no route to the index")
    with pytest.raises(Failure, match=r"uv failed \(no route to the index\)"):
        environment.ensure_python(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["aot.lock"]


def test_a_missing_uv_is_reported(tmp_path, monkeypatch):
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(environment.sys, "executable", "/bin/false")
    monkeypatch.setattr(environment.sys, "_base_executable", "/bin/false")
    with pytest.raises(Failure, match="uv is missing"):
        environment.ensure_python(tmp_path / "cache")


def test_versions_other_than_the_pins_are_rejected(uv, tmp_path):
    uv()
    python = environment.ensure_python(tmp_path / "cache")
    site = next(python.parent.parent.glob("lib/*/site-packages"))
    metadata = next(site.glob("libtpu-*/METADATA"))
    metadata.write_text(metadata.read_text().replace("Version: 0", "Version: 9"))
    with pytest.raises(ctl.UsageError, match=r"has libtpu 9.*delete the folder"):
        environment.ensure_python(tmp_path / "cache")


def test_other_pins_are_another_environment(uv, tmp_path, monkeypatch):
    uv()
    first = environment.ensure_python(tmp_path / "cache")
    pins = tmp_path / "pins.txt"
    pins.write_text(environment.PINS.read_text() + "# changed\n")
    monkeypatch.setattr(environment, "PINS", pins)
    assert environment.ensure_python(tmp_path / "cache") != first


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_a_machine_without_libtpu_is_rejected(monkeypatch, system, machine):
    monkeypatch.setattr(environment.sys, "platform", system)
    monkeypatch.setattr(environment.platform, "machine", lambda: machine)
    with pytest.raises(ctl.UsageError, match="Linux on x86-64"):
        environment.ensure_python(pathlib.Path("/nowhere"))


def test_a_cache_folder_that_cannot_be_made_is_reported(uv, tmp_path):
    uv()
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(Failure, match="XDG_CACHE_HOME"):
        environment.ensure_python(tmp_path / "cache")
