"""Generated code that builds real values from values of the trace: ``table`` says which function rebuilds what."""
