"""What a worker's statistics say that it holds for requests."""

from collections.abc import Mapping
from typing import Any


def worker_holdings(seen: Mapping[str, Any], max_rows: int) -> dict[str, int]:
    """All but blocks of the prefix cache and tasks at rest is 0 when nothing is under way."""
    held = {
        "blocks": sum(seen["held_blocks"].values()),
        "rows": max_rows - seen["free_rows"],
        "waiting": seen["scheduler"]["num_waiting"],
        "running": seen["scheduler"]["num_running"],
        "requests": seen["num_requests"],
        "unacknowledged tokens": seen["streams"]["num_unacknowledged_tokens"],
        "tasks": seen["tasks"],
    }
    if "sender" in seen:
        held |= {"handoffs": seen["sender"]["num_handoffs"]}
    if "receiver" in seen:
        held |= {
            "reservations": seen["incoming"]["num_reservations"],
            "orphans": seen["incoming"]["num_orphans"],
            "reservations in line": seen["receiver"]["num_waiting"],
            "pieces under way": seen["receiver"]["num_pieces_under_way"],
        }
    return held
