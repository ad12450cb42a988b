"""Changes to Inductor: faster code generation, corrections of wrong results, and checks of generated code."""
