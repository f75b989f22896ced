"""What goes with what, in docs/engines.md. Each cell is what the kit's checks say of a small run file.

`python scripts/reference.py` writes the tables between the page's markers.
"""

import itertools
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memory_table import LLAMA_3_8B, generated
from plan_answers import Asked, Model, Settings, refusal

from hyperpod_ft.planning.families import FAMILIES


@dataclass(frozen=True)
class Line:
    """A row or a column: what its cells ask, by a name for each that a cell gives where the answers differ.

    `otherwise`: by name, settings with which the kit takes what it refuses without them.
    """

    title: str
    asked: Mapping[str, Asked]
    otherwise: Mapping[str, Settings] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table, and what is said before it, if anything."""

    title: str
    before: str
    rows: Sequence[Line]
    columns: Sequence[Line]


def _line(title: str, settings: Settings | None = None, *otherwise: Mapping[str, Settings], **asked: Any) -> Line:
    return Line(title, {"": Asked(settings or {}, **asked)}, *otherwise)


def _each(title: str, asked: Mapping[str, Settings], *otherwise: Mapping[str, Settings]) -> Line:
    return Line(title, {name: Asked(settings) for name, settings in asked.items()}, *otherwise)


_SMALL: dict[str, Any] = LLAMA_3_8B | {"num_hidden_layers": 8, "vocab_size": 32768, "max_position_embeddings": 8192}


def _model(model_type: str, *, one_a_row: bool = False, **more: Any) -> Model:
    return Model(_SMALL | {"model_type": model_type} | more, one_a_row)


def _image_text(model_type: str, language: str) -> Model:
    return Model({"model_type": model_type, "text_config": _SMALL | {"model_type": language, "head_dim": 128}})


_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "head_dim": 128}
_T5 = {
    **{"model_type": "t5", "d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 8, "num_heads": 16},
    **{"num_decoder_layers": 8, "vocab_size": 32128, "decoder_start_token_id": 0, "is_encoder_decoder": True},
    **{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
LLAMA, OTHER, MIXTURE, T5 = _model("llama"), _model("cohere"), _model("qwen3_moe", **_EXPERTS), Model(_T5)
ONE_A_ROW = _model("qwen3_next", one_a_row=True, **_EXPERTS, shared_expert_intermediate_size=1024)
GEMMA3, QWEN3_VL = _image_text("gemma3", "gemma3_text"), _image_text("qwen3_vl", "qwen3_vl_text")

_CPUS: Settings = {"cluster.instance_type": "m5.4xlarge", "parallelism.ranks_per_node": 8}
_GPUS, _TRN1, _TRN2 = ({"cluster.instance_type": name} for name in ("p5.48xlarge", "trn1.32xlarge", "trn2.48xlarge"))
ENGINES = tuple(
    _each(f"`{engine}`, {' and '.join(devices)}", {name: {"engine": engine, **of} for name, of in devices.items()})
    for engine, devices in (
        ("torch", {"CPUs": _CPUS, "GPUs": _GPUS}),
        ("torch", {"trn2": _TRN2}),
        ("neuron", {"trn1": _TRN1, "trn2": _TRN2}),
        ("trl", {"CPUs": _CPUS, "GPUs": _GPUS}),
    )
)


def _objective(name: str, rows: str, **more: Any) -> Settings:
    return {"training.objective": name, "dataset.format": rows, **more}


_ANSWER = [{"function": "exact_match", "column": "answer"}]
DPO, REWARD = (_objective(name, "preference") for name in ("dpo", "reward"))
KTO = _objective("kto", "unpaired-preference")
GRPO, RLOO = (_objective(name, "prompt", reward=_ANSWER) for name in ("grpo", "rloo"))
DISTILLATION = _objective("distillation", "prompt", teacher={"source": "any/teacher"})
IMAGES: Settings = {"dataset.images": True, "dataset.format": "chat"}
FULL: Settings = {"training.method": "full"}
WHOLE: Settings = {"lora.modules_to_save": ["embed_tokens", "lm_head"]}
EXPERTS: Settings = {"lora.target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
NEW_TOKENS: Settings = {"model.new_tokens": ["<tool>"], "lora.target_modules": ["q_proj", "embed_tokens", "lm_head"]}
TO_SEQUENCE: Settings = {"dataset.max_target_length": 512}
BEST: Settings = {"training.validate_every_steps": 50, "training.keep_best": True}
TASKS: dict[str, Any] = {"tasks": ["arc_easy"]}
_UNDIVIDED: Settings = {"parallelism.tensor_parallel": 1}
_WITH_TP_1 = {"TP 1": _UNDIVIDED}
_WITH_FP32 = {"`precision: fp32`": {"training.precision": "fp32"}}

LEARNED = (
    _line("SFT"),
    _line("[DPO](methods.md#preferences-dpo)", DPO, {"`packing: none`": {"dataset.packing": "none"}}),
    _each(
        "[KTO](methods.md#labels-kto), [reward models](methods.md#reward-models),"
        " [GRPO, RLOO](methods.md#rewards-grpo-and-rloo), [distillation](methods.md#a-teacher-distillation)",
        {each["training.objective"]: each for each in (KTO, REWARD, GRPO, RLOO, DISTILLATION)},
    ),
    Line("[images](methods.md#images)", {"gemma3": Asked(IMAGES, GEMMA3), "qwen3_vl": Asked(IMAGES, QWEN3_VL)}),
    _each("LoRA, [rsLoRA](methods.md#variants)", {"LoRA": {}, "rsLoRA": {"lora.rslora": True}}),
    _line("DoRA", {"lora.dora": True}),
    _line("LoRA+", {"lora.plus_ratio": 16}),
    _line("QLoRA (`nf4`)", {"lora.quantization": "nf4"}),
    _line("[`modules_to_save`](methods.md#embedding-and-output-layer-as-a-whole)", WHOLE),
    _line("[adapters of experts](models.md#lora-for-experts)", EXPERTS, _WITH_TP_1, model=MIXTURE),
    _line("[continuing an adapter](methods.md#continuing-an-adapter)", {"model.adapter": {"source": "any/adapter"}}),
    _line("[new tokens](methods.md#new-tokens)", NEW_TOKENS),
    _line("`method: full`", FULL),
    _line("validation loss, `keep_best`", BEST),
    _line("section `eval`", {"eval": TASKS}, {"`eval.python`": {"eval": TASKS | {"python": "/opt/eval/bin/python"}}}),
)
_OF_NEURON = ("llama", "qwen3", "granite")
_DIVIDED = sorted({name for family in FAMILIES for name in family.model_types}.difference(_OF_NEURON))
_DECODED = ("fp8", "mxfp4", "bitsandbytes")
_GPTQ = {"quant_method": "gptq"}
KINDS = (
    *(
        Line(", ".join(f"`{name}`" for name in names), {name: Asked(model=_model(name)) for name in names})
        for names in (_OF_NEURON, _DIVIDED)
    ),
    _line("other dense decoders, such as `cohere`", {}, _WITH_TP_1, model=OTHER),
    _line("[mixtures of experts](models.md#mixtures-of-experts), such as `qwen3_moe`", {}, _WITH_TP_1, model=MIXTURE),
    _line("types with [one example in a row](models.md), such as `qwen3_next`", {}, _WITH_TP_1, model=ONE_A_ROW),
    _line("image-text models, such as `gemma3`, tuned on text", model=GEMMA3),
    _line("[`t5`](models.md#flan-t5-and-t5)", TO_SEQUENCE, model=T5),
    _line("other encoder-decoders, such as `bart`", model=_model("bart", is_encoder_decoder=True)),
    _line("encoders, such as `bert`", model=_model("bert")),
    Line(
        "weights in FP8, MXFP4, bitsandbytes' 4 bits",
        {
            name: Asked(model=_model("llama", quantization_config={"quant_method": name, "load_in_4bit": True}))
            for name in _DECODED
        },
    ),
    _line("weights quantized otherwise, such as GPTQ", model=_model("llama", quantization_config=_GPTQ)),
)

_TENSOR: Settings = {"parallelism.tensor_parallel": 4}
_PIPELINE: Settings = {"parallelism.pipeline_parallel": 2}
_CONTEXT: Settings = {"parallelism.context_parallel": 2}
_EXPERT: Settings = {"parallelism.expert_parallel": 2}
BY_LAYER: Mapping[str, Settings] = {name: {"parallelism.sharding": name} for name in ("zero2", "zero3")}
AUTO = _line("`degrees: auto`", {"parallelism.degrees": "auto"})
DEGREES = (
    _line("[tensor parallelism](parallelism.md#tensor-parallelism) (TP)", _TENSOR),
    _line("[pipeline parallelism](parallelism.md#pipeline-parallelism) (PP)", _PIPELINE),
    _line("[context parallelism](parallelism.md#context-parallelism) (CP)", _CONTEXT),
    _line("[expert parallelism](models.md#divide-a-mixture) (EP)", {**_EXPERT, **_UNDIVIDED}, model=MIXTURE),
    _line("[`sharding`](parallelism.md#sharding)`: zero1`", {"parallelism.sharding": "zero1"}),
    _each("`zero2`, `zero3`", BY_LAYER),
    _line("`sequence_parallel`", {**_TENSOR, "parallelism.sequence_parallel": True}),
    AUTO,
    _each("`offload`", {name: {"parallelism.offload": name} for name in ("optimizer", "parameters")}),
    _each("`optimizer_state: bf16`, `int8`", {name: {"training.optimizer_state": name} for name in ("bf16", "int8")}),
    _line("`activation_offload`", {"training.activation_offload": True}),
    _line(
        "`lora.dropout` with `activation_checkpointing`",
        {"lora.dropout": 0.1, "training.activation_checkpointing": "full"},
    ),
)
_TORCH: Settings = {"engine": "torch", **_GPUS}
OF_MODEL = (
    _line("TP", _TENSOR),
    _line("PP", _PIPELINE),
    _line("CP", _CONTEXT),
    _line("EP", _EXPERT),
    _each("`zero2`, `zero3`", BY_LAYER),
    AUTO,
    _line("`modules_to_save`", WHOLE),
    _line("DPO", DPO),
)
BY_MODEL = (
    _line("`llama`", _TORCH, model=LLAMA),
    _line("`cohere`", _TORCH, model=OTHER),
    _line("mixtures", _TORCH, model=MIXTURE),
    _line("one example in a row", _TORCH, model=ONE_A_ROW),
    _line("`t5`", {**_TORCH, **TO_SEQUENCE}, model=T5),
    _line("`llama` with DPO", {**_TORCH, **DPO}, model=LLAMA),
)

_AUTO: Settings = {"engine": "auto", **_GPUS}
OF_OBJECTIVE = (
    _line("`method: full`", FULL),
    _line("`modules_to_save`", WHOLE, _WITH_FP32),
    _line("`packing: bfd`", {"dataset.packing": "bfd"}),
    _line("`packing: wrapped`", {"dataset.packing": "wrapped"}),
    _line("`packing: none`", {"dataset.packing": "none"}),
    _line("`overlong: truncate`", {"dataset.overlong": "truncate"}),
    _line("`loss_on: all`", {"dataset.loss_on": "all"}),
    _line("several sources", sources=2),
    _line("validation loss, `keep_best`", BEST),
    _each("`zero2`, `zero3`", BY_LAYER, _WITH_FP32),
)
BY_OBJECTIVE = (
    _line("SFT", _AUTO),
    _line("DPO", {**_AUTO, **DPO}),
    _line("KTO", {**_AUTO, **KTO}),
    _line("reward", {**_AUTO, **REWARD}),
    _each("GRPO, RLOO", {"GRPO": {**_AUTO, **GRPO}, "RLOO": {**_AUTO, **RLOO}}),
    _line("distillation", {**_AUTO, **DISTILLATION}),
    _line("images", {**_AUTO, **IMAGES}, model=GEMMA3),
)

_ENDPOINT = {"instance_type": "g6.2xlarge"}
FOLLOWING = (
    _line("stage `merge`", stage="merge"),
    _line("stage `generate`", stage="generate"),
    _line("section `eval`", {"eval": TASKS}),
    _line("section `deploy`", {"deploy": _ENDPOINT}),
    _line("`deploy.container: kit`", {"deploy": _ENDPOINT | {"container": "kit"}}),
    _line("`deploy.model: adapter`", {"deploy": _ENDPOINT | {"model": "adapter"}}),
    _line("`push --adapter`", pushes_adapter=True),
)
BY_METHOD = (
    _line("LoRA", _AUTO),
    _line("full", {**_AUTO, **FULL}),
    _line("DoRA", {**_AUTO, "lora.dora": True}),
    _line("`modules_to_save`", {**_AUTO, **WHOLE}),
    _line("new tokens", {**_AUTO, **NEW_TOKENS}),
    _line("adapters of experts", {**_AUTO, **EXPERTS}, model=MIXTURE),
    _line("`t5`", {**_AUTO, **TO_SEQUENCE}, model=T5),
    Line("images", {name: Asked({**_AUTO, **IMAGES}, of) for name, of in (("gemma3", GEMMA3), ("qwen3_vl", QWEN3_VL))}),
    _line("reward models", {**_AUTO, **REWARD}),
)

_JOBS: dict[str, Any] = {"region": "us-west-2", "role": "arn:aws:iam::123456789012:role/any"}
_STORE = {**_JOBS, "store": "s3://any-bucket/prefix"}
_LUSTRE = {
    **{"id": "fs-0123456789abcdef0", "directory": "/abcdefgh/ft"},
    **{"subnets": ["subnet-0123456789abcdef0"], "security_groups": ["sg-0123456789abcdef0"]},
}
_VOLUME = {**_JOBS, "output": "s3://any-bucket/prefix", "file_system": _LUSTRE}


def _jobs(title: str, section: dict[str, Any], settings: Settings | None = None) -> Line:
    own = {**section, "image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/any:1"}
    return _line(title, {"sagemaker": section, **(settings or {})}, {"`sagemaker.image`": {"sagemaker": own}})


_TWO: Settings = {"cluster.nodes": 2}
JOBS = (
    _jobs("one instance", _STORE),
    _jobs("several, a store in S3", _STORE, _TWO),
    _jobs("several, a file system", _VOLUME, _TWO),
    _jobs("section `eval`", _VOLUME, {"eval": TASKS}),
)

TABLES = (
    Table("Objectives and methods", "", LEARNED, ENGINES),
    Table("Models", "[All types](models.md), as stage `certify` found them.", KINDS, ENGINES),
    Table("Parallelism and memory", "", DEGREES, ENGINES),
    Table("Models with engine torch", "On GPUs:", OF_MODEL, BY_MODEL),
    Table("Objectives with data and methods", "With `engine: auto` on GPUs:", OF_OBJECTIVE, BY_OBJECTIVE),
    Table("After training", "With `engine: auto` on GPUs:", FOLLOWING, BY_METHOD),
    Table(
        "Launchers",
        "Slurm runs all of the above, and so do plain processes on one machine. [Training jobs](training-jobs.md) run:",
        JOBS,
        ENGINES,
    ),
)


def document(text: str) -> str:
    """A page with the text between its markers generated again."""
    lines = [
        "Each cell is the answer of `plan`, or of `push --adapter`, to a small run file. A number leads to the reason",
        "below the table. A *yes* does not mean that it [has run there](fidelity.md). Other limits depend on sizes or",
        "rows, such as [degrees](parallelism.md#what-a-model-allows).",
        "",
    ]
    with tempfile.TemporaryDirectory() as root:
        for table in TABLES:
            before = (table.before, "") if table.before else ()
            lines += [f"### {table.title}", "", *before, *_rows(table, Path(root)), ""]
    return generated(text, lines)


def _rows(table: Table, root: Path) -> Iterator[str]:
    reasons: list[str] = []
    yield f"||{'|'.join(column.title for column in table.columns)}|"
    yield f"|{'---|' * (len(table.columns) + 1)}"
    for row in table.rows:
        cells = [_cell(row, column, root, reasons) for column in table.columns]
        yield f"|{row.title}|{'|'.join(cells)}|"
    yield ""
    yield from (f"{number}. {_sentence(reason)}" for number, reason in enumerate(reasons, start=1))


def _sentence(reason: str) -> str:
    """With a full stop, and a capital letter unless it begins with a program's name."""
    return re.sub(r"^(?!accelerate|lm-)[a-z-]+(?= )", lambda word: word[0].capitalize(), reason) + "."


def _cell(row: Line, column: Line, root: Path, reasons: list[str]) -> str:
    """One answer, or each with its names where they differ. New reasons are added to `reasons`."""
    found: dict[str, list[str]] = {}
    for (of_column, given), (of_row, more) in itertools.product(column.asked.items(), row.asked.items()):
        found.setdefault(_answer(given | more, row.otherwise, root, reasons), []).extend([of_column, of_row])
    if len(found) == 1:
        return next(iter(found))
    common = set.intersection(*map(set, found.values()))
    named = {answer: dict.fromkeys(name for name in names if name not in common) for answer, names in found.items()}
    return "; ".join(f"{', '.join(names)}: {answer}" for answer, names in named.items())


_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
# refusals that say no more than "no"
_PLAIN = re.compile(
    r"this engine (has no \w+|trains on text only|cannot train models of this type|does not support it on \w+)"
    r"|only engine \w+ (supports|trains) .*|this setting is not possible with .*|no stage .*"
)


def _answer(asked: Asked, otherwise: Mapping[str, Settings], root: Path, reasons: list[str]) -> str:
    refused = refusal(asked, LLAMA, root)
    if not refused:
        return "yes"
    for name, settings in otherwise.items():
        if not refusal(asked | Asked(settings), LLAMA, root):
            return f"with {name}"
    if _PLAIN.fullmatch(refused):
        return "no"
    if refused not in reasons:
        reasons.append(refused)
    return f"no{str(reasons.index(refused) + 1).translate(_SUPERSCRIPT)}"
