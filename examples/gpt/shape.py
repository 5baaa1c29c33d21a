"""The sizes of the model; both frameworks' examples read them."""

from dataclasses import dataclass

from microfloat.errors import invalid_value

__all__ = ["VOCABULARY", "Shape"]

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Shape:
    """The sizes of the model. `hidden` is the inner width of the SwiGLU; `context` the number of positions."""

    dim: int
    layers: int
    heads: int
    hidden: int
    context: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise invalid_value(f"--{name}", size, "a positive number")
        if self.dim % (2 * self.heads):
            raise invalid_value(
                "--dim, --heads", f"{self.dim} and {self.heads}",
                "a --dim that splits into --heads parts of even size (rotary positions turn pairs)",
            )  # fmt: skip
