"""One kernel that updates many tensors by the same elementwise expression, such as the parameters of a model.

expression      the expression: as Triton source, and by torch's operators
address_table   where the kernel finds the tensors: addresses in static memory of the device
update          the operator, and what generated code calls
"""

from sidefx_train.compile.gpu.multi_tensor.address_table import tables_of_recording as tables_of_recording
from sidefx_train.compile.gpu.multi_tensor.expression import Expression as Expression
from sidefx_train.compile.gpu.multi_tensor.expression import Slot as Slot
from sidefx_train.compile.gpu.multi_tensor.expression import Step as Step
from sidefx_train.compile.gpu.multi_tensor.update import MULTI_TENSOR_UPDATE as MULTI_TENSOR_UPDATE
from sidefx_train.compile.gpu.multi_tensor.update import MultiTensorUpdate as MultiTensorUpdate
