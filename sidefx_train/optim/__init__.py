"""Interceptors for optimizers; importing this package registers them."""

from sidefx_train.optim import grad_scaler as grad_scaler
from sidefx_train.optim import optimizers as optimizers
from sidefx_train.optim import zero_grad as zero_grad
