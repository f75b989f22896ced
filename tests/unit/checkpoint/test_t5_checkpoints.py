"""T5's embedding has several names, and older files hold a bias that no model has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyperpod_ft.checkpoint.consolidate import consolidate_model
from hyperpod_ft.checkpoint.formats.located import locate, untie_head
from hyperpod_ft.checkpoint.formats.model_directory import is_tied
from hyperpod_ft.checkpoint.sharded.sharded import open_checkpoint
from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.engines.torch.loading import skeleton
from hyperpod_ft.errors import UserError
from tests.unit import tiny_checkpoints, tiny_t5

COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def with_old_files(directory: Path, *, gated: bool) -> dict[str, torch.Tensor]:
    """A T5 whose files hold the embedding three times, and the unused bias; its tensors."""
    directory.mkdir()
    tiny_t5.save_model(directory, tiny_t5.config(gated=gated))
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors |= {name: tensors["shared.weight"].clone() for name in COPIES} | {UNUSED: torch.ones(32, 4)}
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("gated", [False, True], ids=["v1.0", "v1.1"])
def test_all_names_of_the_embedding_become_what_was_trained(tmp_path: Path, gated: bool) -> None:
    base = with_old_files(tmp_path / "base", gated=gated)
    trained = {name: tensor + 0.5 for name, tensor in base.items() if name not in (*COPIES, UNUSED)}
    tiny_checkpoints.save_whole(tmp_path / "step-00000001", trained)
    tiny_checkpoints.describe(tmp_path / "step-00000001", tmp_path / "base")
    consolidate_model(open_checkpoint(tmp_path / "step-00000001"), tmp_path / "tuned", base=tmp_path / "base")
    found = load_file(tmp_path / "tuned" / "model.safetensors")
    assert found.keys() == base.keys()
    assert all(torch.equal(found[name], trained["shared.weight"]) for name in COPIES)
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    assert torch.equal(found[UNUSED], base[UNUSED])
    assert verify(tmp_path / "tuned").findings == ()


def test_the_engine_reads_one_of_the_copies_and_sees_that_they_are_equal(tmp_path: Path) -> None:
    tensors = with_old_files(tmp_path / "model", gated=True)
    model = skeleton.build(tmp_path / "model", torch.float32, None)
    untie_head(model, tmp_path / "model")
    located = locate(model, tmp_path / "model")
    assert len(located["shared.weight"].replicas) == 2 and not located["lm_head.weight"].replicas
    skeleton.materialize(model, torch.device("cpu"))
    skeleton.fill(model, located, {})
    assert torch.equal(model.get_submodule("encoder.embed_tokens").weight, tensors["shared.weight"])
    assert torch.equal(model.get_output_embeddings().weight, tensors["lm_head.weight"])

    tensors[COPIES[1]] += 1
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="stored twice, with different values"):
        skeleton.fill(model, locate(model, tmp_path / "model"), {})


@pytest.mark.parametrize(
    ("config", "has_output", "tied"),
    [
        ({"tie_word_embeddings": True}, False, True),  # t5-small
        ({}, True, True),
        ({"tie_word_embeddings": False}, True, False),  # flan-t5
        # transformers ties a missing output layer, whatever this says
        ({"tie_word_embeddings": False}, False, True),
        # flan-t5 as transformers 5 saves it, and t5-small
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, True, True),
    ],
)
def test_whether_the_output_layer_is_the_embedding(config: dict[str, Any], has_output: bool, tied: bool) -> None:
    names = ["shared.weight", *(["lm_head.weight"] if has_output else [])]
    assert is_tied({"model_type": "t5"} | config, names) is tied
