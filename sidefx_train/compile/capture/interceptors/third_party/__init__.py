"""Functions of other libraries that a capture treats specially."""
