"""Views, aliases and storage (`functionalization`, `residual`)."""
