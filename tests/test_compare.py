"""Where two trees differ, to the last bit."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from statetrain.persist.compare import unequal

NAN = struct.unpack("d", struct.pack("Q", 0x7FF8000000000001))[0]  # of other bits than math.nan


@dataclass
class Empty:
    """Holds nothing."""


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({}, {"a": {}}),
        ({"a": {}}, {}),
        ({"a": {}}, {"a": []}),
        ({"a": {}}, {"a": Empty()}),
        ([], ()),
        ([[]], []),
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (math.nan, NAN),
        (complex(0, math.nan), complex(0, NAN)),
        (complex(0, 0.0), complex(0, -0.0)),
        (np.float32(0.0), np.float32(-0.0)),
        (np.float64(1), np.float32(1)),
        (np.zeros(2), np.zeros((2, 1))),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2, 2), torch.zeros(2, 2).t()[:1]),
        (torch.eye(2).to_sparse(), torch.eye(2)),
        (torch.eye(2).to_sparse(), -torch.eye(2).to_sparse()),
    ],
)
def test_what_differs_is_found(a: Any, b: Any) -> None:
    assert unequal(a, b) != []
    assert unequal(b, a) != []


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": {}, 2: [(), Empty()]},
        math.nan,
        complex(math.nan, 1),
        np.float32(math.nan),
        np.array([math.nan, -0.0]),
        torch.tensor([math.nan, -0.0]),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.eye(2).to_sparse(),
        "a",
        None,
    ],
)
def test_the_same_bits_are_equal(value: Any) -> None:
    assert unequal(value, value) == []


def test_the_paths_are_named() -> None:
    assert unequal({"a": [1, 2.0]}, {"a": [1, -2.0]}) == ["['a'][1]"]
