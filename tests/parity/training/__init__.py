"""Models, optimizers and libraries as they are trained."""
