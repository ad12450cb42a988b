"""Files that processes need at the same time are made by one of them."""

import os
import shlex
import signal
import time

import pytest

from sidefx_train import disk_cache
from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.cpp_codegen import build_library
from sidefx_train.compile.native import build

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX locks")

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "g++, Free Software Foundation"; exit; fi
echo $$ >> {log}
while [ ! -e {go} ]; do sleep 0.02; done
for last; do :; done
touch "$last"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that writes its process into ``log`` and ends when ``go`` exists."""
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))
    path = tmp_path / "g++"
    path.write_text(COMPILER.format(log=shlex.quote(str(tmp_path / "log")), go=shlex.quote(str(tmp_path / "go"))))
    path.chmod(0o755)
    monkeypatch.setattr(compat, "cpp_command", lambda quick: [str(path)])
    monkeypatch.setattr(compat, "precompiles_headers", lambda: True)
    yield tmp_path
    (tmp_path / "go").touch()


def in_another_process(function):
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    return child


def started(folder):
    log = folder / "log"
    return log.read_text().split() if log.exists() else []


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_compiler_at_a_time_precompiles_a_header(compiler):
    def prepare():
        build_library.prepare_header("some/header.h")

    prepare()
    prepare()
    os.waitpid(in_another_process(prepare), 0)
    until(lambda: started(compiler))
    prepare()
    time.sleep(0.1)
    assert len(started(compiler)) == 1
    os.killpg(os.getpgid(int(started(compiler)[0])), signal.SIGKILL)

    def again():
        prepare()
        return len(started(compiler)) == 2

    until(again)  # the lock ends with the compiler
    (compiler / "go").touch()
    until(lambda: build_library._precompiled(compat.cpp_command(False), "some/header.h") is not None)
    prepare()
    time.sleep(0.1)
    assert len(started(compiler)) == 2


def test_a_header_is_not_precompiled_where_the_cache_cannot_be_written(compiler, monkeypatch):
    (compiler / "a file").touch()
    monkeypatch.setattr(disk_cache, "machine_dir", lambda: compiler / "a file")
    build_library.prepare_header("some/header.h")
    time.sleep(0.1)
    assert not started(compiler)


def test_one_process_builds_a_native_module(tmp_path, monkeypatch):
    wanted = build._ROWS
    if build.rows_module() is None:
        pytest.skip("no compiler")
    library = build._stored(build._key(wanted)).read_bytes()
    monkeypatch.setenv("SIDEFX_CACHE_DIR", str(tmp_path))

    def compiles(*_):
        with (tmp_path / "log").open("a") as log:
            log.write("built ")
        time.sleep(0.3)
        (tmp_path / "built.so").write_bytes(library)
        return disk_cache.add_library(tmp_path / "built.so", machine=True)

    monkeypatch.setattr(build, "_compile", compiles)
    child = in_another_process(lambda: build._load(wanted))
    until(lambda: started(tmp_path))
    assert build._load(wanted) is not None
    os.waitpid(child, 0)
    assert len(started(tmp_path)) == 1
