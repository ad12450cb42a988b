"""Function modes, and classes that override functions of torch: ``__torch_function__``."""
