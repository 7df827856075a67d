"""What the tests of the vLLM engine share: engines on a depot, sessions run to their end, reference runs."""

from __future__ import annotations
