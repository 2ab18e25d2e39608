"""A model as one list of its arrays, for programs that are called once for each token.

JAX takes the arguments of every call apart. That takes 3 ms for the modules of 30 layers, and tens
of microseconds for a list.
"""

from __future__ import annotations

from typing import Any

import jax

from kvq_models.llama.model import Llama


class _Structure:
    """A PyTreeDef that is hashed once, and is equal to itself without a look inside."""

    def __init__(self, tree: Any):
        self.tree, self._hash = tree, hash(tree)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Structure) and self.tree == other.tree)


@jax.tree_util.register_pytree_node_class
class FlatLlama:
    """The arrays of a `Llama`, collected once, for `decode_step` in a `jax.jit` of yours.

    Args:
        llama: the model, prepared for its cache. What its modules hold later is not seen.
    """

    def __init__(self, llama: Llama):
        self._arrays, tree = jax.tree.flatten(llama)
        self._structure = _Structure(tree)

    def llama(self) -> Llama:
        return self._structure.tree.unflatten(self._arrays)

    def tree_flatten(self) -> tuple[list[Any], _Structure]:
        return self._arrays, self._structure

    @classmethod
    def tree_unflatten(cls, structure: _Structure, arrays: Any) -> FlatLlama:
        flat = object.__new__(cls)
        flat._arrays, flat._structure = list(arrays), structure
        return flat
