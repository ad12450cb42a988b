"""C++ of the guards on objects that an entry holds: the program of tests, tests of one value, metadata of tensors."""
