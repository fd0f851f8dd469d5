"""What happens to a hook when its DDP model is copied or saved whole: DDP copies the state of its hook too."""

from __future__ import annotations

from typing import Any, NoReturn

from gradwire.errors import RegisterError

LOST = (
    "this DDP model was copied or saved whole and has lost its hook; wrap its module in a new DistributedDataParallel"
)


class Uncopied:
    """A copy of the model refers to the same object, which it never calls. A file contains a placeholder."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
        return self

    def __reduce__(self) -> tuple[type[Gone], tuple[()]]:
        return Gone, ()


class Gone:
    """The placeholder in a model that was saved whole."""

    def __call__(self, *args: Any) -> NoReturn:
        """Raise RegisterError: the hook is lost."""
        raise RegisterError(LOST)

    def belongs_to(self, model: object) -> bool:
        """It belongs to no model."""
        return False
