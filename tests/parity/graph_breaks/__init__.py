"""Steps that go on behind a graph break (`capture/resume`), and eager fallback (`runtime`)."""
