"""Private torch names by subject; what has not been sorted yet is in ``sidefx_train/_torch_compat.py``."""
