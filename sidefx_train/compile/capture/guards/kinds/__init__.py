"""Guard kinds: one class each, registered under its name."""

from sidefx_train.compile.capture.guards.kinds import containers as containers
from sidefx_train.compile.capture.guards.kinds import objects as objects
from sidefx_train.compile.capture.guards.kinds import relations as relations
from sidefx_train.compile.capture.guards.kinds import tensors as tensors
from sidefx_train.compile.capture.guards.kinds.base import KINDS as KINDS
from sidefx_train.compile.capture.guards.kinds.base import Kind as Kind
from sidefx_train.compile.capture.guards.kinds.base import describe as describe
