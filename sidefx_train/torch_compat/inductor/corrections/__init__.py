"""Corrections of results that Inductor gets wrong, by topic; ``correctness.py`` lists them."""
