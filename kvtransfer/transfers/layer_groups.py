"""Which layers of a forward pass are computed so far, counted in groups. No vLLM."""

from collections.abc import Sequence


class LayerGroups:
    """Layers may be reported in any order, more than once, or not at all; only those without a gap before them count.

    A group ends after each `layers_per_group` layers, and after the last one.
    """

    def __init__(self, layer_names: Sequence[str] = (), layers_per_group: int = 0) -> None:
        """`layer_names`: in the order in which transfers count layers. Raises ValueError for a negative group."""
        if layers_per_group < 0:
            raise ValueError(
                f"announce_layers is {layers_per_group}: give the number of layers per announcement, "
                "or 0 to announce blocks when all layers are computed."
            )
        self._index_of = {name: index for index, name in enumerate(layer_names)}
        self._per_group = layers_per_group
        self._is_computed = [False] * len(layer_names)
        self._num_computed = 0  # without a gap
        self._num_told = 0

    @property
    def are_wanted(self) -> bool:
        return self._per_group > 0

    def restart(self) -> None:
        """A forward pass begins."""
        self._is_computed = [False] * len(self._is_computed)
        self._num_computed = self._num_told = 0

    def computed(self, layer_name: str) -> int:
        """This layer is computed. Returns how many of the first layers are, if that completes a group; else 0."""
        index = self._index_of.get(layer_name)
        if index is None:
            return 0
        self._is_computed[index] = True
        while self._num_computed < len(self._is_computed) and self._is_computed[self._num_computed]:
            self._num_computed += 1
        is_end = self._num_computed == len(self._is_computed)
        num_layers = self._num_computed if is_end else self._num_computed // self._per_group * self._per_group
        if num_layers <= self._num_told:
            return 0
        self._num_told = num_layers
        return num_layers
