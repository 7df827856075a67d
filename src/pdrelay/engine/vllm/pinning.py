"""The arena as page-locked memory of CUDA, so that the GPU copies from and to it by itself."""

from __future__ import annotations

import logging

import torch

_log = logging.getLogger(__name__)


def pin(arena: torch.Tensor) -> bool:
    """Registers the arena with CUDA; whether that succeeded. Without it copies are slower, nothing else."""
    code = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.nbytes, 0)
    pinned = int(code) == 0
    _log.log(logging.INFO if pinned else logging.WARNING, "arena of %d bytes pinned: %s", arena.nbytes, code)
    return pinned


def unpin(arena: torch.Tensor) -> None:
    """Ends what `pin` did. No copy may be under way."""
    code = torch.cuda.cudart().cudaHostUnregister(arena.data_ptr())
    _log.info("arena unpinned: %s", code)
