"""Sources (where values are found), guards (conditions for a replay), and the code that checks them."""
