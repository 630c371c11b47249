"""Checkpoint folders of safetensors files, whole or in shards, read a tensor at a time.

A file is mapped while one of its tensors is looked at and not longer, so that loading takes the memory of the weights
once, in the form in which they stay, and little besides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from engine.models.errors import ModelError

__all__ = ["Checkpoint", "read_json"]

INDEX = "model.safetensors.index.json"


class _Place(NamedTuple):
    path: Path
    shape: tuple[int, ...]


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a folder by name. What it hands out lies in a mapped file: copy what is to stay.

    Headers are read at once, and nothing else. `shape_of` answers from them.
    """

    borrowed = True
    """Whoever keeps a tensor copies it: see Decoder."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError: no file, one that the index names and that is not there, or one that cannot be read."""
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self._places: dict[str, _Place] = {}
        index = folder / INDEX
        files = _indexed(index) if index.is_file() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"the model folder {folder} has no .safetensors file (for random weights, --load-format dummy)"
            )
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (not a mapping)
                        self._places[name] = _Place(path, tuple(file.get_slice(name).get_shape()))
            except FileNotFoundError:
                raise ModelError(f"{INDEX} names {path.name}, which the model folder {folder} does not have") from None
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {path}: {error}") from None
        self.num_bytes = sum(path.stat().st_size for path in files)
        """Of all files."""

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        place = self._places[name]
        try:
            with safe_open(place.path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {name} from {place.path}: {error}") from None

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows (dim 0) or columns (dim 1) `start` to `stop` of a matrix or vector."""
        tensor = self[name]
        return tensor.narrow(dim, start, stop - start)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Of the tensor of that name, without reading it; None: there is none."""
        place = self._places.get(name)
        return None if place is None else place.shape

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _indexed(index: Path) -> Sequence[Path]:
    """The files that an index names."""
    contents = read_json(index)
    if not isinstance(contents, dict) or not isinstance(contents.get("weight_map"), dict):
        raise ModelError(f"{index} has no weight_map")
    names = set(contents["weight_map"].values())
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelError(f"{index} names files that are not in its folder")
    return [index.parent / name for name in sorted(names)]


def read_json(path: Path) -> Any:
    """The contents of a JSON file. Raises ModelError where it is missing or is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"the model folder {path.parent} has no {path.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
