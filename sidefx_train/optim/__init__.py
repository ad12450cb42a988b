"""What the compiler must know of optimizers; importing this package plugs it in."""

from sidefx_train.optim import capture as capture
