"""``__torch_function__`` and ``__torch_dispatch__`` of modes and classes: Python that torch runs, interpreted."""
