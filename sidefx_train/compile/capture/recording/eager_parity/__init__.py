"""Where fake tensors and real kernels disagree, what is recorded is what eager does."""
