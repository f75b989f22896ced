"""Make tests/data/nxd: small checkpoints that upstream's own trainer writes, and what upstream makes of them.

    ./scripts/test-neuron.sh NEURONX_DISTRIBUTED --checkpoints DIRECTORY

runs this with the environment it makes. tests/data/nxd/README.md says what the files are.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
STEPS = 4


@dataclass(frozen=True)
class Fixture:
    """How a checkpoint is trained."""

    tensor_parallel: int = 2
    pipeline_parallel: int = 1
    data_parallel: int = 1
    kv_heads: int = 4
    lora: bool = True
    xser: bool = True
    fuse_qkv: bool = False
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


FIXTURES = {
    "full_tp2_kv8_fuseqkv_noxser": Fixture(lora=False, xser=False, kv_heads=8, fuse_qkv=True),
    "full_tp2_xser": Fixture(lora=False),
    "lora_tp1_dp2_xser": Fixture(tensor_parallel=1, data_parallel=2),
    "lora_tp2_noxser": Fixture(xser=False),
    "lora_tp2_pp2_noxser": Fixture(pipeline_parallel=2, xser=False),
    "lora_tp2_sp_DIVERGED_noxser": Fixture(sequence_parallel=True, xser=False),
    "lora_tp2_xser": Fixture(),
    "lora_tp8_kv4_noxser": Fixture(tensor_parallel=8, xser=False),
}


def make_base(directory: Path, kv_heads: int) -> None:
    """A random Llama of 2 layers. Wide enough initial weights that four steps change its logits visibly."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    torch.manual_seed(kv_heads)
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "generation_config.json").unlink()


def make(name: str, fixture: Fixture, base: Path, destination: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        training = Path(scratch)
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={fixture.ranks}", "-m", "upstream"]
        # the checkpoint has the base's path in it, so that it is better a short one
        run(fixture.ranks, [*torchrun, "train", name, base.name, str(training)], base.parent)
        checkpoint = training / f"checkpoint-{STEPS}"
        run(1, ["upstream", "consolidate", str(checkpoint), str(training / "consolidated")], training)
        shutil.rmtree(destination, ignore_errors=True)
        keep(checkpoint, destination / checkpoint.name)
        (weights,) = (training / "consolidated").glob("*.safetensors")
        (destination / "expected_consolidated").mkdir()
        # written again, so that its mode is that of other files
        save_file(load_file(weights), destination / "expected_consolidated" / weights.name, {"format": "pt"})
        if fixture.lora:
            # upstream's consolidation leaves it out
            config = checkpoint / "adapter_default" / "adapter_config.json"
            shutil.copyfile(config, destination / "expected_consolidated" / config.name)
        for logits in training.glob("live_sharded_logits.safetensors"):
            shutil.copyfile(logits, destination / logits.name)


def run(ranks: int, module: list[str], cwd: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # one process is a rank too, so that the runtime's stand-ins are there
    alone = {"RANK": "0", "WORLD_SIZE": "1"} if ranks == 1 else {}
    subprocess.run([sys.executable, "-m", *module], cwd=cwd, env=environment | alone, check=True)


def keep(checkpoint: Path, destination: Path) -> None:
    """Copy what is a checkpoint's own: no pickled arguments, no states of optimizer and scheduler, no tokenizer."""
    kept = ["trainer_state.json", "trn_config.json", "config.json", "shards", "adapter_default"]
    for source in (checkpoint / name for name in kept):
        if source.is_dir():
            shutil.copytree(source, destination / source.name, ignore=shutil.ignore_patterns("optim", "README.md"))
        elif source.exists():
            destination.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, destination / source.name)


def main(directory: Path, names: list[str]) -> None:
    for name in names or FIXTURES:
        fixture = FIXTURES[name]
        base = directory / "base" / f"llama-kv{fixture.kv_heads}"
        if not base.exists():
            make_base(base, fixture.kv_heads)
        print(f"{name}: {fixture}", flush=True)
        make(name, fixture, base, directory / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
