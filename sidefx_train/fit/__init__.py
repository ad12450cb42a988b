"""The plain training loop: epochs, progress, validation, checkpoints, exact resume on Lightning Fabric."""
