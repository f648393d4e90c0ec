"""Whole numbers as commands take them: in digits. To round 1.5, or to read 0x10, is to do what nobody asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cyclopts import Parameter, Token

from structured_voronoi.errors import SamplingError

DIGITS = r"[+-]?[0-9](_?[0-9]){0,29}"
"""How large a number may be is for the command to say."""


def whole_number(type_: Any, tokens: Sequence[Token]) -> int:
    """The number that an option was given; an error names the option and what was written."""
    (token,) = tokens
    if not re.fullmatch(DIGITS, token.value):
        raise SamplingError(
            f"{token.keyword} {token.value[:40]!r} is not a whole number of at most 30 digits; write one, for example "
            f"{token.keyword} 10"
        )
    return int(token.value)


WHOLE = Parameter(converter=whole_number)
"""Belongs to every option that is an int, or an int or nothing."""
