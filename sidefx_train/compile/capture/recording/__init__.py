"""Records aten operations in one FX graph."""
