"""Conditions for a replay (`capture/guards`): the world is changed between calls."""
