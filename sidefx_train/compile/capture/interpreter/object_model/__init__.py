"""Python's data-model protocols: attributes, calls, operators, iteration, formatting."""
