"""What is read of a checkpoint: `Reads` stands in for `safetensors.safe_open` and counts."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
from safetensors import safe_open


class Reads:
    """Stands in for `safe_open`; counts the elements that are read of each tensor."""

    def __init__(self) -> None:
        self.elements: dict[str, list[int]] = collections.defaultdict(list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reads, opened = self, safe_open(*args, **kwargs)

        class View:
            def __init__(self, name: str, view: Any) -> None:
                self.name, self.view = name, view
                self.get_shape, self.get_dtype = view.get_shape, view.get_dtype

            def __getitem__(self, index: Any) -> np.ndarray:
                part = self.view[index]
                reads.elements[self.name].append(part.size)
                return part

        class File:
            def __enter__(self) -> File:
                self.file = opened.__enter__()
                self.keys = self.file.keys
                return self

            def __exit__(self, *error: Any) -> Any:
                return opened.__exit__(*error)

            def get_tensor(self, name: str) -> np.ndarray:
                tensor = self.file.get_tensor(name)
                reads.elements[name].append(tensor.size)
                return tensor

            def get_slice(self, name: str) -> View:
                return View(name, self.file.get_slice(name))

        return File()
