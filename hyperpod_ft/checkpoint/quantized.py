"""Models published in 4 or 8 bits, decoded to bfloat16: what a merge adds to must be numbers, each with its own value.

Formats, with what a file has beside the codes of a weight:

    mxfp4         `<weight>_blocks`, two E2M1 codes a byte, 32 to a block; `<weight>_scales`, a power of two for each
                  block, biased by 127. gpt-oss; the last two axes of the weight are swapped.
    fp8           E4M3, `<module>.weight_scale_inv` for each block of `weight_block_size`. DeepSeek-V3, Qwen3-FP8.
    bitsandbytes  4 bits, two codes a byte, `quant_map` with the 16 values, `absmax` for each block, which may itself be
                  in 8 bits; `quant_state.bitsandbytes__nf4` (or fp4), JSON. QLoRA (arXiv:2305.14314).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperpod_ft import publish
from hyperpod_ft.checkpoint.formats import checksums, model_directory
from hyperpod_ft.checkpoint.formats.resumable import resumable_directory
from hyperpod_ft.checkpoint.formats.safetensors_file import INDEX, read_model
from hyperpod_ft.checkpoint.formats.safetensors_writer import MAX_SHARD_BYTES, Outgoing, copied, write_model
from hyperpod_ft.checkpoint.tensors import reading
from hyperpod_ft.checkpoint.tensors.elements import Stored, narrow
from hyperpod_ft.checkpoint.tensors.logical_tensor import LogicalTensor
from hyperpod_ft.errors import UserError
from hyperpod_ft.progress import ByteProgress

_BF16 = "BF16"
_DECODED = ".decoded"
_BLOCKS, _SCALES, _SCALE_INV = "_blocks", "_scales", ".weight_scale_inv"
_ACTIVATIONS = (".activation_scale", ".input_scale")  # of kernels that compute in 8 bits
_OTHER_FORM = "use the model in bf16, fp16 or fp32"
_STATE = ".quant_state.bitsandbytes__"
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_COLUMNS = 64  # transposed at a time, so that the caches hold them
_ONE_EXPERT = Lock()  # several threads write the parts of one
_Values = NDArray[np.float32]


def decode(directory: Path) -> str:
    """Replace the weights of a quantized model by the same in bfloat16; the method, or nothing for other models.

    The quantized weights are removed when all is decoded. Raises UserError for a form that is not known, and for codes
    without what they are decoded with.
    """
    config = model_directory.read_config(directory)
    model_directory.refuse_undecodable(config)
    if not (found := model_directory.quantization(config)):
        return ""
    stored = {tensor.name: tensor for tensor in read_model(directory)}
    tensors = list(_decoded(directory, stored, config))
    files = {piece.file for tensor in stored.values() for piece in tensor.pieces}
    identity = {"sizes": sorted((file.name, file.stat().st_size) for file in files)}
    print(f"model: decoding {found} to bfloat16", flush=True)
    with (
        resumable_directory(directory / _DECODED, identity) as target,
        ByteProgress("decode", sum(tensor.nbytes for tensor in tensors)) as progress,
    ):
        write_model(target, tensors, MAX_SHARD_BYTES, progress)
    for file in (*files, directory / INDEX):
        file.unlink(missing_ok=True)
    for file in (directory / _DECODED).iterdir():
        if file.name != checksums.CHECKSUMS:
            file.replace(directory / file.name)
    publish.remove(directory / _DECODED)
    del config["quantization_config"]
    publish.write_json(directory / model_directory.CONFIG, config)
    model_directory.set_dtype(directory, "bfloat16")
    return found


def _decoded(directory: Path, stored: Mapping[str, LogicalTensor], config: Mapping[str, Any]) -> Iterable[Outgoing]:
    """All tensors of the decoded model."""
    block = tuple(config["quantization_config"].get("weight_block_size") or ())
    used: set[str] = set()

    def beside(name: str) -> LogicalTensor:
        used.add(name)
        if name not in stored:
            raise UserError(f"{directory}: tensor {name} is missing", "download the model again")
        return stored[name]

    found: dict[str, Outgoing] = {}
    for name, tensor in stored.items():
        if name.endswith(_BLOCKS) and tensor.dtype == "U8":
            weight = name.removesuffix(_BLOCKS)
            found[weight] = _Mxfp4(tensor, beside(weight + _SCALES)).outgoing(weight)
            used.add(name)
        elif name.endswith(_ACTIVATIONS):
            used.add(name)
        elif tensor.dtype == "F8_E4M3":
            if name.removesuffix(".weight") + _SCALE_INV not in stored:
                raise UserError(f"{directory}: the form of fp8 in which {name} is stored is not known", _OTHER_FORM)
            found[name] = _Fp8(tensor, beside(name.removesuffix(".weight") + _SCALE_INV), block).outgoing(name)
        elif _STATE in name:
            weight = name.partition(_STATE)[0]
            state = json.loads(reading.read(tensor).tobytes())
            nested = "nested_absmax" in state or f"{weight}.nested_absmax" in stored
            parts = ("absmax", "quant_map", *(("nested_absmax", "nested_quant_map") if nested else ()))
            own = {part: beside(f"{weight}.{part}") for part in parts}
            codes = beside(weight)
            # FSDP's users store two codes of a byte as half a bfloat16
            if codes.dtype != "U8" or codes.elements != -(-prod(state["shape"]) // 2):
                raise UserError(
                    f"{directory}: tensor {weight} has {codes.elements} elements of {codes.dtype} for codes of"
                    f" {state['shape']}: this form of bitsandbytes is not known",
                    _OTHER_FORM,
                )
            found[weight] = _FourBits(codes, own, state).outgoing(weight)
            used.add(name)
    plain = (tensor for name, tensor in stored.items() if name not in found and name not in used)
    return [*found.values(), *map(copied, plain)]


@dataclass(frozen=True, eq=False)
class _Mxfp4:
    """blocks: U8 [experts, out, in / 32, 16]; scales: U8 [experts, out, in / 32]. The weight is [experts, in, out]."""

    blocks: LogicalTensor
    scales: LogicalTensor

    def outgoing(self, name: str) -> Outgoing:
        experts, outputs, blocks, nbytes = self.blocks.shape
        shape = (experts, blocks * nbytes * 2, outputs)
        size = prod(shape[1:])

        def fill(begin: int, end: int, out: Stored) -> None:
            for index in range(begin // size, -(-end // size)):
                start = index * size
                first, last = max(begin, start), min(end, start + size)
                out[first - begin : last - begin] = self._expert(index)[first - start : last - start]

        return Outgoing(name, _BF16, shape, fill)

    def _expert(self, index: int) -> Stored:
        """Bits of bfloat16 [in x out], one after the other."""
        with _ONE_EXPERT:
            return self._decoded(index)

    @lru_cache(maxsize=2)  # noqa: B019 - of all tensors together; a block to write is a part of an expert
    def _decoded(self, index: int) -> Stored:
        _, outputs, blocks, nbytes = self.blocks.shape
        codes = _read(self.blocks, index, 1).reshape(outputs, blocks, nbytes)
        scales = _read(self.scales, index, 1).reshape(outputs, blocks, 1)
        found = np.empty((blocks * nbytes * 2, outputs), np.uint16)
        for first in range(0, outputs, _COLUMNS):
            part = slice(first, first + _COLUMNS)
            which = scales[part].astype(np.int32) << 8 | codes[part]
            pairs = np.take(_mxfp4(), which).view(np.uint16)
            found[:, part] = pairs.reshape(-1, found.shape[0]).T
        return found.reshape(-1)


@dataclass(frozen=True, eq=False)
class _Fp8:
    """weight: E4M3 [..., out, in]; scales: F32 [..., blocks, blocks], or one. `block`: its rows and columns."""

    weight: LogicalTensor
    scales: LogicalTensor
    block: Sequence[int]

    def outgoing(self, name: str) -> Outgoing:
        columns = self.weight.shape[-1]

        def fill(begin: int, end: int, out: Stored) -> None:
            first, last = begin // columns, -(-end // columns)
            rows = self._rows(first, last).reshape(-1)
            narrow(rows[begin - first * columns : end - first * columns], _BF16, out)

        return Outgoing(name, _BF16, self.weight.shape, fill)

    def _rows(self, first: int, last: int) -> _Values:
        outputs, columns = self.weight.shape[-2:]
        codes = np.empty((last - first) * columns, np.uint8)
        reading.fill(self.weight, first * columns, last * columns, codes)
        high, wide = self.block or (outputs, columns)
        rows = np.arange(first, last)
        own = self._scales[rows // outputs, rows % outputs // high]
        values: _Values = _e4m3()[codes].reshape(last - first, columns)
        values *= np.repeat(own, wide, axis=1)[:, :columns]
        return values

    @cached_property
    def _scales(self) -> _Values:
        """fp32 [experts, blocks, blocks]."""
        whole = np.empty(self.scales.elements, np.float32)
        reading.fill_as(self.scales, "F32", 0, self.scales.elements, whole)
        shape = self.scales.shape[-2:] if len(self.scales.shape) > 1 else (1, 1)
        return whole.reshape(-1, *shape)


@dataclass(frozen=True, eq=False)
class _FourBits:
    """bitsandbytes'. `weight`: U8 [elements / 2, 1], the first of two elements in the upper half of a byte."""

    weight: LogicalTensor
    parts: Mapping[str, LogicalTensor]
    state: Mapping[str, Any]

    def outgoing(self, name: str) -> Outgoing:
        shape = tuple(int(size) for size in self.state["shape"])

        def fill(begin: int, end: int, out: Stored) -> None:
            first, last = begin // 2, -(-end // 2)
            codes = np.empty(last - first, np.uint8)
            reading.fill(self.weight, first, last, codes)
            values = np.empty((last - first, 2), np.float32)
            np.take(self._map, codes >> 4, out=values[:, 0])
            np.take(self._map, codes & 15, out=values[:, 1])
            flat = values.reshape(-1)[begin - first * 2 : end - first * 2]
            flat *= self._absmax()[np.arange(begin, end) // int(self.state["blocksize"])]
            narrow(flat, _BF16, out)

        return Outgoing(name, _BF16, shape, fill)

    @cached_property
    def _map(self) -> _Values:
        found: _Values = reading.read(self.parts["quant_map"])
        return found

    @lru_cache(maxsize=8)  # noqa: B019 - of all tensors together
    def _absmax(self) -> _Values:
        found = reading.read(self.parts["absmax"]).reshape(-1)
        if "nested_absmax" not in self.parts:
            return found.astype(np.float32)
        of_blocks = reading.read(self.parts["nested_absmax"])
        blocks = np.arange(found.size) // int(self.state["nested_blocksize"])
        values: _Values = reading.read(self.parts["nested_quant_map"])[found] * of_blocks[blocks]
        values += np.float32(self.state["nested_offset"])
        return values


def _read(tensor: LogicalTensor, first: int, count: int) -> NDArray[np.uint8]:
    """Rows of a tensor of bytes, 1-D."""
    row = prod(tensor.shape[1:])
    found = np.empty(count * row, np.uint8)
    reading.fill(tensor, first * row, (first + count) * row, found)
    return found


@lru_cache(maxsize=1)
def _mxfp4() -> NDArray[np.uint32]:
    """The bits of two values in bfloat16, by scale x 256 + the byte with their codes."""
    codes = np.arange(256)
    pairs = np.stack([_E2M1[codes & 15], _E2M1[codes >> 4]], -1)
    with np.errstate(over="ignore"):
        values = np.ldexp(pairs, np.arange(256, dtype=np.int32)[:, None, None] - 127)
    bits = np.empty(values.shape, np.uint16)
    narrow(values, _BF16, bits)
    return bits.reshape(-1).view(np.uint32)


@lru_cache(maxsize=1)
def _e4m3() -> _Values:
    """The value of each code: sign, 4 bits of exponent biased by 7, 3 of mantissa (arXiv:2209.05433)."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(
        exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, np.full_like(exponent, -6))
    )
    values[(codes & 127) == 127] = np.nan
    return np.where(codes > 127, -values, values).astype(np.float32)
