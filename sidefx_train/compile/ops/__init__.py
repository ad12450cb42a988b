"""Definitions of the ``sidefx::`` operators."""
