"""Runs graphs op by op, and generates the function around a compiled graph."""
