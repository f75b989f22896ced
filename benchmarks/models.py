"""The certificates of all types of causal language models that transformers knows: the tables of docs/models.md.

python -m benchmarks.models torch|trl [TYPE ...]

All types, or those named. A type's config.json is that of its class's defaults, with what published ones have besides:
small models of such kinds are tried, as stage certify does, with LoRA and with all parameters.
"""

import contextlib
import io
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from benchmarks.command import ROOT
from hyperpod_ft.checkpoint.formats.model_directory import is_encoder_decoder, read_config
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.engines.certificate.model import save_small
from hyperpod_ft.engines.torch.certificate.certify import certify as certify_torch
from hyperpod_ft.engines.torch.consolidable import needed_targets
from hyperpod_ft.engines.trl.certificate import certify as certify_trl
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.planning.families import ENCODER_DECODERS, NOT_CAUSAL, default_targets

DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- made by `python -m benchmarks.models {}` -->", "<!-- end -->"
Certify = Callable[[Path, Lora | None, Path], Certificate]
# What the defaults of transformers' classes lack, by type.
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
# What a reader can use of the reasons, by what errors say.
_REASONS = {
    "TRL does not compute the loss": "TRL does not compute their loss",
    "TRL cannot train": "TRL's trainers do not take them",
    "no language model alone": "transformers has no language model alone for their text",
    "does not compute what transformers does": "engine `torch` does not compute what transformers does",
    "computes its logits": "engine `torch` does not know how they compute their logits",
}
_OTHER_REASONS = "a small model of the type cannot be made or trained"
_ORDER = [*_REASONS.values(), _OTHER_REASONS]


def write_config(model_type: str, directory: Path, **values: Any) -> Path:
    """A directory with a config.json of this type."""
    directory.mkdir(parents=True, exist_ok=True)
    AutoConfig.for_model(model_type, **{**PUBLISHED.get(model_type, {}), **values}).save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Outcome:
    """What the certificates of a type say."""

    rows: str  # `packed` or `one`; empty when it cannot be trained
    lora: str  # `yes`, `named` where lora.target_modules must be set, `no`
    full: str  # `yes` or `no`
    reason: str = ""  # why nothing can be trained


def outcome(model_type: str, certify: Certify) -> Outcome | None:
    """The outcome of a type's certificates; None for an encoder-decoder."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        try:
            write_config(model_type, source)
        except Exception:  # transformers' own defaults are refused
            return Outcome("", "no", "no", _OTHER_REASONS)
        if is_encoder_decoder(read_config(source)):
            return None
        found, reason = _certified(certify, source, None, Path(scratch))
        if found and found.not_proven:
            return Outcome("", "", "")
        adapted, lora = _adapted(certify, source, Path(scratch))
        packed = found or adapted
        if packed is None:
            matching = (sentence for part, sentence in _REASONS.items() if part in reason)
            return Outcome("", "no", "no", next(matching, _OTHER_REASONS))
        return Outcome("one" if packed.not_packed else "packed", lora, "yes" if found else "no")


def _adapted(certify: Certify, source: Path, scratch: Path) -> tuple[Certificate | None, str]:
    """With LoRA on the default modules, or else on those that can have adapters, without those that are refused."""
    found, _ = _certified(certify, source, Lora(), scratch)
    if found:
        return found, "yes"
    with contextlib.suppress(Exception):
        save_small(source, scratch / "named")
        targets = needed_targets(scratch / "named") or list(default_targets(str(read_config(source)["model_type"])))
        while targets:
            found, reason = _certified(certify, source, Lora(target_modules=tuple(targets)), scratch)
            if found:
                return found, "named"
            dead = reason.partition("set it to modules without ")[2].split(", ")
            known = reason.partition("set it to some of those that it has: ")[2].split(", ")
            wanted = known if known != [""] else targets
            left = [name for name in targets if name in wanted and name not in dead]
            targets = left if left != targets else []
    return None, "no"


def _certified(certify: Certify, source: Path, lora: Lora | None, scratch: Path) -> tuple[Certificate | None, str]:
    """The certificate, or why there is none."""
    with tempfile.TemporaryDirectory(dir=scratch) as directory, contextlib.redirect_stdout(io.StringIO()):
        try:
            return certify(source, lora, Path(directory)), ""
        except UserError as error:
            return None, str(error).removeprefix("model.source: ")
        finally:
            if dist.is_initialized():  # training leaves its process group after an error: its process ends
                dist.destroy_process_group()


def section(outcomes: Mapping[str, Outcome]) -> str:
    """The tables, dense: types that came out alike are in one row."""
    alike: defaultdict[Outcome, list[str]] = defaultdict(list)
    for model_type, found in outcomes.items():
        alike[found].append(model_type)
    proven = {found: names for found, names in alike.items() if found.rows}
    lines = [
        f"transformers {transformers.__version__}, {len(outcomes)} types of decoders,"
        f" {sum(map(len, proven.values()))} of which train:",
        "",
        "| examples in a row | LoRA | full | types |",
        "|---|---|---|---|",
    ]
    words = {"packed": "several", "one": "one"}
    ranks = ("yes", "named", "no")
    for found in sorted(proven, key=lambda each: (each.rows != "packed", each.full != "yes", ranks.index(each.lora))):
        lines.append(f"| {words[found.rows]} | {found.lora} | {found.full} | {' '.join(proven[found])} |")
    refused = {found.reason: names for found, names in alike.items() if found.reason}
    lines += ["", "Refused:", ""]
    lines += [f"- {reason}: {' '.join(refused[reason])}" for reason in sorted(refused, key=_ORDER.index)]
    if unproven := alike[Outcome("", "", "")]:
        lines += ["", f"Not proven, since no small model could be tried: {' '.join(unproven)}"]
    return "\n".join(lines)


def trl(objective: str) -> Certify:
    """The certificate of engine trl for an objective, on CPUs: with eager attention, which all types have."""
    of_objective: dict[str, Any] = {"dataset": {"format": "text"}}
    if objective == "grpo":
        of_objective = {"dataset": {"format": "prompt"}, "reward": [{"function": "json"}]}

    def certify(source: Path, lora: Lora | None, scratch: Path) -> Certificate:
        values = {
            "name": "models",
            "engine": "trl",
            "cluster": {"instance_type": "local"},
            "model": {"source": str(source)},
            "training": {"objective": objective, "method": "lora" if lora else "full", "micro_batch_size": 8},
            **({"lora": lora.model_dump()} if lora else {}),
            **of_objective,
        }
        values["dataset"] |= {"source": str(source), "max_length": 64}
        return certify_trl(RunConfig.model_validate(values), source, None, scratch)

    return certify


def samples(model_type: str) -> bool:
    """Whether answers of the type are sampled together as it computes them."""
    with tempfile.TemporaryDirectory() as scratch:
        found, _ = _certified(trl("grpo"), write_config(model_type, Path(scratch, "source")), None, Path(scratch))
    return found is not None


def main() -> None:
    torch.set_num_threads(1)
    engine, *chosen = sys.argv[1:]
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    known = sorted(names - NOT_CAUSAL - set(ENCODER_DECODERS))
    certify = certify_torch if engine == "torch" else trl("sft")
    outcomes = {name: found for name in chosen or known if (found := outcome(name, certify))}
    text = section(outcomes)
    if engine == "trl":
        without = [name for name, found in outcomes.items() if found.full == "yes" and not samples(name)]
        text += f"\n\nWithout GRPO, RLOO and distillation: {' '.join(without)}"
    begin = BEGIN.format(engine)
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{begin}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
