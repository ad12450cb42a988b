"""Settings of the programs on a simulated device."""

import pytest
import torch


@pytest.fixture(autouse=True)
def layers_run_operation_by_operation():
    """Takes oneDNN out of the reference and the capture: its recurrent layers are single operators of the CPU."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield
