"""Prefill, relay decode and main decode in different datacenters, on stock vLLM."""

__version__ = "0.1.0"
