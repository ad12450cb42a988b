"""A graph that Inductor cannot compile: the step runs eagerly, and neither the log nor the disk shows a trace."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

PROGRAM = """
import gc, json, os, pathlib, sys, tempfile, warnings
import pytest, torch
from torch import nn
import sidefx_train
from sidefx_train.compile.native import guards_module, native_module, products_module
from tests.support.disk_cache import new_cache

patch = pytest.MonkeyPatch()
products_module(), native_module(), guards_module()
new_cache(pathlib.Path(sys.argv[3]), patch)
tempfile.tempdir = os.environ["TMPDIR"] = sys.argv[4]
warnings.simplefilter("ignore")

def fails(*args, **kwargs):
    raise RuntimeError("not today")

from torch._inductor import compile_fx, graph, scheduler
from torch._inductor.codegen.cpp import KernelGroup
write = KernelGroup.codegen_group
where = {
    "compile": (compile_fx, "compile_fx_inner", fails),
    "passes": (compile_fx, "_recursive_joint_graph_passes", fails),
    "lowering": (graph.GraphLowering, "run_node", fails),
    "scheduler": (scheduler.Scheduler, "__init__", fails),
    "codegen": (graph.GraphLowering, "codegen", fails),
    "kernel": (KernelGroup, "codegen_group", lambda *given: write(*given).replace("{", "{ no such code; ", 1)),
    "nowhere": (graph, "no_such_name", None),
}[sys.argv[1]]
patch.setattr(*where, raising=False)

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())

def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

begun = set(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else set()
captured = sidefx_train.compile(step, backend="inductor", warmup=sys.argv[2])
for _ in range(5):
    captured(torch.randn(3, 4))
    captured.wait(300)
report = captured.report()
del captured
gc.collect()
print(json.dumps({
    "codes": sorted({each.code for each in report.breaks}),
    "replays": report.replays,
}))
"""


def run(where, warmup, tmp_path):
    (tmp_path / "files").mkdir()
    command = [sys.executable, "-c", PROGRAM, where, warmup, str(tmp_path / "cache"), str(tmp_path / "files")]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1]), found.stderr, _left(tmp_path / "files")


def _left(folder):
    """What is there but Inductor's own cache, once compilers that still run have ended."""
    for _ in range(200):
        left = [each.name for each in folder.iterdir() if not each.name.startswith("torchinductor_")]
        left += [each.name for each in folder.glob("torchinductor_*/tmp*")]
        if not left:
            break
        time.sleep(0.1)
    return left


@pytest.mark.parametrize(
    ("where", "warmup"),
    [
        *(pytest.param(where, "now", marks=pytest.mark.slow) for where in ("codegen", "compile", "passes", "lowering")),
        *(pytest.param(where, "now", marks=pytest.mark.slow) for where in ("scheduler", "kernel")),
        *(pytest.param(where, "background", marks=pytest.mark.slow) for where in ("codegen", "kernel")),
    ],
)
def test_nothing_stays(where, warmup, tmp_path):
    found, said, left = run(where, warmup, tmp_path)
    assert found == {"codes": ["SFX201"], "replays": 0}
    assert said == "" and left == []


@pytest.mark.slow
@pytest.mark.parametrize("warmup", ["now", "background"])
def test_nothing_stays_of_what_succeeds(warmup, tmp_path):
    found, said, left = run("nowhere", warmup, tmp_path)
    assert found["codes"] == [] and found["replays"]
    assert said == "" and left == []
