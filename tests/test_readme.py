"""The README's Python runs as it stands, in one go, and its error message is the one that comes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import valuepath as vp

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
MARKED = re.findall(r"<!-- this block is run by the tests -->\n```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(MARKED) == README.count("```python") == 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in MARKED:
        exec(compile(block, "README.md", "exec"), names)  # our own file, not input
    text, ids = names["text"], names["ids"]
    assert text.shape == (1, 70) and (text[:, :20] == ids).all()  # type: ignore[attr-defined]
    assert (tmp_path / "my-model" / "model.safetensors").exists()
    printed = capsys.readouterr().out
    for shown in re.findall(r"print\(.*\)\s+# (.*)", "".join(MARKED)):
        assert shown in printed


def test_the_error_shown_is_the_error_raised() -> None:
    with pytest.raises(vp.WiringError) as caught:
        vp.parse("v[1:] = 0.5*owm + 0.5*tap(0)", 6)
    assert str(caught.value) in README


def test_the_number_of_presets_is_right() -> None:
    assert f"{len(vp.variants())} presets in all" in README
