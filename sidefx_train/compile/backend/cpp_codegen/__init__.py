"""Builds the C++ that Inductor generates: earlier, and with less source to compile."""
