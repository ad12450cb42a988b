"""What the compiler must know of optimizers; importing this package plugs it in."""

from sidefx_train.optim import optimizers as optimizers
from sidefx_train.optim import zero_grad as zero_grad
