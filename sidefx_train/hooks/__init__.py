"""Hooks and backward passes during a capture; importing this package plugs them in."""

from sidefx_train.hooks import arrays as arrays
from sidefx_train.hooks import branches as branches
from sidefx_train.hooks import capture as capture
from sidefx_train.hooks import comparisons as comparisons
from sidefx_train.hooks import copies as copies
from sidefx_train.hooks import finite_numbers as finite_numbers
from sidefx_train.hooks import frames as frames
from sidefx_train.hooks import functions as functions
from sidefx_train.hooks import metrics as metrics
from sidefx_train.hooks import modes as modes
from sidefx_train.hooks import nan_checks as nan_checks
from sidefx_train.hooks import number_tensors as number_tensors
from sidefx_train.hooks import numbers as numbers
from sidefx_train.hooks import operators as operators
from sidefx_train.hooks import parameters as parameters
from sidefx_train.hooks import rng as rng
from sidefx_train.hooks import settled as settled
from sidefx_train.hooks import transformers as transformers
