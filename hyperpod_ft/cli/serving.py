"""The commands that ask a model: serve and ask."""

from typing import Annotated

import typer

app = typer.Typer()

Reference = Annotated[
    str | None,
    typer.Argument(metavar="[RUN|DIR]", help="A run, or a model's directory. Default: the run submitted last."),
]
Device = Annotated[str, typer.Option("--device", help="`cpu`, `cuda`, or `auto`: a GPU if there is one.")]


@app.command()
def serve(
    reference: Reference = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; any but this machine's own needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 8000,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=DIR", help="Also serve a PEFT adapter of the base model."),
    ] = None,
    base: Annotated[bool, typer.Option("--base/--no-base", help="Also serve a run's base model.")] = True,
    device: Device = "auto",
) -> None:
    """Serve a run's tuned model and its base model with the OpenAI API and a chat page.

    Where the environment has HYPERPOD_FT_API_KEY, clients must send it as their API key.
    """
    from hyperpod_ft.serving import models  # noqa: PLC0415 - --help starts fast
    from hyperpod_ft.serving.program import own_server  # noqa: PLC0415

    found = models.find(reference, adapter or (), base=base)
    own_server(found, ["--host", host, "--port", str(port), "--device", device]).become()


@app.command()
def ask(
    reference: Annotated[str, typer.Argument(metavar="RUN|DIR", help="A run, or a model's directory.")],
    question: Annotated[str, typer.Argument(help="The question.")],
    device: Device = "auto",
) -> None:
    """Print the tuned model's answer to one question, greedy."""
    from hyperpod_ft.serving import models  # noqa: PLC0415
    from hyperpod_ft.serving.program import own_server  # noqa: PLC0415

    found = models.find(reference, base=False)
    own_server(found, ["--device", device, f"--ask={question}"]).become()
