"""What runs here and how: the value that `explain` shows and every refusal carries."""

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Support"]


@dataclass(frozen=True)
class Support:
    """Whether something runs (`available`), runs on tensor cores of its format (`accelerated`), and why.

    Unpacks into ``(available, reason)`` and its truth value is `available`, so both
    ``available, reason = is_nvfp4_available()`` and ``if is_nvfp4_available():`` mean what they say.
    """

    available: bool
    accelerated: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available

    def __iter__(self) -> Iterator[bool | str]:
        return iter((self.available, self.reason))
