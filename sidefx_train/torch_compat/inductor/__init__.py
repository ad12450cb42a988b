"""Changes to Inductor: code generation made faster, wrong results mended, and checks of what it generates."""
