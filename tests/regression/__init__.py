"""Regression tests of fixed bugs, one test each."""
