"""Sizes as people write them."""

import pytest

from jaxllm.byte_size import byte_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GB", 24 * 10**9),
        ("500 mb", 500 * 10**6),
        ("1.5GiB", 3 * 2**29),
        (" 2KiB ", 2048),
        ("0GB", 0),
        ("24", None),
        ("GB", None),
        ("-1GB", None),
        ("1TB", None),
        ("1e3KB", None),
    ],
)
def test_byte_size(text, size_bytes):
    assert byte_size(text) == size_bytes
