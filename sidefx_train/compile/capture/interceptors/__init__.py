"""Interceptors for functions of torch and of libraries; importing this package registers them."""

from sidefx_train.compile.capture.interceptors import comparisons as comparisons
from sidefx_train.compile.capture.interceptors import control_flow as control_flow
from sidefx_train.compile.capture.interceptors import function_modes as function_modes
from sidefx_train.compile.capture.interceptors import import_statements as import_statements
from sidefx_train.compile.capture.interceptors import numpy_conversion as numpy_conversion
from sidefx_train.compile.capture.interceptors import operator_registration as operator_registration
from sidefx_train.compile.capture.interceptors import parameters as parameters
from sidefx_train.compile.capture.interceptors import process_constants as process_constants
from sidefx_train.compile.capture.interceptors import python_functions as python_functions
from sidefx_train.compile.capture.interceptors import random_numbers as random_numbers
from sidefx_train.compile.capture.interceptors import rng_state as rng_state
from sidefx_train.compile.capture.interceptors import schedulers as schedulers
from sidefx_train.compile.capture.interceptors import tensor_copies as tensor_copies
from sidefx_train.compile.capture.interceptors import tensor_from_numbers as tensor_from_numbers
from sidefx_train.compile.capture.interceptors import torch_modes as torch_modes
from sidefx_train.compile.capture.interceptors.nn import interpolation as interpolation
from sidefx_train.compile.capture.interceptors.nn import jagged_tensors as jagged_tensors
from sidefx_train.compile.capture.interceptors.nn import module_attributes as module_attributes
from sidefx_train.compile.capture.interceptors.nn import one_hot as one_hot
from sidefx_train.compile.capture.interceptors.nn import packed_sequences as packed_sequences
from sidefx_train.compile.capture.interceptors.nn import recurrent_layers as recurrent_layers
from sidefx_train.compile.capture.interceptors.nn import sparse_embedding as sparse_embedding
from sidefx_train.compile.capture.interceptors.third_party import metrics as metrics
from sidefx_train.compile.capture.interceptors.third_party import nan_checks as nan_checks
from sidefx_train.compile.capture.interceptors.third_party import pandas_index as pandas_index
from sidefx_train.compile.capture.interceptors.third_party import transformers as transformers
