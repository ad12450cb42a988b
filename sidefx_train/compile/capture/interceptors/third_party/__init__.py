"""Interceptors for functions of other libraries."""
