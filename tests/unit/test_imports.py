"""Effects of ``import sidefx_train`` other than definitions."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, multiprocessing, sys
before = gc.get_threshold()
full = []
gc.callbacks.append(lambda phase, info: full.append(info) if info["generation"] == 2 and phase == "start" else None)

def has_dynamo():
    return "torch._dynamo" in sys.modules

def worker(queue):
    import sidefx_train
    queue.put(has_dynamo())

if __name__ == "__main__":
    import torch
    full.clear()
    import sidefx_train
    assert not full, f"{len(full)} collections of all objects while the library was imported"
    assert gc.get_threshold() == before, gc.get_threshold()
    assert has_dynamo(), "a first step imports it"
    parameter = torch.nn.Parameter(torch.ones(2))
    known = set(sys.modules)
    torch.optim.AdamW([parameter])
    more = [name for name in set(sys.modules) - known if name.startswith("torch.")]
    assert not more, more
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=worker, args=(queue,))
    process.start()
    assert queue.get(timeout=120) is False, "a worker of a data loader waits for what it does not need"
    process.join()
    print("as it should be")
"""


def test_a_first_step_finds_its_imports_done_and_a_workers_process_does_without_them(tmp_path) -> None:
    file = tmp_path / "program.py"  # a spawned process reads it again
    file.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and "as it should be" in done.stdout, done.stderr


REGISTERED = """
import sys
from pathlib import Path
import sidefx_train
import sidefx_train.compile.pipeline.compile_capture
root = Path(sidefx_train.__file__).parent
registering = [p for p in root.rglob("*.py") if "registry.intercept" in p.read_text()]
names = [".".join(p.relative_to(root.parent).with_suffix("").parts) for p in registering]
missing = [name for name in names if name not in sys.modules and not name.startswith("sidefx_train.callbacks")]
assert len(names) > 15 and not missing, missing
"""


def test_every_file_that_registers_interceptors_is_imported():
    """A file that nothing refers to by name is imported for what it registers, or it does nothing."""
    subprocess.run([sys.executable, "-c", REGISTERED], check=True)
