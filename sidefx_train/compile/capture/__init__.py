"""A Python step becomes a graph, side effects and guards."""
