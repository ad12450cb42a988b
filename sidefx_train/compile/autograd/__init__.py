"""Graphs whose results still need autograd outside: a model or a loss compiled alone, a part of a step before a break.

Autograd is live while a step is captured, so its backward is recorded behind the forward, in one joint graph, by asking
for the gradients of what leaves (``trace.py``), and cut in two (``cut.py``). The two halves are compiled each like any
graph, and joined again under one ``autograd.Function`` when they run (``runtime.py``).
"""
