"""The degrees of parallelism of a run file, and whether a model can be divided by them.

Errors show the arithmetic of what does not divide.
"""

from hyperpod_ft.config.run_config import EngineName, RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.engine_rules import limits_of, rules_of
from hyperpod_ft.planning.layout import Degrees, check_divides, divisors, listed_divisors
from hyperpod_ft.planning.lora import check_targets, whole_modules
from hyperpod_ft.planning.model_shape import ModelShape
from hyperpod_ft.planning.undivided.shape import UndividedShape
from hyperpod_ft.progress import count


def ranks_per_node(config: RunConfig) -> int:
    """The ranks of a node. Raises UserError when the run file lacks the number, or has one that is too large."""
    instance = config.instance
    ranks = config.parallelism.ranks_per_node or instance.ranks
    if ranks is None:
        raise UserError(
            f"parallelism.ranks_per_node: required with instance type {instance.name}",
            "set it, for example to 2",
        )
    if instance.ranks is not None and ranks > instance.ranks:
        raise UserError(
            f"parallelism.ranks_per_node: {ranks} is more than the {instance.ranks} ranks of {instance.name}",
            f"set it to {instance.ranks} or leave it out",
        )
    return ranks


def degrees_of(config: RunConfig) -> Degrees:
    """The degrees of a run. Raises UserError when the engine cannot train with them, or with the settings."""
    limits_of(config.engine).check_settings(config)
    degrees = _divided(config)
    limits_of(config.engine).check_degrees(config, degrees)
    return degrees


def keeping_rows(config: RunConfig, rows: int) -> RunConfig:
    """The same with as many forward passes a step as `rows` rows of a step need, with fewer rows each if they must.

    Raises UserError when no numbers are possible, with the arithmetic.
    """
    training, degrees = config.training, _divided(config)
    ranks = degrees.data_parallel
    if (rows * config.answers_per_prompt) % ranks:
        raise UserError(
            f"training.gradient_accumulation_steps: a step has {rows} rows, which {ranks} data-parallel ranks"
            f" ({degrees}) cannot share: {rows} / {ranks} = {rows / ranks:.2f}",
            f"choose nodes or degrees with {_nearest(rows, ranks)} data-parallel ranks",
        )
    on_rank = rows * config.answers_per_prompt // ranks
    errors: list[UserError] = []
    for size in reversed([size for size in divisors(on_rank) if size <= training.micro_batch_size]):
        numbers = {"micro_batch_size": size, "gradient_accumulation_steps": on_rank // size}
        found = config.model_copy(update={"training": training.model_copy(update=numbers)})
        try:
            degrees_of(found)
        except UserError as error:
            errors.append(error)
            continue
        return found
    raise errors[0]


def on_nodes(config: RunConfig, degrees: Degrees, nodes: int) -> RunConfig:
    """A run file, whose degrees are given, with another number of nodes. Raises UserError as `keeping_rows` does."""
    cluster = config.cluster.model_copy(update={"nodes": nodes})
    return keeping_rows(config.model_copy(update={"cluster": cluster}), config.rows_per_step(degrees.data_parallel))


def check_fewer_nodes(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError unless training can go on with every number of nodes from cluster.min_nodes on."""
    least, rules = config.cluster.min_nodes, rules_of(config.engine)
    if least is None:
        return
    if not rules.continues_elsewhere(config) or rules.precompiles(config):
        raise UserError(
            "cluster.min_nodes: this training cannot continue on other nodes (docs/reliability.md says why)",
            "leave it out",
        )
    for nodes in range(least, degrees.nodes):
        try:
            on_nodes(config, degrees, nodes)
        except UserError as error:
            raise UserError(
                f"cluster.min_nodes: not with {count(nodes, 'node')}: {error.problem}",
                "choose rows per step that each number of nodes can share, or raise min_nodes",
            ) from error


def _nearest(rows: int, ranks: int) -> str:
    """The numbers of ranks that can share the rows and are nearest to `ranks`."""
    possible = divisors(rows)
    fewer, more = ([one for one in possible if (one < ranks) == less] for less in (True, False))
    return " or ".join(map(str, [*fewer[-1:], *more[:1]]))


def _divided(config: RunConfig) -> Degrees:
    """The degrees that a run file gives. Raises UserError when they do not divide its ranks."""
    given, rules, ranks = config.parallelism, rules_of(config.engine), ranks_per_node(config)
    instance = config.instance
    tensor_parallel = given.tensor_parallel or rules.default_tensor_parallel(instance, ranks)
    result = Degrees(
        config.cluster.nodes,
        ranks,
        tensor_parallel,
        given.pipeline_parallel,
        given.context_parallel,
        given.expert_parallel,
    )
    if result.world_size % result.model_ranks:
        context = f" x context_parallel {result.context_parallel}" if result.context_parallel > 1 else ""
        raise UserError(
            f"parallelism: tensor_parallel {result.tensor_parallel} x pipeline_parallel {result.pipeline_parallel}"
            f"{context} = {result.model_ranks} does not divide {count(result.nodes, 'node')} x"
            f" {count(ranks, 'rank')} = {result.world_size}",
            f"choose degrees whose product is {listed_divisors(result.world_size)}",
        )
    if ranks % result.tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {result.tensor_parallel} does not divide the {ranks} ranks of a node,"
            " so a tensor-parallel group would span nodes",
            f"set it to {listed_divisors(ranks)}",
        )
    return result


def check_model(config: RunConfig, degrees: Degrees, shape: ModelShape) -> None:
    """Raise UserError for degrees that do not divide the model, and settings that its heads or modules do not allow."""
    check_heads(config.engine, degrees.tensor_parallel, shape.heads, shape.kv_heads)
    check_divides(degrees, "intermediate size", shape.intermediate)
    if shape.layers < degrees.pipeline_parallel:
        raise UserError(
            f"parallelism.pipeline_parallel: {degrees.pipeline_parallel} pipeline parts for {shape.layers} layers",
            f"set it to at most {shape.layers}",
        )
    if isinstance(shape, UndividedShape):
        _check_rows(config, shape)
        if config.training.method == "lora":
            whole_modules(config.lora.modules_to_save, [each.module for each in shape.ends], tied=shape.tied)
    else:
        check_targets(config, shape)
    limits_of(config.engine).check_shape(config, degrees, shape)


def _check_rows(config: RunConfig, shape: UndividedShape) -> None:
    """Stage certify finds this out for every model; of these types it is known, so that auto does not choose it.

    Their LoRA targets are compared with transformers' modules (launch/trainability.py).
    """
    if config.parallelism.context_parallel > 1 and shape.one_a_row:
        raise UserError(
            f"parallelism.context_parallel: engine torch does not compute the attention of {shape.model_type} models,"
            " so their rows cannot be divided",
            "set it to 1",
        )


def check_heads(engine: EngineName, tensor_parallel: int, heads: int, kv_heads: int) -> None:
    """Raise UserError for a degree that does not divide the attention heads."""
    if heads % tensor_parallel:
        raise UserError(
            f"parallelism.tensor_parallel: {tensor_parallel} does not divide the model's {heads} attention heads",
            f"set it to {listed_divisors(heads)}",
        )
    limits_of(engine).check_kv_heads(tensor_parallel, kv_heads)
