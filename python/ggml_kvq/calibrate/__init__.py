"""Calibration of methods that need data: capture rows of the cache, fit, write GGUF."""
