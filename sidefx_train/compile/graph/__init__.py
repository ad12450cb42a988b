"""The values passed between stages, and analyses of FX graphs: view chains, aliasing, validation."""
