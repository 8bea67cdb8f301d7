"""Sizes as people write them, in bytes."""

from __future__ import annotations

import re

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_size(text: str) -> int | None:
    """Bytes of a size such as "24GB" (10^9 each), "500 MB" or "1.5GiB"; None of any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)", text.strip(), re.IGNORECASE)
    return int(float(found[1]) * UNITS[found[2].upper()]) if found else None
