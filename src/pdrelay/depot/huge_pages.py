"""Memory files on huge pages: fewer page faults and TLB misses for arenas of many GiB.

`transparent` asks the kernel for huge pages where it can (shared memory must allow it); `2MiB` and `1GiB` take them
from the pools that the administrator has reserved, or fail.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pdrelay.cluster.topology import HugePages
from pdrelay.errors import StartError

SYSFS = Path("/sys/kernel/mm")


class Pool(NamedTuple):
    """Huge pages of one size."""

    size: int
    flag: int  # of memfd_create
    directory: str
    remedy: str


_POOLS: dict[HugePages, Pool] = {
    "2MiB": Pool(2 << 20, os.MFD_HUGE_2MB, "hugepages-2048kB", "`sysctl vm.nr_hugepages={pages}`"),
    "1GiB": Pool(
        1 << 30, os.MFD_HUGE_1GB, "hugepages-1048576kB", "kernel parameters `hugepagesz=1G hugepages={pages}`"
    ),
}


def memory_file(capacity: int, huge_pages: HugePages) -> tuple[int, mmap.mmap]:
    """A memory file of at least `capacity` bytes, and its mapping. Raises OSError; StartError without such pages."""
    if pool := _POOLS.get(huge_pages):
        return _from_pool(capacity, huge_pages, pool)
    if huge_pages == "transparent":
        _require_transparent()
    fd = os.memfd_create("pdrelay-arena", os.MFD_CLOEXEC)
    return fd, _mapped(fd, capacity, transparent=huge_pages == "transparent")


def advise(mapping: mmap.mmap) -> None:
    """Asks for transparent huge pages. Each process that writes must: the first to touch a page decides."""
    with suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)


def _from_pool(capacity: int, huge_pages: HugePages, pool: Pool) -> tuple[int, mmap.mmap]:
    pages = -(-capacity // pool.size)
    try:
        fd = os.memfd_create("pdrelay-arena", os.MFD_CLOEXEC | os.MFD_HUGETLB | pool.flag)
        return fd, _mapped(fd, pages * pool.size)
    except OSError as error:
        raise StartError(
            f"huge_pages: found {_free(pool)} free pages of {huge_pages}, expected {pages} ({error.strerror}); reserve "
            f"them with {pool.remedy.format(pages=pages)}, or choose another value"
        ) from error


def _mapped(fd: int, size: int, *, transparent: bool = False) -> mmap.mmap:
    try:
        os.ftruncate(fd, size)
        mapping = mmap.mmap(fd, size)
    except OSError:
        os.close(fd)
        raise
    if transparent:
        advise(mapping)
    return mapping


def _free(pool: Pool) -> str:
    try:
        return (SYSFS / "hugepages" / pool.directory / "free_hugepages").read_text().strip()
    except OSError:
        return "no"


def _require_transparent() -> None:
    setting = SYSFS / "transparent_hugepage" / "shmem_enabled"
    try:
        words = setting.read_text().split()
    except OSError:
        words = ["[unknown]"]
    chosen = next((word.strip("[]") for word in words if word.startswith("[")), "unknown")
    if chosen in ("never", "deny", "unknown"):
        raise StartError(
            f"huge_pages: found {chosen} in {setting}, expected advise, within_size or always; "
            f"`echo advise > {setting}`, or choose another value"
        )
