"""Numbers that change from call to call: their truth, errors and subclasses."""
