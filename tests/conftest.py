"""Every graph that a test makes is checked after every pass."""

import os

os.environ.setdefault("SIDEFX_CHECK_GRAPHS", "1")
