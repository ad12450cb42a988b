"""Generated prologue and epilogue of a step, and view replay at run time."""
