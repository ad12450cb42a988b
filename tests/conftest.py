"""Checks every graph that a test builds after every pass."""

import os

os.environ.setdefault("SIDEFX_CHECK_GRAPHS", "1")
