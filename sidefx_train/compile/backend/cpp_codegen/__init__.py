"""Builds the C++ that Inductor generates: sooner, and with less of it to compile."""
