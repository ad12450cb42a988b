"""aten operations recorded into one FX graph."""
