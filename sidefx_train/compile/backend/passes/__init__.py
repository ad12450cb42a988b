"""Rewrites of functional FX graphs before Inductor lowers them."""
