"""What a torch `DataLoader` does badly beside JAX, seen without importing torch."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import jax

_ITEMS_AS_NUMPY = (
    "return NumPy arrays from the dataset's __getitem__ (and from collate_fn): rows go "
    "to the devices once, as a whole batch"
)


def check_loader(batches: Any) -> None:
    """Refuse a loader that would fork this process for its workers.

    JAX runs threads, and a forked child inherits their locks without the threads:
    sooner or later it hangs.

    Raises:
        ValueError: the loader has workers and starts them by fork.
    """
    if has_workers(batches) and _start_method(batches) == "fork":
        raise ValueError(
            f"this {type(batches).__name__} forks {batches.num_workers} worker "
            "processes, and a fork of a process that runs JAX can hang: give it "
            "multiprocessing_context='spawn' (or 'forkserver'), or num_workers=0"
        )


def has_workers(batches: Any) -> bool:
    """Whether `batches` looks like a torch `DataLoader` with worker processes."""
    workers = getattr(batches, "num_workers", 0)
    return (
        hasattr(batches, "multiprocessing_context")
        and isinstance(workers, int)
        and workers > 0
    )


def refuse_jax_arrays(place: Callable[..., Any]) -> Callable[..., Any]:
    """`place` for the batches of worker processes, which have no business with JAX."""

    def place_checked(batch: Any, **agreed: Any) -> Any:
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch)):
            raise ValueError(
                "the loader's worker processes make JAX arrays, so each of them "
                f"starts JAX and takes device memory: {_ITEMS_AS_NUMPY}"
            )
        return place(batch, **agreed)

    return place_checked


def explain_jax_items(error: BaseException) -> BaseException:
    """The error, with a note where torch could not collate JAX arrays."""
    if "collate" in str(error) and "ArrayImpl" in str(error):
        error.add_note(f"The dataset's items are JAX arrays: {_ITEMS_AS_NUMPY}.")
    return error


def _start_method(loader: Any) -> str:
    """How the loader starts its workers; asking must not settle Python's default."""
    context = loader.multiprocessing_context
    if isinstance(context, str):
        return context
    if context is not None:
        return context.get_start_method()
    settled = multiprocessing.get_start_method(allow_none=True)
    return settled or multiprocessing.get_all_start_methods()[0]
