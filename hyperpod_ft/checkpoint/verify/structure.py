"""Pairs the parts of a tuned model with its base's, and says what is lost, added, renamed or of another kind."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hyperpod_ft.checkpoint.formats import model_directory
from hyperpod_ft.checkpoint.formats.model_directory import OUTPUT, SHARED_ALIASES
from hyperpod_ft.checkpoint.tensors.logical_tensor import FLOATING, LogicalTensor
from hyperpod_ft.checkpoint.tensors.reading import same_values
from hyperpod_ft.checkpoint.verify import forms
from hyperpod_ft.checkpoint.verify.base_values import Pair
from hyperpod_ft.checkpoint.verify.forms import Line, ModelPart, some

Tensors = Mapping[str, LogicalTensor]
Config = Mapping[str, Any]

# Constants that older versions of transformers stored: masks of attention, and what positions are multiplied by.
_CONSTANT = re.compile(r".*(attn\.(masked_)?bias|rotary_emb\.inv_freq|position_ids|\.attention\.(masked_)?bias)")
# What transformers itself puts before all names of a model that was saved without its head, or leaves out.
_OWN_PREFIXES = frozenset({"model", "transformer", "gpt_neox"})
# Ends of names of output layers, the last in layers that predict several tokens.
_OUTPUTS = (".lm_head.weight", "lm_head.bias", "embed_out.weight", "shared_head.head.weight")


def compare(tuned: Tensors, tuned_config: Config, base: Tensors, base_config: Config) -> tuple[list[Pair], list[Line]]:
    """The parts that both models have, and a line for each kind of difference. `*_config`: config.json."""
    lines: list[Line] = []
    tied = model_directory.is_tied(base_config, base)
    if tied and OUTPUT in tuned and OUTPUT not in base:
        base = model_directory.with_tied_output(base)
        embedding = model_directory.embedding(tuned)
        if embedding and not same_values(tuned[OUTPUT], tuned[embedding]):
            stated = tuned_config.get("tie_word_embeddings")  # if true, `config_checks` says so
            line = f"{OUTPUT} has values of its own; in the base it is {embedding}"
            if stated is None:
                lines.append((True, f"{line}, and config.json does not say that tie_word_embeddings is false"))
            elif not stated:
                lines.append((False, line))
    mine, theirs = forms.parts(tuned, base), forms.parts(base, tuned)
    if forms.JOINED.fullmatch(_first_expert(tuned)) and forms.ONE.fullmatch(forms.key(_first_expert(base))):
        lines.append((False, "experts are stored in another form: joined, one by one in the base"))
    if forms.ONE.fullmatch(forms.key(_first_expert(tuned))) and forms.JOINED.fullmatch(_first_expert(base)):
        lines.append((False, "experts are stored in another form: one by one, joined in the base"))
    lost = {name: part for name, part in theirs.items() if name not in mine}
    added = {name: part for name, part in mine.items() if name not in theirs}
    moved = forms.renamed(lost, added)
    same_class = tuned_config.get("architectures") == base_config.get("architectures")
    if moved:
        lines.append((same_class and not _is_own_prefix(moved), _renamed(moved, lost)))
    lost = {name: part for name, part in lost.items() if name not in moved}
    added = {name: part for name, part in added.items() if name not in moved.values()}
    lines += _missing(lost, base, tuned, tuned_config, base_config)
    lines += _added(added, mine, same_class)
    pairs = [
        Pair(name, mine[moved.get(name, name)], part) for name, part in theirs.items() if moved.get(name, name) in mine
    ]
    lines += [*_shapes(pairs), *_dtypes(pairs, tuned_config)]
    return [pair for pair in pairs if _is_alike(pair)], lines


def _first_expert(tensors: Tensors) -> str:
    return next((name for name in tensors if forms.ONE.fullmatch(forms.key(name)) or forms.JOINED.fullmatch(name)), "")


def _is_own_prefix(moved: Mapping[str, str]) -> bool:
    """Whether all names got, or lost, the same prefix, which transformers adds or removes when it loads them."""
    return any(
        all(new == f"{prefix}.{old}" for old, new in moved.items())
        or all(old == f"{prefix}.{new}" for old, new in moved.items())
        for prefix in _OWN_PREFIXES
    )


def _renamed(moved: Mapping[str, str], lost: Mapping[str, ModelPart]) -> str:
    names = sorted(moved)[:3]
    shown = ", ".join(f"{name} is now {moved[name]}" for name in names[:2])
    more = ", ..." if len(moved) > 2 else ""
    return f"{_tensors(moved)} of the base have another name: {shown}{more}"


def _missing(
    lost: Mapping[str, ModelPart], base: Tensors, tuned: Tensors, tuned_config: Config, base_config: Config
) -> Iterator[Line]:
    """Lines about parts of the base that the tuned model lacks."""
    kept = model_directory.without_predictors(base_config, base)
    constants = {name for name in lost if _CONSTANT.fullmatch(name)}
    predictors = {name for name in lost if lost[name].tensor.name not in kept} - constants
    aliases = {name for name in lost if name in SHARED_ALIASES}
    gone = lost.keys() - constants - predictors - aliases
    if OUTPUT in gone and model_directory.is_classifier(tuned_config):
        gone -= {OUTPUT}
        yield False, f"{OUTPUT} is replaced by a score"
    if OUTPUT in gone and (embedding := model_directory.embedding(base)) and embedding in base:
        gone -= {OUTPUT}
        if not same_values(base[OUTPUT], base[embedding]):
            yield True, f"{OUTPUT} is lost: the base has one, unlike its embedding, and here the embedding replaces it"
    if predictors:
        yield (
            False,
            f"without {_tensors(predictors)} for layers that predict several tokens, which transformers' class lacks",
        )
    if gone:
        yield True, f"{_tensors(gone, len(base))} of the base are lost: {some(gone)}"


def _added(added: Mapping[str, ModelPart], mine: Mapping[str, ModelPart], same_class: bool) -> Iterator[Line]:
    left = {name for name in added if not _CONSTANT.fullmatch(name) and name not in SHARED_ALIASES}
    heads = {name for name in left if name.endswith(("score.weight", "v_head.summary.weight", "v_head.summary.bias"))}
    left -= heads if not same_class else set()
    if left:
        yield True, f"{_tensors(left, len(mine))} are not in the base: {some(left)}"


def _tensors(names: Collection[str], total: int | None = None) -> str:
    """For example `18,432 of 18,867 expert tensors`."""
    experts = sum(forms.is_expert(name) for name in names)
    what = "expert tensors" if experts == len(names) else "tensors"
    return f"{len(names):,}{f' of {total:,}' if total else ''} {what}"


def _is_alike(pair: Pair) -> bool:
    return pair.tuned.shape == pair.base.shape or _is_resized(pair)


def _is_resized(pair: Pair) -> bool:
    """Whether only the number of tokens differs."""
    one, other = pair.tuned.shape, pair.base.shape
    outer = pair.name == OUTPUT or pair.name.endswith(_OUTPUTS)
    outer = outer or model_directory.embedding([pair.name]) is not None
    return outer and one[1:] == other[1:] and len(one) > 0


def _shapes(pairs: Collection[Pair]) -> Iterator[Line]:
    resized = {pair.name: pair for pair in pairs if pair.tuned.shape != pair.base.shape and _is_resized(pair)}
    for name, pair in resized.items():
        rows, before = pair.tuned.shape[0], pair.base.shape[0]
        yield False, f"{name} has {rows:,} rows for tokens, {before:,} in the base"
    sizes = {pair.tuned.shape[0] for pair in pairs if _is_resized(pair)}
    if resized and len(sizes) > 1:
        yield True, f"embedding and output layer have {' and '.join(f'{size:,}' for size in sorted(sizes))} rows"
    if other := [pair for pair in pairs if not _is_alike(pair)]:
        first = other[0]
        yield (
            True,
            f"{_tensors([pair.name for pair in other], len(pairs))} have another shape: {first.name} is"
            f" {list(first.tuned.shape)}, {list(first.base.shape)} in the base",
        )


def _dtypes(pairs: Collection[Pair], config: Config) -> Iterator[Line]:
    changes = Counter(
        (pair.tuned.tensor.dtype, pair.base.tensor.dtype)
        for pair in pairs
        if pair.tuned.tensor.dtype != pair.base.tensor.dtype
    )
    for (now, before), count in changes.most_common(3):
        narrow = now not in FLOATING or now.startswith("F8")
        wrong = narrow and not config.get("quantization_config")
        yield wrong, f"{count:,} of {len(pairs):,} tensors are {now}, {before} in the base"
