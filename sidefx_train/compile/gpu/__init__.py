"""CUDA graphs over static addresses: the device's part of a step is recorded once, and replayed.

replaying       which steps are recorded, and by which device
section         what of a runner is recorded, or why nothing can be
static_replay   which recording fits a call; plain runs with their reasons
prefetch        copies the next batch to the device while a step runs there
recording       one recording: its buffers, results and version counters
cuda            records and replays on a CUDA device
simulation/     a GPU without a device: steps are lowered for it, interpreted, and replayed on CPU tensors
"""
