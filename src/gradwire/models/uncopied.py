"""What stays behind when a DDP model is copied or saved whole: DDP copies the states of its hooks along with itself."""

from __future__ import annotations

from typing import Any, NoReturn

from gradwire.errors import RegisterError

LOST = (
    "this DDP model was copied or saved whole and has lost its hook; wrap its module in a new DistributedDataParallel"
)


class Uncopied:
    """A copy of the model refers to the same object, which it never calls; in a file there is nothing of it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
        return self

    def __reduce__(self) -> tuple[type[Gone], tuple[()]]:
        return Gone, ()


class Gone:
    """In its place in a model that was saved whole."""

    def __call__(self, *args: Any) -> NoReturn:
        """Nothing can be done with it."""
        raise RegisterError(LOST)

    def belongs_to(self, model: object) -> bool:
        """To none."""
        return False
