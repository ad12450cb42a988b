"""Python's data model inside a step (`capture/world`, `capture/shadows`)."""
