"""Graphs run op by op, and the generated function around a compiled graph."""
