"""Compares a compiled graph with the captured graph before it is used."""
