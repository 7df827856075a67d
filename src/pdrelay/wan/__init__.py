"""The wide-area line in user space."""
