"""How many threads this process may use at once: a thread more than there are CPUs for it waits for the others, which
spin meanwhile.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
GROUPS = Path("/proc/self/cgroup")


def available() -> int:
    """CPUs of the process's affinity, at most those of its control groups' quota; at least 1."""
    try:
        n = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        n = os.cpu_count() or 1
    quota = _quota(GROUPS, ROOT)
    return max(1, min(n, int(quota)) if quota else n)


def _quota(groups: Path, root: Path) -> float:
    """The smallest share of CPUs that a group of the process, or one above it, allows; 0: none says."""
    found = []
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            base = (
                root if not controllers else next((p for p in (root / "cpu", root / controllers) if p.is_dir()), root)
            )
            group = base / path.lstrip("/")
            for folder in (group, *group.parents):
                found.append(_share(folder))
                if folder == base:
                    break
    return min((share for share in found if share > 0), default=0.0)


def _share(folder: Path) -> float:
    """CPUs that a control group may use, of version 2 or 1; 0: as many as there are."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return 0.0 if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        return max(0, limit) / int((folder / "cpu.cfs_period_us").read_text())
    return 0.0
