"""Captures a Python step as a graph, side effects and guards."""
