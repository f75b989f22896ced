"""Pictures that prompts name: pinned by content, copied with the run, and checked before a job starts."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hyperpod_ft.config import prompt_images, run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.preflight import check_run
from hyperpod_ft.runs.run import Run
from hyperpod_ft.shipped import shipped
from tests.unit.config.run_files import load, refused

SETTINGS: dict[str, Any] = {"engine": "trl", "training__method": "lora", "dataset__format": "chat"}
SETTINGS |= {"dataset__images": True, "parallelism": {"ranks_per_node": 1}}
PICTURES = shipped("examples") / "pictures" / "colors" / "images"
ASKED = {"images": ["red.png"], "messages": "Which color?"}


def part(**image: Any) -> dict[str, Any]:
    content = [{"type": "image", **image}, {"type": "text", "text": "Which color?"}]
    return {"messages": [{"role": "user", "content": content}]}


def images(config: run_file.RunConfig) -> list[Any]:
    prompt: Any = config.generate.prompts[0]
    return prompt["images"]  # type: ignore[no-any-return]


@pytest.fixture
def red(tmp_path: Path) -> Path:
    return shutil.copy(PICTURES / "000.png", tmp_path / "red.png")


def test_a_picture_is_what_is_in_it(tmp_path: Path, red: Path) -> None:
    """Wherever a prompt names it, and wherever it lies; only stage generate depends on it."""
    run = Run.of(load(tmp_path, **SETTINGS, generate__prompts=[ASKED]))
    (pinned,) = images(run.config)
    assert pinned == {"path": "red.png", "source": str(red), "revision": pinned["revision"]}
    assert run_file.resolve(run.config, Path("/")) == run.config, "resolving it again changes nothing"
    same = [part(image="red.png"), part(image_url={"url": "red.png"}), part(path=pinned)]
    for prompt in load(tmp_path, **SETTINGS, generate__prompts=same).generate.prompts:
        assert isinstance(prompt, dict) and pinned in prompt["messages"][0]["content"][0].values()
    (tmp_path / "moved").mkdir()
    red.rename(tmp_path / "moved" / "red.png")
    moved = [{**ASKED, "images": [{**pinned, "source": "moved/red.png"}]}]
    assert Run.of(load(tmp_path, **SETTINGS, generate__prompts=moved)).plan == run.plan
    shutil.copy(PICTURES / "001.png", red)
    other = Run.of(load(tmp_path, **SETTINGS, generate__prompts=[ASKED])).plan
    assert [one.name for one in other.stages if one != run.plan[one.name]] == ["generate"]
    assert "restore the files" in refused(tmp_path, **SETTINGS, generate__prompts=[{**ASKED, "images": [pinned]}])


def test_a_run_keeps_its_copy(tmp_path: Path, red: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, content = load(tmp_path, **SETTINGS, generate__prompts=[ASKED]), red.read_bytes()
    shutil.copy(PICTURES / "001.png", red)
    with pytest.raises(UserError, match=r"generate\.prompts\.0: .*red\.png is local-"):
        Run.of(config).freeze()
    red.write_bytes(content)
    red.chmod(0o640)
    copied = shutil.copy2

    def changed_meanwhile(source: Path, target: Path) -> None:
        red.write_bytes((PICTURES / "001.png").read_bytes())
        copied(source, target)
        red.write_bytes(content)

    with (
        monkeypatch.context() as patched,
        pytest.raises(UserError, match=r"generate\.prompts\.0: .*red\.png is local-"),
    ):
        patched.setattr(shutil, "copy2", changed_meanwhile)
        Run.of(config).freeze()
    Run.of(config).freeze()
    assert [copy.stat().st_mode & 0o777 for copy in Run.of(config).paths.prompt_images.iterdir()] == [0o640]
    red.unlink()
    run = Run.open(Run.of(config).paths.directory)
    check_run(run)
    run.freeze()
    assert [copy.read_bytes() for copy in run.paths.prompt_images.iterdir()] == [content]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({**ASKED, "images": ["none.png"]}, "no such file or directory: "),
        ({**ASKED, "images": ["."]}, "is not a file; name the file of a picture"),
        ({**ASKED, "images": ["run.yaml"]}, "image that cannot be read: not one of PNG"),
        (part(image="data:image/png;base64,?"), "image whose base64 is damaged"),
        (part(url="https://a.b/c.png"), "image at a URL: https://a.b/c.png"),
        ({**ASKED, "images": [{"url": "https://a/b.png", "revision": "x"}]}, "neither a path nor bytes"),
        (part(image={"url": "https://a/b.png", "path": "red.png", "revision": "x"}), "image at a URL: https://a/b.png"),
        (part(), "more image parts than images: the row has 0 images"),
        ({**part(), "images": ["red.png"] * 2}, "more images than image parts"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_a_job_starts(
    tmp_path: Path, red: Path, prompt: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=rf"^generate\.prompts\.1: .*{says}"):
        check_run(Run.of(load(tmp_path, **SETTINGS, generate__prompts=["Which?", prompt])))


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_file_is_a_picture_by_how_it_begins(red: Path, name: str) -> None:
    """Where there is no Pillow too: what a run copies, others may read."""
    with Image.open(PICTURES / "000.png") as image:
        image.convert("RGB").save(red, format=name)
    prompt_images.check_file("", red)
    for other in (b"", b"-----BEGIN OPENSSH PRIVATE KEY-----", b"BM, a text file that begins so", red.read_bytes()[1:]):
        red.write_bytes(other)
        with pytest.raises(UserError, match="image that cannot be read: not one of PNG"):
            prompt_images.check_file("", red)


def test_runs_without_images_and_training_jobs_with_a_store_have_none(tmp_path: Path, red: Path) -> None:
    given = {"generate__prompts": ["Which?", ASKED]}
    said = refused(tmp_path, **given, dataset__format="chat")
    assert "generate.prompts.1: has images; remove them, or set dataset.images" in said
    section = {"region": "us-west-2", "role": "arn:aws:iam::111122223333:role/r", "store": "s3://bucket/ft"}
    assert "generate.prompts.1: with sagemaker.store" in refused(tmp_path, **SETTINGS, **given, sagemaker=section)
