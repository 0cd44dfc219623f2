"""A `PrefixStore` in a folder: safetensors, and an index that says whose they are and how they must read."""

from __future__ import annotations

import json
import shutil
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load as parse
from safetensors.torch import save as packed

from .index import digests

if TYPE_CHECKING:
    from .store import PrefixStore

FORMAT = 1
FILE_BYTES = 256 << 20
"""Of blocks in one file: what saving and loading hold twice."""


class PrefixFileError(ValueError):
    """A saved store can't be used; the message says why."""


def save(store: "PrefixStore", path: Path) -> None:
    """The blocks of the model as it is now, those before others first. Nothing stands at `path` until all is written.

    Raises:
        PrefixFileError: there is something at `path`. OSError.
    """
    if path.exists():
        raise _exists(path)
    index, identity = store.index, store.identity()
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")  # nobody else's
    part.mkdir(parents=True)
    try:
        files: list[dict[str, Any]] = []
        place: dict[int, int] = {}
        for some in _runs(_own(store, identity), max(1, FILE_BYTES // store.layout.nbytes)):
            place |= {at: len(place) + i for i, at in enumerate(some)}
            tensors = {name: kept[some] for name, kept in index.parts.items()}
            tensors["pages"] = store.pool.pages[index.pages[some]]
            tensors["ids"] = index.ids[some]
            tensors["parent"] = torch.tensor([place.get(int(index.parent[at]), -1) for at in some])
            data = packed(tensors)
            name = f"blocks-{len(files):05d}.safetensors"
            (part / name).write_bytes(data)
            files.append({"name": name, "bytes": len(data), "crc32": zlib.crc32(data)})
        told = {"format": FORMAT, "identity": identity, "blocks": len(place), "files": files}
        (part / "index.json").write_text(json.dumps(told, indent=1))
        part.rename(path)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError) and path.exists():
            raise _exists(path) from error
        raise


def _exists(path: Path) -> PrefixFileError:
    return PrefixFileError(f"{str(path)!r} exists: a prefix store is saved to a new folder.")


def _own(store: "PrefixStore", identity: str) -> list[int]:
    """Entries of this identity, each behind its parent."""
    index, root, mine = store.index, bytes.fromhex(identity), set()
    for at in sorted(index.entry.values(), key=index.depth):
        parent = int(index.parent[at])
        if parent in mine or (parent < 0 and index.entry.get(digests(root, index.ids[at])[0]) == at):
            mine.add(at)
    return sorted(mine, key=index.depth)


def _runs(entries: list[int], most: int) -> Iterator[list[int]]:
    for at in range(0, len(entries), most):
        yield entries[at : at + most]


def load(store: "PrefixStore", path: Path) -> int:
    """Blocks of a saved store, as many as there is room for. Nothing of a file that is damaged is taken.

    Raises:
        PrefixFileError: see `PrefixStore.load`.
    """
    told = _told(path)
    if told["identity"] != store.identity():
        raise PrefixFileError(f"{str(path)!r} was saved of another model, adapter or layout than this store's.")
    index, new = store.index, 0
    index.tick()
    names: list[bytes] = []
    entries: list[int | None] = []
    root = bytes.fromhex(told["identity"])
    for file in told["files"]:
        tensors = _tensors(path, file, store)
        for i, (ids, parent) in enumerate(zip(tensors["ids"], tensors["parent"].tolist())):
            name = digests(root if parent < 0 else names[parent], ids)[0]
            names.append(name)
            # Looked up, not only asked for: what a younger block stands on must not go before it.
            at, above = next(iter(index.find([name])), None), -1 if parent < 0 else entries[parent]
            if at is None and above is not None:
                at = index.add(name, above, ids)
                if at is not None:
                    try:
                        pages = store.pool.allocate(store.layout.layers * store.layout.heads)
                    except BaseException:
                        index.drop(at)
                        raise
                    store.pool.pages[pages] = tensors["pages"][i].flatten(0, 1)
                    index.pages[at] = pages.view(store.layout.layers, store.layout.heads)
                    for part, kept in index.parts.items():
                        kept[at] = tensors[part][i]
                    new += 1
            entries.append(at)
    return new


def _told(path: Path) -> dict[str, Any]:
    try:
        told = json.loads((path / "index.json").read_text())
        if told["format"] != FORMAT:
            raise PrefixFileError(f"{str(path)!r} has format {told['format']}, not {FORMAT}: another version saved it.")
        if not isinstance(told["files"], list):
            raise ValueError("its list of files is none")
        return {name: told[name] for name in ("identity", "blocks", "files")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, PrefixFileError):
            raise
        raise PrefixFileError(f"{str(path)!r} holds no saved prefix store that can be read: {error}.") from error


def _tensors(path: Path, file: dict[str, Any], store: "PrefixStore") -> dict[str, torch.Tensor]:
    """A file's tensors, of the shapes that this store has."""
    try:
        data = (path / str(file["name"])).read_bytes()
        if len(data) != file["bytes"] or zlib.crc32(data) != file["crc32"]:
            raise ValueError(f"it has {len(data):,} of {file['bytes']:,} bytes, or others than were saved")
        tensors = parse(data)
        pages = (store.layout.layers, store.layout.heads, *store.pool.pages.shape[1:])
        shapes = {name: shape for name, (shape, _) in store.layout.parts.items()} | {"pages": pages}
        if any(tuple(tensors[name].shape[1:]) != shape for name, shape in shapes.items()):
            raise ValueError("its blocks have another shape")
        return tensors
    except Exception as error:  # whatever a damaged file makes of its reader
        name = file.get("name") if isinstance(file, dict) else file
        raise PrefixFileError(f"{name!r} in {str(path)!r} can't be used: {error}.") from error
