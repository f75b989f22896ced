"""What a written model is checked for before it gets its name."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from hyperpod_ft.checkpoint.layout import LogicalTensor
from hyperpod_ft.checkpoint.reading import BLOCK_BYTES, TORCH_DTYPE, Reader, refuse_nonfinite, row_ranges
from hyperpod_ft.checkpoint.safetensors_file import read_model
from hyperpod_ft.errors import UserError

Form = tuple[str, tuple[int, ...]]  # dtype and shape


def verify_model(directory: Path, expected: Mapping[str, Form]) -> dict[str, LogicalTensor]:
    """Read a written model back: exactly the expected names, dtypes and shapes, every value finite.

    Returns its tensors by name. Raises UserError with the first difference.
    """
    written = {tensor.name: tensor for tensor in read_model(directory)}
    if different := sorted(written.keys() ^ expected.keys()):
        state = "is missing" if different[0] in expected else "should not be there"
        raise UserError(f"{directory}: after writing, tensor {different[0]} {state}", "check the volume, run again")
    with Reader() as reader:
        for name, tensor in written.items():
            if (tensor.dtype, tensor.shape) != expected[name]:
                raise UserError(
                    f"{directory}: after writing, tensor {name} is {tensor.dtype} {list(tensor.shape)}, should be"
                    f" {expected[name][0]} {list(expected[name][1])}",
                    "check the volume, run again",
                )
            for block in reader.blocks(tensor):
                refuse_nonfinite(block, name, str(directory), "check the volume, run again")
    return written


def differing(
    left: Mapping[str, LogicalTensor], right: Mapping[str, LogicalTensor], names: Iterable[str]
) -> tuple[str, ...]:
    """Of `names`, those whose values differ between two models; compared in the wider of both dtypes."""
    with Reader() as reader:
        return tuple(name for name in names if _differ(reader, left[name], right[name]))


def _differ(reader: Reader, left: LogicalTensor, right: LogicalTensor) -> bool:
    # by the widest dtype's rows, so that both are cut alike
    ranges = row_ranges(left.shape or (1,), 8, BLOCK_BYTES)
    wider = torch.promote_types(TORCH_DTYPE[left.dtype], TORCH_DTYPE[right.dtype])
    return any(
        not torch.equal(reader.rows(left, *rows).to(wider), reader.rows(right, *rows).to(wider)) for rows in ranges
    )
