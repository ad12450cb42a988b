"""Fake tensors: of inputs, their strides and storage; fake kernels that torch gets wrong or lacks."""
