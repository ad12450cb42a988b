"""The order of the stages: one capture, its guards, its compiled graphs, its cache entry."""
