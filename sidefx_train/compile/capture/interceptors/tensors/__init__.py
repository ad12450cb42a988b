"""Functions that make tensors, copy them, convert them to NumPy arrays or compare them."""
