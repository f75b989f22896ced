"""verify --served tells which model a server answers with: the kit's own server, asked as any other."""

import pytest

from hyperpod_ft.checkpoint.verify.verify import verify
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from tests.programs import call
from tests.unit.serving.conftest import Serving


def test_the_models_of_a_server_are_told_apart(tuned_run: Run, serving: Serving) -> None:
    paths = tuned_run.paths
    for directory, name in ((paths.tuned_model, "tuned"), (paths.tuned_model, "mine"), (paths.adapter, "mine")):
        found = verify(directory, base=paths.base_model, served=serving.url, model=name)
        assert found.findings == () and found.served
        assert found.served.tuned == found.served.asked == 16 and found.served.base == 0
    # a server that ignores an adapter, as in vllm#41754, answers as the base under the adapter's name
    ignored = call("verify", paths.adapter, "--base", paths.base_model, "--served", serving.url, "--model", "base")
    assert ignored.returncode == 1
    assert "base is the base model: 16 of 16 tokens are the base's, 0 the tuned model's" in ignored.stdout
    same = verify(paths.base_model, base=paths.base_model, served=serving.url)
    assert "cannot be told from the base" in same.findings[-1]


def test_a_server_that_cannot_be_asked(tuned_run: Run, serving: Serving) -> None:
    def refusal(served: str, model: str | None = None) -> str:
        with pytest.raises(UserError) as refused:
            verify(tuned_run.paths.tuned_model, base=tuned_run.paths.base_model, served=served, model=model)
        return str(refused.value)

    assert "is not a URL" in refusal("file:///etc/passwd")
    assert "does not answer" in refusal("http://127.0.0.1:9")
    assert "answered 404" in refusal(f"{serving.url}/v1", "nobody")
    with pytest.raises(UserError, match="add --served and --base"):
        verify(tuned_run.paths.tuned_model, served=serving.url)
