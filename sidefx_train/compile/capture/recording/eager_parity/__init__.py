"""Records what eager does where fake tensors and real kernels disagree."""
