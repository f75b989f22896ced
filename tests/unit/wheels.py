"""Tiny wheels, so that the real pip has something to install without any network."""

import zipfile
from pathlib import Path


def wheel(index: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> None:
    """Write a wheel below `index`/<name>/, where a file server's listing makes it a package index."""
    directory = index / name
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    content = {
        **files,
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        "Provides-Extra: training\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*content, f"{stem}.dist-info/RECORD"))
    with zipfile.ZipFile(directory / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in {**content, f"{stem}.dist-info/RECORD": record}.items():
            archive.writestr(path, text)
