"""A GPU without a device: lowers captured steps to GPU code, compiles its kernels, and runs them by interpreter.

placement         moves a graph captured on CPU tensors to fake tensors of a GPU
device_operators  operators that differ between CPU and GPU
lowering          the library's own path from that graph to Triton kernels
kernels           what stands for Inductor's kernel objects: compiled for a GPU, or interpreted on CPU tensors
interpreter       Triton's interpreter, beside its compiler in one process
libdevice         functions of CUDA's math library for the interpreter
multi_tensor      the kernel that updates many tensors, interpreted or compiled for a GPU
step              whole steps

Needs Triton, which builds of torch for the CPU do not bring: ``pip install triton``.
"""

from sidefx_train.compile.gpu.simulation.interpreter import DeviceAssertFailed as DeviceAssertFailed
from sidefx_train.compile.gpu.simulation.kernels import Cubin as Cubin
from sidefx_train.compile.gpu.simulation.kernels import HostMemoryRead as HostMemoryRead
from sidefx_train.compile.gpu.simulation.lowering import LoweredGraph as LoweredGraph
from sidefx_train.compile.gpu.simulation.lowering import lower as lower
from sidefx_train.compile.gpu.simulation.multi_tensor import compile_update as compile_update
from sidefx_train.compile.gpu.simulation.placement import place as place
from sidefx_train.compile.gpu.simulation.placement import stay_on_cpu as stay_on_cpu
from sidefx_train.compile.gpu.simulation.step import SimulatedStep as SimulatedStep
