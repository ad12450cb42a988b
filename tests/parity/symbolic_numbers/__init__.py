"""Numbers that change from call to call (`capture/world/symbolic_numbers`)."""
