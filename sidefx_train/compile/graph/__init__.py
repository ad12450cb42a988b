"""The values between stages, and what is asked of FX graphs: view chains, aliasing, validation."""
