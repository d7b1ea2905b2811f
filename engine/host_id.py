"""Names the machine that this process runs on."""

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same for all processes of a machine


def host_id() -> str:
    """Returns what all processes of this machine have in common until it is started anew."""
    return _BOOT_ID.read_text().strip()
