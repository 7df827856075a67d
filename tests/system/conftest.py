"""Fixtures of the system tests."""
