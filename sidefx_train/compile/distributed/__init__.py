"""Communication between processes in a step; importing this package registers its interceptors."""

from sidefx_train.compile.distributed import collective_calls as collective_calls
from sidefx_train.compile.distributed import data_parallel as data_parallel
from sidefx_train.compile.distributed import dtensor_methods as dtensor_methods
from sidefx_train.compile.distributed import fully_sharded as fully_sharded
from sidefx_train.compile.distributed import process_groups as process_groups
from sidefx_train.compile.distributed import uncaptured_calls as uncaptured_calls
