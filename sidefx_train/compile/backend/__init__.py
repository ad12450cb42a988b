"""Compiles a captured graph to a callable: op by op, or through Inductor."""
