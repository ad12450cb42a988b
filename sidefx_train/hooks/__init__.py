"""Interceptors for hooks and backward passes; importing this package registers them."""

from sidefx_train.hooks import autograd_function as autograd_function
from sidefx_train.hooks import backward as backward
from sidefx_train.hooks import custom_operators as custom_operators
