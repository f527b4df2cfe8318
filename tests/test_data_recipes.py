"""The recipe that builds corpora from packages: its text functions, and its errors. Nothing here needs a network."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from data_texts import ROOT


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_corpora", ROOT / "recipes" / "build_corpora.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_html_becomes_its_visible_text(recipe):
    page = """<html><HEAD><title>No</title><script>no()</script></HEAD><body><nav><ul><li>Menu</ul></nav>
    <h1>One &amp; two</h1><p>First<br>second &lt;b&gt; <b>bold</b></p><script>var x = "<p>";</script>
    <div></div><div></div><div></div><pre>a
  b</pre><footer>foot</footer><header>the page's head</header></body></html>"""
    text = recipe.from_html(page)
    assert [line.strip() for line in text.splitlines() if line.strip()] == ["One & two", "First", "second <b> bold", "a", "b"]
    assert "\n\n\n" not in text and "  b" in text
    assert recipe.from_html("</nav><p>kept after a stray end</p>") == "kept after a stray end"


def test_wikitext_becomes_prose(recipe):
    source = (
        "{{Infobox|a={{nested|x}}|b=[[link]]}}'''Anarchism''' is a [[political philosophy|philosophy]] of "
        "[[society]].&lt;ref name=a&gt;cited&lt;/ref&gt; Also&lt;ref name=b/&gt; &lt;b&gt;bold&lt;/b&gt;.<!-- note -->"
        "[[File:x.png|thumb|with [[inner]] text]][[Category:Things]]{| class=w\n| cell {| inner |}\n|}"
    )
    assert recipe.from_wikitext(source) == "Anarchism is a philosophy of society. Also bold."


def test_books_dictionaries_and_proofs_are_cut_into_documents(recipe):
    assert recipe.chapters("one\n\ntwo\n\n\nthree\n\n\n\n\nfour") == ["one\n\ntwo", "three", "four"]
    assert recipe.entries("word\n  meaning\n\n  more\nnext\n  x") == ["word\n  meaning\n\n  more", "next\n  x"]
    database = " ".join(f"$( Comment  {n % 25}\n of it. $) x{n} $p |- ph $= ? $." for n in range(45))
    found = recipe.comments(database)
    assert [len(each.splitlines()) for each in found] == [20, 5, 0], "each comment once, where it first stands"
    assert "\n".join(found).strip().splitlines() == [f"Comment {n} of it." for n in range(25)]


def test_old_encodings_and_line_ends_are_read(recipe):
    assert recipe.decode("naïve\r\nπ".encode()) == "naïve\nπ"
    assert recipe.decode("naïve".encode("latin-1")) == "naïve"


def test_a_domain_is_written_whole_up_to_its_limit_or_not_at_all(recipe, tmp_path):
    long = [f"{n} " + "é" * 300 for n in range(10)]
    documents, size = recipe.write_domain("x", iter(["short", *long]), tmp_path, 3 * 602 + 10)
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows == [{"text": text, "domain": "x"} for text in long[:3]]
    assert (documents, size) == (3, sum(len(text.encode()) for text in long[:3]))
    with pytest.raises(recipe.Failure, match="no document"):
        recipe.write_domain("y", iter(["short"]), tmp_path, 1e6)

    def breaks():
        yield long[0]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        recipe.write_domain("z", breaks(), tmp_path, 1e6)
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_the_standard_library_is_a_domain_that_needs_no_tool(recipe, tmp_path, capsys):
    assert recipe.main([str(tmp_path / "new"), "--domains", "code", "--max-mb", "1"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "new" / "code.jsonl").read_bytes().split(b"\n") if line]
    assert 500_000 < sum(len(row["text"].encode()) for row in rows) <= 1_000_000
    import abc

    assert Path(abc.__file__).read_text(encoding="utf-8").strip() in {row["text"] for row in rows}
    assert f"{len(rows)} documents" in capsys.readouterr().out


@pytest.mark.parametrize("domain, tool", [("books", "npm"), ("maths", "apt-get")])
def test_a_missing_tool_is_one_clear_error(recipe, tmp_path, capsys, monkeypatch, domain, tool):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert recipe.main([str(tmp_path / "out"), "--domains", domain]) == 2
    assert f"error: {tool} is not installed" in capsys.readouterr().err


def test_a_tool_that_fails_is_quoted(recipe, tmp_path):
    code = "import sys; print('the registry is closed', file=sys.stderr); sys.exit(7)"
    with pytest.raises(recipe.Failure, match=r"ended with 7:\nthe registry is closed"):
        recipe.run(sys.executable, "-c", code, cwd=tmp_path)


@pytest.mark.parametrize("arguments", [["--domains", "bokos"], ["--domains", ","], ["--max-mb", "0"], ["--max-mb", "nan"]])
def test_wrong_arguments_end_before_anything_is_fetched(recipe, tmp_path, capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        recipe.main([str(tmp_path / "out"), *arguments])
    assert ended.value.code == 2 and not (tmp_path / "out").exists()
    assert "error: " in capsys.readouterr().err
