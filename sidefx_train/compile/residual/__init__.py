"""The generated prologue and epilogue of a step, and views replayed at run time."""
