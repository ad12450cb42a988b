"""Steps that continue after a graph break (`capture/resume`), and eager fallback (`runtime`)."""
