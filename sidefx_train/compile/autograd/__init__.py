"""Graphs whose results need autograd outside: a model or loss compiled alone, a part of a step before a break.

Autograd is live while a step is captured. The backward of differentiable outputs is recorded after the forward, in one
joint graph (``trace_backward.py``), which is split into forward and backward (``extract_graphs.py``). Both are compiled
like any graph and run under one ``autograd.Function`` (``compiled_function.py``).
"""
