"""Harnesses; no test file imports another test file."""
