"""Runs the stages in order: one capture, its guards, its compiled graphs, its cache entry."""
