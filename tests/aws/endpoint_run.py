"""Finished runs without their training: models and their answers, and of the included tiny Llama also the adapter."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import models
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hyperpod_ft.checkpoint.formats import pretrained
from hyperpod_ft.checkpoint.merge.merge import WeightedAdapter, merge
from hyperpod_ft.config import run_file
from hyperpod_ft.data import chat_template
from hyperpod_ft.data import tokenizer as tokenizers
from hyperpod_ft.evaluation.greedy import answers
from hyperpod_ft.runs.results.samples import RecordedAnswers, Samples
from hyperpod_ft.runs.run import Run
from hyperpod_ft.shipped import shipped
from tests.unit import tiny_t5
from tests.unit.stage_runs import finish

_PROMPTS = ("### Instruction\nWhich command submits a batch script?\n\n### Answer\n", "squeue", "A node is")
BUCKET, ROLE = "sagemaker-models", "arn:aws:iam::123456789012:role/endpoint"
_DEPLOY = {"instance_type": "g6.2xlarge", "store": f"s3://{BUCKET}/kit", "role": ROLE, "region": "us-west-2"}


def frozen(base: Path, **sections: Any) -> Run:
    """The run in its directory, with nothing done."""
    values = {
        "name": "tiny.llama",
        "engine": "torch",
        "cluster": {"root": str(base / "root"), "instance_type": "local"},
        "parallelism": {"ranks_per_node": 1},
        "env": {"python": "current"},
        "model": {"source": "example:tiny-llama"},
        "dataset": {"source": "example:qa", "format": "dolly", "max_length": 256},
        "lora": {"r": 4, "alpha": 8},
        "generate": {"max_new_tokens": 12},
        "deploy": _DEPLOY,
        **sections,
    }
    run = Run.of(run_file.resolve(run_file.validate(values, "test"), base))
    run.freeze()
    return run


def make_run(base: Path) -> Run:
    run = frozen(base)
    run.paths.base_model.parent.mkdir(parents=True)
    run.paths.base_model.symlink_to(shipped("examples/quickstart/tiny-llama"))
    _adapter(run)
    merge(run.paths.base_model, [WeightedAdapter(run.paths.adapter)], run.paths.tuned_model)
    for file in run.paths.tuned_model.glob("*.safetensors"):
        os.utime(file, (0, 0))  # as one that came back from a backup
    _samples(run).write(run.paths.samples_path)
    finish(run, "consolidate", run.paths.adapter, digests=False)
    finish(run, "merge", run.paths.tuned_model, digests=False)
    return run


def make_t5_run(base: Path) -> Run:
    """Both models are random."""
    source, data = tiny_t5.save(base / "t5", list(_PROMPTS)), base / "pairs.jsonl"
    # what is trained on so little text differs each time; characters do not
    tokenizer = tiny_t5.tokenizer(list(_PROMPTS))
    tokens = [tiny_t5.PAD, tiny_t5.EOS, tiny_t5.UNK, *sorted({*"".join(_PROMPTS).replace(" ", "▁")} - {"\n"})]
    tokenizer.model = models.Unigram([(token, -1.0) for token in tokens], unk_id=2)
    tokenizer.save(str(source / "tokenizer.json"))
    data.write_text("".join(json.dumps({"prompt": prompt, "completion": "x"}) + "\n" for prompt in _PROMPTS))
    pairs = {"source": str(data), "format": "prompt-completion", "max_length": 64, "max_target_length": 32}
    run = frozen(
        base,
        name="tiny.t5",
        model={"source": str(source)},
        dataset=pairs,
        training={"method": "full"},
        deploy={**_DEPLOY, "container": "kit", "max_length": 128},
    )
    run.paths.base_model.parent.mkdir(parents=True)
    run.paths.base_model.symlink_to(source)
    shutil.copytree(source, run.paths.tuned_model)
    template = chat_template.of(run.config.dataset.questions, source)
    assert template is not None
    (run.paths.tuned_model / "chat_template.jinja").write_text(template.text)
    torch.manual_seed(1)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(source)
    with torch.no_grad():
        model.lm_head.weight[3 : len(tokens)].normal_()  # it writes characters only
    model.save_pretrained(run.paths.tuned_model)
    shutil.copy(source / "config.json", run.paths.tuned_model)
    _samples(run).write(run.paths.samples_path)
    finish(run, "consolidate", run.paths.tuned_model, digests=False)
    return run


def only_in_store(finished: Run, base: Path, s3: Any) -> Run:
    """The same run after training jobs: its outputs are in a store in S3, its records here."""
    store = {"store": f"s3://{BUCKET}/store", "role": ROLE, "region": "us-west-2"}
    # without env.python: its environment was in containers
    run = frozen(base, sagemaker=store, deploy={"instance_type": "g6.2xlarge"}, env={})
    merged, files = finished.journal.record("merge"), [finished.paths.samples_path]
    assert merged is not None
    merged.write(run.paths.record_path("merge"))
    files += [finished.paths.root / output.path for output in merged.outputs]
    names = [file.relative_to(finished.paths.root).as_posix() for file in files]
    for name, file in zip(names, files, strict=True):
        s3.upload_file(str(file), BUCKET, f"store/{name}")
    sizes = {name: file.stat().st_size for name, file in zip(names, files, strict=True)}
    run.paths.store_listing.write_text(json.dumps(sizes))
    return run


def _adapter(run: Run) -> None:
    """Random factors, large enough to change what the model says."""
    model: Any = AutoModelForCausalLM.from_pretrained(run.paths.base_model)
    torch.manual_seed(7)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    adapted.save_pretrained(run.paths.adapter)


def _samples(run: Run) -> Samples:
    tokenizer = tokenizers.load(run.paths.tuned_model)
    encode = tokenizers.source_ids if run.config.dataset.max_target_length else tokenizers.prompt_ids
    ids = [encode(tokenizer, prompt) for prompt in _PROMPTS]
    both = [
        answers(pretrained.load(where, "auto").eval(), tokenizer, ids, run.config.generate.max_new_tokens)  # type: ignore[no-untyped-call]
        for where in (run.paths.base_model, run.paths.tuned_model)
    ]
    changed = sum(one.ids != other.ids for one, other in zip(*both, strict=True))
    prompts = [
        RecordedAnswers(prompt, False, one.text, other.text) for prompt, one, other in zip(_PROMPTS, *both, strict=True)
    ]
    return Samples.of(prompts, [], changed, None)
