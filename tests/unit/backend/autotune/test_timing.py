"""A forked worker measures with several threads, although the threads of its parent process do not exist in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import json, os, signal, sys
import torch
import sidefx_train
from sidefx_train.compile.backend.autotune import attention, conv_layout, lstm, matmul, timing
from sidefx_train.compile.backend.cpp_codegen.forked_lowering import begin_fork, start_fork

torch.set_num_threads(2)
big = torch.rand(512, 512)

def kernels():  # of OpenMP, MKL and oneDNN
    return (big @ big).sum() + torch.conv2d(torch.rand(8, 8, 32, 32), torch.rand(8, 8, 3, 3)).sum() + big.exp().sum()

kernels()
child = start_fork()
if child == 0:
    signal.alarm(120)  # a thread that waits for one that is not there would do so for ever
    out = os.dup(1)
    begin_fork(os.environ["SIDEFX_FORK_FILES"])
    timing.measure_in_process()
    timing.begin(10.0)  # more than it takes on a busy machine: the limit is not what is tested
    tasks = {
        "product": ("product", [[[256, 256], [256, 1]], [[256, 256], [256, 1]], 2]),
        "attention": ("attention", [[2, 2, 64, 32], True, 2]),
        "convolution": ("convolution", json.loads(sys.argv[1])),
        "lstm": ("lstm", [5, 8, 64, 64, lstm.WEIGHTS, 2]),
    }
    found = timing.timings(tasks)
    kernels()  # on the first thread, and on it alone
    os.write(out, json.dumps({key: sorted(times) for key, times in found.items()}).encode())
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
kernels()
"""

_CONVOLUTION = [[8, 8, 32, 32], [8, 8, 3, 3], [[1, 1], [1, 1], [1, 1], False, [0, 0], 1], [True] * 3, 2, "float32"]


@pytest.mark.slow
def test_a_forked_process_measures_on_threads_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "SIDEFX_CACHE_DIR": str(tmp_path), "SIDEFX_FORK_FILES": str(tmp_path)}
    command = [sys.executable, "-c", _PROGRAM, json.dumps(_CONVOLUTION)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    found = {key: set(ways) for key, ways in json.loads(done.stdout).items()}
    assert found["product"] == {"mkl", "onednn", "tiles"}
    assert found["attention"] >= {"fused", "native", "products", "tiles"}
    assert found["convolution"] == {"channels-last", "contiguous"}
    assert found["lstm"] == {"onednn", "native"}
